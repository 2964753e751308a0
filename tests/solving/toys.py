"""Toy profiles with the shape of real ones, random toy problems, and a brute force to hold the solver to."""

import dataclasses
import random
from collections.abc import Iterable, Iterator
from itertools import product

from hilore_cli.solving.evaluate import PLAIN, RECOMPUTE_ALL, Assignment, LayerPlan, Outcome, evaluate, fits
from hilore_cli.solving.problem import Choice, Layer, Op, Point, Problem, Unit, problem_from_profile
from hilore_cli.tables.profile_table import (
    INPUT_UNIT,
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

CODECS = ("int8", "int4", "bf16")
_PACKED = {"int8": 0.53, "int4": 0.28, "bf16": 0.5}
_ERROR = {"int8": 0.008, "int4": 0.12, "bf16": 0.002}

# name: module, op, reads, bytes a token and hidden unit, microseconds (share of the layer), saved
Spec = tuple[str, str, str, str, float, float, bool]


def _norm(name: str, reads: str, *, width: float = 1.0) -> list[Spec]:
    return [
        (f"{name}.cast", name, "_to_copy", reads, 4 * width, 1.2 * width, True),
        (f"{name}.pow", name, "pow", f"{name}.cast", 4 * width, 1.4 * width, False),
        (f"{name}.mean", name, "mean", f"{name}.pow", 0.01, 0.8 * width, False),
        (f"{name}.eps", name, "add", f"{name}.mean", 0.01, 0.2, False),
        (f"{name}.rsqrt", name, "rsqrt", f"{name}.eps", 0.01, 0.2, True),
        (f"{name}.mul", name, "mul", f"{name}.cast {name}.rsqrt", 4 * width, 1.5 * width, False),
        (f"{name}.half", name, "_to_copy", f"{name}.mul", 2 * width, 1.0 * width, True),
        (name, name, "mul", f"{name}.half", 2 * width, 1.0 * width, True),
    ]


def _rope(name: str, reads: str, *, width: float) -> list[Spec]:
    return [
        (f"{name}.cos", "self_attn", "mul", reads, 2 * width, 0.7 * width, False),
        (f"{name}.neg", "self_attn", "neg", reads, 1 * width, 0.4 * width, False),
        (f"{name}.cat", "self_attn", "cat", f"{name}.neg {reads}", 2 * width, 0.7 * width, False),
        (f"{name}.sin", "self_attn", "mul", f"{name}.cat", 2 * width, 0.7 * width, False),
        (name, "self_attn", "add", f"{name}.cos {name}.sin", 2 * width, 0.8 * width, True),
    ]


DECODER: list[Spec] = [
    *_norm("input_layernorm", ""),
    ("q", "self_attn.q_proj", "mm", "input_layernorm", 2, 8, False),
    ("k", "self_attn.k_proj", "mm", "input_layernorm", 1, 4, False),
    ("v", "self_attn.v_proj", "mm", "input_layernorm", 1, 4, True),
    *_norm("self_attn.q_norm", "q"),
    *_norm("self_attn.k_norm", "k", width=0.5),
    *_rope("rope_q", "self_attn.q_norm", width=1),
    *_rope("rope_k", "self_attn.k_norm", width=0.5),
    ("attention", "self_attn", "attention", "rope_q rope_k v", 2, 14, True),
    ("o", "self_attn.o_proj", "mm", "attention", 2, 8, False),
    ("residual", "", "add", "o", 2, 1, False),
    *_norm("post_attention_layernorm", "residual"),
    ("gate", "mlp.gate_proj", "mm", "post_attention_layernorm", 6, 24, True),
    ("up", "mlp.up_proj", "mm", "post_attention_layernorm", 6, 24, True),
    ("silu", "mlp.act_fn", "silu", "gate", 6, 3, True),
    ("product", "mlp", "mul", "silu up", 6, 3.5, True),
    ("down", "mlp.down_proj", "mm", "product", 2, 24, False),
    ("out", "", "add", "residual down", 2, 1, False),
]


def toy_profile(
    *,
    layers: int = 2,
    tokens: int = 512,
    hidden: int = 512,
    micro_batch: int = 2,
    gain: float = 0.004,
    codecs: tuple[str, ...] = CODECS,
    weights: str = "pretrained",
    seed: int = 0,
) -> Profile:
    """A valid profile of a toy decoder: every layer the 54 ops of a Qwen3-like block, risks varying by layer."""
    dice = dice_of(seed)
    count = tokens * micro_batch * hidden
    names = {spec[0]: index for index, spec in enumerate(DECODER)}
    sizes = [max(64, round(spec[4] * count)) for spec in DECODER]
    spent_us = [spec[5] * count / 4e4 for spec in DECODER]
    rows: list[ProfileRow] = []
    for layer in range(layers):
        rows.append(_row(layer=layer, unit=INPUT_UNIT, op="input", size=2 * count, keepable=False))
        factor = dice.uniform(0.5, 2.0)
        for unit, (_, module, op, reads, *_, saved) in enumerate(DECODER):
            keepable = unit < len(DECODER) - 1
            base = _row(
                layer=layer,
                unit=unit,
                op=op,
                module=module,
                size=sizes[unit],
                recompute_us=spent_us[unit],
                saved=saved,
                keepable=keepable,
                reads=tuple(names[name] for name in reads.split()),
            )
            rows.append(base)
            kind_gain = gain * factor * dice.uniform(0.2, 3.0)
            rows += [
                dataclasses.replace(
                    base,
                    codec=codec,
                    packed_bytes=round(sizes[unit] * _PACKED[codec]),
                    codec_us=sizes[unit] / 4e5 if codec != "bf16" else sizes[unit] / 1e6,
                    error=_ERROR[codec],
                    gain=kind_gain * _ERROR[codec] / _ERROR["int8"],
                )
                for codec in (codecs if keepable and sizes[unit] > 1000 else ())
            ]
    rows.append(_row(layer=layers, unit=0, op="lm_head", size=8 * count, keepable=False))
    meta = _meta(
        layers=layers,
        tokens=tokens,
        micro_batch=micro_batch,
        hidden=hidden,
        sizes=sizes,
        spent_us=spent_us,
        weights=weights,
    )
    profile = Profile(meta=meta, rows=tuple(rows), digest="d" * 64)
    problem = problem_from_profile(profile)
    peaks = {
        "gc_peak_bytes": evaluate(problem, (RECOMPUTE_ALL,) * layers).peak_bytes - problem.static_bytes,
        "plain_peak_bytes": evaluate(problem, (PLAIN,) * layers).peak_bytes - problem.static_bytes,
    }
    memory = dataclasses.replace(meta.memory, **peaks)
    return dataclasses.replace(profile, meta=dataclasses.replace(meta, memory=memory))


def _row(
    *,
    layer: int,
    unit: int,
    op: str,
    size: int,
    module: str = "",
    recompute_us: float = 0.0,
    saved: bool = False,
    keepable: bool = True,
    reads: tuple[int, ...] = (),
) -> ProfileRow:
    return ProfileRow(
        shape=0,
        layer=layer,
        unit=unit,
        op_index=unit,
        leaf=0,
        module=module,
        op=op,
        occurrence=0,
        codec="none",
        dtype="bfloat16",
        bytes=size,
        flops=0,
        recompute_us=recompute_us,
        saved=saved,
        keepable=keepable,
        forced=False,
        reads=reads,
        packed_bytes=size,
        codec_us=0.0,
        error=0.0,
        gain=0.0,
    )


def _points(sizes: list[int]) -> tuple[ReplayPoint, ...]:
    """What is alive as a layer is rebuilt op by op, then consumed op by op from its end."""
    last_reader: dict[str, int] = {}
    for index, spec in enumerate(DECODER):
        for name in spec[3].split():
            last_reader[name] = index
    points = []
    for now in range(len(DECODER)):
        alive = [u for u in range(now + 1) if DECODER[u][6] or last_reader.get(DECODER[u][0], u) >= now]
        points.append(ReplayPoint(bytes=sum(sizes[u] for u in alive), alive=tuple(alive)))
    for now in range(len(DECODER) - 1, -1, -1):
        alive = [u for u in range(now + 1) if DECODER[u][6]]
        points.append(ReplayPoint(bytes=sum(sizes[u] for u in alive) + 2 * sizes[now], alive=tuple(alive)))
    return tuple(points)


def _meta(
    *, layers: int, tokens: int, micro_batch: int, hidden: int, sizes: list[int], spent_us: list[float], weights: str
) -> ProfileMeta:
    count = tokens * micro_batch * hidden
    plain_us = 3.2 * layers * sum(spent_us) + 3 * count / 1e3
    layer_us = sum(us for us, spec in zip(spent_us, DECODER, strict=True) if spec[0] not in ("out", "down"))
    return ProfileMeta(
        identity=Identity(
            model="toy/decoder",
            model_class="ToyForCausalLM",
            config_hash="c" * 16,
            parameter_hash="p" * 16,
            layers=layers,
            dtype="bfloat16",
            attention="sdpa",
            adapter="none",
            call="attention_mask",
        ),
        shape=Shape(micro_batch=micro_batch, prompt_tokens=tokens // 4, response_tokens=tokens - tokens // 4),
        workload=Workload(
            model="toy/decoder",
            weights=weights,
            weights_digest="w" * 16,
            rollouts="builtin",
            rollouts_digest="r" * 16,
            mean_reward=0.5,
            loss="grpo",
            optimizer="adamw",
            seed=0,
            device="cpu",
            torch_version="2.13.0",
            transformers_version="5.0.0",
        ),
        static_bytes=StaticBytes(
            parameters=2 * layers * count, gradients=2 * layers * count, optimizer=8 * layers * count, buffers=0
        ),
        timing=StepTiming(
            plain_us=plain_us,
            gc_us=plain_us + layers * (layer_us + 150.0),
            plain_fastest_us=plain_us,
            gc_fastest_us=plain_us + layers * (layer_us + 150.0),
            rounds=5,
            checkpoint_us=150.0,
            recompute_scale=1.0,
            mode_us=250.0,
        ),
        memory=MemoryCurve(
            layer_class=(0,) * layers,
            classes=(LayerClass(plain_extra_bytes=2 * sizes[-4], points=_points(sizes)),),
            forward_peak_bytes=tuple(2 * count * (layer + 1) + 30 * count for layer in range(layers)),
            backward_base_bytes=tuple(2 * count * (layer + 2) for layer in range(layers)),
            head_peak_bytes=2 * count * layers + 60 * count,
            tail_peak_bytes=20 * count,
            gc_peak_bytes=0,
            plain_peak_bytes=0,
            plain_peak_measured=True,
            profiling_peak_bytes=0,
        ),
        calibration=Calibration(
            micro_batches=4,
            gammas=(0.7, 0.8),
            ratios=(1.0,),
            gamma=1.0,
            quantile=0.95,
            margin=1.0,
            measured_codecs=("int8", "int4", "bf16"),
        ),
        device_bytes=24 * 10**9,
        command="hilore profile --model toy/decoder",
    )


def dice_of(seed: int) -> random.Random:
    """Repeatable chance."""
    return random.Random(seed)  # noqa: S311 - toys, not secrets


def random_problem(dice: random.Random) -> Problem:
    """One to three layers of at most six, three, two units: random streams, saves, forced ops, points and times."""
    layers = dice.choice((1, 1, 2, 2, 3))
    most = {1: 6, 2: 3, 3: 2}[layers]
    return Problem(
        layers=tuple(_random_layer(dice, units=dice.randrange(1, most + 1)) for _ in range(layers)),
        static_bytes=dice.randrange(50),
        head_peak_bytes=dice.randrange(40),
        tail_peak_bytes=dice.randrange(40),
        plain_us=float(dice.randrange(1, 100)),
        checkpoint_us=float(dice.choice((0, 1, 5))),
        mode_us=float(dice.choice((0, 0, 1, 4))),
    )


def _random_layer(dice: random.Random, *, units: int) -> Layer:
    ops: list[Op] = []
    made: list[Unit] = []
    while len(made) < units:
        reads = tuple(unit for unit in range(len(made)) if dice.random() < 0.5)
        us = float(dice.randrange(10))
        ops.append(Op(recompute_us=us, forced=dice.random() < 0.15, reads=reads))
        count = min(dice.choice((1, 1, 1, 1, 2, 0)), units - len(made))
        made += [_random_unit(dice, op=len(ops) - 1) for _ in range(count)]
    points = tuple(
        Point(
            bytes=dice.randrange(40),
            alive=frozenset(unit for unit in range(units) if dice.random() < 0.5),
        )
        for _ in range(dice.randrange(4))
    )
    return Layer(
        ops=tuple(ops),
        units=tuple(made),
        points=points,
        forward_peak_bytes=dice.randrange(30),
        backward_base_bytes=dice.randrange(30),
        plain_extra_bytes=dice.choice((dice.randrange(12), 60)),  # 60: hardly ever fits, so keeping units pays
    )


def _random_unit(dice: random.Random, *, op: int) -> Unit:
    size = dice.randrange(1, 20)
    choices = [Choice(codec="none", held_bytes=size, codec_us=0.0, risk2=0.0)]
    for codec in ("int8", "int4")[: dice.randrange(3)]:
        held, us = dice.randrange(1, size + 1), float(dice.randrange(4))
        choices.append(Choice(codec=codec, held_bytes=held, codec_us=us, risk2=dice.choice((0.0, 0.01, 0.04, 0.09))))
    keepable = dice.random() < 0.7
    return Unit(op=op, bytes=size, saved=dice.random() < 0.5, choices=tuple(choices) if keepable else ())


def layer_plans(layer: Layer) -> Iterator[LayerPlan]:
    """Every schedule of a layer."""
    yield PLAIN
    options: Iterable[list[str | None]] = [[None, *(choice.codec for choice in u.choices)] for u in layer.units]
    for codecs in product(*options):
        yield LayerPlan(plain=False, kept={unit: codec for unit, codec in enumerate(codecs) if codec is not None})


def brute_force(problem: Problem, *, cap_bytes: int, risk: float) -> tuple[Assignment, Outcome] | None:
    """The fastest assignment by trying all of them, or None if none fits."""
    best = None
    for assignment in product(*(list(layer_plans(layer)) for layer in problem.layers)):
        outcome = evaluate(problem, assignment)
        if fits(outcome, cap_bytes=cap_bytes, risk=risk) and (best is None or outcome.step_us < best[1].step_us):
            best = assignment, outcome
    return best
