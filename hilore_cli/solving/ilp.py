"""The integer program of DESIGN section 7: what to store, compress and recompute, layer by layer.

Variables per layer: `replayed` (0: the layer runs plain), `kept[unit, codec]`, `run[op]` (the op runs in
replay), `mode` (anything is kept at all), and continuous `held` and `alive` bytes. `run` is continuous: its
constraints push it to 0 or 1. Bytes and microseconds are scaled so that the solver's tolerances stay far
below one unit's worth; what it returns is priced again by `evaluate`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pulp

from hilore_cli.solving.evaluate import PLAIN, Assignment, LayerPlan
from hilore_cli.solving.presolve import readers_of
from hilore_cli.solving.problem import Problem
from hilore_cli.tables.profile_table import NO_CODEC


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Units of the program: bytes, microseconds and squared risk that count as 1."""

    bytes: float
    us: float
    risk2: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The program and its variables, by layer."""

    lp: pulp.LpProblem
    scale: Scale
    replayed: list[pulp.LpVariable]
    """Binary: the layer is replayed in backward; 0 runs it plain."""
    mode: list[pulp.LpVariable]
    """In [0, 1]: the layer keeps anything, so its replay needs the dispatch mode."""
    kept: list[dict[tuple[int, str], pulp.LpVariable]]
    """Binary, per (unit, codec)."""
    run: list[dict[int, pulp.LpVariable]]
    """In [0, 1], per op."""
    alive: list[pulp.LpVariable]
    """Bytes held by this layer and all before it."""

    def keep(self, layer: int, unit: int) -> pulp.LpAffineExpression:
        """1 if the unit is kept by any codec."""
        return pulp.lpSum(variable for (position, _), variable in self.kept[layer].items() if position == unit)


def build(problem: Problem, *, cap_bytes: float, risk2: float) -> Program:
    """Model a problem under a cap (bytes, static included) and a squared risk budget."""
    room = cap_bytes - problem.static_bytes
    slowest = len(problem.layers) * (problem.checkpoint_us + problem.mode_us) + sum(
        op.recompute_us for layer in problem.layers for op in layer.ops
    )
    scale = Scale(bytes=max(room, 1) / 1000, us=max(problem.plain_us, slowest, 1e-9) / 1000, risk2=risk2 / 1000 or 1.0)
    program = _variables(problem, scale)
    program.lp.setObjective(_replay_time(program, problem))
    for constraint in _constraints(program, problem, room=room, risk2=risk2):
        program.lp.addConstraint(constraint)
    return program


def _variables(problem: Problem, scale: Scale) -> Program:
    lp = pulp.LpProblem("hilore", pulp.LpMinimize)
    layers = range(len(problem.layers))
    return Program(
        lp=lp,
        scale=scale,
        replayed=[lp.add_variable(f"replayed_{layer}", cat=pulp.LpBinary) for layer in layers],
        mode=[lp.add_variable(f"mode_{layer}", 0, 1) for layer in layers],
        kept=[
            {
                (position, choice.codec): lp.add_variable(f"kept_{layer}_{position}_{rank}", cat=pulp.LpBinary)
                for position, unit in enumerate(problem.layers[layer].units)
                for rank, choice in enumerate(unit.choices)
            }
            for layer in layers
        ],
        run=[
            {op: lp.add_variable(f"run_{layer}_{op}", 0, 1) for op in range(len(problem.layers[layer].ops))}
            for layer in layers
        ],
        alive=[lp.add_variable(f"alive_{layer}", 0) for layer in layers],
    )


def _replay_time(program: Program, problem: Problem) -> pulp.LpAffineExpression:
    """Step time above plain (DESIGN section 6)."""
    us = program.scale.us
    terms = []
    for index, layer in enumerate(problem.layers):
        terms.append((program.replayed[index], problem.checkpoint_us / us))
        terms.append((program.mode[index], problem.mode_us / us))
        terms += [(program.run[index][op], layer.ops[op].recompute_us / us) for op in range(len(layer.ops))]
        for position, unit in enumerate(layer.units):
            terms += [(program.kept[index][position, c.codec], c.codec_us / us) for c in unit.choices]
    return pulp.LpAffineExpression(terms)


def _constraints(program: Program, problem: Problem, *, room: float, risk2: float) -> Iterator[pulp.LpConstraint]:
    for index in range(len(problem.layers)):
        yield from _one_codec_in_replayed_layers(program, problem, index)
        yield from _needed_ops_run(program, problem, index)
        yield from _held_bytes_add_up(program, problem, index)
        yield from _forward_fits(program, problem, index, room)
        yield from _replayed_backward_fits(program, problem, index, room)
        yield from _plain_backward_fits(program, problem, index, room)
    yield from _head_fits(program, problem, room)
    if risk2 > 0:
        yield _risk_within_budget(program, problem, risk2)


# --- a unit is kept by at most one codec, only in a replayed layer, and the mode is paid once


def _one_codec_in_replayed_layers(program: Program, problem: Problem, index: int) -> Iterator[pulp.LpConstraint]:
    for position, unit in enumerate(problem.layers[index].units):
        if unit.choices:
            yield program.keep(index, position) <= program.mode[index]
    yield program.mode[index] <= program.replayed[index]


# --- an op runs if forced, or if an output that is not kept is saved by autograd or read by an op that runs


def _needed_ops_run(program: Program, problem: Problem, index: int) -> Iterator[pulp.LpConstraint]:
    layer, run, replayed = problem.layers[index], program.run[index], program.replayed[index]
    readers = readers_of(layer)
    for op, description in enumerate(layer.ops):
        if description.forced:
            yield run[op] >= replayed
    for position, unit in enumerate(layer.units):
        keep = program.keep(index, position)
        if unit.saved:
            yield run[unit.op] >= replayed - keep
        else:
            for reader in readers[position]:
                yield run[unit.op] >= run[reader] - keep


# --- held bytes accumulate over the forward: `alive` of a layer counts it and all before it


def _held_bytes_add_up(program: Program, problem: Problem, index: int) -> Iterator[pulp.LpConstraint]:
    layer, scale = problem.layers[index], program.scale.bytes
    held = [(program.replayed[index], -layer.plain_held_bytes / scale)]
    for position, unit in enumerate(layer.units):
        held += [(program.kept[index][position, c.codec], c.held_bytes / scale) for c in unit.choices]
    before = [(program.alive[index - 1], 1.0)] if index else []
    yield pulp.LpAffineExpression([*held, *before, (program.alive[index], -1.0)]) == -layer.plain_held_bytes / scale


# --- memory: forward of each layer, head and loss, backward of each layer


def _forward_fits(program: Program, problem: Problem, index: int, room: float) -> Iterator[pulp.LpConstraint]:
    """Also where the layer's backward starts, from its base."""
    layer = problem.layers[index]
    height = max(layer.forward_peak_bytes, layer.backward_base_bytes)
    yield program.alive[index] <= (room - height) / program.scale.bytes


def _head_fits(program: Program, problem: Problem, room: float) -> Iterator[pulp.LpConstraint]:
    yield program.alive[-1] <= (room - problem.head_peak_bytes) / program.scale.bytes


def _replayed_backward_fits(program: Program, problem: Problem, index: int, room: float) -> Iterator[pulp.LpConstraint]:
    """At every point; a stored unit that is alive there is held already, so it counts once."""
    layer, scale = problem.layers[index], program.scale.bytes
    for point in layer.points:
        terms = [(program.alive[index], 1.0), (program.replayed[index], point.bytes / scale)]
        terms += [
            (program.kept[index][unit, NO_CODEC], -layer.units[unit].bytes / scale)
            for unit in sorted(point.alive)
            if (unit, NO_CODEC) in program.kept[index]
        ]
        yield pulp.LpAffineExpression(terms) <= (room - layer.backward_base_bytes) / scale


def _plain_backward_fits(program: Program, problem: Problem, index: int, room: float) -> Iterator[pulp.LpConstraint]:
    layer, scale = problem.layers[index], program.scale.bytes
    extra = max(layer.plain_extra_bytes, 0) / scale
    yield program.alive[index] - extra * program.replayed[index] <= (room - layer.backward_base_bytes) / scale - extra


# --- squared risks of independent errors add up


def _risk_within_budget(program: Program, problem: Problem, risk2: float) -> pulp.LpConstraint:
    terms = [
        (program.kept[index][position, choice.codec], choice.risk2 / program.scale.risk2)
        for index, layer in enumerate(problem.layers)
        for position, unit in enumerate(layer.units)
        for choice in unit.choices
        if choice.risk2
    ]
    return pulp.LpAffineExpression(terms) <= risk2 / program.scale.risk2


def read_assignment(program: Program) -> Assignment:
    """The assignment that the solved variables say, rounded."""
    plans = []
    for replayed, kept in zip(program.replayed, program.kept, strict=True):
        if replayed.value() < 0.5:
            plans.append(PLAIN)
        else:
            chosen = {unit: codec for (unit, codec), variable in kept.items() if variable.value() > 0.5}
            plans.append(LayerPlan(plain=False, kept=chosen))
    return tuple(plans)
