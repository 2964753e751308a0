from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hilore_cli.experiments.profiling import profile_actor
from hilore_cli.measuring.models import PACKAGED_MODEL, Actor, load_actor, quiet_transformers
from hilore_cli.measuring.options import WorkloadOptions
from hilore_cli.tables.profile_table import Profile, Shape

TinyLlama = Callable[..., Actor]


@pytest.fixture(scope="session")
def smollm2() -> Actor:
    """The real SmolLM2-135M-Instruct, loaded once; leave its weights and mode as they are."""
    pytest.importorskip("gguf")
    return load_actor(WorkloadOptions(model=PACKAGED_MODEL))


@pytest.fixture
def tiny_llama() -> TinyLlama:
    """Builds actors around a random 2-layer Llama; keyword arguments change its configuration."""

    def build(*, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **changes: Any) -> Actor:
        settings = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
            "max_position_embeddings": 512,
            "use_cache": False,
            **changes,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = LlamaConfig(**settings, attn_implementation=attention)
            model = LlamaForCausalLM(config).to(dtype)
        return Actor(model=model.eval(), tokenizer=None, name="tiny-llama", weights_digest="random")

    return build


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small models run many times faster on one thread than on two that wait for each other."""
    with threads(1):
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 3-layer Llama as `save_pretrained` writes it, without a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_options(tiny_folder: Path) -> WorkloadOptions:
    """2 x (8 + 16) tokens of the tiny Llama, weights random so that it needs no tokenizer."""
    shape = Shape(micro_batch=2, prompt_tokens=8, response_tokens=16)
    return WorkloadOptions(model=str(tiny_folder), weights="random", shape=shape)


@pytest.fixture(scope="session")
def tiny_profile(tiny_options: WorkloadOptions) -> Profile:
    """The tiny Llama measured once."""
    with threads(1):
        return profile_actor(tiny_options, rounds=1)
