"""Predicted against measured risk of held-out updates on SmolLM2-135M, at several risks and by exposure, in one run.

    python benchmarks/held_out_risk.py [--updates 40] [--dtype bfloat16] [--loss grpo] [--loss-level sequence]

Real text: the actor's own answers to the built-in questions. Steps are small, so that 1,300 of them take minutes; the
head and the optimizer would then decide the peak and no cap would make a plan compress, so the cap counts the layers
alone: their minimum and a share of the way to plain. Codecs count as free, so that plans spend the risk they may. It
prints a table after every few updates; --out FILE writes every update as JSON, --plot a figure.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

import typer

from hilore_cli.experiments.calibration import CALIBRATION_BATCHES
from hilore_cli.experiments.profiling import profile_actor
from hilore_cli.experiments.progress import Silent
from hilore_cli.experiments.reports import UpdatesReport
from hilore_cli.experiments.updates import verify_updates
from hilore_cli.experiments.workloads import prepare
from hilore_cli.measuring.options import LossSpec, WorkloadOptions
from hilore_cli.report.risk_plot import plot_risk
from hilore_cli.report.verify_view import updates_facts
from hilore_cli.solving.evaluate import PLAIN, evaluate
from hilore_cli.solving.nearest import smallest_cap
from hilore_cli.solving.problem import problem_from_profile
from hilore_cli.solving.solve import solve
from hilore_cli.tables.profile_table import Profile, Shape

RISK = 0.01
AT_ONCE = 5
MULTIPLES = (0.0, 0.25, 0.3, 0.5, 2.0, 3.0, 4.0)


def main(
    *,
    updates: int = 40,
    micro_batches: int = 8,
    micro_batch: int = 1,
    prompt_tokens: int = 64,
    response_tokens: int = 64,
    dtype: str = "float32",
    loss: str = "dapo",
    loss_level: str = "token",
    beta: float = 0.0,
    share: float = 0.1,
    by_exposure: bool = True,
    out: Annotated[Path | None, typer.Option()] = None,
    plot: Annotated[Path | None, typer.Option()] = None,
) -> None:
    shape = Shape(micro_batch=micro_batch, prompt_tokens=prompt_tokens, response_tokens=response_tokens)
    spec = LossSpec(kind=loss, level=loss_level, beta=beta)
    options = WorkloadOptions(model="smollm2-135m", shape=shape, dtype=dtype, loss=spec, optimizer="none")
    workload = prepare(options, count=CALIBRATION_BATCHES + updates * micro_batches, skip=0, progress=Silent())
    start = time.perf_counter()
    profile = profile_actor(options, workload=workload, rounds=5)
    wall_s, gc_s = time.perf_counter() - start, profile.meta.timing.gc_us / 1e6
    calibration = profile.meta.calibration
    ratios = " ".join(f"{ratio:.2f}" for ratio in calibration.ratios)
    print(f"profile {wall_s:.0f} s = {wall_s / gc_s:.1f} GC steps; ratios {ratios}, margin {calibration.margin:.3f}")
    profile = free_codecs(layers_alone(profile))
    problem = problem_from_profile(profile)
    lowest = smallest_cap(problem)
    highest = evaluate(problem, (PLAIN,) * len(problem.layers)).peak_bytes
    plan = solve(
        profile, cap_bytes=int(lowest + share * (highest - lowest)), risk=RISK, time_limit_s=60, multiples=MULTIPLES
    )
    rungs: list[int | None] = [rung.rung for rung in plan.meta.rungs if rung.risk in (0.3 * RISK, RISK, 3 * RISK)]
    print("rungs", " ".join(f"{one.predicted_risk:.5f}/{one.compressed}" for one in plan.meta.rungs), flush=True)
    calibrated, held_out = workload.micro_batches[:CALIBRATION_BATCHES], workload.micro_batches[CALIBRATION_BATCHES:]
    reports: list[UpdatesReport] = []
    for done in range(0, updates, AT_ONCE):
        part = held_out[done * micro_batches : min(done + AT_ONCE, updates) * micro_batches]
        found = verify_updates(
            plan,
            options,
            updates=len(part) // micro_batches,
            micro_batches=micro_batches,
            rungs=[*rungs, None] if by_exposure else rungs,
            workload=dataclasses.replace(workload, micro_batches=(*calibrated, *part)),
        )
        reports = [merged(*pair) for pair in zip(reports, found, strict=True)] if reports else found
        tell(reports)
        if out is not None:
            out.write_text(json.dumps([updates_facts(report) for report in reports]) + "\n")
    if plot is not None:
        plot_risk(plot, reports)


def merged(one: UpdatesReport, other: UpdatesReport) -> UpdatesReport:
    return dataclasses.replace(one, updates=(*one.updates, *other.updates))


def tell(reports: list[UpdatesReport]) -> None:
    print(f"{len(reports[0].updates)} updates")
    print("variant      budget  plan    median   95 %     within  predicted/measured p05 p50 p95  tax back")
    for report in reports:
        facts = updates_facts(report)
        measured = sorted(one.measured_risk for one in report.updates)
        ratio = facts["predicted_over_measured"]
        predicted = max(one.predicted_risk for one in report.updates)
        name = "by exposure" if report.rung is None else f"rung {report.rung}"
        print(
            f"{name:11s}  {report.risk_budget:.4f}  {predicted:.4f}  {measured[len(measured) // 2]:.4f}  "
            f"{measured[int(0.95 * (len(measured) - 1))]:.4f}  {report.share_within:6.1%}  "
            f"{ratio['p05']:.2f} {ratio['median']:.2f} {ratio['p95']:.2f}  {report.tax_recovered:.3f}",
            flush=True,
        )


def free_codecs(profile: Profile) -> Profile:
    """The profile as if packing and unpacking took no time, so that a plan compresses all that its risk allows."""
    return dataclasses.replace(profile, rows=tuple(dataclasses.replace(row, codec_us=0.0) for row in profile.rows))


def layers_alone(profile: Profile) -> Profile:
    """The profile without the peaks of the head and of the optimizer step."""
    memory = dataclasses.replace(profile.meta.memory, head_peak_bytes=0, tail_peak_bytes=0)
    return dataclasses.replace(profile, meta=dataclasses.replace(profile.meta, memory=memory))


if __name__ == "__main__":
    typer.run(main)
