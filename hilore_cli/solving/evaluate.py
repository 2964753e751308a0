"""What an assignment costs, exactly: step time, squared risk, held and peak bytes (DESIGN sections 3, 5 and 6).

Plain Python on whole numbers of bytes, no solver: every plan is checked here before anyone sees it, and the
greedy, the canonical form and the tests' brute force price their moves with the same functions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from hilore_cli.solving.problem import Choice, Layer, Problem, Unit
from hilore_cli.tables.profile_table import NO_CODEC


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """One layer's schedule: unwrapped (`plain`), or replayed with `kept` units (unit to codec) handed back."""

    plain: bool
    kept: Mapping[int, str]


Assignment = tuple[LayerPlan, ...]
PLAIN = LayerPlan(plain=True, kept={})
RECOMPUTE_ALL = LayerPlan(plain=False, kept={})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an assignment promises for one micro-batch at the profiled shape."""

    step_us: float
    risk2: float
    held_bytes: tuple[int, ...]
    """Per layer, the layer's input aside."""
    peak_bytes: int
    """Static bytes included."""
    replays: tuple[frozenset[int], ...]
    """Per layer, the ops that run again in backward."""


def choice_of(unit: Unit, codec: str) -> Choice:
    """The unit's choice named `codec`. Raises ValueError if the unit cannot be kept so."""
    for choice in unit.choices:
        if choice.codec == codec:
            return choice
    raise ValueError(f"a unit of op {unit.op} cannot be kept as {codec!r}")


def replayed_ops(layer: Layer, kept: Mapping[int, str]) -> frozenset[int]:
    """Ops that must run in the layer's replay (DESIGN section 3, dead ops are skipped).

    An op runs if it is forced, or if an output of it that is not kept is saved by autograd or read by an op
    that runs. Readers come after what they read, so one pass over the stream from its end decides.
    """
    needed = [unit.saved for unit in layer.units]
    running = set()
    unit = len(layer.units) - 1
    for index in range(len(layer.ops) - 1, -1, -1):
        runs = layer.ops[index].forced
        while unit >= 0 and layer.units[unit].op == index:
            runs = runs or (needed[unit] and unit not in kept)
            unit -= 1
        if runs:
            running.add(index)
            for read in layer.ops[index].reads:
                needed[read] = True
    return frozenset(running)


def replay_us(problem: Problem, layer: Layer, kept: Mapping[int, str]) -> float:
    """Microseconds that replaying this layer adds to a plain step."""
    recompute = sum(layer.ops[op].recompute_us for op in sorted(replayed_ops(layer, kept)))
    codecs = sum(choice_of(layer.units[unit], codec).codec_us for unit, codec in sorted(kept.items()))
    return problem.checkpoint_us + recompute + codecs + (problem.mode_us if kept else 0.0)


def held_bytes(layer: Layer, plan: LayerPlan) -> int:
    """Bytes that the layer keeps from its forward to its backward, its input aside."""
    if plan.plain:
        return layer.plain_held_bytes
    return sum(choice_of(layer.units[unit], codec).held_bytes for unit, codec in plan.kept.items())


def working_bytes(layer: Layer, plan: LayerPlan) -> int:
    """How far the layer's backward rises above its base and everything held, which is where it starts.

    A stored unit is held already and not rebuilt, so the points at which it is alive carry it only once; a
    compressed one is rebuilt into a buffer of its own.
    """
    if plan.plain:
        return max(layer.plain_extra_bytes, 0)
    stored = {unit: layer.units[unit].bytes for unit, codec in plan.kept.items() if codec == NO_CODEC}
    rises = (point.bytes - sum(stored[unit] for unit in stored.keys() & point.alive) for point in layer.points)
    return max(0, max(rises, default=0))


def timeline_bytes(problem: Problem, assignment: Assignment, held: tuple[int, ...]) -> Iterator[int]:
    """Bytes above static at every point of the step that can be its peak."""
    for layer, plan, alive in zip(problem.layers, assignment, accumulate(held), strict=True):
        yield layer.forward_peak_bytes + alive
        yield layer.backward_base_bytes + alive + working_bytes(layer, plan)
    yield problem.head_peak_bytes + sum(held)
    yield problem.tail_peak_bytes


def evaluate(problem: Problem, assignment: Assignment) -> Outcome:
    """Price an assignment, one plan a layer. Raises ValueError if it does not fit the problem."""
    held = tuple(held_bytes(layer, plan) for layer, plan in zip(problem.layers, assignment, strict=True))
    replays, step_us, risk2 = [], problem.plain_us, 0.0
    for layer, plan in zip(problem.layers, assignment, strict=True):
        replays.append(frozenset() if plan.plain else replayed_ops(layer, plan.kept))
        if not plan.plain:
            step_us += replay_us(problem, layer, plan.kept)
            risk2 += sum(choice_of(layer.units[unit], codec).risk2 for unit, codec in sorted(plan.kept.items()))
    return Outcome(
        step_us=step_us,
        risk2=risk2,
        held_bytes=held,
        peak_bytes=problem.static_bytes + max(timeline_bytes(problem, assignment, held)),
        replays=tuple(replays),
    )


def fits(outcome: Outcome, *, cap_bytes: int, risk: float) -> bool:
    """Whether an outcome stays within the cap (bytes, static included) and the risk budget."""
    return outcome.peak_bytes <= cap_bytes and outcome.risk2 <= risk**2
