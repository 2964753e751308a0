"""Stand between a model and its decoder layers: checkpoint some, watch them, catch what they were called with."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hilore_cli.measuring import identity
from hilore_cli.measuring.checkpointing import checkpointed
from hilore_cli.measuring.stream import tensors

LayerForward = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInput:
    """Arguments of one layer's call, detached."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]:
        """Arguments to call the layer with once more, and the layer input among them, which requires grad."""
        hidden = identity.hidden_states(self.args, self.kwargs)
        leaf = hidden.detach().requires_grad_()
        args = tuple(leaf if value is hidden else value for value in self.args)
        kwargs = {name: leaf if value is hidden else value for name, value in self.kwargs.items()}
        return args, kwargs, leaf


@contextmanager
def around_layers(model: nn.Module, run: LayerForward) -> Iterator[None]:
    """While inside, `run(index, original, args, kwargs)` stands for each decoder layer's forward."""

    def override(index: int, layer: nn.Module) -> Callable[..., Any]:
        original = layer.forward

        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return run(index, original, args, kwargs)

        return types.MethodType(forward, layer)

    layers = identity.decoder_layers(model)
    try:
        for index, layer in enumerate(layers):
            layer.forward = override(index, layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def capture_inputs(model: nn.Module, forward: Callable[[], Any]) -> tuple[LayerInput, ...]:
    """Run `forward` without gradients and keep every layer's input."""
    inputs: dict[int, LayerInput] = {}

    def run(index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs[index] = LayerInput(args=_detached(args), kwargs=_detached(kwargs))
        return original(*args, **kwargs)

    with around_layers(model, run), torch.no_grad():
        forward()
    return tuple(inputs[index] for index in range(len(inputs)))


def layer_output(out: Any) -> torch.Tensor:
    """The hidden states among what a layer returns."""
    return tensors(out)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedStep:
    """One step's layer calls and the gradient that reached each layer's output."""

    inputs: tuple[LayerInput, ...]
    upstream: tuple[torch.Tensor, ...]


def capture_step(model: nn.Module, step: Callable[[], Any]) -> CapturedStep:
    """Run `step` (forward and backward) under full checkpointing and keep every layer's input and upstream gradient."""
    inputs: dict[int, LayerInput] = {}
    upstream: dict[int, torch.Tensor] = {}

    def catch(index: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            upstream[index] = gradient.detach()

        return hook

    def run(index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs[index] = LayerInput(args=_detached(args), kwargs=_detached(kwargs))
        out = checkpointed(original, args, kwargs)
        layer_output(out).register_hook(catch(index))
        return out

    with around_layers(model, run):
        step()
    order = range(len(inputs))
    return CapturedStep(inputs=tuple(inputs[i] for i in order), upstream=tuple(upstream[i] for i in order))


def _detached(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.detach()
    if isinstance(values, tuple):
        return tuple(_detached(value) for value in values)
    if isinstance(values, dict):
        return {name: _detached(value) for name, value in values.items()}
    return values
