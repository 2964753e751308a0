"""Why each unit is treated as it is: what the runner-up would have cost, the rest of the plan as it stands."""

from collections.abc import Iterator

from hilore_cli.quantities import format_bytes
from hilore_cli.solving.evaluate import LayerPlan, replay_us
from hilore_cli.solving.problem import Layer, Problem
from hilore_cli.tables.profile_table import NO_CODEC


def reasons(problem: Problem, layer: Layer, plan: LayerPlan, replayed: frozenset[int]) -> Iterator[str]:
    """One reason a unit of the layer, in order; `replayed` are the ops that run again under this plan."""
    if plan.plain:
        cost = _time(replay_us(problem, layer, {}))
        for unit in layer.units:
            yield f"plain: recomputing this layer would cost {cost}" if unit.saved else "plain: not needed in backward"
        return
    now_us = replay_us(problem, layer, plan.kept)
    for position, unit in enumerate(layer.units):
        if position in plan.kept:
            yield _why_kept(problem, layer, plan, position, now_us)
        elif unit.op not in replayed:
            yield "not needed in replay"
        elif layer.ops[unit.op].forced:
            yield "runs in every replay"
        else:
            yield _why_rebuilt(problem, layer, plan, position, now_us)


def _why_kept(problem: Problem, layer: Layer, plan: LayerPlan, position: int, now_us: float) -> str:
    others = {unit: codec for unit, codec in plan.kept.items() if unit != position}
    cost = _time(replay_us(problem, layer, others) - now_us)
    codec, unit = plan.kept[position], layer.units[position]
    if codec == NO_CODEC:
        return f"recomputing it would cost {cost} and free {format_bytes(unit.bytes)}"
    stored = next((choice for choice in unit.choices if choice.codec == NO_CODEC), None)
    held = next(choice.held_bytes for choice in unit.choices if choice.codec == codec)
    more = f"storing it would hold {format_bytes(stored.held_bytes - held)} more, " if stored else ""
    return f"{more}recomputing it would cost {cost}"


def _why_rebuilt(problem: Problem, layer: Layer, plan: LayerPlan, position: int, now_us: float) -> str:
    unit = layer.units[position]
    if not unit.choices:
        return "cannot be kept"
    saved_us = now_us - replay_us(problem, layer, {**plan.kept, position: unit.choices[0].codec})
    if saved_us <= 0:
        return "keeping it would save no time"
    return f"rebuilding costs {_time(saved_us)} and frees {format_bytes(unit.bytes)}"


def _time(us: float) -> str:
    return f"{us / 1000:.3g} ms" if abs(us) >= 100 else f"{us:.3g} us"
