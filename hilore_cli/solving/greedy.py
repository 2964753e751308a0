"""Greedy plans: from the most frugal one, buy the move that saves most time per byte and per risk.

A move keeps one more unit (or keeps it through another codec), or turns a layer plain. Moves are priced by
their exact marginal effect on the layer they touch; when a layer changes, only its own moves are priced again.
The result starts the ILP, and the ILP's margin over it is reported.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hilore_cli.solving.evaluate import PLAIN, Assignment, LayerPlan, choice_of, held_bytes, working_bytes
from hilore_cli.solving.nearest import frugal_assignment
from hilore_cli.solving.problem import Choice, Layer, Problem

_NOTHING = Choice(codec="", held_bytes=0, codec_us=0.0, risk2=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    unit: int | None
    """None: the whole layer runs plain."""
    codec: str
    saved_us: float
    risk2: float
    score: float

    def applied_to(self, plan: LayerPlan) -> LayerPlan:
        return PLAIN if self.unit is None else LayerPlan(plain=False, kept={**plan.kept, self.unit: self.codec})


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
        self.risk2_left = risk2 * (1 - 1e-12)  # sums taken in another order must not pass the budget
        self.run_us = [compile_run_us(layer) for layer in problem.layers]
        self.held = [0] * len(start)
        self.rise = [0] * len(start)
        for index, plan in enumerate(start):
            self._place(index, plan)
        self.byte_price = 1 / max(1, self._spare())
        self.risk2_price = 1 / risk2 if risk2 else 0.0
        self.moves = [self._ranked_moves(index) for index in range(len(start))]

    def run(self) -> Assignment:
        """Take the best move that fits until none is left."""
        while any(self.moves):
            open_layers = (index for index, moves in enumerate(self.moves) if moves)
            layer = max(open_layers, key=lambda index: (self.moves[index][-1].score, -index))
            move = self.moves[layer].pop()
            if self._try(layer, move):
                self.moves[layer] = self._ranked_moves(layer)
        return tuple(self.plans)

    def _try(self, index: int, move: _Move) -> bool:
        if move.risk2 > self.risk2_left:
            return False
        before = self.held[index], self.rise[index]
        plan = move.applied_to(self.plans[index])
        self._place(index, plan)
        if self._spare() < 0:
            self.held[index], self.rise[index] = before
            return False
        self.plans[index] = plan
        self.risk2_left -= move.risk2
        return True

    def _place(self, index: int, plan: LayerPlan) -> None:
        layer = self.problem.layers[index]
        self.held[index] = held_bytes(layer, plan)
        rise = layer.backward_base_bytes + working_bytes(layer, plan)
        self.rise[index] = max(layer.forward_peak_bytes, rise)

    def _spare(self) -> int:
        """Bytes between the cap and the highest point of the step."""
        total, spare = 0, self.room - self.problem.head_peak_bytes - sum(self.held)
        for held, rise in zip(self.held, self.rise, strict=True):
            total += held
            spare = min(spare, self.room - rise - total)
        return spare

    def _ranked_moves(self, index: int) -> list[_Move]:
        """A layer's worthwhile moves, the best one last."""
        if self.plans[index].plain:
            return []
        worthwhile = (move for move in self._moves(index) if move.saved_us > 0)
        return sorted(worthwhile, key=lambda move: (move.score, move.saved_us))

    def _moves(self, index: int) -> Iterator[_Move]:
        layer, kept = self.problem.layers[index], self.plans[index].kept
        chosen = {unit: choice_of(layer.units[unit], codec) for unit, codec in kept.items()}
        mask = sum(1 << unit for unit in kept)
        run_us = self.run_us[index](mask)
        # the mode is paid by the first unit kept, for all that follow: charged to it alone it would hide them
        replay_us = self.problem.checkpoint_us + self.problem.mode_us + run_us
        yield self._move(
            unit=None,
            codec="",
            saved_us=replay_us + sum(choice.codec_us for choice in chosen.values()),
            held=layer.plain_held_bytes - self.held[index],
            risk2=-sum(choice.risk2 for choice in chosen.values()),
        )
        for position, unit in enumerate(layer.units):
            if unit.choices:
                now = chosen.get(position, _NOTHING)
                spared_us = run_us - self.run_us[index](mask | 1 << position) + now.codec_us
                for choice in unit.choices:
                    yield self._move(
                        unit=position,
                        codec=choice.codec,
                        saved_us=spared_us - choice.codec_us,
                        held=choice.held_bytes - now.held_bytes,
                        risk2=choice.risk2 - now.risk2,
                    )

    def _move(self, *, unit: int | None, codec: str, saved_us: float, held: int, risk2: float) -> _Move:
        cost = max(held, 0) * self.byte_price + max(risk2, 0.0) * self.risk2_price
        return _Move(unit=unit, codec=codec, saved_us=saved_us, risk2=risk2, score=saved_us / (cost + 1e-9))


def compile_run_us(layer: Layer) -> Callable[[int], float]:
    """Microseconds of the ops that run in replay, as a function of a bit mask of kept units.

    The same rule as `evaluate.replayed_ops`, many times faster; results are remembered.
    """
    outputs = [0] * len(layer.ops)
    for position, unit in enumerate(layer.units):
        outputs[unit.op] |= 1 << position
    saved = sum(1 << position for position, unit in enumerate(layer.units) if unit.saved)
    steps = [
        (made, sum(1 << read for read in set(op.reads)), op.forced, op.recompute_us)
        for op, made in zip(reversed(layer.ops), reversed(outputs), strict=True)
    ]
    known: dict[int, float] = {}

    def run_us(kept: int) -> float:
        if kept not in known:
            needed, total = saved, 0.0
            for made, reads, forced, us in steps:
                if forced or made & needed & ~kept:
                    needed |= reads
                    total += us
            known[kept] = total
        return known[kept]

    return run_us
