"""What choosing rungs by exposure is worth where one answer in eight is right: predicted, on a measured profile.

    python benchmarks/exposure_gain.py PROFILE [--micro-batches 8]

Each micro-batch is one sequence, all of one length, so a success has 49 times the energy of a failure. For every cap (a
share of the way from the layers' minimum to plain, head and optimizer left out) and risk it prints the recompute tax
that the best single rung recovers, what the choice by exposure recovers at the same risk of the update, and a bound
that no choice can pass: failures at the fastest rung there is whatever its risk, the success at the best rung that the
update's whole risk would pay for.
"""

from pathlib import Path

import typer
from held_out_risk import layers_alone

from hilore_cli import load_profile
from hilore_cli.measuring.completions import group_advantages
from hilore_cli.runtime.choice import RungCost, choose_rungs
from hilore_cli.solving.evaluate import PLAIN, evaluate
from hilore_cli.solving.nearest import smallest_cap
from hilore_cli.solving.problem import problem_from_profile
from hilore_cli.solving.solve import solve

SHARES = (0.05, 0.1, 0.2, 0.3)
RISKS = (0.001, 0.003, 0.01)
GROUP = 8


def main(profile_path: Path, micro_batches: int = GROUP, time_limit_s: float = 60.0) -> None:
    profile = layers_alone(load_profile(profile_path))
    problem = problem_from_profile(profile)
    lowest, highest = smallest_cap(problem), evaluate(problem, (PLAIN,) * len(problem.layers)).peak_bytes
    exposures = [abs(value) for value in group_advantages([1.0] + [0.0] * (GROUP - 1))] * (micro_batches // GROUP)
    energy = sum(exposure**2 for exposure in exposures)
    print("share   risk  exact  single  by exposure   gain  bound  rungs (of risk)")
    for share in SHARES:
        for risk in RISKS:
            cap = int(lowest + share * (highest - lowest))
            meta = solve(profile, cap_bytes=cap, risk=risk, time_limit_s=time_limit_s).meta
            tax_us = meta.gc_us - meta.plain_us
            costs = [RungCost(rung=one.rung, step_us=one.step_us, risk2=one.predicted_risk**2) for one in meta.rungs]

            def back(step_us: float, gc_us: float = meta.gc_us, tax_us: float = tax_us) -> float:
                return (gc_us - step_us) / tax_us

            single = min(one.step_us for one in meta.rungs if one.predicted_risk <= risk)
            chosen = choose_rungs(costs, exposures, budget2=risk**2 * energy)
            by_exposure = sum(meta.rungs[rung].step_us for rung in chosen) / len(chosen)
            most = max(exposures)
            fastest = min(one.step_us for one in meta.rungs)
            whole = [one.step_us for one in meta.rungs if one.predicted_risk**2 * most**2 <= risk**2 * energy]
            bound = sum(min(whole) if exposure == most else fastest for exposure in exposures) / len(exposures)
            names = " ".join(f"{meta.rungs[rung].predicted_risk:.4f}" for rung in chosen)
            print(
                f"{share:5.2f}  {risk:.3f}  {back(meta.rungs[0].step_us):5.3f}   {back(single):5.3f}        "
                f"{back(by_exposure):5.3f}  {back(by_exposure) / back(single) - 1:+5.1%}  {back(bound):5.3f}  {names}",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
