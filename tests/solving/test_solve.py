import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from hilore_cli.errors import HiloreError, Infeasible
from hilore_cli.solving.evaluate import evaluate
from hilore_cli.solving.ladder import ladder_risks
from hilore_cli.solving.problem import problem_from_profile
from hilore_cli.solving.solve import profile_warnings, solve
from hilore_cli.tables.plan_table import COMPRESS, RECOMPUTE, STORE, Plan, load_plan
from hilore_cli.tables.profile_table import Profile
from tests.solving.toys import toy_profile

RISK = 0.01


def cap_between(profile: Profile, share: float) -> int:
    """A cap this share of the way from GC's peak to plain's."""
    memory = profile.meta.memory
    spread = memory.plain_peak_bytes - memory.gc_peak_bytes
    return profile.meta.static_bytes.total + memory.gc_peak_bytes + round(share * spread)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return toy_profile(layers=4)


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return solve(profile, cap_bytes=cap_between(profile, 0.25), risk=RISK, cap_text="1.2gc", profile_name="toy.parquet")


def test_the_same_input_gives_the_same_plan(profile: Profile, plan: Plan) -> None:
    again = solve(
        profile, cap_bytes=cap_between(profile, 0.25), risk=RISK, cap_text="1.2gc", profile_name="toy.parquet"
    )
    assert again == plan


def test_the_ladder_spans_zero_to_four_times_the_risk() -> None:
    assert ladder_risks(0.01) == (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04)
    assert ladder_risks(0.4) == (0.0, 0.1, 0.2, 0.4, 0.8)
    assert ladder_risks(0.0) == (0.0,)


def test_the_chosen_rung_is_the_one_solved_for_the_risk_asked_for(plan: Plan) -> None:
    assert plan.meta.rungs[plan.meta.chosen].risk == RISK


def test_a_larger_risk_is_never_slower(plan: Plan) -> None:
    steps = [rung.step_us for rung in plan.meta.rungs]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]


def test_every_rung_keeps_to_the_cap_and_to_its_risk(plan: Plan) -> None:
    for rung in plan.meta.rungs:
        assert rung.peak_bytes <= plan.meta.cap_bytes
        assert rung.predicted_risk <= rung.risk


def test_the_rows_of_a_rung_add_up_to_what_it_promises(profile: Profile, plan: Plan) -> None:
    timing = profile.meta.timing
    for rung in plan.meta.rungs:
        rows = plan.rung_rows(rung.rung)
        replayed = {row.layer for row in rows if not row.plain}
        modes = {row.layer for row in rows if not row.plain and row.action != RECOMPUTE}
        overhead = timing.checkpoint_us * len(replayed) + timing.mode_us * len(modes)
        spent = sum(row.recompute_us + row.codec_us for row in rows)
        assert rung.step_us == pytest.approx(timing.plain_us + overhead + spent)
        assert rung.held_bytes == sum(row.held_bytes for row in rows)
        assert rung.predicted_risk**2 == pytest.approx(sum(row.risk2 for row in rows))


def test_every_unit_of_every_layer_has_a_row_in_every_rung(profile: Profile, plan: Plan) -> None:
    units = [(row.layer, row.unit) for row in profile.rows if row.codec == "none" and row.unit >= 0 and row.layer < 4]
    for rung in plan.meta.rungs:
        assert [(row.layer, row.unit) for row in plan.rung_rows(rung.rung)] == units


def test_rung_zero_compresses_nothing_lossy(plan: Plan) -> None:
    assert all(row.risk2 == 0.0 for row in plan.rung_rows(0))


def test_only_compressed_rows_name_a_codec(plan: Plan) -> None:
    for row in plan.rows:
        assert (row.codec != "none") == (row.action == COMPRESS)


def test_every_row_has_a_reason(plan: Plan) -> None:
    assert all(row.why for row in plan.rows)
    assert any("recomputing it would cost" in row.why for row in plan.rows if row.action == STORE)
    assert {row.why for row in plan.rows if row.op == "mm" and row.module == "mlp.down_proj" and not row.plain} == {
        "not needed in replay"
    }


def test_a_loose_cap_runs_every_layer_plain(profile: Profile) -> None:
    loose = solve(profile, cap_bytes=cap_between(profile, 1.0), risk=0.0)
    (rung,) = loose.meta.rungs
    assert rung.plain_layers == 4
    assert rung.step_us == profile.meta.timing.plain_us
    assert {(row.action, row.replays) for row in loose.rows} == {(STORE, False), (RECOMPUTE, False)}


def test_compressing_needs_risk() -> None:
    lossy = toy_profile(codecs=("int8", "int4"))
    plan = solve(lossy, cap_bytes=cap_between(lossy, 0.3), risk=0.1)
    assert plan.meta.rungs[0].compressed == 0
    assert plan.meta.rungs[plan.meta.chosen].compressed > 0


def test_tax_recovered_is_measured_against_gc(profile: Profile, plan: Plan) -> None:
    timing = profile.meta.timing
    for rung in plan.meta.rungs:
        share = (timing.gc_us - rung.step_us) / (timing.gc_us - timing.plain_us)
        assert rung.tax_recovered == pytest.approx(share)


def test_peaks_of_plain_and_gc_include_static_bytes(profile: Profile, plan: Plan) -> None:
    assert plan.meta.gc_peak_bytes == profile.meta.static_bytes.total + profile.meta.memory.gc_peak_bytes
    assert plan.meta.plain_peak_bytes == profile.meta.static_bytes.total + profile.meta.memory.plain_peak_bytes


def test_a_cap_that_nothing_fits_is_infeasible(profile: Profile) -> None:
    with pytest.raises(Infeasible, match=r"--mem 1GB --risk 0\.01: no plan fits"):
        solve(profile, cap_bytes=1000, risk=RISK, cap_text="1GB")


def test_a_risk_of_one_is_refused(profile: Profile) -> None:
    with pytest.raises(HiloreError, match="--risk 1"):
        solve(profile, cap_bytes=10**12, risk=1.0)


def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.parquet")
    assert dataclasses.replace(load_plan(tmp_path / "plan.parquet"), digest="") == plan


def test_random_weights_are_warned_about() -> None:
    assert profile_warnings(toy_profile(weights="random")) == [
        "the profile's weights are random: errors measured on random weights mean nothing"
    ]
    assert profile_warnings(toy_profile()) == []


def test_a_profile_without_risk_rows_still_solves() -> None:
    bare = toy_profile(codecs=())
    plan = solve(bare, cap_bytes=cap_between(bare, 0.3), risk=RISK)
    assert all(rung.compressed == 0 for rung in plan.meta.rungs)


def test_predictions_are_those_of_the_exact_evaluation(profile: Profile, plan: Plan) -> None:
    from hilore_cli.solving.evaluate import PLAIN, LayerPlan  # noqa: PLC0415

    problem = problem_from_profile(profile)
    for rung in plan.meta.rungs:
        layers = []
        for layer in range(4):
            rows = [row for row in plan.rung_rows(rung.rung) if row.layer == layer]
            kept = {row.unit: row.codec for row in rows if row.action != RECOMPUTE}
            layers.append(PLAIN if rows[0].plain else LayerPlan(plain=False, kept=kept))
        outcome = evaluate(problem, tuple(layers))
        assert (rung.step_us, rung.peak_bytes) == (outcome.step_us, outcome.peak_bytes)


def test_solving_imports_no_torch() -> None:
    code = "import sys, hilore_cli.solving.solve; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
