"""What the solver decides on: layers of ops and units with times, bytes and risks, out of a profile.

Plain numbers, no solver and no tensors: the ILP, the greedy, the brute force of the tests and the exact
evaluation all read this one form.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hilore_cli.errors import HiloreError
from hilore_cli.tables.profile_table import INPUT_UNIT, NO_CODEC, Profile, ProfileRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way of keeping a unit: `none` stores it as computed, any other codec compresses it."""

    codec: str
    held_bytes: int
    codec_us: float
    risk2: float
    """(K / Gamma)^2: what it adds to the squared relative gradient error of a micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One op output."""

    op: int
    bytes: int
    saved: bool
    choices: tuple[Choice, ...]
    """Empty if the unit cannot be kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One op of a layer's stream."""

    recompute_us: float
    forced: bool
    """Runs in every replay."""
    reads: tuple[int, ...]
    """Units (positions in the layer) that it reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A moment in the layer's replay or backward: bytes above its base, and the units alive in it."""

    bytes: int
    alive: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One decoder layer: its ops in order, their outputs, and its place on the memory curve."""

    ops: tuple[Op, ...]
    units: tuple[Unit, ...]
    points: tuple[Point, ...]
    forward_peak_bytes: int
    backward_base_bytes: int
    plain_extra_bytes: int

    @property
    def plain_held_bytes(self) -> int:
        """What autograd saves when the layer runs unwrapped (its input aside)."""
        return sum(unit.bytes for unit in self.units if unit.saved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Everything the solver needs; bytes above `static_bytes` unless named otherwise."""

    layers: tuple[Layer, ...]
    static_bytes: int
    head_peak_bytes: int
    tail_peak_bytes: int
    plain_us: float
    checkpoint_us: float
    """Per replayed layer."""
    mode_us: float
    """Per replayed layer that keeps anything."""


def problem_from_profile(profile: Profile, *, shape: int = 0) -> Problem:
    """Group a profile's rows into layers (DESIGN section 7's data).

    Raises HiloreError if a layer's rows are not a stream of ops.
    """
    by_layer: dict[int, list[ProfileRow]] = defaultdict(list)
    for row in profile.rows:
        if row.shape == shape and row.unit != INPUT_UNIT:
            by_layer[row.layer].append(row)
    curve, timing = profile.meta.memory, profile.meta.timing
    layers = []
    for index in range(profile.meta.identity.layers):
        layer_class = curve.classes[curve.layer_class[index]]
        ops, units = _ops_and_units(
            by_layer[index], gamma=profile.meta.calibration.gamma / profile.meta.calibration.margin
        )
        layers.append(
            Layer(
                ops=ops,
                units=units,
                points=tuple(Point(bytes=point.bytes, alive=frozenset(point.alive)) for point in layer_class.points),
                forward_peak_bytes=curve.forward_peak_bytes[index],
                backward_base_bytes=curve.backward_base_bytes[index],
                plain_extra_bytes=layer_class.plain_extra_bytes,
            )
        )
    return Problem(
        layers=tuple(layers),
        static_bytes=profile.meta.static_bytes.total,
        head_peak_bytes=curve.head_peak_bytes,
        tail_peak_bytes=curve.tail_peak_bytes,
        plain_us=timing.plain_fastest_us,  # the steadiest figure where others use the machine
        checkpoint_us=timing.checkpoint_us,
        mode_us=max(timing.mode_us, 0.0),  # measured as a difference, so noise can turn it negative
    )


def _ops_and_units(rows: Iterable[ProfileRow], *, gamma: float) -> tuple[tuple[Op, ...], tuple[Unit, ...]]:
    plain_rows: list[ProfileRow] = []
    choices: dict[int, list[Choice]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.unit):
        if row.codec == NO_CODEC:
            plain_rows.append(row)
        if row.keepable:
            choices[row.unit].append(_choice(row, gamma=gamma))
    places = {row.op_index: place for place, row in enumerate(row for row in plain_rows if row.leaf == 0)}
    _check_stream(plain_rows, places)
    ops = tuple(
        # the layer's input is always held
        Op(recompute_us=row.recompute_us, forced=row.forced, reads=tuple(u for u in row.reads if u != INPUT_UNIT))
        for row in plain_rows
        if row.leaf == 0
    )
    units = tuple(
        Unit(op=places[row.op_index], bytes=row.bytes, saved=row.saved, choices=tuple(choices[row.unit]))
        for row in plain_rows
    )
    return ops, units


def _choice(row: ProfileRow, *, gamma: float) -> Choice:
    if row.codec == NO_CODEC:
        return Choice(codec=NO_CODEC, held_bytes=row.bytes, codec_us=0.0, risk2=0.0)
    ratio = 0.0 if not row.gain else row.gain / gamma if gamma > 0 else math.inf
    return Choice(codec=row.codec, held_bytes=row.packed_bytes, codec_us=row.codec_us, risk2=ratio**2)


def _check_stream(rows: list[ProfileRow], places: dict[int, int]) -> None:
    """Units are numbered in the order they are made, and nothing reads what is made later."""
    for position, row in enumerate(rows):
        ordered = row.unit == position and row.op_index in places
        if not ordered or any(not INPUT_UNIT <= read < position for read in row.reads):
            raise HiloreError(
                f"layer {row.layer}, unit {row.unit} ({row.module or 'layer'} {row.op})",
                "does not follow the layer's op stream",
                "run `hilore profile` again",
            )
