import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hilore_cli.errors import HiloreError
from hilore_cli.measuring import codecs
from hilore_cli.measuring.codecs import Codec, Packed, codec, names, register

NEAREST = ("int8-g64", "int4-g64")
STOCHASTIC = ("int8-g64-sr", "int4-g64-sr")
GROUPED = NEAREST + STOCHASTIC
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

unhurried = settings(deadline=None, max_examples=40)
finite_values = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=200)
shapes = st.lists(st.integers(0, 7), max_size=4)
seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def permuted(shape: list[int], order: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return gaussian(*shape, dtype=dtype).permute(order)


def in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def assert_within(steps: float, before: Tensor, packed: Packed, after: Tensor) -> None:
    """Each error is at most so many scales of its group, give or take what its dtype cannot represent."""
    assert after.isfinite().all()
    scales = packed.payload[1].double().expand(-1, 64).reshape(-1)[: before.numel()]
    error = (in_memory_order(after).double() - in_memory_order(before).double()).abs()
    limits = torch.finfo(before.dtype)
    spacing = 0.0 if before.dtype == torch.float32 else limits.eps
    representable = in_memory_order(after).double().abs() * spacing / 2 + limits.tiny * limits.eps / 2
    assert (error <= scales * (steps + 1e-4) + representable).all()


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", FLOATS)
@unhurried
@given(values=finite_values)
def test_any_finite_value_comes_back_within_half_a_scale_or_one(
    name: str, dtype: torch.dtype, values: list[float]
) -> None:
    limits = torch.finfo(dtype)
    before = torch.tensor(values, dtype=torch.float32).clamp(limits.min, limits.max).to(dtype)
    packed = codec(name).pack(before)
    assert not packed.raw
    assert_within(0.5 if name in NEAREST else 1.0, before, packed, codec(name).unpack(packed))


@pytest.mark.parametrize("name", GROUPED)
@given(exponent=st.integers(-149, 127), seed=seeds)
@unhurried
def test_error_bound_holds_at_every_magnitude(name: str, exponent: int, seed: int) -> None:
    before = gaussian(300, seed=seed).clamp(-1.99, 1.99).double().mul(2.0**exponent).float()
    packed = codec(name).pack(before)
    assert_within(0.5 if name in NEAREST else 1.0, before, packed, codec(name).unpack(packed))


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_of_a_dtype_do_not_overflow(name: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    before = torch.linspace(-1, 1, 4097).double().mul(largest).to(dtype)
    packed = codec(name).pack(before)
    assert not packed.raw
    assert_within(0.5 if name in NEAREST else 1.0, before, packed, codec(name).unpack(packed))


@pytest.mark.parametrize("name", GROUPED)
def test_the_scale_is_the_absmax_over_the_largest_integer_up_to_one_bfloat16_step(name: str) -> None:
    before = gaussian(100, 64)
    wanted = before.abs().amax(1) / (2 ** (codec(name).bits - 1) - 1)
    scale = codec(name).pack(before).payload[1].float().view(-1)
    assert (scale >= wanted * (1 - 1e-6)).all()
    assert (scale <= wanted * (1 + 2**-7)).all()


@pytest.mark.parametrize("name", names())
def test_zeros_come_back_as_zeros(name: str) -> None:
    assert codec(name).unpack(codec(name).pack(torch.zeros(130))).eq(0).all()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_multiples_of_the_scale_survive_stochastic_rounding_exactly(name: str) -> None:
    top = 2 ** (codec(name).bits - 1) - 1
    before = torch.arange(-top, top + 1).float().repeat_interleave(64)
    before[::64] = top
    assert codec(name).unpack(codec(name).pack(before)).equal(before)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    draws = 20_000
    row = gaussian(64)
    packed = codec(name).pack(row.expand(draws, 64))
    bias = (codec(name).unpack(packed).double().mean(0) - row.double()) / packed.payload[1][0].double()
    assert bias.abs().max() <= 1 / 256 + 5 * 0.5 / math.sqrt(draws)


def test_rounding_to_nearest_is_biased_where_stochastic_rounding_is_not() -> None:
    row = gaussian(64)
    packed = codec("int4-g64").pack(row)
    bias = (codec("int4-g64").unpack(packed) - row) / packed.payload[1][0].float()
    assert bias.abs().max() > 0.4


def test_stochastic_errors_of_two_packs_are_independent() -> None:
    before = gaussian(64_000)
    errors = [codec("int8-g64-sr").unpack(codec("int8-g64-sr").pack(before)) - before for _ in range(2)]
    rounding = [error - sum(errors) / 2 for error in errors]
    assert not errors[0].equal(errors[1])
    assert torch.corrcoef(torch.stack((rounding[0][:-1], rounding[0][1:])))[0, 1].abs() < 0.02


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_same_seed_gives_the_same_noise(name: str) -> None:
    before = gaussian(1000)
    known = codec(name)
    fresh = [Codec(name=name, bits=known.bits, rounding="stochastic", seed=3) for _ in range(2)]
    first, second = (one.pack(before).payload[0] for one in fresh)
    assert first.equal(second)
    fresh[0].restart()
    assert fresh[0].pack(before).payload[0].equal(first)


@pytest.mark.parametrize("name", names())
def test_the_global_random_state_is_left_alone(name: str) -> None:
    state = torch.get_rng_state()
    codec(name).unpack(codec(name).pack(gaussian(1000)))
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("name", names())
@unhurried
@given(shape=shapes, data=st.data())
def test_held_bytes_are_those_predicted(name: str, shape: list[int], data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([dtype for dtype in FLOATS if codec(name).supports(dtype)]))
    before = gaussian(*shape, dtype=dtype)
    assert codec(name).pack(before).held_bytes == codec(name).packed_bytes(before.numel(), dtype)


def test_bytes_are_an_integer_and_a_share_of_the_scale() -> None:
    assert codec("int8-g64").packed_bytes(6400, torch.float32) == 6400 + 200
    assert codec("int4-g64").packed_bytes(6400, torch.bfloat16) == 3200 + 200
    assert codec("int8-g64").packed_bytes(1, torch.float32) == 66
    assert codec("bf16").packed_bytes(3, torch.float32) == 6


@pytest.mark.parametrize("name", names())
@unhurried
@given(shape=shapes, data=st.data())
def test_dense_strides_come_back_exactly(name: str, shape: list[int], data: st.DataObject) -> None:
    before = permuted(shape, data.draw(st.permutations(range(len(shape)))))
    after = codec(name).unpack(codec(name).pack(before))
    assert (after.shape, after.stride(), after.dtype) == (before.shape, before.stride(), before.dtype)
    assert torch.allclose(after, before, atol=0.75)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    "before",
    [
        gaussian(40, 9)[:, ::2],
        gaussian(40, 9)[3:, 1:5],
        gaussian(1, 9).expand(7, 9),
        gaussian(12).as_strided((5, 4), (1, 2)),
        gaussian(40, 9).t()[2:7],
    ],
    ids=["steps", "slices", "expanded", "overlapping", "transposed slice"],
)
def test_gaps_and_overlaps_come_back_contiguous(name: str, before: Tensor) -> None:
    packed = codec(name).pack(before)
    after = codec(name).unpack(packed)
    assert after.shape == before.shape
    assert after.is_contiguous()
    assert torch.allclose(after, before, atol=0.75)
    assert packed.held_bytes == codec(name).packed_bytes(before.numel(), before.dtype)


def test_a_dimension_of_one_keeps_its_odd_stride() -> None:
    before = gaussian(10).as_strided((10, 1), (1, 3))
    assert codec("int8-g64").unpack(codec("int8-g64").pack(before)).stride() == (1, 3)


def test_groups_follow_memory_not_the_logical_order() -> None:
    rows = gaussian(64, 64).mul(torch.logspace(-6, 6, 64)[:, None])
    after = codec("int8-g64").unpack(codec("int8-g64").pack(rows.t()))
    assert after.equal(codec("int8-g64").unpack(codec("int8-g64").pack(rows)).t())
    assert ((after.t() - rows).norm(dim=1) / rows.norm(dim=1)).max() < 0.01


@pytest.mark.parametrize("name", names())
def test_a_view_into_a_larger_storage_is_packed_alone(name: str) -> None:
    view = gaussian(1000)[100:300].view(10, 20)
    packed = codec(name).pack(view)
    assert packed.held_bytes == codec(name).packed_bytes(200, torch.float32)
    assert torch.allclose(codec(name).unpack(packed), view, atol=0.75)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 4097])
def test_odd_sizes_survive(name: str, size: int) -> None:
    before = gaussian(size)
    after = codec(name).unpack(codec(name).pack(before))
    assert after.shape == before.shape
    assert torch.allclose(after, before, atol=0.75)


@pytest.mark.parametrize("name", names())
def test_a_scalar_survives(name: str) -> None:
    after = codec(name).unpack(codec(name).pack(torch.tensor(0.5)))
    assert after.shape == ()
    assert after.item() == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("name", names())
@unhurried
@given(
    size=st.integers(1, 300),
    place=st.integers(0, 299),
    bits=st.sampled_from([0x7F800000, -0x800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1]),
    dtype=st.sampled_from(FLOATS),
)
def test_infinities_and_nans_pass_through_bit_for_bit(
    name: str, size: int, place: int, bits: int, dtype: torch.dtype
) -> None:
    if not codec(name).supports(dtype):
        return
    before = gaussian(size)
    before.view(torch.int32)[place % size] = bits
    before = before.to(dtype)
    packed = codec(name).pack(before)
    assert packed.raw
    assert packed.held_bytes == before.nbytes
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    assert codec(name).unpack(packed).view(whole).equal(before.view(whole))


@pytest.mark.parametrize("name", names())
def test_raw_values_do_not_alias_the_tensor(name: str) -> None:
    before = torch.full((3,), math.inf)
    packed = codec(name).pack(before)
    before.zero_()
    assert codec(name).unpack(packed).eq(math.inf).all()


@pytest.mark.parametrize("name", NEAREST)
@pytest.mark.parametrize("dtype", FLOATS)
def test_blocks_of_any_size_give_the_same_result(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gaussian(5000, dtype=dtype)
    whole = codec(name).pack(before)
    for size in (1, 64, 1024, 4999):
        monkeypatch.setattr(codecs, "CPU_BLOCK", size)
        packed = codec(name).pack(before)
        assert all(one.equal(other) for one, other in zip(packed.payload, whole.payload, strict=True))
        assert codec(name).unpack(packed).equal(codec(name).unpack(whole))


class LargestOutput(TorchDispatchMode):
    """The largest storage that any op gave out, those of the sizes to expect aside."""

    def __init__(self, expected: set[int]) -> None:
        super().__init__()
        self.expected = expected
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            size = tensor.untyped_storage().nbytes() if isinstance(tensor, Tensor) else 0
            if size not in self.expected:
                self.largest = max(self.largest, size)
        return out


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_workspace_is_one_block(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "CPU_BLOCK", 4096)
    before = gaussian(100_001, dtype=dtype)
    groups = -(-before.numel() // 64)
    with LargestOutput({before.nbytes, groups * 64, groups * 32, groups * 2}) as seen:
        codec(name).unpack(codec(name).pack(before))
    assert 0 < seen.largest <= 4 * 4096


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float64, torch.complex64])
def test_other_dtypes_are_refused(name: str, dtype: torch.dtype) -> None:
    assert not codec(name).supports(dtype)
    with pytest.raises(HiloreError, match=f"codec {name}: does not take {dtype}"):
        codec(name).pack(torch.zeros(3, dtype=dtype))


def test_bf16_takes_float32_only() -> None:
    assert [codec("bf16").supports(dtype) for dtype in FLOATS] == [True, False, False]


@unhurried
@given(values=finite_values)
def test_bf16_is_exact_on_bfloat16_values(values: list[float]) -> None:
    limits = torch.finfo(torch.bfloat16)
    before = torch.tensor(values, dtype=torch.float32).clamp(limits.min, limits.max).bfloat16().float()
    after = codec("bf16").unpack(codec("bf16").pack(before))
    assert after.view(torch.int32).equal(before.view(torch.int32))


@unhurried
@given(values=finite_values)
def test_bf16_errors_are_a_256th_even_beyond_its_largest_number(values: list[float]) -> None:
    before = torch.tensor(values, dtype=torch.float32)
    packed = codec("bf16").pack(before)
    assert packed.held_bytes == codec("bf16").packed_bytes(before.numel(), before.dtype)
    error = (codec("bf16").unpack(packed).double() - before.double()).abs()
    assert (error <= before.double().abs() / 256 + 2.0**-134).all()


def test_what_autograd_tracks_is_packed_without_its_history() -> None:
    before = gaussian(100).requires_grad_()
    assert not codec("int8-g64").unpack(codec("int8-g64").pack(before * 2)).requires_grad


def test_the_built_in_codecs_are_known_in_order() -> None:
    assert names() == ("int8-g64", "int8-g64-sr", "int4-g64", "int4-g64-sr", "bf16")
    assert [codec(name).name for name in names()] == list(names())
    assert [codec(name).rounding for name in STOCHASTIC] == ["stochastic"] * 2


def test_an_unknown_name_is_answered_with_the_known_ones_and_a_way_to_add_it() -> None:
    with pytest.raises(HiloreError, match="codec int3: is none of int8-g64, ") as error:
        codec("int3")
    assert "register" in error.value.hint


class SignCodec(Codec):
    """One bit an element, held as a byte."""

    def packed_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel

    def encode(self, flat: Tensor) -> tuple[tuple[Tensor, ...], bool]:
        return (flat.sign().to(torch.int8),), False

    def decode(self, payload: tuple[Tensor, ...], flat: Tensor, *, clamp: bool) -> None:
        flat.copy_(payload[0])


def test_a_users_own_format_needs_three_methods() -> None:
    register(SignCodec(name="sign", bits=1, group=1))
    before = gaussian(3, 5).t()
    packed = codec("sign").pack(before)
    assert codec("sign").unpack(packed).equal(before.sign())
    assert codec("sign").unpack(packed).stride() == before.stride()
    assert packed.held_bytes == codec("sign").packed_bytes(15, torch.float32)


@pytest.mark.parametrize("group", [8, 32, 128])
def test_smaller_groups_err_less(group: int) -> None:
    register(Codec(name=f"int4-g{group}", bits=4, group=group))
    before = gaussian(10_000)
    mine, wider = codec(f"int4-g{group}"), Codec(name="wider", bits=4, group=2 * group)
    errors = [(one.unpack(one.pack(before)) - before).norm() for one in (mine, wider)]
    assert errors[0] < errors[1]


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(HiloreError, match="codec int8-g64: is registered already"):
        register(Codec(name="int8-g64", bits=8))


@pytest.mark.parametrize(
    "options",
    [{"bits": 3}, {"bits": 8, "group": 0}, {"bits": 4, "group": 12}, {"bits": 8, "rounding": "up"}],
    ids=["bits", "no group", "ragged group", "rounding"],
)
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(HiloreError, match="codec odd: cannot have"):
        Codec(name="odd", **options)
