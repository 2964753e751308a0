"""From a profile to a plan: the ladder of solved rungs written out as rows, each with its reason."""

import math
from collections.abc import Iterator, Sequence

from hilore_cli.quantities import check_risk
from hilore_cli.solving.evaluate import LayerPlan, choice_of
from hilore_cli.solving.ladder import MULTIPLES, SolvedRung, solve_ladder
from hilore_cli.solving.problem import Problem, problem_from_profile
from hilore_cli.solving.reasons import reasons
from hilore_cli.solving.solver import solver_name
from hilore_cli.tables.plan_table import COMPRESS, RECOMPUTE, STORE, Plan, PlanMeta, PlanRow, Rung
from hilore_cli.tables.profile_table import INPUT_UNIT, NO_CODEC, Profile, ProfileRow


def solve(
    profile: Profile,
    *,
    cap_bytes: int,
    risk: float,
    cap_text: str = "",
    profile_name: str = "",
    command: str = "",
    time_limit_s: float = 120.0,
    multiples: Sequence[float] = MULTIPLES,
) -> Plan:
    """Compile a profile into a plan under a cap (bytes, static included) and a risk (DESIGN section 7).

    The rungs are solved at these multiples of the risk, and at the risk itself.

    The same profile and flags give the same plan unless the time limit (seconds, for all rungs) cuts in.
    Raises HiloreError for a risk outside [0, 1), Infeasible with the nearest feasible numbers.
    """
    check_risk(risk)
    problem = problem_from_profile(profile)
    solved = solve_ladder(
        problem, cap_bytes=cap_bytes, risk=risk, cap_text=cap_text, time_limit_s=time_limit_s, multiples=multiples
    )
    by_layer = _unit_rows(profile)
    rows, rungs = [], []
    for index, rung in enumerate(solved):
        mine = list(_plan_rows(index, rung, problem, by_layer))
        rows += mine
        rungs.append(_rung(index, rung, mine, profile))
    return Plan(
        meta=_meta(
            profile,
            rungs=tuple(rungs),
            cap_bytes=cap_bytes,
            cap_text=cap_text,
            risk=risk,
            profile_name=profile_name,
            command=command,
        ),
        rows=tuple(rows),
    )


def profile_warnings(profile: Profile) -> list[str]:
    """What makes a plan of this profile worth less than it looks, a sentence each."""
    warnings = []
    if profile.meta.workload.weights == "random":
        warnings.append("the profile's weights are random: errors measured on random weights mean nothing")
    timing = profile.meta.timing
    if timing.gc_fastest_us <= timing.plain_fastest_us:
        warnings.append("the profile measured GC no slower than plain: there is no recompute tax to recover")
    return warnings


def _unit_rows(profile: Profile) -> list[list[ProfileRow]]:
    """Per layer, the rows that describe its units, in stream order."""
    by_layer: list[list[ProfileRow]] = [[] for _ in range(profile.meta.identity.layers)]
    for row in profile.rows:
        is_unit = row.codec == NO_CODEC and row.unit != INPUT_UNIT and row.layer < len(by_layer)
        if row.shape == 0 and is_unit:
            by_layer[row.layer].append(row)
    return [sorted(rows, key=lambda row: row.unit) for rows in by_layer]


def _plan_rows(index: int, rung: SolvedRung, problem: Problem, by_layer: list[list[ProfileRow]]) -> Iterator[PlanRow]:
    solution = rung.solution
    for layer, plan, replayed, units in zip(
        problem.layers, solution.assignment, solution.outcome.replays, by_layer, strict=True
    ):
        for row, unit, why in zip(units, layer.units, reasons(problem, layer, plan, replayed), strict=True):
            kept = plan.kept.get(row.unit)
            choice = choice_of(unit, kept) if kept else None
            action = _action(row, plan)
            replays = unit.op in replayed
            yield PlanRow(
                rung=index,
                layer=row.layer,
                unit=row.unit,
                op_index=row.op_index,
                leaf=row.leaf,
                module=row.module,
                op=row.op,
                action=action,
                codec=kept if kept and action == COMPRESS else NO_CODEC,
                plain=plan.plain,
                replays=replays,
                held_bytes=choice.held_bytes if choice else row.bytes if action == STORE else 0,
                recompute_us=row.recompute_us if replays and row.leaf == 0 else 0.0,
                codec_us=choice.codec_us if choice else 0.0,
                risk2=choice.risk2 if choice else 0.0,
                why=why,
            )


def _action(row: ProfileRow, plan: LayerPlan) -> str:
    if plan.plain:
        return STORE if row.saved else RECOMPUTE
    kept = plan.kept.get(row.unit)
    if kept is None:
        return RECOMPUTE
    return STORE if kept == NO_CODEC else COMPRESS


def _rung(index: int, rung: SolvedRung, rows: list[PlanRow], profile: Profile) -> Rung:
    timing, solution = profile.meta.timing, rung.solution
    tax_us = timing.gc_fastest_us - timing.plain_fastest_us
    actions = [row.action for row in rows]
    return Rung(
        rung=index,
        risk=rung.risk,
        predicted_risk=math.sqrt(solution.outcome.risk2),
        peak_bytes=solution.outcome.peak_bytes,
        step_us=solution.outcome.step_us,
        held_bytes=sum(solution.outcome.held_bytes),
        tax_recovered=(timing.gc_fastest_us - solution.outcome.step_us) / tax_us if tax_us > 0 else 0.0,
        stored=actions.count(STORE),
        compressed=actions.count(COMPRESS),
        recomputed=sum(row.action == RECOMPUTE and row.replays for row in rows),
        plain_layers=sum(plan.plain for plan in solution.assignment),
        status=solution.status,
        gap=solution.gap,
        bound_us=solution.bound_us,
        greedy_us=solution.greedy_us,
    )


def _meta(
    profile: Profile,
    *,
    rungs: tuple[Rung, ...],
    cap_bytes: int,
    cap_text: str,
    risk: float,
    profile_name: str,
    command: str,
) -> PlanMeta:
    identity, meta = profile.meta.identity, profile.meta
    static = meta.static_bytes.total
    return PlanMeta(
        model=identity.model,
        model_class=identity.model_class,
        config_hash=identity.config_hash,
        parameter_hash=identity.parameter_hash,
        layers=identity.layers,
        dtype=identity.dtype,
        attention=identity.attention,
        adapter=identity.adapter,
        call=identity.call,
        micro_batch=meta.shape.micro_batch,
        tokens=meta.shape.tokens,
        profile_digest=profile.digest,
        profile_name=profile_name,
        cap_bytes=cap_bytes,
        cap_text=cap_text,
        risk=risk,
        chosen=next(rung.rung for rung in rungs if rung.risk == risk),
        solver=solver_name(),
        static_bytes=static,
        gamma=meta.calibration.gamma,
        calibration_micro_batches=meta.calibration.micro_batches,
        plain_us=meta.timing.plain_fastest_us,
        gc_us=meta.timing.gc_fastest_us,
        plain_peak_bytes=static + meta.memory.plain_peak_bytes,
        gc_peak_bytes=static + meta.memory.gc_peak_bytes,
        rungs=rungs,
        command=command,
    )
