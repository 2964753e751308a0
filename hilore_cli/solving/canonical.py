"""One form for plans that are equally good, so that ties are broken by a rule and not by a solver's mood."""

from collections import defaultdict
from collections.abc import Hashable, Mapping

from hilore_cli.solving.evaluate import Assignment, LayerPlan, evaluate, fits, held_bytes, replay_us, replayed_ops
from hilore_cli.solving.problem import Layer, Problem


def canonical(problem: Problem, assignment: Assignment, *, cap_bytes: int, risk: float) -> Assignment:
    """The same plan without worthless keeps, like layers in a fixed order; never slower, never over a limit.

    `problem` may be a presolved one: layers that differ only in choices that the risk forbids are alike there.
    """
    cleaned = tuple(
        drop_worthless_keeps(problem, layer, plan) for layer, plan in zip(problem.layers, assignment, strict=True)
    )
    ordered = order_like_layers(problem, cleaned)
    return ordered if fits(evaluate(problem, ordered), cap_bytes=cap_bytes, risk=risk) else cleaned


def drop_worthless_keeps(problem: Problem, layer: Layer, plan: LayerPlan) -> LayerPlan:
    """Keep only what earns its bytes: not a unit whose loss neither slows the step nor adds an op to replay."""
    if plan.plain:
        return plan
    kept = dict(sorted(plan.kept.items()))
    best_us, runs = replay_us(problem, layer, kept), replayed_ops(layer, kept)
    for unit in list(kept):
        fewer = {other: codec for other, codec in kept.items() if other != unit}
        fewer_us, fewer_runs = replay_us(problem, layer, fewer), replayed_ops(layer, fewer)
        if fewer_us < best_us or (fewer_us == best_us and fewer_runs <= runs):
            kept, best_us, runs = fewer, fewer_us, fewer_runs
    if replay_us(problem, layer, {}) < best_us:  # all together they do not pay for the mode
        kept = {}
    return LayerPlan(plain=False, kept=kept)


def order_like_layers(problem: Problem, assignment: Assignment) -> Assignment:
    """Among layers that differ only in their place, schedules by held bytes, the least first.

    Bytes held late are alive for fewer memory points, so this order is the easiest on the cap.
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for index, layer in enumerate(problem.layers):
        alike[(layer.ops, layer.units, layer.points, layer.plain_extra_bytes)].append(index)
    plans = list(assignment)
    for group in alike.values():
        ranked = sorted((assignment[index] for index in group), key=lambda plan: _rank(problem.layers[group[0]], plan))
        for index, plan in zip(group, ranked, strict=True):
            plans[index] = plan
    return tuple(plans)


def _rank(layer: Layer, plan: LayerPlan) -> tuple[int, bool, list[tuple[int, str]]]:
    return held_bytes(layer, plan), plan.plain, _items(plan.kept)


def _items(kept: Mapping[int, str]) -> list[tuple[int, str]]:
    return sorted(kept.items())
