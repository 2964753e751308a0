"""What makes a model the one a plan was solved for: its decoder layers, configuration and parameter shapes."""

import hashlib
import json
from typing import Any

import torch
from torch import nn

from hilore_cli.errors import HiloreError
from hilore_cli.measuring.stream import tensors

_STACKS = ("layers", "h", "blocks", "layer")
# Fields that change neither the op stream nor a shape; older files lack some of them.
_VOLATILE = ("name", "version", "dtype", "cache", "attn_implementation", "token_id", "architectures", "quantization")


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a causal LM, in order. Raises HiloreError if there are none."""
    stacks = [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and path.rpartition(".")[2] in _STACKS and len(module) > 0
    ]
    if not stacks:
        raise HiloreError(
            type(model).__name__,
            "has no decoder layers that hilore can find",
            f"it looks for a torch.nn.ModuleList named one of {', '.join(_STACKS)}; give a Hugging Face causal LM",
        )
    return list(max(stacks, key=lambda stack: sum(p.numel() for layer in stack for p in layer.parameters())))


def config_hash(model: nn.Module) -> str:
    """SHA-256 of the configuration, without fields that change neither an op nor a shape."""
    config = getattr(model, "config", None)
    facts: dict[str, Any] = config.to_dict() if config is not None else {}
    kept = {name: value for name, value in facts.items() if not any(part in name for part in _VOLATILE)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def parameter_hash(model: nn.Module) -> str:
    """SHA-256 of every parameter's name, shape and whether it is trained."""
    lines = [f"{name}:{tuple(value.shape)}:{value.requires_grad}" for name, value in model.named_parameters()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def dtype_name(model: nn.Module) -> str:
    """`float32` or `bfloat16`: of the model's parameters."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def attention_name(model: nn.Module) -> str:
    """`sdpa`, `eager`, ...: the attention kernel the configuration selects."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "eager")


def adapter_name(model: nn.Module) -> str:
    """`none`, or the adapters' names and ranks as PEFT records them."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, dict):
        return "none"
    return ",".join(f"{name}:r{getattr(adapter, 'r', '?')}" for name, adapter in sorted(adapters.items()))


def active_checkpointing(model: nn.Module) -> str | None:
    """Path of a module whose own gradient checkpointing is on, if any."""
    return next(
        (path or "model" for path, m in model.named_modules() if getattr(m, "gradient_checkpointing", False)), None
    )


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Which tensors a layer is called with: their number by position and their names."""
    named = sorted(name for name, value in kwargs.items() if tensors(value))
    return " ".join([str(len(tensors(args))), *named])


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The layer's input among the arguments of its call: the first floating-point tensor."""
    for value in (*args, kwargs.get("hidden_states"), *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    raise HiloreError("decoder layer", "was called without a floating-point tensor", "hilore plans transformer layers")
