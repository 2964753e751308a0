"""What can be read off a model without running it: who it is, and the bytes that stand for a whole step."""

import torch
from torch import nn

from hilore_cli.measuring import identity
from hilore_cli.measuring.stream import tensors
from hilore_cli.tables.profile_table import Identity, StaticBytes


def static_bytes(model: nn.Module, optimizer: str) -> StaticBytes:
    """Bytes of a full step's standing tensors, by storage: what an optimizer of this kind will allocate included."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # AdamW holds two moments like the parameter, and one float32 step count a parameter.
    states = sum(2 * parameter.nbytes + 4 for parameter in trained) if optimizer == "adamw" else 0
    return StaticBytes(
        parameters=_storage_bytes(list(model.parameters())),
        gradients=sum(parameter.nbytes for parameter in trained),
        optimizer=states,
        buffers=_storage_bytes(list(model.buffers())),
    )


def measured_static_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the standing tensors as they are now, by storage: gradients and optimizer states included."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    states = [] if optimizer is None else tensors(list(optimizer.state.values()))
    return _storage_bytes([*model.parameters(), *model.buffers(), *gradients, *states])


def model_identity(model: nn.Module, name: str, call: str) -> Identity:
    """What a plan must find again; `call` is what its layers are called with."""
    return Identity(
        model=name,
        model_class=type(model).__name__,
        config_hash=identity.config_hash(model),
        parameter_hash=identity.parameter_hash(model),
        layers=len(identity.decoder_layers(model)),
        dtype=identity.dtype_name(model),
        attention=identity.attention_name(model),
        adapter=identity.adapter_name(model),
        call=call,
    )


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]  # held, so that no id is given twice
    return sum({id(storage): storage.nbytes() for storage in storages}.values())
