"""Kernels that torch does not see: they fill a buffer that the op stream shows as an empty tensor."""

import torch
from torch import nn

from hilore_cli.measuring.units import record_layer


class HiddenKernel(torch.autograd.Function):
    """Doubles its input behind the dispatcher's back, as a Triton kernel would."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        out.detach().numpy()[...] = 2 * x.detach().numpy()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Layer(nn.Module):
    def forward(self, hidden_states):
        return HiddenKernel.apply(hidden_states) + 1


def test_an_empty_tensor_is_never_kept_and_its_op_always_runs():
    layer, x = Layer(), torch.randn(1, 4, 8, requires_grad=True)
    with record_layer(layer, (x,), {}) as recorder:
        layer(x)
    blank = next(unit for unit in recorder.units if unit.op.startswith("aten.empty_like"))
    assert blank.saved
    assert not blank.keepable
    assert blank.forced
