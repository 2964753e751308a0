"""The nearest feasible numbers when no plan fits (DESIGN section 7).

No solver is needed. Keeping a unit never lowers a memory point (a stored unit cancels out where it would have
been rebuilt anyway, and adds its bytes elsewhere), so the smallest footprint keeps nothing: each layer either
recomputes all or runs plain. Fewer held bytes early help every later point, so taking the layers in order and
recomputing wherever that fits decides a cap exactly. It follows that risk never buys feasibility: whatever
fits at some risk fits at risk 0.
"""

from hilore_cli.errors import Infeasible
from hilore_cli.quantities import format_bytes
from hilore_cli.solving.evaluate import PLAIN, RECOMPUTE_ALL, Assignment, LayerPlan, evaluate, working_bytes
from hilore_cli.solving.problem import Problem


def frugal_assignment(problem: Problem, *, cap_bytes: int) -> Assignment | None:
    """An exact plan that fits under `cap_bytes` (static included) and keeps nothing, or None if no plan fits."""
    room = cap_bytes - problem.static_bytes
    plans: list[LayerPlan] = []
    held = 0
    for layer in problem.layers:
        rise = layer.backward_base_bytes + working_bytes(layer, RECOMPUTE_ALL)
        plans.append(RECOMPUTE_ALL if held + max(rise, layer.forward_peak_bytes) <= room else PLAIN)
        held += layer.plain_held_bytes if plans[-1].plain else 0
    assignment = tuple(plans)
    return assignment if evaluate(problem, assignment).peak_bytes <= cap_bytes else None


def smallest_cap(problem: Problem) -> int:
    """The smallest cap, in bytes, under which some plan fits; the same at every risk."""
    high = evaluate(problem, (RECOMPUTE_ALL,) * len(problem.layers)).peak_bytes
    low = problem.static_bytes + min(problem.tail_peak_bytes, problem.head_peak_bytes, 0) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if frugal_assignment(problem, cap_bytes=middle) is None:
            low = middle
        else:
            high = middle
    return high


def smallest_risk(problem: Problem, *, cap_bytes: int) -> float | None:
    """The smallest risk at which some plan fits under the cap: 0, or None if no risk helps."""
    return None if frugal_assignment(problem, cap_bytes=cap_bytes) is None else 0.0


def infeasible(problem: Problem, *, cap_bytes: int, cap_text: str, risk: float) -> Infeasible:
    """The error for a cap that no plan fits under: what was asked, and what would work."""
    nearest = smallest_cap(problem)
    return Infeasible(
        f"--mem {cap_text or format_bytes(cap_bytes)} --risk {risk:g}",
        "no plan fits",
        f"smallest cap at this risk: {format_bytes(nearest)} (--mem {nearest}B); smallest risk at this cap: none, since"
        " the smallest plan recomputes all and has risk 0; or profile a smaller micro-batch",
    )
