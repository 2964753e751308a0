"""Greedy plans: from the most frugal one, buy the move that saves most time per byte and per risk.

A move keeps one more unit (or keeps it through another codec), or turns a layer plain. Moves are priced by
their exact marginal effect on the layer they touch; when a layer changes, only its own moves are priced again.
The result starts the ILP, and the ILP's margin over it is reported.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hilore_cli.solving.evaluate import (
    PLAIN,
    Assignment,
    LayerPlan,
    choice_of,
    held_bytes,
    replay_us,
    working_bytes,
)
from hilore_cli.solving.nearest import frugal_assignment
from hilore_cli.solving.problem import Layer, Problem

_Ops = dict[tuple[object, ...], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    plan: LayerPlan
    saved_us: float
    held_bytes: int
    risk2: float
    score: float


def solve_greedy(problem: Problem, *, cap_bytes: int, risk: float) -> Assignment | None:
    """A good plan under the cap (bytes, static included) and the risk, or None if no plan fits."""
    start = frugal_assignment(problem, cap_bytes=cap_bytes)
    return None if start is None else _Climb(problem, start, cap_bytes=cap_bytes, risk2=risk**2).run()


class _Climb:
    """The state of one climb: the plans so far, what they hold, and every layer's open moves."""

    def __init__(self, problem: Problem, start: Assignment, *, cap_bytes: int, risk2: float) -> None:
        self.problem = problem
        self.plans = list(start)
        self.room = cap_bytes - problem.static_bytes
        self.risk2_left = risk2
        self.replay_us = _memoised_replay_us(problem)
        self.held = [held_bytes(layer, plan) for layer, plan in zip(problem.layers, start, strict=True)]
        self.rise = [
            max(layer.forward_peak_bytes, layer.backward_base_bytes + working_bytes(layer, plan))
            for layer, plan in zip(problem.layers, start, strict=True)
        ]
        self.prices = (max(1, self._spare()), risk2)
        self.moves = [self._moves(index) for index in range(len(start))]

    def run(self) -> Assignment:
        """Take the best move that fits until none is left."""
        while True:
            open_layers = [index for index, moves in enumerate(self.moves) if moves]
            if not open_layers:
                return tuple(self.plans)
            layer = max(open_layers, key=lambda index: (self.moves[index][-1].score, -index))
            move = self.moves[layer].pop()  # what does not fit now never will: room and risk only shrink
            if self._fits(layer, move):
                self._take(layer, move)

    def _spare(self) -> int:
        total, spare = 0, self.room - self.problem.head_peak_bytes - sum(self.held)
        for held, rise in zip(self.held, self.rise, strict=True):
            total += held
            spare = min(spare, self.room - rise - total)
        return spare

    def _fits(self, layer: int, move: _Move) -> bool:
        if move.risk2 > self.risk2_left:
            return False
        before = self.held[layer], self.rise[layer]
        self._place(layer, move.plan)
        fits = self._spare() >= 0
        self.held[layer], self.rise[layer] = before
        return fits

    def _place(self, index: int, plan: LayerPlan) -> None:
        layer = self.problem.layers[index]
        self.held[index] = held_bytes(layer, plan)
        rise = layer.backward_base_bytes + working_bytes(layer, plan)
        self.rise[index] = max(layer.forward_peak_bytes, rise)

    def _take(self, layer: int, move: _Move) -> None:
        self.plans[layer] = move.plan
        self.risk2_left -= move.risk2
        self._place(layer, move.plan)
        self.moves[layer] = self._moves(layer)

    def _moves(self, index: int) -> list[_Move]:
        """A layer's worthwhile moves, the best one last."""
        layer, plan = self.problem.layers[index], self.plans[index]
        if plan.plain:
            return []
        now_us = self.replay_us(index, plan)
        moves = [self._move(index, now_us, PLAIN)]
        for position, unit in enumerate(layer.units):
            for choice in unit.choices:
                if plan.kept.get(position) != choice.codec:
                    kept = {**plan.kept, position: choice.codec}
                    moves.append(self._move(index, now_us, LayerPlan(plain=False, kept=kept)))
        worthwhile = [move for move in moves if move.saved_us > 0]
        return sorted(worthwhile, key=lambda move: (move.score, move.saved_us))

    def _move(self, index: int, now_us: float, plan: LayerPlan) -> _Move:
        layer, current = self.problem.layers[index], self.plans[index]
        # the mode's cost falls on the first unit kept: shared by all that follow, so not weighed here
        saved_us = now_us - (0.0 if plan.plain else self.replay_us(index, plan))
        held = held_bytes(layer, plan) - held_bytes(layer, current)
        risk2 = _risk2(layer, plan) - _risk2(layer, current)
        room, budget = self.prices
        cost = max(held, 0) / room + (max(risk2, 0.0) / budget if budget else 0.0)
        return _Move(plan=plan, saved_us=saved_us, held_bytes=held, risk2=risk2, score=saved_us / (cost + 1e-9))


def _risk2(layer: Layer, plan: LayerPlan) -> float:
    return sum(choice_of(layer.units[unit], codec).risk2 for unit, codec in plan.kept.items())


def _memoised_replay_us(problem: Problem) -> Callable[[int, LayerPlan], float]:
    """Replay times, shared between layers with the same stream; they differ in risk only.

    The mode's cost falls on every replayed layer here, kept or not: charged to the first unit alone it would
    hide what the units after it save. `drop_worthless_keeps` settles it afterwards.
    """
    streams: _Ops = {}
    kinds = [
        streams.setdefault(
            (
                layer.ops,
                tuple((u.op, u.saved, tuple((c.codec, c.codec_us) for c in u.choices)) for u in layer.units),
            ),
            len(streams),
        )
        for layer in problem.layers
    ]
    free = replace(problem, mode_us=0.0)
    known: dict[tuple[int, frozenset[tuple[int, str]]], float] = {}

    def measure(index: int, plan: LayerPlan) -> float:
        key = (kinds[index], frozenset(plan.kept.items()))
        if key not in known:
            known[key] = replay_us(free, problem.layers[index], plan.kept) + problem.mode_us
        return known[key]

    return measure
