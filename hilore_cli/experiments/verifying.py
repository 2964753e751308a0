"""`hilore verify`: run the actor plain, under GC and under the plan, in turn; hold the plan to what it predicts.

The data are held out: micro-batches after those that the profile was calibrated on. Gradients are compared over an
update of several micro-batches, memory is read from allocator events with real optimizer states allocated, times are
interleaved rounds. On a shared machine absolute times mean little, so the time promise is the ratio to plain.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hilore_cli.errors import PlanMismatch
from hilore_cli.experiments.facts import measured_static_bytes
from hilore_cli.experiments.progress import Progress, Silent
from hilore_cli.experiments.reports import UPDATE_SEQUENCES, Promise, VerifyReport
from hilore_cli.experiments.workloads import PreparedWorkload, prepare
from hilore_cli.measuring.options import WorkloadOptions
from hilore_cli.measuring.step import actor_step, facts_of, same_random_numbers
from hilore_cli.measuring.timing import Rounds, interleaved
from hilore_cli.measuring.tracing import trace
from hilore_cli.runtime.loader import Applied, apply_plan
from hilore_cli.tables.plan_table import Plan
from hilore_cli.tables.profile_table import Shape

PEAK_TOLERANCE = 1.05
TIME_TOLERANCE = 1.10
PLAIN, GC = "plain", "gc"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Update:
    """An update's gradient (accumulated over micro-batches) and every completion log-prob."""

    gradients: list[torch.Tensor]
    logps: list[torch.Tensor]


def verify_plan(
    plan: Plan,
    options: WorkloadOptions,
    *,
    workload: PreparedWorkload | None = None,
    name: str = "",
    rungs: Sequence[int] | None = None,
    rounds: int = 5,
    progress: Progress | None = None,
) -> list[VerifyReport]:
    """One report a rung, all rungs, plain and GC in one interleaved run.

    Args:
        plan: what to hold to its promises.
        options: the workload to run; the profile's own unless asked otherwise.
        workload: the same made ready already, with `held_out_batches` micro-batches after those of the calibration.
        name: what to call the plan in the reports.
        rungs: the one solved for the plan's risk if None.
        rounds: timed rounds of each variant.
        progress: told of every stage.

    Raises:
        PlanMismatch: the plan is for another model or a smaller shape.
    """
    progress = progress or Silent()
    check_shape(plan, options, name)
    wanted = [plan.meta.chosen] if rungs is None else list(rungs)
    skip, count = plan.meta.calibration_micro_batches, held_out_batches(options.shape)
    if workload is None:
        workload = prepare(options, count=count, skip=skip, progress=progress)
    else:
        workload = replace(workload, micro_batches=workload.micro_batches[skip : skip + count])
    applied = apply_plan(workload.actor.model, plan)
    applied.remove()
    return _Verifier(plan, name, workload, applied, progress).reports(wanted, rounds=rounds)


def held_out_batches(shape: Shape) -> int:
    """Micro-batches of the update that is compared: two, or as many as an update has at least."""
    return max(2, math.ceil(UPDATE_SEQUENCES / shape.micro_batch))


def check_shape(plan: Plan, options: WorkloadOptions, name: str) -> None:
    """Raise PlanMismatch unless the workload has the very shape that the plan was solved for."""
    shape = options.shape
    if (shape.micro_batch, shape.tokens) != (plan.meta.micro_batch, plan.meta.tokens):
        raise PlanMismatch(
            f"plan {name or plan.meta.model}".strip(),
            f"is for micro-batches of {plan.meta.micro_batch} x {plan.meta.tokens} tokens, asked for is "
            f"{shape.micro_batch} x {shape.tokens} tokens",
            "leave out --micro-batch, --prompt-tokens and --response-tokens, or profile and solve at that shape",
        )


class _Verifier:
    def __init__(self, plan: Plan, name: str, workload: PreparedWorkload, applied: Applied, progress: Progress) -> None:
        self.plan = plan
        self.name = name
        self.workload = workload
        self.model: nn.Module = workload.actor.model
        self.device = next(self.model.parameters()).device
        self.applied = applied
        self.progress = progress
        self.optimizer = _optimizer(self.model, workload.options.optimizer)

    def reports(self, rungs: Sequence[int], *, rounds: int) -> list[VerifyReport]:
        contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            PLAIN: nullcontext,
            GC: lambda: gradient_checkpointing(self.model),
        }
        for rung in rungs:
            contexts[f"rung {rung}"] = lambda rung=rung: self._at_rung(rung)  # type: ignore[misc]
        errors, held = self._compare_updates(contexts)
        peaks = self._peaks(contexts)
        self.progress.stage("Timing, interleaved", (rounds + 1) * len(contexts))
        times = interleaved(
            dict.fromkeys(contexts, self._step),
            around=contexts,
            rounds=rounds,
            device=self.device,
            advance=self.progress.advance,
        )
        return [self._report(rung, errors, peaks, times, held[rung], rounds=rounds) for rung in rungs]

    @contextmanager
    def _at_rung(self, rung: int) -> Iterator[None]:
        if self.applied.rung != rung:
            self.applied.rung = rung
        with self.applied:
            yield

    def _step(self, micro_batch: int = 0) -> torch.Tensor:
        batches = self.workload.micro_batches
        return actor_step(self.model, batches[micro_batch], self.workload.options.loss, facts=facts_of(batches)).logps

    def _update(self) -> _Update:
        self.model.zero_grad(set_to_none=True)
        with same_random_numbers(self.device):
            logps = [self._step(index).detach() for index in range(len(self.workload.micro_batches))]
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        for parameter in self.model.parameters():
            parameter.grad = None
        return _Update(gradients=gradients, logps=logps)

    def _compare_updates(
        self, contexts: Mapping[str, Callable[[], Any]]
    ) -> tuple[dict[str, tuple[float, bool, bool]], dict[int, int]]:
        """Per variant: gradient error, gradients bit-equal, log-probs bit-equal; and per rung its held bytes."""
        self.progress.stage("Comparing gradients", len(contexts))
        with contexts[PLAIN]():
            exact = self._update()
        norm2 = sum(float(g.float().square().sum(dtype=torch.float64)) for g in exact.gradients)
        self.progress.advance()
        found = {PLAIN: (0.0, True, True)}
        held: dict[int, int] = {}
        for name in contexts:
            if name == PLAIN:
                continue
            with contexts[name]():
                update = self._update()
                if name != GC:
                    held[self.applied.rung] = sum(self.applied.held_bytes().values())
            pairs = list(zip(update.gradients, exact.gradients, strict=True))
            change2 = sum(float((a - b).float().square().sum(dtype=torch.float64)) for a, b in pairs)
            found[name] = (
                (change2 / norm2) ** 0.5 if norm2 else float(change2 > 0),
                all(torch.equal(a, b) for a, b in pairs),
                all(torch.equal(a, b) for a, b in zip(update.logps, exact.logps, strict=True)),
            )
            self.progress.advance()
        return found, held

    def _peaks(self, contexts: Mapping[str, Callable[[], Any]]) -> dict[str, int]:
        """Peak of a later micro-batch and the optimizer step, in bytes, by allocator events above what stands."""
        self.progress.stage("Tracing memory", len(contexts))
        self._step()
        self._optimizer_step()
        static = measured_static_bytes(self.model, self.optimizer)

        def whole_step() -> None:
            self._step()
            self._optimizer_step()

        peaks = {}
        for name, context in contexts.items():
            with context():
                peaks[name] = static + trace(whole_step, self.device).peak_bytes
            self.progress.advance()
        return peaks

    def _optimizer_step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    def _report(
        self,
        rung: int,
        errors: Mapping[str, tuple[float, bool, bool]],
        peaks: Mapping[str, int],
        times: Mapping[str, Rounds],
        held: int,
        *,
        rounds: int,
    ) -> VerifyReport:
        meta, promised = self.plan.meta, self.plan.meta.rungs[rung]
        name = f"rung {rung}"
        plain, gc, planned = times[PLAIN], times[GC], times[name]
        predicted_ratio = promised.step_us / meta.plain_us
        measured_ratio = min(
            planned.median_us / plain.median_us,
            planned.fastest_us / plain.fastest_us,
            planned.median_cpu_us / plain.median_cpu_us,
        )
        report = VerifyReport(
            plan=self.name,
            rung=rung,
            predicted=Promise(
                peak_bytes=promised.peak_bytes,
                step_us=predicted_ratio * plain.median_us,
                fastest_us=predicted_ratio * plain.fastest_us,
                cpu_us=predicted_ratio * plain.median_cpu_us,
                risk=promised.predicted_risk,
            ),
            measured=_measured(planned, peaks[name], errors[name][0]),
            gc=_measured(gc, peaks[GC], errors[GC][0]),
            plain=_measured(plain, peaks[PLAIN], 0.0),
            tax_recovered=_recovered(gc.fastest_us, planned.fastest_us, plain.fastest_us),
            tax_recovered_median=_recovered(gc.median_us, planned.median_us, plain.median_us),
            time_ratio=measured_ratio / predicted_ratio,
            forward_equal=errors[name][2],
            bit_equal=errors[name][1],
            held_plan_bytes=promised.held_bytes,
            held_measured_bytes=held,
            cap_bytes=meta.cap_bytes,
            risk_budget=promised.risk,
            rounds=rounds,
            broken=(),
        )
        return replace(report, broken=broken_promises(report))


def broken_promises(report: VerifyReport) -> tuple[str, ...]:
    """What does not hold, in words with numbers; empty if all does."""
    predicted, measured = report.predicted, report.measured
    rules = (
        (report.forward_equal, "forward: log-probs are not bit-equal to plain training"),
        (
            report.bit_equal or report.predicted.risk > 0,
            f"risk: the plan promises bit-equal gradients, measured error {measured.risk:.2e}",
        ),
        (
            measured.risk <= report.risk_budget or report.predicted.risk == 0,
            f"risk: measured {measured.risk:.4f}, budget {report.risk_budget:.4f}",
        ),
        (
            report.held_measured_bytes == report.held_plan_bytes,
            f"held bytes: measured {report.held_measured_bytes}, the plan says {report.held_plan_bytes}",
        ),
        (
            measured.peak_bytes <= report.cap_bytes,
            f"peak: measured {measured.peak_bytes} bytes, above the cap of {report.cap_bytes}",
        ),
        (
            measured.peak_bytes <= predicted.peak_bytes * PEAK_TOLERANCE,
            f"peak: measured {measured.peak_bytes} bytes, predicted {predicted.peak_bytes}",
        ),
        (
            report.time_ratio <= TIME_TOLERANCE,
            f"time: {report.time_ratio:.2f} times the predicted ratio to plain",
        ),
    )
    return tuple(text for holds, text in rules if not holds)


@contextmanager
def gradient_checkpointing(model: Any) -> Iterator[None]:
    """The model under its own non-reentrant gradient checkpointing, by the name its transformers gives it."""
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{word}_checkpointing_enable")(**{f"{word}_checkpointing_kwargs": {"use_reentrant": False}})
    try:
        yield
    finally:
        getattr(model, f"{word}_checkpointing_disable")()


def _measured(rounds: Rounds, peak_bytes: int, risk: float) -> Promise:
    return Promise(
        peak_bytes=peak_bytes,
        step_us=rounds.median_us,
        fastest_us=rounds.fastest_us,
        cpu_us=rounds.median_cpu_us,
        risk=risk,
    )


def _recovered(gc_us: float, plan_us: float, plain_us: float) -> float:
    return (gc_us - plan_us) / (gc_us - plain_us) if gc_us != plain_us else 0.0


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer | None:
    """A real optimizer that moves nothing: its states are what is wanted."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "adamw":
        return torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0, fused=True)
    return torch.optim.SGD(trained, lr=0.0) if kind == "sgd" else None
