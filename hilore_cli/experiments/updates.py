"""`hilore verify --updates`: the risk of whole held-out updates, predicted beside measured.

Each update's gradient is accumulated over its micro-batches twice, exactly and under the plan. The exact one runs at
the plan's rung of no risk, which fits wherever the plan does, or under GC if the plan has no such rung.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from hilore_cli.errors import HiloreError
from hilore_cli.experiments.progress import Progress, Silent
from hilore_cli.experiments.reports import UpdateOutcome, UpdatesReport
from hilore_cli.experiments.verifying import check_shape, gradient_checkpointing
from hilore_cli.experiments.workloads import PreparedWorkload, prepare
from hilore_cli.measuring.completions import MicroBatch
from hilore_cli.measuring.losses import BatchFacts, is_skippable
from hilore_cli.measuring.options import WorkloadOptions
from hilore_cli.measuring.step import actor_step, exposure_before, facts_of, same_random_numbers
from hilore_cli.runtime.loader import Applied, apply_plan
from hilore_cli.tables.plan_table import Plan

MICRO_BATCHES = 8


def verify_updates(
    plan: Plan,
    options: WorkloadOptions,
    *,
    updates: int,
    micro_batches: int = MICRO_BATCHES,
    rungs: Sequence[int | None] | None = None,
    workload: PreparedWorkload | None = None,
    name: str = "",
    progress: Progress | None = None,
) -> list[UpdatesReport]:
    """One report a variant, all on the same updates.

    Args:
        plan: what to hold to its promise.
        options: the workload to run; the profile's own unless asked otherwise.
        updates: how many, of micro-batches after those that the profile was calibrated on.
        micro_batches: in each update.
        rungs: variants: a rung for every micro-batch, or None for `Applied.choose`; the plan's own rung by default.
        workload: the same made ready already, with micro-batches enough.
        name: what to call the plan in the reports.
        progress: told of every step.

    Raises:
        PlanMismatch: the plan is for another model or shape.
        HiloreError: there are too few rollouts to hold these updates out.
    """
    progress = progress or Silent()
    check_shape(plan, options, name)
    variants = [plan.meta.chosen] if rungs is None else list(rungs)
    skip, count = plan.meta.calibration_micro_batches, updates * micro_batches
    if workload is None:
        workload = prepare(options, count=count, skip=skip, progress=progress)
    else:
        workload = replace(workload, micro_batches=workload.micro_batches[skip : skip + count])
    _check_held_out(workload, needed=(skip + count) * options.shape.micro_batch)
    runner = _Runner(plan, workload, progress)
    progress.stage("Running updates exactly and under the plan", updates * (1 + len(variants)))
    outcomes: list[list[UpdateOutcome]] = [[] for _ in variants]
    for start in range(0, count, micro_batches):
        batches = workload.micro_batches[start : start + micro_batches]
        for found, outcome in zip(outcomes, runner.outcomes(batches, variants), strict=True):
            found.append(outcome)
    return [_report(plan, name, rung, found, micro_batches) for rung, found in zip(variants, outcomes, strict=True)]


def _check_held_out(workload: PreparedWorkload, *, needed: int) -> None:
    if workload.rollouts.useful < needed:
        raise HiloreError(
            f"rollouts {workload.rollouts.source}",
            f"hold {workload.rollouts.useful} completions with an advantage, but calibration and these updates take "
            f"{needed}, each once",
            "give more rollouts, fewer --updates or fewer --micro-batches",
        )


class _Runner:
    def __init__(self, plan: Plan, workload: PreparedWorkload, progress: Progress) -> None:
        self.plan = plan
        self.loss = workload.options.loss
        self.model: nn.Module = workload.actor.model
        self.applied: Applied = apply_plan(self.model, plan)
        self.applied.remove()
        self.progress = progress
        self.risk2 = {rung.rung: rung.predicted_risk**2 for rung in plan.meta.rungs}

    def outcomes(self, batches: Sequence[MicroBatch], variants: Sequence[int | None]) -> list[UpdateOutcome]:
        """The same update, exactly and by every variant."""
        exact_rung = next((rung.rung for rung in self.plan.meta.rungs if rung.predicted_risk == 0), None)
        context = self.applied if exact_rung is not None else gradient_checkpointing(self.model)
        with context:
            exact, exposures, _ = self._run(batches, 0 if exact_rung is None else exact_rung)
        norm2 = sum(_norm2(gradient) for gradient in exact.values())
        found = []
        for variant in variants:
            with self.applied:
                gradients, _, rungs = self._run(batches, variant)
            change2 = sum(_norm2(gradients[name] - gradient) for name, gradient in exact.items())
            found.append(
                UpdateOutcome(
                    predicted_risk=_predicted(self.risk2, rungs, exposures),
                    measured_risk=(change2 / norm2) ** 0.5 if norm2 else float(change2 > 0),
                    exposures=tuple(exposures),
                    rungs=tuple(rungs),
                    skippable=sum(is_skippable(self.loss, exposure) for exposure in exposures),
                )
            )
        return found

    def _run(
        self, batches: Sequence[MicroBatch], variant: int | None
    ) -> tuple[dict[str, torch.Tensor], list[float], list[int]]:
        """Gradients by parameter, exact exposures, and the rungs that the micro-batches ran at."""
        facts = facts_of(batches)
        rungs = [variant] * len(batches) if variant is not None else self._chosen(batches, facts)
        exposures: list[float] = []

        def audit(exposure: float) -> None:
            exposures.append(exposure)
            if variant is None:
                rungs[:] = self.applied.audit(exposure)

        self.model.zero_grad(set_to_none=True)
        with same_random_numbers(next(self.model.parameters()).device), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # an excess is in the report
            for number, batch in enumerate(batches):
                self.applied.rung = rungs[number]
                actor_step(self.model, batch, self.loss, facts=facts, audit=audit)
        named = self.model.named_parameters()
        gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        self.model.zero_grad(set_to_none=True)
        self.progress.advance()
        return gradients, exposures, rungs

    def _chosen(self, batches: Sequence[MicroBatch], facts: BatchFacts) -> list[int]:
        bounds = [exposure_before(batch, self.loss, facts) for batch in batches]
        return self.applied.choose(bounds, on_excess="replan")


def _predicted(risk2: dict[int, float], rungs: Sequence[int], exposures: Sequence[float]) -> float:
    """Root of sum K^2 X^2 over sum X^2, as DESIGN section 4 has it."""
    energy = sum(exposure**2 for exposure in exposures)
    error2 = sum(risk2[rung] * exposure**2 for rung, exposure in zip(rungs, exposures, strict=True))
    return float((error2 / energy) ** 0.5) if energy else 0.0


def _norm2(tensor: torch.Tensor) -> float:
    flat = tensor.float().reshape(-1)
    return float(flat.dot(flat))


def _report(
    plan: Plan, name: str, rung: int | None, outcomes: Sequence[UpdateOutcome], micro_batches: int
) -> UpdatesReport:
    meta = plan.meta
    times = [meta.rungs[one].step_us for outcome in outcomes for one in outcome.rungs]
    step_us = sum(times) / len(times)
    tax_us = meta.gc_us - meta.plain_us
    return UpdatesReport(
        plan=name,
        rung=rung,
        risk_budget=meta.risk if rung is None else meta.rungs[rung].risk,
        micro_batches=micro_batches,
        step_us=step_us,
        tax_recovered=(meta.gc_us - step_us) / tax_us if tax_us > 0 else 0.0,
        updates=tuple(outcomes),
    )
