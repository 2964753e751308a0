"""Plans at five caps from GC's minimum to plain, each run and held to its promises.

    python benchmarks/five_caps.py profiles/smollm2-135m.parquet [--risk 0.01] [--rounds 1]

Prints, per cap and rung: predicted and measured peak, their ratio, held bytes of both kinds, gradient error, and tax
recovered (from medians; raise --rounds where times matter).
"""

from pathlib import Path
from typing import Annotated

import typer

from hilore_cli.cli.workload import options_from_profile
from hilore_cli.experiments.progress import Silent
from hilore_cli.experiments.verifying import held_out_batches, verify_plan
from hilore_cli.experiments.workloads import prepare
from hilore_cli.solving.solve import solve
from hilore_cli.tables.profile_table import load_profile

CAPS = 5


def main(
    profile_path: Path,
    risk: Annotated[float, typer.Option()] = 0.0,
    rounds: Annotated[int, typer.Option()] = 1,
) -> None:
    profile = load_profile(profile_path)
    static = profile.meta.static_bytes.total
    lowest, highest = static + profile.meta.memory.gc_peak_bytes, static + profile.meta.memory.plain_peak_bytes
    options = options_from_profile(profile)
    calibration = profile.meta.calibration.micro_batches
    workload = prepare(options, count=calibration + held_out_batches(options.shape), skip=0, progress=Silent())
    print("cap MB     rung  predicted MB  measured MB   ratio  held equal  forward  error     tax back  broken")
    for step in range(CAPS):
        cap_bytes = lowest + (highest - lowest) * step // (CAPS - 1)
        plan = solve(profile, cap_bytes=cap_bytes, risk=risk)
        for report in verify_plan(plan, options, workload=workload, rounds=rounds):
            predicted, measured = report.predicted.peak_bytes, report.measured.peak_bytes
            print(
                f"{cap_bytes / 1e6:9.1f}  {report.rung:4d}  {predicted / 1e6:12.3f}  {measured / 1e6:11.3f}  "
                f"{predicted / measured:6.4f}  {report.held_plan_bytes == report.held_measured_bytes!s:>10}  "
                f"{report.forward_equal!s:>7}  {report.measured.risk:.2e}  {report.tax_recovered:8.3f}  "
                f"{report.broken}",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
