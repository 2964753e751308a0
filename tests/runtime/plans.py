"""Hand-made plans for small models: any unit of any layer kept in any way, dead ops decided as the solver does."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hilore_cli.experiments.facts import model_identity
from hilore_cli.measuring import identity
from hilore_cli.measuring.codecs import codec
from hilore_cli.measuring.layer_calls import capture_inputs
from hilore_cli.measuring.units import UnitRecord, record_layer
from hilore_cli.solving.evaluate import replayed_ops
from hilore_cli.solving.problem import Layer, Op, Unit
from hilore_cli.tables.plan_table import COMPRESS, RECOMPUTE, STORE, Plan, PlanMeta, PlanRow, Rung

Kept = Mapping[int, Mapping[int, str]]


def record(model: nn.Module, forward: Callable[[], Any]) -> tuple[list[list[UnitRecord]], str]:
    """Units of every layer in one real forward, and what the layers are called with."""
    units = []
    for layer, call in zip(identity.decoder_layers(model), capture_inputs(model, forward), strict=True):
        args, kwargs, _ = call.fresh()
        with record_layer(layer, args, kwargs) as recorder:
            layer(*args, **kwargs)
        units.append(recorder.units)
        signature = identity.call_signature(call.args, call.kwargs)
    return units, signature


def as_layer(units: list[UnitRecord]) -> Layer:
    """What the solver sees of a layer's data flow."""
    return Layer(
        ops=tuple(
            Op(recompute_us=1.0, forced=unit.forced, reads=tuple(r for r in unit.reads if r >= 0))
            for unit in units
            if unit.leaf == 0
        ),
        units=tuple(Unit(op=unit.op_index, bytes=unit.bytes, saved=unit.saved, choices=()) for unit in units),
        points=(),
        forward_peak_bytes=0,
        backward_base_bytes=0,
        plain_extra_bytes=0,
    )


def plan_for(
    model: nn.Module,
    units: list[list[UnitRecord]],
    *ladder: Kept,
    plain: frozenset[int] = frozenset(),
    shape: tuple[int, int] = (64, 4096),
    call: str,
) -> Plan:
    """A plan with one rung per assignment: {layer: {unit: codec, `none` to store}}."""
    rows = [
        row
        for rung, kept in enumerate(ladder)
        for layer, members in enumerate(units)
        for row in _layer_rows(rung, layer, members, kept.get(layer, {}), plain=layer in plain)
    ]
    facts = model_identity(model, "test", call)
    rungs = tuple(
        Rung(
            rung=rung,
            risk=0.0,
            predicted_risk=0.0,
            peak_bytes=0,
            step_us=0.0,
            held_bytes=sum(row.held_bytes for row in rows if row.rung == rung),
            tax_recovered=0.0,
            stored=0,
            compressed=0,
            recomputed=0,
            plain_layers=len(plain),
            status="optimal",
            gap=0.0,
            bound_us=0.0,
            greedy_us=0.0,
        )
        for rung in range(len(ladder))
    )
    meta = PlanMeta(
        model=facts.model,
        model_class=facts.model_class,
        config_hash=facts.config_hash,
        parameter_hash=facts.parameter_hash,
        layers=facts.layers,
        dtype=facts.dtype,
        attention=facts.attention,
        adapter=facts.adapter,
        call=facts.call,
        micro_batch=shape[0],
        tokens=shape[1],
        profile_digest="",
        profile_name="",
        cap_bytes=0,
        cap_text="",
        risk=0.0,
        chosen=0,
        solver="by hand",
        static_bytes=0,
        gamma=1.0,
        calibration_micro_batches=0,
        plain_us=0.0,
        gc_us=0.0,
        plain_peak_bytes=0,
        gc_peak_bytes=0,
        rungs=rungs,
        command="",
    )
    return Plan(meta=meta, rows=tuple(rows))


def _layer_rows(
    rung: int, layer: int, units: list[UnitRecord], kept: Mapping[int, str], *, plain: bool
) -> list[PlanRow]:
    running = frozenset() if plain else replayed_ops(as_layer(units), kept)
    rows = []
    for index, unit in enumerate(units):
        name = kept.get(index, "none")
        stored = unit.saved if plain else index in kept
        held = unit.bytes if stored else 0
        if stored and name != "none":
            held = codec(name).packed_bytes(unit.numel, getattr(torch, unit.dtype))
        rows.append(
            PlanRow(
                rung=rung,
                layer=layer,
                unit=index,
                op_index=unit.op_index,
                leaf=unit.leaf,
                module=unit.module,
                op=unit.op,
                action=(COMPRESS if name != "none" else STORE) if stored else RECOMPUTE,
                codec=name,
                plain=plain,
                replays=unit.op_index in running,
                held_bytes=held,
                recompute_us=0.0,
                codec_us=0.0,
                risk2=0.0,
                why="",
            )
        )
    return rows
