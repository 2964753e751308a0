"""Which rung each micro-batch of an update runs at (DESIGN section 4): least time within the update's risk budget.

A micro-batch of exposure X at a rung of relative gain k adds k^2 X^2 to the squared error of the update's gradient, so
the micro-batches of small exposure can be compressed harder. Rungs differ for every micro-batch by the same times and
gains, which makes the best choice monotone: never a riskier rung for a larger exposure. Few micro-batches are decided
exactly, by listing every monotone choice; many by the convex hull of the rungs, best ratio first, which is at most one
move from the best.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

_LISTED = 2**15
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class RungCost:
    """What one micro-batch at this rung costs."""

    rung: int
    step_us: float
    risk2: float
    """Its squared risk where all micro-batches run at it: (K / Gamma)^2, margin included."""


def choose_rungs(costs: Sequence[RungCost], exposures: Sequence[float], *, budget2: float) -> list[int]:
    """A rung a micro-batch, so that the sum of risk2 * X^2 is within `budget2`, in the least time.

    If no choice is within the budget, every micro-batch gets the rung of the least gain.
    """
    useful = _pareto(costs)
    if not exposures:
        return []
    energies = torch.tensor(exposures, dtype=torch.float64).square()
    budget2 *= 1 + _ROUNDING
    ascending = energies.argsort(stable=True)
    if math.comb(len(exposures) + len(useful) - 1, len(useful) - 1) * len(exposures) <= _LISTED:
        places = _exact(useful, energies[ascending], budget2)
    else:
        places = _greedy(_hull(useful), energies[ascending], budget2)
    chosen = [0] * len(exposures)
    for position, cost in zip(ascending.tolist(), places, strict=True):
        chosen[position] = cost.rung
    return chosen


def _pareto(costs: Sequence[RungCost]) -> list[RungCost]:
    """Rungs that none beats in gain and time, the least gain first, each faster than the one before."""
    kept: list[RungCost] = []
    for cost in sorted(costs, key=lambda cost: (cost.risk2, cost.step_us, cost.rung)):
        if not kept or cost.step_us < kept[-1].step_us:
            kept.append(cost)
    return kept


def _exact(useful: list[RungCost], energies: torch.Tensor, budget2: float) -> list[RungCost]:
    """The best of all monotone choices; `energies` ascending, so rungs come riskiest first."""
    choices = _monotone(len(useful), len(energies))
    risk2 = torch.tensor([cost.risk2 for cost in reversed(useful)], dtype=torch.float64)
    step_us = torch.tensor([cost.step_us for cost in reversed(useful)], dtype=torch.float64)
    risk2 = risk2[choices] @ energies
    times = step_us[choices].sum(dim=1)
    times[risk2 > budget2] = torch.inf
    best = int(times.argmin())
    if math.isinf(float(times[best])):
        return [useful[0]] * len(energies)
    return [useful[len(useful) - 1 - place] for place in choices[best].tolist()]


@lru_cache(maxsize=32)
def _monotone(rungs: int, micro_batches: int) -> torch.Tensor:
    """[choices, micro_batches]: every way to give rungs in order."""
    return torch.tensor(list(itertools.combinations_with_replacement(range(rungs), micro_batches)))


def _hull(useful: list[RungCost]) -> list[RungCost]:
    """Rungs on the lower convex hull of time over gain: each step saves less time per gain than the one before."""
    hull: list[RungCost] = []
    for cost in useful:
        while len(hull) > 1 and _saved_per_gain(hull[-2], hull[-1]) <= _saved_per_gain(hull[-1], cost):
            hull.pop()
        hull.append(cost)
    return hull


def _saved_per_gain(slow: RungCost, fast: RungCost) -> float:
    return (slow.step_us - fast.step_us) / (fast.risk2 - slow.risk2)


def _greedy(hull: list[RungCost], energies: torch.Tensor, budget2: float) -> list[RungCost]:
    """From the least gain, the moves that save most time per risk; those that no longer fit are passed over."""
    places = [0] * len(energies)
    left = budget2 - hull[0].risk2 * float(energies.sum())
    if len(hull) == 1 or left < 0:
        return [hull[0]] * len(energies)
    steps = list(itertools.pairwise(hull))
    gains = torch.tensor([fast.risk2 - slow.risk2 for slow, fast in steps], dtype=torch.float64)
    rates = torch.tensor([_saved_per_gain(slow, fast) for slow, fast in steps], dtype=torch.float64)
    # by micro-batch, then step: a stable sort keeps a micro-batch's steps in order where rates tie
    order = (rates[None, :] / energies[:, None]).flatten().argsort(descending=True, stable=True)
    spent = (gains[None, :] * energies[:, None]).flatten()[order]
    fitting = int((spent.cumsum(0) <= left).sum())
    left -= float(spent[:fitting].sum())
    for move in order[:fitting].tolist():
        places[move // len(steps)] += 1
    for move, cost in zip(order[fitting:].tolist(), spent[fitting:].tolist(), strict=True):
        if cost <= left and places[move // len(steps)] == move % len(steps):
            places[move // len(steps)] += 1
            left -= cost
    return [hull[place] for place in places]
