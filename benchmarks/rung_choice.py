"""How long the choice of rungs takes, by the number of micro-batches in an update.

    python benchmarks/rung_choice.py [PLAN]

Exposures are drawn; prints the fastest and the median of many choices in microseconds, and the mean predicted step.
"""

import random
import statistics
import time
from pathlib import Path
from typing import Annotated

import typer

from hilore_cli import load_plan
from hilore_cli.runtime.choice import RungCost, choose_rungs

ROUNDS = 300


def main(plan_path: Annotated[Path, typer.Argument()] = Path("plans/smollm2-135m-1.10gc-r0.01.parquet")) -> None:
    meta = load_plan(plan_path).meta
    costs = [RungCost(rung=one.rung, step_us=one.step_us, risk2=one.predicted_risk**2) for one in meta.rungs]
    draw = random.Random(0)  # noqa: S311 - not a secret
    print("micro-batches  fastest us  median us  mean step ms")
    for count in (8, 16, 64, 256, 1024):
        exposures = [draw.lognormvariate(0, 1) for _ in range(count)]
        budget2 = meta.risk**2 * sum(exposure**2 for exposure in exposures)
        spent = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            chosen = choose_rungs(costs, exposures, budget2=budget2)
            spent.append((time.perf_counter() - start) * 1e6)
        step_ms = statistics.fmean(meta.rungs[rung].step_us for rung in chosen) / 1e3
        print(f"{count:13d}  {min(spent):10.0f}  {statistics.median(spent):9.0f}  {step_ms:12.1f}")


if __name__ == "__main__":
    typer.run(main)
