"""Shrink a problem without losing an optimal plan: what no best plan needs is not offered to the solver.

Each rule is an exchange argument over the exact evaluation: any plan that uses what is dropped can be
rewritten to one that is no slower, no riskier, and no higher at any memory point.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hilore_cli.solving.problem import Choice, Layer, Point, Problem, Unit
from hilore_cli.tables.profile_table import NO_CODEC


def presolve(problem: Problem, *, risk: float) -> Problem:
    """The problem without hopeless choices and points; plans of the result are plans of the original."""
    return replace(problem, layers=tuple(reduce_layer(layer, risk2=risk**2) for layer in problem.layers))


def reduce_layer(layer: Layer, *, risk2: float) -> Layer:
    """Apply every rule to one layer under a squared risk budget."""
    readers = readers_of(layer)
    offered = [
        () if not (unit.saved or readers[index]) else efficient_choices(unit.choices, risk2=risk2)
        for index, unit in enumerate(layer.units)
    ]
    layer = replace(layer, units=_with_choices(layer.units, offered))
    layer = replace(layer, points=efficient_points(layer))
    # from the end: a unit gives way to its reader's output, which may itself have given way by then
    for index in range(len(layer.units) - 1, -1, -1):
        successor = _sole_successor(layer, index, readers[index])
        if successor is not None:
            left = [c for c in offered[index] if not _replaceable(layer, index, c, successor, offered[successor])]
            offered[index] = tuple(left)
    layer = replace(layer, units=_with_choices(layer.units, offered))
    return replace(layer, points=efficient_points(layer))


def readers_of(layer: Layer) -> list[list[int]]:
    """For each unit, the ops that read it."""
    readers: list[list[int]] = [[] for _ in layer.units]
    for index, op in enumerate(layer.ops):
        for unit in sorted(set(op.reads)):
            readers[unit].append(index)
    return readers


def efficient_choices(choices: Iterable[Choice], *, risk2: float) -> tuple[Choice, ...]:
    """Choices within the risk budget that no other one beats in held bytes, codec time and risk together.

    Storing is never dropped: at points where the unit is alive it costs nothing, which no codec can match.
    """
    allowed = [choice for choice in choices if choice.risk2 <= risk2 and math.isfinite(choice.codec_us)]
    kept: list[Choice] = []
    for choice in sorted(allowed, key=lambda c: (c.codec != NO_CODEC, c.held_bytes, c.codec_us, c.risk2, c.codec)):
        beaten = any(
            other.held_bytes <= choice.held_bytes and other.codec_us <= choice.codec_us and other.risk2 <= choice.risk2
            for other in kept
        )
        if choice.codec == NO_CODEC or not beaten:
            kept.append(choice)
    return tuple(kept)


def efficient_points(layer: Layer) -> tuple[Point, ...]:
    """Points that can be a layer's highest for some choice of stored units.

    Point p never rises above q if p.bytes + bytes of storable units alive in q only <= q.bytes: storing
    units that are alive in q only is what lowers q most against p.
    """
    size = {
        index: unit.bytes
        for index, unit in enumerate(layer.units)
        if any(choice.codec == NO_CODEC for choice in unit.choices)
    }
    highest: dict[frozenset[int], int] = {}
    for point in layer.points:
        alive = point.alive.intersection(size)
        highest[alive] = max(highest.get(alive, point.bytes), point.bytes)
    ranked = sorted(highest.items(), key=lambda item: (-item[1], len(item[0]), sorted(item[0])))
    kept: list[tuple[frozenset[int], int]] = []
    for alive, height in ranked:
        covered = (height + sum(size[unit] for unit in other - alive) <= above for other, above in kept)
        if not any(covered):
            kept.append((alive, height))
    return tuple(Point(bytes=height, alive=alive) for alive, height in kept)


def _with_choices(units: Sequence[Unit], offered: Sequence[tuple[Choice, ...]]) -> tuple[Unit, ...]:
    return tuple(replace(unit, choices=choices) for unit, choices in zip(units, offered, strict=True))


def _sole_successor(layer: Layer, index: int, readers: Sequence[int]) -> int | None:
    """The one output of the one op that reads this unit, if keeping that output makes the unit useless."""
    if layer.units[index].saved or len(readers) != 1 or layer.ops[readers[0]].forced:
        return None
    outputs = [position for position, unit in enumerate(layer.units) if unit.op == readers[0]]
    return outputs[0] if len(outputs) == 1 else None


def _replaceable(layer: Layer, index: int, choice: Choice, successor: int, instead: Iterable[Choice]) -> bool:
    """Whether keeping the successor by some choice is as good everywhere as keeping the unit by this one."""
    return any(
        other.held_bytes <= choice.held_bytes
        and other.codec_us <= choice.codec_us
        and other.risk2 <= choice.risk2
        and all(
            _rise(layer.units[successor], successor, other, point) <= _rise(layer.units[index], index, choice, point)
            for point in layer.points
        )
        for other in instead
    )


def _rise(unit: Unit, index: int, choice: Choice, point: Point) -> int:
    """Bytes that keeping a unit adds at a point of its own layer's backward."""
    return choice.held_bytes - (unit.bytes if choice.codec == NO_CODEC and index in point.alive else 0)
