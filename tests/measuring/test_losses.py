"""Loss coefficients against autograd: of TRL's own trainer, and of verl's losses written out from their definitions."""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import GRPOTrainer

from hilore_cli.errors import HiloreError
from hilore_cli.measuring.losses import BatchFacts, exposure, exposure_bound, is_skippable, loss_coefficients
from hilore_cli.measuring.options import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    LOSSES,
    TRL_LOSSES,
    VERL_LOSSES,
    LossSpec,
    parse_loss,
)

FACTS = BatchFacts(accumulation=4, tokens_in_batch=97.0, sequences_in_batch=16, max_completion=32)


def example(seed: int = 0, sequences: int = 4, width: int = 9) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (sequences, 1), generator=draw)
    mask = (torch.arange(width)[None, :] < lengths).double()
    logps = -normal(sequences, width).abs() - 0.1
    return {
        "logps": logps,
        "old_logps": logps + 0.25 * normal(sequences, width),
        "ref_logps": logps + 0.5 * normal(sequences, width),
        "advantages": normal(sequences),
        "mask": mask,
    }


def is_weights(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5


# --- TRL: its own trainer


class Trainer:
    """As much of a GRPOTrainer as `_compute_loss` asks for; log-probs and entropies are given, all else is TRL's."""

    get_off_policy_mask = staticmethod(GRPOTrainer.get_off_policy_mask)
    get_gamma_weights = staticmethod(GRPOTrainer.get_gamma_weights)
    get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask

    def __init__(
        self, spec: LossSpec, facts: BatchFacts, logps: torch.Tensor, entropies: torch.Tensor, **options: Any
    ) -> None:
        self.model = SimpleNamespace(training=True)
        self.logps, self.entropies = logps, entropies
        self.loss_type, self.importance_sampling_level, self.beta = spec.kind, spec.level, spec.beta
        self.epsilon_low, self.epsilon_high = spec.eps_low, spec.eps_high
        self.current_gradient_accumulation_steps = facts.accumulation
        self.max_completion_length = facts.max_completion
        self.top_entropy_quantile = options.get("top_entropy_quantile", 1.0)
        self.off_policy_mask_threshold = options.get("off_policy_mask_threshold")
        self.use_vllm = self.vllm_importance_sampling_correction = options.get("use_vllm", False)
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self._metrics: Any = {"train": defaultdict(list)}
        self.accelerator = SimpleNamespace(
            num_processes=facts.world_size,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
            pad_across_processes=lambda value, **_: value,
            device=torch.device("cpu"),
        )
        self.args = SimpleNamespace(
            delta=spec.delta,
            use_bias_correction_kl=spec.kl_bias_correction,
            sapo_temperature_pos=spec.tau_pos,
            sapo_temperature_neg=spec.tau_neg,
            vespo_k_pos=spec.vespo_k_pos,
            vespo_lambda_pos=spec.vespo_lambda_pos,
            vespo_k_neg=spec.vespo_k_neg,
            vespo_lambda_neg=spec.vespo_lambda_neg,
            steps_per_generation=facts.steps_per_generation or facts.accumulation,
        )

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return self.logps, self.entropies, None


TRL_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"beta": 0.04},
    {"eps_low": 0.1, "eps_high": 0.28},
    {"delta": 1.5},
    {"delta": 1.1, "beta": 0.1, "eps_high": 0.3},
    {"on_policy": True},
    {"on_policy": True, "beta": 0.04},
    {"facts": FACTS},
    {
        "facts": BatchFacts(
            accumulation=2, steps_per_generation=4, world_size=2, tokens_in_batch=200.0, max_completion=16
        )
    },
    {"beta": 0.1, "kl_bias_correction": True},
    {"use_vllm": "token"},
    {"use_vllm": "sequence", "beta": 0.02},
    {"top_entropy_quantile": 0.4, "beta": 0.02},
    {"off_policy_mask_threshold": 0.05},
    {"off_policy_mask_threshold": 0.02, "top_entropy_quantile": 0.5, "use_vllm": "token", "beta": 0.1, "delta": 1.3},
    {"tau_pos": 0.7, "tau_neg": 2.0, "vespo_k_pos": 1.0, "vespo_lambda_neg": 0.5, "eps_high": 1.4},
    {"advantages": "token"},
)
_TRAINER_OPTIONS = ("use_vllm", "top_entropy_quantile", "off_policy_mask_threshold")


@pytest.mark.parametrize("options", TRL_OPTIONS, ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", TRL_LOSSES)
def test_coefficients_equal_autograd_of_trls_trainer(kind: str, level: str, options: dict[str, Any]) -> None:
    others = (*_TRAINER_OPTIONS, "on_policy", "facts", "advantages")
    spec = LossSpec(kind=kind, level=level, **{name: v for name, v in options.items() if name not in others})
    seed = TRL_OPTIONS.index(options)
    data = example(seed=seed)
    mask = data["mask"]
    facts = options.get("facts", BatchFacts(tokens_in_batch=float(mask.sum()), max_completion=mask.shape[1]))
    if options.get("on_policy"):
        data["old_logps"] = None
    if options.get("advantages") == "token":
        data["advantages"] = data["advantages"][:, None] * is_weights(seed, tuple(mask.shape))
        if level == "sequence" and kind == "luspo":
            pytest.skip("TRL's luspo with advantages a token is not a loss of sequences")
    leaf = data["logps"].clone().requires_grad_()
    entropies = is_weights(seed + 1, tuple(mask.shape))
    trainer = Trainer(spec, facts, leaf, entropies, **{name: options.get(name, d) for name, d in _DEFAULTS.items()})
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), torch.zeros(4, 9)),
        "completion_mask": mask,
        "advantages": data["advantages"],
        "num_items_in_batch": torch.tensor(facts.tokens_in_batch),
        "ref_per_token_logps": data["ref_logps"],
    }
    if data["old_logps"] is not None:
        inputs["old_per_token_logps"] = data["old_logps"]
    masks: dict[str, torch.Tensor] = {}
    if options.get("use_vllm"):
        shape = tuple(mask.shape) if options["use_vllm"] == "token" else (4, 1)
        masks["is_weights"] = inputs["importance_sampling_ratio"] = is_weights(seed, shape)
    if "top_entropy_quantile" in options:
        masks["entropy_mask"] = trainer.get_high_entropy_mask(  # type: ignore[misc]
            entropies, mask, 1 - options["top_entropy_quantile"]
        )
    if "off_policy_mask_threshold" in options:
        masks["off_policy_mask"] = trainer.get_off_policy_mask(
            data["advantages"][:, None], data["logps"], data["old_logps"], mask, options["off_policy_mask_threshold"]
        )
        assert 0 < masks["off_policy_mask"].sum() < 4

    GRPOTrainer._compute_loss(trainer, trainer.model, inputs).backward()
    g = loss_coefficients(spec, **data, facts=facts, **masks)

    assert g.shape == mask.shape
    assert (g - leaf.grad).abs().max() < 1e-10
    assert leaf.grad is not None
    assert leaf.grad.abs().max() > 1e-4


_DEFAULTS = {"use_vllm": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}


def test_clipping_takes_part_in_the_comparison_above() -> None:
    data = example()
    g = loss_coefficients(LossSpec(), **data)
    assert ((g == 0) & (data["mask"] == 1)).any()


# --- verl: the losses from their definitions, for autograd


def verl_token_losses(spec: LossSpec, data: dict[str, Any], logps: torch.Tensor) -> torch.Tensor:
    mask, advantages = data["mask"], data["advantages"]
    old = logps.detach() if data["old_logps"] is None else data["old_logps"]
    difference = logps - old
    ratio = difference.clamp(-20, 20).exp()
    low, high = 1 - spec.eps_low, 1 + spec.eps_high
    if spec.kind == "verl_vanilla":
        clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
        return torch.where(advantages < 0, torch.minimum(-advantages * spec.dual_clip, clipped), clipped)
    if spec.kind == "verl_clip_cov":
        ratio = difference.exp()
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if spec.kind == "verl_gspo":
        mean = (difference * mask).sum(1) / mask.sum(1).clamp(min=1)
        ratio = (logps - logps.detach() + mean.detach()[:, None]).clamp(max=10).exp()
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if spec.kind == "verl_sapo":
        tau = torch.where(advantages > 0, spec.tau_pos, spec.tau_neg)
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    if spec.kind == "verl_cispo":
        return -ratio.clamp(low, high).detach() * advantages * logps
    assert spec.kind == "verl_gpg"
    return -logps * advantages


def verl_aggregate(values: torch.Tensor, mask: torch.Tensor, aggregation: str, facts: BatchFacts) -> torch.Tensor:
    lengths = mask.sum(1)
    if aggregation == "token-sum":
        return (values * mask).sum() * facts.world_size
    if aggregation == "token-mean":
        tokens = facts.tokens_in_batch or mask.sum() * facts.accumulation
        return (values * mask).sum() / tokens * facts.world_size
    sums = (values * mask).sum(1)
    if aggregation == "seq-mean-token-mean":
        sums = sums / (lengths + 1e-8)
    sequences = facts.sequences_in_batch or (lengths > 0).sum() * facts.accumulation
    loss = sums.sum() / sequences * facts.world_size
    norm = facts.max_completion or mask.shape[1]
    return loss / norm if aggregation == "seq-mean-token-sum-norm" else loss


def verl_kl(spec: LossSpec, logps: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    gap = logps - reference
    if spec.kl == "k1":
        return gap
    if spec.kl == "abs":
        return gap.abs()
    if spec.kl == "k3":
        other = (-gap).clamp(-20, 20)
        return (other.exp() - other - 1).clamp(-10, 10)
    return gap.square() / 2  # k2, and the gradient that a + asks for


VERL_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    *({"aggregation": aggregation, "facts": FACTS} for aggregation in AGGREGATIONS),
    *({"aggregation": aggregation, "beta": 0.05} for aggregation in AGGREGATIONS),
    *({"kl": kl, "beta": 0.1} for kl in KL_ESTIMATORS),
    {"eps_low": 0.1, "eps_high": 0.28, "dual_clip": 1.2},
    {"on_policy": True, "beta": 0.04},
    {"wild": True, "beta": 0.1},
    {"weights": True, "beta": 0.1},
    {"facts": BatchFacts(world_size=4, tokens_in_batch=300.0, sequences_in_batch=32)},
)


@pytest.mark.parametrize("options", VERL_OPTIONS, ids=str)
@pytest.mark.parametrize("kind", VERL_LOSSES)
def test_coefficients_equal_autograd_of_verls_definitions(kind: str, options: dict[str, Any]) -> None:
    others = ("on_policy", "facts", "wild", "weights")
    spec = LossSpec(kind=kind, **{name: value for name, value in options.items() if name not in others})
    facts = options.get("facts", BatchFacts(accumulation=2))
    data = example(seed=VERL_OPTIONS.index(options))
    data["advantages"] = data["advantages"][:, None] * is_weights(1, tuple(data["mask"].shape))
    if options.get("on_policy"):
        data["old_logps"] = None
    if options.get("wild"):  # ratios and reference gaps past every clamp
        scale = torch.linspace(-30, 30, 36, dtype=torch.float64).reshape(4, 9)
        data["old_logps"] = data["logps"] + scale
        data["ref_logps"] = data["logps"] - scale
    weights = is_weights(2, tuple(data["mask"].shape)) if options.get("weights") else None
    leaf = data["logps"].clone().requires_grad_()
    losses = verl_token_losses(spec, data, leaf)
    if weights is not None:
        losses = losses * weights
    policy = verl_aggregate(
        losses, data["mask"], "seq-mean-token-mean" if kind == "verl_sapo" else spec.aggregation, facts
    )
    kl = verl_aggregate(verl_kl(spec, leaf, data["ref_logps"]), data["mask"], spec.aggregation, facts)
    (policy + spec.beta * kl).backward()

    g = loss_coefficients(spec, **data, is_weights=weights, facts=facts)

    assert leaf.grad is not None
    scale_of = max(1.0, float(leaf.grad.abs().max()))
    assert (g - leaf.grad).abs().max() < 1e-10 * scale_of
    assert leaf.grad.abs().max() > 1e-4


# --- what is known when


@pytest.mark.parametrize("kind", LOSSES)
def test_on_policy_coefficients_need_no_log_probs(kind: str) -> None:
    data = example()
    known = {**data, "old_logps": None, "ref_logps": None}
    before = loss_coefficients(LossSpec(kind=kind), **{**known, "logps": None})
    assert torch.equal(before, loss_coefficients(LossSpec(kind=kind), **known))


@pytest.mark.parametrize("kind", LOSSES)
def test_padding_holds_no_coefficient_even_where_its_log_probs_are_garbage(kind: str) -> None:
    data = example()
    for name in ("logps", "old_logps", "ref_logps"):
        data[name] = data[name].masked_fill(data["mask"] == 0, float("nan"))
    weights = is_weights(0, tuple(data["mask"].shape))
    if kind != "vespo":  # as in TRL, its weights count on padding
        weights = weights.masked_fill(data["mask"] == 0, float("nan"))
    for level in ("token", "sequence") if kind in TRL_LOSSES else ("token",):
        g = loss_coefficients(LossSpec(kind=kind, beta=0.1, level=level), **data, is_weights=weights)
        assert torch.isfinite(g).all()
        assert (g[data["mask"] == 0] == 0).all()


def test_a_kl_term_without_reference_is_refused() -> None:
    with pytest.raises(HiloreError, match="ref_logps") as caught:
        loss_coefficients(LossSpec(beta=0.1), **{**example(), "ref_logps": None})
    assert "--beta 0" in caught.value.hint


def test_old_log_probs_without_current_ones_are_refused() -> None:
    with pytest.raises(HiloreError, match="logps"):
        loss_coefficients(LossSpec(), **{**example(), "logps": None})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_advantage_that_is_not_finite_is_refused(value: float) -> None:
    data = example()
    data["advantages"][1] = value
    with pytest.raises(HiloreError, match="not finite") as caught:
        loss_coefficients(LossSpec(), **data)
    assert "NaN reward" in caught.value.hint


def test_exposure_is_the_root_of_the_sum_of_squares_inside_the_mask() -> None:
    g = torch.tensor([[3.0, 4.0, 9.0]])
    assert exposure(g, torch.tensor([[1.0, 1.0, 0.0]])) == 5.0


def test_one_success_in_eight_holds_fifty_times_the_energy_of_a_failure() -> None:
    advantages = torch.tensor([2.65, -0.378])
    g = loss_coefficients(
        LossSpec(), logps=None, old_logps=None, ref_logps=None, advantages=advantages, mask=torch.ones(2, 10)
    )
    energy = g.square().sum(1)
    assert energy[0] / energy[1] == pytest.approx(49, rel=0.02)


def test_a_micro_batch_is_skippable_only_if_nothing_at_all_asks_for_a_gradient() -> None:
    data = {**example(), "advantages": torch.zeros(4, dtype=torch.float64)}
    nothing = exposure(loss_coefficients(LossSpec(), **data), data["mask"])
    assert is_skippable(LossSpec(), nothing)
    assert not is_skippable(LossSpec(), nothing, entropy_bonus=0.01)
    assert not is_skippable(LossSpec(), nothing, auxiliary_loss=0.01)
    assert not is_skippable(LossSpec(beta=0.04), nothing)
    assert not is_skippable(LossSpec(), exposure(loss_coefficients(LossSpec(), **example()), data["mask"]))


def test_a_fully_clipped_micro_batch_has_no_gradient() -> None:
    data = example()
    data["advantages"], data["old_logps"] = data["advantages"].abs(), data["logps"] - 1
    assert is_skippable(LossSpec(), exposure(loss_coefficients(LossSpec(), **data), data["mask"]))


# --- the bound before the forward


@pytest.mark.parametrize("kind", LOSSES)
def test_the_bound_is_exact_on_policy(kind: str) -> None:
    data = example()
    known = {"advantages": data["advantages"], "mask": data["mask"]}
    g = loss_coefficients(LossSpec(kind=kind), logps=None, old_logps=None, ref_logps=None, **known)
    assert exposure_bound(LossSpec(kind=kind), **known, on_policy=True) == pytest.approx(exposure(g, data["mask"]))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(LOSSES),
    level=st.sampled_from(["token", "sequence"]),
    weighted=st.booleans(),
)
def test_the_bound_holds_wherever_the_loss_bounds_its_ratio(
    seed: int, kind: str, level: str, *, weighted: bool
) -> None:
    data = example(seed)
    if kind in VERL_LOSSES:
        level = "token"
    if kind in ("verl_gspo", "verl_clip_cov"):  # these bound a negative advantage's ratio nowhere
        data["advantages"] = data["advantages"].abs()
    spec = LossSpec(kind=kind, level=level, delta=2.0)
    weights = is_weights(seed, tuple(data["mask"].shape)) if weighted else None
    known = {"advantages": data["advantages"], "mask": data["mask"], "is_weights": weights}
    bound = exposure_bound(spec, **known, on_policy=False)
    assert exposure(loss_coefficients(spec, **data, is_weights=weights), data["mask"]) <= bound * (1 + 1e-12)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kl=st.sampled_from([*KL_ESTIMATORS, "TRL", "TRL, bias-corrected"]),
    shift=st.floats(math.log(0.8), math.log(1.2)),
    spread=st.sampled_from([0.5, 2.0, 8.0]),
)
def test_the_bound_on_the_kl_term_holds_for_ratios_inside_the_clip(
    seed: int, kl: str, shift: float, spread: float
) -> None:
    data = example(seed)
    data["old_logps"] = data["logps"] - shift
    data["ref_logps"] = data["logps"] + spread * (data["ref_logps"] - data["logps"])
    data["advantages"] = torch.zeros(4, dtype=torch.float64)
    if kl.startswith("TRL"):
        spec = LossSpec(kl_bias_correction=kl.endswith("corrected"), beta=0.1)
    else:
        spec = LossSpec(kind="verl_vanilla", kl=kl, beta=0.1)
    known = {name: data[name] for name in ("advantages", "mask", "old_logps", "ref_logps")}
    bound = exposure_bound(spec, **known, on_policy=False)
    assert exposure(loss_coefficients(spec, **data), data["mask"]) <= bound * (1 + 1e-9)


# --- names and options


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec(),
        LossSpec(kind="grpo", level="sequence", beta=0.04, delta=1.5),
        LossSpec(kind="verl_vanilla", aggregation="seq-mean-token-sum", kl="k3+", beta=0.001, dual_clip=5.0),
        LossSpec(kind="sapo", tau_neg=1.1, kl_bias_correction=True),
    ],
)
def test_a_described_loss_is_read_back(spec: LossSpec) -> None:
    assert parse_loss(spec.describe()) == spec


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "ppo"}, "--loss ppo"),
        ({"level": "word"}, "--loss-level word"),
        ({"kind": "verl_gspo", "level": "sequence"}, "verl"),
        ({"kind": "verl_vanilla", "kl_bias_correction": True}, "verl"),
        ({"kind": "dapo", "kl": "k1"}, "kl=k1"),
        ({"kind": "verl_vanilla", "kl": "k9"}, "k9"),
        ({"kind": "verl_vanilla", "aggregation": "mean"}, "aggregation mean"),
        ({"delta": 0.9}, "--delta 0.9"),
        ({"dual_clip": 1.0}, "--loss-option dual_clip 1"),
        ({"tau_pos": 0.0}, "tau_pos 0"),
        ({"kind": "vespo", "vespo_k_pos": -1.0}, "vespo_k_pos -1"),
        ({"beta": math.nan}, "--beta nan"),
    ],
)
def test_an_option_that_no_loss_has_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(HiloreError, match=match.replace("+", r"\+")):
        LossSpec(**options)
