"""Toy profiles and plans: two layers of three ops, small enough to check by hand."""

import dataclasses
from typing import Any

from hilore_cli.tables.parquet import columns_of, contents_digest
from hilore_cli.tables.plan_table import COMPRESS, RECOMPUTE, STORE, Plan, PlanMeta, PlanRow, Rung
from hilore_cli.tables.profile_table import (
    INPUT_UNIT,
    NO_CODEC,
    SCHEMA,
    Calibration,
    Identity,
    LayerClass,
    MemoryCurve,
    Profile,
    ProfileMeta,
    ProfileRow,
    ReplayPoint,
    Shape,
    StaticBytes,
    StepTiming,
    Workload,
)

LAYERS = 2
MODULES = ("self_attn.q_proj", "mlp.up_proj", "mlp.act_fn")
OPS = ("mm", "mm", "silu")


def profile_row(**changes: Any) -> ProfileRow:
    row = ProfileRow(
        shape=0,
        layer=0,
        unit=0,
        op_index=0,
        leaf=0,
        module=MODULES[0],
        op="mm",
        occurrence=0,
        codec=NO_CODEC,
        dtype="float32",
        bytes=4000,
        flops=80_000,
        recompute_us=100.0,
        saved=True,
        keepable=True,
        forced=False,
        reads=(),
        packed_bytes=4000,
        codec_us=0.0,
        error=0.0,
        gain=0.0,
    )
    return dataclasses.replace(row, **changes)


def profile_meta() -> ProfileMeta:
    return ProfileMeta(
        identity=Identity(
            model="toy/two-layers",
            model_class="ToyForCausalLM",
            config_hash="c0ffee",
            parameter_hash="beef",
            layers=LAYERS,
            dtype="float32",
            attention="sdpa",
            adapter="none",
            call="attention_mask",
        ),
        shape=Shape(micro_batch=2, prompt_tokens=3, response_tokens=5),
        workload=Workload(
            model="toy/two-layers",
            weights="random",
            weights_digest="",
            rollouts="builtin",
            rollouts_digest="0123456789abcdef",
            mean_reward=0.5,
            loss="dapo token beta=0 eps_low=0.2 eps_high=0.2",
            optimizer="adamw",
            seed=0,
            device="cpu",
            torch_version="2.13.0",
            transformers_version="5.24.0",
        ),
        static_bytes=StaticBytes(parameters=10_000, gradients=10_000, optimizer=20_000, buffers=100),
        timing=StepTiming(
            plain_us=1000.0,
            gc_us=1300.0,
            plain_fastest_us=990.0,
            gc_fastest_us=1280.0,
            rounds=5,
            checkpoint_us=10.0,
            recompute_scale=1.0,
            mode_us=5.0,
        ),
        memory=MemoryCurve(
            layer_class=(0,) * LAYERS,
            classes=(LayerClass(plain_extra_bytes=1000, points=(ReplayPoint(bytes=4000, alive=(0, 1)),)),),
            forward_peak_bytes=(9000,) * LAYERS,
            backward_base_bytes=(2000,) * LAYERS,
            head_peak_bytes=15_000,
            tail_peak_bytes=3000,
            gc_peak_bytes=20_000,
            plain_peak_bytes=44_000,
            plain_peak_measured=True,
            profiling_peak_bytes=48_000,
        ),
        calibration=Calibration(
            micro_batches=4,
            gammas=(0.7, 0.8),
            ratios=(0.9, 1.2),
            gamma=0.75,
            quantile=0.95,
            margin=1.25,
            measured_codecs=("int8-64",),
        ),
        device_bytes=1_000_000,
        command="hilore profile --model toy/two-layers",
    )


def profile_rows() -> tuple[ProfileRow, ...]:
    rows = []
    for layer in range(LAYERS):
        rows.append(profile_row(layer=layer, unit=INPUT_UNIT, op_index=-1, module="", op="input", recompute_us=0.0))
        for unit, (module, op) in enumerate(zip(MODULES, OPS, strict=True)):
            reads = (unit - 1,) if unit else ()
            plain = profile_row(layer=layer, unit=unit, op_index=unit, module=module, op=op, reads=reads)
            rows.append(plain)
            rows.append(
                dataclasses.replace(
                    plain, codec="int8-64", packed_bytes=1125, codec_us=20.0, error=0.01 / 3, gain=0.1 * (unit + 1)
                )
            )
    rows.append(profile_row(layer=LAYERS, unit=0, module="", op="lm_head", keepable=False))
    return tuple(rows)


def toy_profile() -> Profile:
    return Profile(meta=profile_meta(), rows=profile_rows())


def plan_row(**changes: Any) -> PlanRow:
    row = PlanRow(
        rung=0,
        layer=0,
        unit=0,
        op_index=0,
        leaf=0,
        module=MODULES[0],
        op="mm",
        action=STORE,
        codec=NO_CODEC,
        plain=False,
        replays=False,
        held_bytes=4000,
        recompute_us=0.0,
        codec_us=0.0,
        risk2=0.0,
        why="recompute: +100 us",
    )
    return dataclasses.replace(row, **changes)


def rung(index: int, *, risk: float, step_us: float, compressed: int) -> Rung:
    return Rung(
        rung=index,
        risk=risk,
        predicted_risk=risk * 0.9,
        peak_bytes=60_000,
        step_us=step_us,
        held_bytes=8000,
        tax_recovered=(1300 - step_us) / 300,
        stored=2,
        compressed=compressed,
        recomputed=4 - compressed,
        plain_layers=0,
        status="optimal",
        gap=0.0,
        bound_us=step_us,
        greedy_us=step_us * 1.02,
    )


def toy_plan() -> Plan:
    meta = PlanMeta(
        model="toy/two-layers",
        model_class="ToyForCausalLM",
        config_hash="c0ffee",
        parameter_hash="beef",
        layers=LAYERS,
        dtype="float32",
        attention="sdpa",
        adapter="none",
        call="attention_mask",
        micro_batch=2,
        tokens=8,
        profile_digest=toy_profile_digest(),
        profile_name="two-layers.parquet",
        cap_bytes=66_110,
        cap_text="1.10gc",
        risk=0.01,
        chosen=1,
        solver="HiGHS",
        static_bytes=40_100,
        gamma=0.75,
        calibration_micro_batches=4,
        plain_us=1000.0,
        gc_us=1300.0,
        plain_peak_bytes=84_100,
        gc_peak_bytes=60_100,
        rungs=(
            rung(0, risk=0.0, step_us=1100.0, compressed=0),
            rung(1, risk=0.01, step_us=1040.0, compressed=2),
        ),
        command="hilore solve --profile profiles/two-layers.parquet --mem 1.10gc --risk 0.01",
    )
    actions = {0: (STORE, RECOMPUTE, RECOMPUTE), 1: (STORE, COMPRESS, RECOMPUTE)}
    rows = [
        plan_row(
            rung=index,
            layer=layer,
            unit=unit,
            op_index=unit,
            module=module,
            op=op,
            action=action,
            codec="int8-64" if action == COMPRESS else NO_CODEC,
            held_bytes={STORE: 4000, COMPRESS: 1125, RECOMPUTE: 0}[action],
            replays=action == RECOMPUTE,
            recompute_us=100.0 if action == RECOMPUTE else 0.0,
            codec_us=20.0 if action == COMPRESS else 0.0,
            risk2=4e-5 if action == COMPRESS else 0.0,
        )
        for index in actions
        for layer in range(LAYERS)
        for unit, (module, op, action) in enumerate(zip(MODULES, OPS, actions[index], strict=True))
    ]
    return Plan(meta=meta, rows=tuple(rows))


def toy_profile_digest() -> str:
    """What `toy_profile().save(...)` returns."""
    return contents_digest(columns_of(profile_rows(), SCHEMA), dataclasses.asdict(profile_meta()))
