"""What the verbs print and write; solving and measuring themselves have their own tests."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes

from hilore_cli.errors import Infeasible
from hilore_cli.experiments.reports import Promise, UpdateOutcome, UpdatesReport, VerifyReport
from hilore_cli.measuring.options import WorkloadOptions
from hilore_cli.tables.plan_table import Plan
from hilore_cli.tables.profile_table import Profile
from tests.cli.conftest import Hilore
from tests.tables.samples import toy_plan, toy_profile

ROOT = Path(__file__).parents[2]
VERBS = ("profile", "solve", "verify", "show", "diff", "demo", "doctor")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example_in_its_help(verb: str, hilore: Hilore) -> None:
    outcome = hilore(verb, "--help")
    assert outcome.code == 0
    assert f"hilore {verb} " in outcome.out.split("Example:")[1]


def test_no_arguments_and_help_name_every_verb(hilore: Hilore) -> None:
    for outcome in (hilore(), hilore("--help")):
        assert outcome.code == 0
        assert all(verb in outcome.out for verb in VERBS)


def test_version_is_the_packages(hilore: Hilore) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    version = hilore("--version").out.removeprefix("hilore ").strip()
    assert f'version = "{version}"' in pyproject


# show


def test_show_tells_a_plans_rungs_and_the_margin_over_the_greedy(hilore: Hilore, plan_file: Path) -> None:
    outcome = hilore("show")
    assert (outcome.code, outcome.err) == (0, f"using {plan_file}, newest of 1\n")
    assert "1 *" in outcome.out
    assert "2.0 %) shorter than the greedy's" in outcome.out
    assert "\x1b" not in outcome.out


def test_show_tells_a_profiles_steps_and_units(hilore: Hilore, profile_file: Path) -> None:
    outcome = hilore("show", str(profile_file))
    assert outcome.code == 0
    assert "toy/two-layers" in outcome.out
    assert "self_attn.q_proj" in outcome.out


def test_show_json_holds_metadata_and_every_row(hilore: Hilore, plan_file: Path) -> None:
    facts = hilore("show", str(plan_file), "--json").facts
    assert facts["kind"] == "plan"
    assert facts["metadata"]["cap_bytes"] == 66_110
    assert len(facts["rows"]) == len(toy_plan().rows)


def test_show_text_is_a_line_a_row_after_sorted_metadata(hilore: Hilore, plan_file: Path) -> None:
    lines = hilore("show", "--text", str(plan_file)).out.splitlines()
    rows = [line for line in lines if line.startswith("rung ")]
    metadata = [line for line in lines[1:] if " = " in line]
    assert lines[0] == "kind = plan"
    assert metadata == sorted(metadata)
    assert [*lines[:1], *metadata, *rows] == lines
    assert rows[4].startswith("rung 0 layer 1 unit 1 module mlp.up_proj op mm action recompute: op_index=1 ")


def test_show_text_does_not_depend_on_where_the_file_lies(hilore: Hilore, plan_file: Path, folder: Path) -> None:
    (folder / "blob_1234").write_bytes(plan_file.read_bytes())
    assert hilore("show", "--text", "blob_1234").out == hilore("show", "--text", str(plan_file)).out


def test_show_text_of_a_damaged_file_is_one_line_so_that_git_log_goes_on(hilore: Hilore, plan_file: Path) -> None:
    plan_file.write_bytes(plan_file.read_bytes()[:500])
    outcome = hilore("show", "--text", str(plan_file))
    assert (outcome.code, outcome.out) == (0, "unreadable: is a damaged or truncated Parquet file\n")


def test_show_text_of_a_missing_file_is_an_error(hilore: Hilore) -> None:
    assert hilore("show", "--text", "none.parquet").code == 2


def test_git_diffs_a_plan_row_by_row(plan_file: Path, folder: Path) -> None:
    def git(*arguments: str) -> str:
        config = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", f"diff.hilore.textconv={textconv}")
        return subprocess.run(["git", *config, *arguments], capture_output=True, text=True, check=True).stdout

    textconv = f"PYTHONPATH={ROOT} {sys.executable} -m hilore_cli show --text"
    (folder / ".gitattributes").write_bytes((ROOT / ".gitattributes").read_bytes())
    git("init")
    git("add", ".")
    git("commit", "-m", "plan")
    plan = toy_plan()
    first = dataclasses.replace(plan.rows[0], action="recompute")
    Plan(meta=plan.meta, rows=(first, *plan.rows[1:])).save(plan_file, force=True)
    changed = [line for line in git("diff").splitlines() if line[0] in "+-" and not line.startswith(("+++", "---"))]
    assert [line[:70].split(":")[0] for line in changed] == [
        "-rung 0 layer 0 unit 0 module self_attn.q_proj op mm action store",
        "+rung 0 layer 0 unit 0 module self_attn.q_proj op mm action recompute"[:70],
    ]


# diff


def test_equal_contents_differ_in_nothing(hilore: Hilore, plan_file: Path) -> None:
    outcome = hilore("diff", str(plan_file), str(plan_file), "--json")
    assert outcome.code == 0
    assert outcome.facts["changed"] == []
    assert outcome.facts["same"] is True


def test_diff_names_changed_added_and_removed_rows(hilore: Hilore, plan_file: Path) -> None:
    plan = toy_plan()
    first = dataclasses.replace(plan.rows[0], action="recompute", held_bytes=0)
    extra = dataclasses.replace(plan.rows[-1], unit=3)
    Plan(meta=dataclasses.replace(plan.meta, cap_bytes=1), rows=(first, *plan.rows[2:], extra)).save("b.parquet")
    outcome = hilore("diff", str(plan_file), "b.parquet", "--json")
    assert outcome.code == 1
    assert [(row["change"], row["layer"], row["unit"]) for row in outcome.facts["changed"]] == [
        ("changed", 0, 0),
        ("removed", 0, 1),
        ("added", 1, 3),
    ]
    assert outcome.facts["changed"][0]["fields"] == {"action": ["store", "recompute"], "held_bytes": [4000, 0]}
    assert outcome.facts["metadata"] == {"cap_bytes": ["66110", "1"]}
    assert outcome.facts["totals"]["rows_changed"] == 1
    plain = hilore("diff", str(plan_file), "b.parquet")
    assert plain.code == 1
    assert "action store -> recompute, held_bytes 4000 -> 0" in plain.out


def test_diff_compares_profiles_too(hilore: Hilore, profile_file: Path) -> None:
    profile = toy_profile()
    slower = tuple(dataclasses.replace(row, recompute_us=row.recompute_us * 2) for row in profile.rows)
    Profile(meta=profile.meta, rows=slower).save(Path("b.parquet"))
    outcome = hilore("diff", str(profile_file), "b.parquet", "--json")
    assert outcome.code == 1
    assert outcome.facts["totals"]["recompute_us"] == {"a": 700.0, "b": 1400.0}
    assert all(set(row["fields"]) == {"recompute_us"} for row in outcome.facts["changed"])


# solve, with the solver replaced


@pytest.fixture
def solver(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def solve(profile: Profile, **arguments: Any) -> Plan:
        calls.append({"profile": profile, **arguments})
        if arguments["cap_bytes"] < 1000:
            raise Infeasible("a cap of 1 kB", "is below every plan's peak", "the smallest cap at risk 0 is 2 kB")
        plan = toy_plan()
        return dataclasses.replace(plan, meta=dataclasses.replace(plan.meta, command=arguments["command"]))

    module = ModuleType("hilore_cli.solving.solve")
    module.__dict__.update(solve=solve, profile_warnings=lambda _: ["its weights are random"])
    monkeypatch.setitem(sys.modules, "hilore_cli.solving.solve", module)
    return calls


def test_solve_takes_the_newest_profile_and_says_so(hilore: Hilore, profile_file: Path, solver: list[Any]) -> None:
    outcome = hilore("solve", "--mem", "1.10gc", "--risk", "0.01", "--json")
    assert outcome.code == 0
    assert outcome.err == f"using {profile_file}, newest of 1\nwarning: its weights are random\n"
    assert outcome.facts["plan"] == "plans/two-layers-1.10gc-r0.01.parquet"
    assert outcome.facts["bound_ms"] == 1.04
    assert outcome.facts["rungs"][0]["step_ms"] == 1.1
    assert Path(outcome.facts["plan"]).exists()


def test_a_gc_cap_counts_from_the_absolute_peak(hilore: Hilore, profile_file: Path, solver: list[Any]) -> None:
    hilore("solve", "--mem", "1.10gc")
    assert solver[0]["cap_bytes"] == round(1.10 * (40_100 + 20_000))


def test_a_device_cap_counts_from_the_profiles_device(hilore: Hilore, profile_file: Path, solver: list[Any]) -> None:
    hilore("solve", "--mem", "0.5x")
    assert solver[0]["cap_bytes"] == 500_000


def test_the_recorded_command_depends_on_nothing_but_the_question(
    hilore: Hilore, profile_file: Path, solver: list[Any]
) -> None:
    hilore("solve", "--mem", "48 GB", "--json")
    hilore("solve", "--force", "--profile", str(profile_file.resolve()), "--risk", "0.0", "--mem", "48 GB")
    assert solver[0]["command"] == solver[1]["command"]
    assert solver[0]["command"] == "hilore solve --profile profiles/two-layers.parquet --mem '48 GB' --risk 0"


def test_solving_again_says_unchanged(hilore: Hilore, profile_file: Path, solver: list[Any]) -> None:
    hilore("solve", "--mem", "1GB")
    again = hilore("solve", "--mem", "1GB")
    assert again.code == 0
    assert again.out.splitlines()[-1] == "unchanged plans/two-layers-1GB-r0.parquet"


def test_solve_does_not_replace_another_plan_unasked(hilore: Hilore, profile_file: Path, solver: list[Any]) -> None:
    hilore("solve", "--mem", "1GB", "--out", "plan.parquet")
    assert hilore("solve", "--mem", "2GB", "--out", "plan.parquet").code == 2
    assert hilore("solve", "--mem", "2GB", "--out", "plan.parquet", "--force").code == 0


def test_infeasible_exits_3_with_the_nearest_numbers(hilore: Hilore, profile_file: Path, solver: list[Any]) -> None:
    outcome = hilore("solve", "--mem", "1B", "--json")
    assert (outcome.code, outcome.out) == (3, "")
    assert "hint: the smallest cap at risk 0 is 2 kB\n" in outcome.err


def test_an_interrupted_solve_exits_130_and_leaves_no_file(
    hilore: Hilore, profile_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Plan:
        raise KeyboardInterrupt

    module = ModuleType("hilore_cli.solving.solve")
    module.__dict__.update(solve=interrupted, profile_warnings=lambda _: [])
    monkeypatch.setitem(sys.modules, "hilore_cli.solving.solve", module)
    outcome = hilore("solve", "--mem", "1GB")
    assert (outcome.code, outcome.out) == (130, "")
    assert "error" not in outcome.err
    assert not list(Path("plans").iterdir())


# verify, with the experiment replaced


def report(*, broken: tuple[str, ...]) -> VerifyReport:
    promise = Promise(peak_bytes=60_000, step_us=1040.0, fastest_us=1000.0, cpu_us=2000.0, risk=0.009)
    return VerifyReport(
        plan="plan.parquet",
        rung=1,
        rounds=5,
        predicted=promise,
        measured=promise,
        gc=promise,
        plain=promise,
        tax_recovered=0.87,
        tax_recovered_median=0.9,
        time_ratio=1.01,
        forward_equal=True,
        bit_equal=False,
        held_plan_bytes=10_250,
        held_measured_bytes=10_250,
        cap_bytes=66_110,
        risk_budget=0.01,
        broken=broken,
    )


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {"broken": ()}

    def verify_plan(plan: Plan, options: WorkloadOptions, **arguments: Any) -> list[VerifyReport]:
        seen.update(plan=plan, options=options, **arguments)
        return [report(broken=seen["broken"])]

    module = ModuleType("hilore_cli.experiments.verifying")
    module.__dict__.update(verify_plan=verify_plan)
    monkeypatch.setitem(sys.modules, "hilore_cli.experiments.verifying", module)
    return seen


def test_verify_shows_promises_that_hold(hilore: Hilore, plan_file: Path, experiment: dict[str, Any]) -> None:
    outcome = hilore("verify", str(plan_file))
    assert outcome.code == 0
    assert outcome.out.count("✓ holds") == 5


def test_a_broken_promise_exits_1_after_the_table(hilore: Hilore, plan_file: Path, experiment: dict[str, Any]) -> None:
    experiment["broken"] = ("peak: 70.0 kB measured, 60.0 kB promised",)
    outcome = hilore("verify", str(plan_file), "--json")
    assert outcome.code == 1
    assert outcome.facts["ok"] is False
    assert outcome.facts["broken"] == list(experiment["broken"])
    assert f"error: {plan_file}: rung 1: peak: 70.0 kB measured" in outcome.err


def test_verify_runs_the_workload_of_the_plans_profile(
    hilore: Hilore, plan_file: Path, profile_file: Path, experiment: dict[str, Any]
) -> None:
    hilore("verify", str(plan_file), "--seed", "3")
    options = experiment["options"]
    assert (options.model, options.weights, options.seed) == ("toy/two-layers", "random", 3)
    assert options.shape == toy_profile().meta.shape


@pytest.mark.parametrize("place", ["out", "out/profiles"])
def test_verify_finds_the_profile_beside_the_plan(
    place: str, hilore: Hilore, folder: Path, experiment: dict[str, Any]
) -> None:
    toy_profile().save(folder / place / "p.parquet")
    toy_plan().save(folder / "out" / "plans" / "plan.parquet")
    toy_plan().save(folder / "out" / "plan.parquet")
    outcome = hilore("verify", "out/plan.parquet" if place == "out" else "out/plans/plan.parquet")
    assert (outcome.code, outcome.err) == (0, "")
    assert experiment["options"].model == "toy/two-layers"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_device_that_is_too_small_is_one_clear_line(
    error: Exception, hilore: Hilore, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify_plan(*_: Any, **__: Any) -> None:
        raise error

    module = ModuleType("hilore_cli.experiments.verifying")
    module.__dict__.update(verify_plan=verify_plan)
    monkeypatch.setitem(sys.modules, "hilore_cli.experiments.verifying", module)
    outcome = hilore("verify", str(plan_file))
    assert (outcome.code, outcome.out) == (2, "")
    assert "error: hilore verify: needs more memory" in outcome.err
    assert "--micro-batch" in outcome.err


def test_verify_without_the_profile_says_what_it_guesses(
    hilore: Hilore, plan_file: Path, experiment: dict[str, Any]
) -> None:
    outcome = hilore("verify", str(plan_file), "--json")
    assert "note: the plan's profile is neither in profiles/ nor beside the plan" in outcome.err
    assert outcome.facts["held_bytes"] == {"plan": 10_250, "measured": 10_250}
    assert experiment["options"].shape.tokens == 8


# doctor


def test_doctor_lists_what_is_here(hilore: Hilore, folder: Path) -> None:
    facts = hilore("doctor", "--json").facts
    names = {check["name"]: check["ok"] for check in facts["checks"]}
    assert names["torch"]
    assert names["solver HiGHS"]
    assert all({"name", "ok", "hint"} <= set(check) for check in facts["checks"])
    assert not list(folder.iterdir())


# verify --updates, with the experiment replaced


def updates_report(*, risk: float = 0.009) -> UpdatesReport:
    outcomes = [
        UpdateOutcome(predicted_risk=0.01, measured_risk=risk, exposures=(1.0, 0.5), rungs=(1, 1), skippable=0)
        for _ in range(20)
    ]
    return UpdatesReport(
        plan="plan.parquet",
        rung=1,
        risk_budget=0.01,
        micro_batches=2,
        step_us=1000.0,
        tax_recovered=0.7,
        updates=tuple(outcomes),
    )


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {"risk": 0.009}

    def verify_updates(plan: Plan, options: WorkloadOptions, **arguments: Any) -> list[UpdatesReport]:
        seen.update(plan=plan, options=options, **arguments)
        risks = {rung: seen.get("risk_of", {}).get(rung, seen["risk"]) for rung in arguments["rungs"]}
        return [dataclasses.replace(updates_report(risk=risk), rung=rung) for rung, risk in risks.items()]

    module = ModuleType("hilore_cli.experiments.updates")
    module.__dict__.update(verify_updates=verify_updates)
    monkeypatch.setitem(sys.modules, "hilore_cli.experiments.updates", module)
    return seen


def test_updates_are_told_as_a_distribution(hilore: Hilore, plan_file: Path, updates: dict[str, Any]) -> None:
    outcome = hilore("verify", str(plan_file), "--updates", "20", "--micro-batches", "2", "--by-exposure", "--json")
    assert outcome.code == 0
    assert (updates["updates"], updates["micro_batches"], updates["rungs"]) == (20, 2, [1, None])
    facts = outcome.facts
    assert (facts["ok"], facts["share_within"], len(facts["updates"])) == (True, 1.0, 20)
    assert facts["predicted_over_measured"]["median"] == pytest.approx(0.01 / 0.009)
    assert [one["rung"] for one in facts["variants"]] == [1, None]


def test_updates_are_a_line_a_variant(hilore: Hilore, plan_file: Path, updates: dict[str, Any]) -> None:
    outcome = hilore("verify", str(plan_file), "--updates", "20", "--by-exposure")
    assert "20 held-out updates" in outcome.out
    assert "by exposure" in outcome.out
    assert outcome.out.count("✓ holds") == 2


def test_a_risk_that_does_not_hold_exits_1(hilore: Hilore, plan_file: Path, updates: dict[str, Any]) -> None:
    updates["risk"] = 0.011
    outcome = hilore("verify", str(plan_file), "--updates", "20")
    assert outcome.code == 1
    assert "rung 1: risk within 0.01 in 0 of 20 updates" in outcome.err


def test_a_variant_that_breaks_breaks_the_whole(hilore: Hilore, plan_file: Path, updates: dict[str, Any]) -> None:
    updates["risk_of"] = {None: 0.02}
    outcome = hilore("verify", str(plan_file), "--updates", "20", "--by-exposure", "--json")
    assert outcome.code == 1
    assert outcome.facts["ok"] is False
    assert outcome.facts["broken"] == [
        "by exposure: risk within 0.01 in 0 of 20 updates, promised are 95%; the highest is 0.02"
    ]


def test_a_plot_replaces_nothing_unasked(hilore: Hilore, plan_file: Path, updates: dict[str, Any]) -> None:
    Path("risk.svg").write_text("mine")
    outcome = hilore("verify", str(plan_file), "--updates", "20", "--plot", "risk.svg")
    assert (outcome.code, Path("risk.svg").read_text()) == (2, "mine")
    assert hilore("verify", str(plan_file), "--updates", "20", "--plot", "risk.svg", "--force").code == 0


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_plot_has_a_point_an_update(
    suffix: str, hilore: Hilore, plan_file: Path, updates: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = []
    scatter = Axes.scatter

    def count(self: Axes, x: Any, y: Any, **rest: Any) -> Any:
        points.append(len(x))
        return scatter(self, x, y, **rest)

    monkeypatch.setattr(Axes, "scatter", count)
    outcome = hilore("verify", str(plan_file), "--updates", "20", "--by-exposure", "--plot", f"risk.{suffix}")
    assert outcome.code == 0
    assert points == [20, 20]
    assert [path.name for path in Path().glob("*risk*")] == [f"risk.{suffix}"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--updates", "0"], ["--updates 0", "at least 1"]),
        (["--updates", "2", "--micro-batches", "0"], ["--micro-batches 0"]),
        (["--by-exposure"], ["--by-exposure", "--updates 40"]),
        (["--plot", "risk.svg"], ["--plot", "--updates 40"]),
        (["--updates", "2", "--plot", "risk.xls"], ["--plot risk.xls", ".png"]),
        (["--updates", "2", "--plot", "plans/two-layers-1.10gc-r0.01.parquet"], [".parquet", ".png"]),
        (["--micro-batches", "4"], ["--micro-batches", "--updates 40"]),
        (["--loss-option", "tau"], ["--loss-option tau", "NAME=VALUE"]),
        (["--loss-option", "tau_pos=x"], ["tau_pos=x", "not a number"]),
        (["--loss-option", "sigma=1"], ["sigma=1", "tau_pos"]),
    ],
)
def test_a_wrong_flag_of_verify_is_one_clear_line(
    flags: list[str], words: list[str], hilore: Hilore, plan_file: Path
) -> None:
    outcome = hilore("verify", str(plan_file), *flags)
    assert (outcome.code, outcome.out) == (2, "")
    assert all(word in outcome.err for word in words)


def test_an_option_of_the_loss_reaches_the_workload(hilore: Hilore, plan_file: Path, updates: dict[str, Any]) -> None:
    flags = ["--loss", "verl_vanilla", "--loss-option", "dual_clip=2.5", "--loss-option", "aggregation=token-sum"]
    assert hilore("verify", str(plan_file), "--updates", "1", *flags).code == 0
    loss = updates["options"].loss
    assert (loss.kind, loss.dual_clip, loss.aggregation) == ("verl_vanilla", 2.5, "token-sum")
