"""Risk gains by local VJP (DESIGN section 4): what compressing one unit of one layer does to the gradient.

A layer's backward is run alone, from its real input and under its real upstream gradient: once exactly, then once a
unit with that unit's output replaced by its unpacked form, so that everything derived from it is perturbed as replay
would perturb it. Statistics, such as a norm's scale or attention's log-sum-exp, are the exception: nearly every plan
stores them, exactly, so they do not follow the perturbation, and the backward meets inputs that they do not fit. That
errs more (1.2 to 2.3 times for the sums of SmolLM2-135M) than rebuilding them would. The gain K of a unit is, per unit
of exposure,

    K^2 = ( norm(change of the layer's parameter gradients)^2
          + (norm(change of the input gradient) / norm(input gradient))^2 * norm(gradients below)^2 ) / X^2

Layers are walked from the first up, so that the norm below is known when it is needed; only one layer's gradients
exist at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hilore_cli.errors import HiloreError
from hilore_cli.measuring.candidates import Candidate
from hilore_cli.measuring.codecs import codec
from hilore_cli.measuring.layer_calls import CapturedStep, LayerInput, layer_output
from hilore_cli.measuring.stream import counts, leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """One unit of one layer through one codec."""

    layer: int
    unit: int
    codec: str
    error: float
    """Relative L2 error of the unit."""
    change2: float
    """Squared norm of the gradient's change: this layer's, and what reaches the layers below."""
    measured: bool
    """False: scaled from another codec's."""

    def per_exposure(self, exposure: float) -> "Gain":
        """With the change per unit of exposure."""
        return replace(self, change2=self.change2 / exposure**2)


class Remember(TorchDispatchMode):
    """Remember some outputs of ops.

    Args:
        wanted: (op index, leaf) of each.
    """

    def __init__(self, wanted: Collection[tuple[int, int]]) -> None:
        super().__init__()
        self.wanted = wanted
        self.outputs: dict[tuple[int, int], torch.Tensor] = {}
        self.index = -1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if counts(func, args):
            self.index += 1
            for leaf, value in enumerate(leaves(out)):
                if (self.index, leaf) in self.wanted:
                    self.outputs[self.index, leaf] = value.detach()
        return out


class Substitute(TorchDispatchMode):
    """Replace some ops' first outputs by what a codec makes of them, as replay hands compressed units back.

    Args:
        codecs: op index -> codec.
        stored: (op index, leaf) -> that output, exact, handed back for what the op makes this time.
        probed: codecs whose errors on each of the replaced outputs are measured besides.
    """

    def __init__(
        self,
        codecs: Mapping[int, str],
        stored: Mapping[tuple[int, int], torch.Tensor],
        probed: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.codecs = codecs
        self.stored = stored
        self.probed = probed
        self.errors: dict[tuple[int, str], float] = {}
        self.index = -1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not counts(func, args):
            return out
        self.index += 1
        values = [
            self.stored[self.index, leaf].detach() if (self.index, leaf) in self.stored else value
            for leaf, value in enumerate(out if isinstance(out, tuple | list) else [out])
        ]
        name = self.codecs.get(self.index)
        if name is not None:
            for other in self.probed:
                self.errors[self.index, other] = round_trip(values[0], other)[1]
            values[0], self.errors[self.index, name] = round_trip(values[0], name)
        return type(out)(values) if isinstance(out, tuple | list) else values[0]


def round_trip(exact: torch.Tensor, codec_name: str) -> tuple[torch.Tensor, float]:
    """The tensor through a codec and back, and its relative L2 error (0 for an all-zero tensor)."""
    coding = codec(codec_name)
    packed = coding.pack(exact)
    approximate = coding.unpack(packed)
    if packed.raw:
        return approximate, 0.0
    peak = exact.abs().amax().float()  # keeps squares in range where a mask added its lowest number
    if not peak:
        return approximate, 0.0
    error = (approximate.float() / peak - exact.float() / peak).norm() / (exact.float() / peak).norm()
    return approximate, float(error)


def layer_gains(
    layers: Sequence[nn.Module],
    captured: CapturedStep,
    candidates: Sequence[Iterable[Candidate]],
    codec_names: Sequence[str],
    *,
    stored: Sequence[Collection[tuple[int, int]]],
    every: Collection[int],
    below2: float,
    advance: Callable[[], None],
) -> list[Gain]:
    """Gains of each layer's candidates for each codec, on one micro-batch.

    The first codec is measured in every layer, the others in the layers `every`; elsewhere theirs follow from the
    first's by the ratio of their errors, which are measured for every unit, and `measured` is False.

    Args:
        layers: the decoder layers, in training mode.
        captured: their inputs and upstream gradients in one real step.
        candidates: which units of each layer to compress.
        codec_names: codecs to measure, at least one.
        stored: (op index, leaf) of each layer's outputs that stay exact.
        every: layers in which each codec is measured.
        below2: squared norm of the gradient below the first layer (the embedding's lookup).
        advance: called after each layer.

    Raises:
        HiloreError: a gradient is not finite.
    """
    gains: list[Gain] = []
    for index, layer in enumerate(layers):
        remembered = Remember(stored[index])
        exact, exact_input = _backward(layer, captured.inputs[index], captured.upstream[index], remembered)
        input2 = _norm2([exact_input])
        if not all(torch.isfinite(gradient).all() for gradient in (*exact, exact_input)):
            raise HiloreError(f"layer {index}", "has a gradient that is not finite", "check the weights and the dtype")
        for candidate in candidates[index]:
            found: dict[str, Gain] = {}
            for name in codec_names if index in every else codec_names[:1]:
                probed = codec_names[1:] if index not in every else ()
                mode = Substitute({candidate.op_index: name}, remembered.outputs, probed)
                grads, input_grad = _backward(layer, captured.inputs[index], captured.upstream[index], mode)
                change2 = _norm2(new - old for new, old in zip(grads, exact, strict=True))
                change2 += _norm2([input_grad - exact_input]) / input2 * below2 if input2 else 0.0
                for (_, other), error in mode.errors.items():
                    found[other] = Gain(
                        layer=index,
                        unit=candidate.unit,
                        codec=other,
                        error=error,
                        change2=change2 * _ratio2(error, mode.errors[candidate.op_index, name]),
                        measured=other == name,
                    )
            gains += found.values()
        below2 += _norm2(exact)
        advance()
    return gains


def fit_codecs(gains: Sequence[Gain], layer_class: Sequence[int]) -> list[Gain]:
    """Gains that were scaled by errors, corrected by what scaling misses in the layers where they were measured.

    The correction is one factor a unit and codec, the median over those layers of one class: codecs err in different
    places, and a gradient does not feel all alike.
    """
    first: dict[tuple[int, int], Gain] = {}
    for gain in gains:
        if gain.measured:
            first.setdefault((gain.layer, gain.unit), gain)
    factors: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for gain in gains:
        base = first[gain.layer, gain.unit]
        scaled2 = base.change2 * _ratio2(gain.error, base.error)
        if gain.measured and gain is not base and scaled2:
            factors[layer_class[gain.layer], gain.unit, gain.codec].append(gain.change2 / scaled2)
    return [
        gain
        if gain.measured
        else replace(
            gain,
            change2=gain.change2 * median(factors.get((layer_class[gain.layer], gain.unit, gain.codec), [1.0])),
        )
        for gain in gains
    ]


def _ratio2(error: float, measured: float) -> float:
    return (error / measured) ** 2 if measured else 0.0


def lookup_norm2(token_ids: torch.Tensor, gradient: torch.Tensor) -> float:
    """Squared norm of the gradient that an embedding table gets from its lookup.

    Args:
        token_ids: [B, S].
        gradient: [B, S, H], of the embedding's output.
    """
    rows, inverse = torch.unique(token_ids, return_inverse=True)
    table = gradient.new_zeros((len(rows), gradient.shape[-1]), dtype=torch.float32)
    table.index_add_(0, inverse.flatten(), gradient.flatten(0, -2).float())
    return _norm2([table])


def input_gradient(layer: nn.Module, call: LayerInput, upstream: torch.Tensor) -> torch.Tensor:
    """The gradient of the layer's input, exactly."""
    with no_weight_gradients(layer):
        return _backward(layer, call, upstream, None)[1]


@contextmanager
def no_weight_gradients(layer: nn.Module) -> Iterator[None]:
    """While inside, the layer's parameters ask for no gradient."""
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _backward(
    layer: nn.Module, call: LayerInput, upstream: torch.Tensor, mode: TorchDispatchMode | None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Parameter gradients and input gradient of one local forward and backward; dropout always the same."""
    args, kwargs, leaf = call.fresh()
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    devices = [upstream.device] if upstream.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), mode or nullcontext():
        torch.manual_seed(0)
        with torch.enable_grad():
            out = layer_output(layer(*args, **kwargs))
    grads = torch.autograd.grad(out, [leaf, *weights], upstream, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, [leaf, *weights], strict=True)]
    return tuple(filled[1:]), filled[0]


def _norm2(tensors: Iterable[torch.Tensor]) -> float:
    flat = (tensor.float().reshape(-1) for tensor in tensors)
    return sum(float(values.dot(values)) for values in flat)
