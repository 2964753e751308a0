"""The whole of `hilore profile` on a small model: every number that can be counted another way is."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from hilore_cli.experiments import profiling
from hilore_cli.experiments.calibration import CALIBRATION_BATCHES
from hilore_cli.experiments.profiling import profile_actor
from hilore_cli.experiments.progress import Silent
from hilore_cli.experiments.workloads import prepare
from hilore_cli.measuring.candidates import compressible
from hilore_cli.measuring.codecs import codec
from hilore_cli.measuring.identity import decoder_layers
from hilore_cli.measuring.layer_calls import capture_inputs
from hilore_cli.measuring.step import completion_logps
from hilore_cli.measuring.stream import tensors
from hilore_cli.measuring.tracing import trace
from hilore_cli.measuring.units import record_layer
from hilore_cli.solving.solve import solve
from hilore_cli.tables.profile_table import INPUT_UNIT, NO_CODEC, Profile, load_profile

pytestmark = pytest.mark.usefixtures("one_thread")

TIMES = {"recompute_us": 0.0, "codec_us": 0.0}
TOKENS, HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 2 * 24, 64, 128, 4, 2, 256


def units(profile: Profile, layer: int = 0):
    return [row for row in profile.rows if row.layer == layer and row.codec == NO_CODEC and row.unit != INPUT_UNIT]


def by_module(profile: Profile, op: str) -> dict[str, int]:
    """Bytes of this op's outputs, by module."""
    return {row.module: row.bytes for row in units(profile) if row.op == op}


def saved_by_autograd(layer, call) -> int:
    """Bytes of the storages that autograd saves in one layer, arguments and parameters aside."""
    args, kwargs, _ = call.fresh()
    known = {tensor.data_ptr() for tensor in [*layer.parameters(), *layer.buffers(), *tensors((args, kwargs))]}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(*args, **kwargs)
    assert out is not None
    return sum(storage.nbytes() for address, storage in storages.items() if address not in known)


def test_a_profile_saves_and_loads(tiny_profile, tmp_path):
    path = tmp_path / "p.parquet"
    digest, written = tiny_profile.save(path)
    loaded = load_profile(path)
    assert written
    assert loaded == replace(tiny_profile, digest=digest)
    assert tiny_profile.save(path) == (digest, False)


def test_layers_alike_are_one_class_of_units_in_order(tiny_profile):
    assert tiny_profile.meta.identity.layers == 3
    assert tiny_profile.meta.memory.layer_class == (0, 0, 0)
    streams = [
        [(row.unit, row.op_index, row.op, row.bytes, row.reads) for row in units(tiny_profile, i)] for i in (0, 1, 2)
    ]
    assert streams[0] == streams[1] == streams[2]
    assert [row.unit for row in units(tiny_profile)] == list(range(len(streams[0])))
    assert all(read < row.unit for row in units(tiny_profile) for read in row.reads)


def test_the_bytes_of_known_tensors_are_right(tiny_profile):
    products = by_module(tiny_profile, "aten.mm.default")
    assert products == {
        "self_attn.q_proj": 4 * TOKENS * HIDDEN,
        "self_attn.k_proj": 4 * TOKENS * HIDDEN * KV_HEADS // HEADS,
        "self_attn.v_proj": 4 * TOKENS * HIDDEN * KV_HEADS // HEADS,
        "self_attn.o_proj": 4 * TOKENS * HIDDEN,
        "mlp.gate_proj": 4 * TOKENS * INNER,
        "mlp.up_proj": 4 * TOKENS * INNER,
        "mlp.down_proj": 4 * TOKENS * HIDDEN,
    }
    inputs = [row for row in tiny_profile.rows if row.unit == INPUT_UNIT]
    head = [row for row in tiny_profile.rows if row.layer == 3]
    assert [row.bytes for row in inputs] == [4 * TOKENS * HIDDEN] * 3
    assert [row.bytes for row in head] == [4 * 2 * 17 * VOCAB]


def test_flops_are_those_of_matrix_products_and_attention(tiny_profile):
    flops = {row.module: row.flops for row in units(tiny_profile) if row.flops}
    assert flops["mlp.gate_proj"] == 2 * TOKENS * HIDDEN * INNER
    assert flops["self_attn"] == 2 * 2 * 2 * 24 * 24 * HIDDEN
    assert len(flops) == 8


def test_saved_bytes_are_what_autograd_saves(tiny_profile, tiny_options):
    workload = prepare(tiny_options, count=1, skip=0, progress=Silent())
    model = workload.actor.model
    calls = capture_inputs(model, lambda: completion_logps(model, workload.micro_batches[0]))
    for index, (layer, call) in enumerate(zip(decoder_layers(model), calls, strict=True)):
        rows = units(tiny_profile, index)
        assert sum(row.bytes for row in rows if row.saved) == saved_by_autograd(layer, call)


def test_static_bytes_are_the_models(tiny_profile, tiny_options):
    model = prepare(tiny_options, count=1, skip=0, progress=Silent()).actor.model
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    count = len(list(model.parameters()))
    static = tiny_profile.meta.static_bytes
    assert (static.parameters, static.gradients, static.optimizer) == (
        parameters,
        parameters,
        2 * parameters + 4 * count,
    )
    assert static.total == sum((static.parameters, static.gradients, static.optimizer, static.buffers))


def test_packed_bytes_and_errors_are_the_codecs(tiny_profile):
    bases = {(row.layer, row.unit): row for row in tiny_profile.rows if row.codec == NO_CODEC}
    packed = [row for row in tiny_profile.rows if row.codec != NO_CODEC]
    assert {row.codec for row in packed} == {"int8-g64", "int4-g64", "bf16"}
    for row in packed:
        assert row.packed_bytes == codec(row.codec).packed_bytes(row.bytes // 4, torch.float32) < row.bytes
        assert row.reads == bases[row.layer, row.unit].reads
        assert 0 < row.error < {"int8-g64": 0.01, "int4-g64": 0.2, "bf16": 0.003}[row.codec]
        assert row.codec_us > 0


def test_gains_are_finite_and_positive_and_grow_with_the_error(tiny_profile):
    gains = {(row.layer, row.unit, row.codec): row.gain for row in tiny_profile.rows if row.codec != NO_CODEC}
    assert len(gains) >= 3 * 3 * 8
    assert all(0 < gain < float("inf") for gain in gains.values())
    for layer, unit, name in gains:
        assert gains[layer, unit, "bf16"] < gains[layer, unit, "int8-g64"] < gains[layer, unit, "int4-g64"], name


def test_what_is_compressed_is_saved_or_a_product(tiny_profile, tiny_options):
    workload = prepare(tiny_options, count=1, skip=0, progress=Silent())
    model = workload.actor.model
    (call, *_) = capture_inputs(model, lambda: completion_logps(model, workload.micro_batches[0]))
    args, kwargs, _ = call.fresh()
    layer = decoder_layers(model)[0]
    with record_layer(layer, args, kwargs) as recorder:
        layer(*args, **kwargs)
    wanted = {candidate.unit for candidate in compressible(recorder.units)}
    assert {row.unit for row in tiny_profile.rows if row.layer == 0 and row.codec != NO_CODEC} == wanted
    assert all(recorder.units[unit].saved or recorder.units[unit].flops for unit in wanted)


def test_two_runs_differ_in_times_only(tiny_profile, tiny_options):
    again = profile_actor(tiny_options, rounds=1)
    assert [replace(row, **TIMES) for row in again.rows] == [replace(row, **TIMES) for row in tiny_profile.rows]
    assert again.meta.memory == tiny_profile.meta.memory
    assert again.meta.calibration == tiny_profile.meta.calibration
    assert again.meta.identity == tiny_profile.meta.identity
    assert again.meta.workload == tiny_profile.meta.workload


def test_profiling_stays_within_its_share_of_a_gc_step_as_the_profile_says(tiny_profile):
    static, memory = tiny_profile.meta.static_bytes, tiny_profile.meta.memory
    used = memory.profiling_peak_bytes + static.parameters + static.buffers
    assert used <= profiling.PROFILING_LIMIT * (static.total + memory.gc_peak_bytes)


def test_profiling_stays_within_its_share_of_a_gc_step_as_the_allocator_says(tiny_profile, tiny_options, monkeypatch):
    """Every pass under one trace; the profiler's own traces, which cannot be nested, come from a first run."""
    workload = prepare(tiny_options, count=CALIBRATION_BATCHES, skip=0, progress=Silent())
    seen = []

    def remember(run, device):
        seen.append(trace(run, device))
        return seen[-1]

    replace_traces(monkeypatch, remember)
    profile_actor(tiny_options, workload=workload, rounds=1)
    workload.actor.model.zero_grad(set_to_none=True)
    order = iter(seen)

    def repeat(run, _):
        run()
        return next(order)

    replace_traces(monkeypatch, repeat)
    whole = trace(lambda: profile_actor(tiny_options, workload=workload, rounds=1), torch.device("cpu"))
    static, memory = tiny_profile.meta.static_bytes, tiny_profile.meta.memory
    assert whole.peak_bytes <= memory.profiling_peak_bytes * 1.01
    used = whole.peak_bytes + static.parameters + static.buffers
    assert used <= profiling.PROFILING_LIMIT * (static.total + memory.gc_peak_bytes)


def replace_traces(monkeypatch, stand_in):
    for module in ("hilore_cli.experiments.calibration", "hilore_cli.measuring.memory"):
        monkeypatch.setattr(f"{module}.trace", stand_in)


def test_recording_a_layer_holds_nothing_afterwards(tiny_options):
    workload = prepare(tiny_options, count=1, skip=0, progress=Silent())
    model = workload.actor.model
    (call, *_) = capture_inputs(model, lambda: completion_logps(model, workload.micro_batches[0]))
    layer = decoder_layers(model)[0]

    def record():
        args, kwargs, _ = call.fresh()
        with record_layer(layer, args, kwargs):
            layer(*args, **kwargs)

    assert trace(record, torch.device("cpu")).levels[-1] == 0


def test_where_a_plain_step_does_not_fit_it_is_computed_and_close(tiny_profile, tiny_options, monkeypatch):
    monkeypatch.setattr(profiling, "PROFILING_LIMIT", 0.7)
    computed = profile_actor(replace(tiny_options, optimizer="none"), rounds=1)
    measured = tiny_profile.meta.memory
    assert measured.plain_peak_measured
    assert not computed.meta.memory.plain_peak_measured
    assert computed.meta.memory.plain_peak_bytes == pytest.approx(measured.plain_peak_bytes, rel=0.05)
    assert computed.meta.timing.plain_us > 0


def test_dropout_is_forced_and_is_not_kept(tiny_options, tmp_path):
    config = LlamaConfig.from_pretrained(tiny_options.model)
    config.attention_dropout = 0.1
    config.save_pretrained(tmp_path / "dropout")
    options = replace(tiny_options, model=str(tmp_path / "dropout"), attention="eager")
    profile = profile_actor(options, rounds=1)
    for layer in range(3):
        forced = [row for row in units(profile, layer) if row.forced]
        assert [row.op for row in forced] == ["aten.empty_like.default", "aten.bernoulli_.float"]
        assert not any(row.keepable for row in forced)
    plan = solve(profile, cap_bytes=10**9, risk=0.0)
    assert all(row.replays or row.plain for row in plan.rows if "bernoulli" in row.op)
    assert all(0.3 < ratio < 3 for ratio in profile.meta.calibration.ratios)  # both runs draw the same masks


def test_bfloat16_halves_the_bytes_and_leaves_out_its_own_codec(tiny_profile, tiny_options):
    half = profile_actor(replace(tiny_options, dtype="bfloat16"), rounds=1)
    assert half.meta.identity.dtype == "bfloat16"
    assert {row.codec for row in half.rows} == {NO_CODEC, "int8-g64", "int4-g64"}
    whole = by_module(tiny_profile, "aten.mm.default")
    assert by_module(half, "aten.mm.default") == {module: size // 2 for module, size in whole.items()}
    assert half.meta.static_bytes.parameters * 2 == tiny_profile.meta.static_bytes.parameters
    assert all(0 < row.gain < float("inf") for row in half.rows if row.codec != NO_CODEC)


def test_only_the_codecs_asked_for_are_measured(tiny_options):
    found = profile_actor(tiny_options, codecs=("bf16",), rounds=1)
    assert {row.codec for row in found.rows} == {NO_CODEC, "bf16"}
    assert found.meta.calibration.measured_codecs == ("bf16",)


def test_the_model_is_left_as_it_was(tiny_options):
    workload = prepare(tiny_options, count=2, skip=0, progress=Silent())
    model = workload.actor.model
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    profile_actor(tiny_options, workload=workload, rounds=1)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all("forward" not in layer.__dict__ for layer in decoder_layers(model))
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_progress_is_told_of_as_many_steps_as_it_was_promised(tiny_options):
    class Count:
        def __init__(self):
            self.stages = []

        def stage(self, text, total):
            self.stages.append([text, total, 0])

        def advance(self):
            self.stages[-1][2] += 1

    progress = Count()
    profile_actor(tiny_options, rounds=1, progress=progress)
    assert [(text, done) for text, _, done in progress.stages] == [(text, total) for text, total, _ in progress.stages]


def test_the_recorded_command_and_file_name_are_kept(tiny_options, tmp_path):
    found = profile_actor(tiny_options, rounds=1, command="hilore profile --model tiny")
    found.save(Path(tmp_path / "p.parquet"))
    assert load_profile(tmp_path / "p.parquet").meta.command == "hilore profile --model tiny"
    assert found.meta.identity.model == "tiny-llama"
