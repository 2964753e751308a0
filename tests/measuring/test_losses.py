from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilore_cli.errors import HiloreError
from hilore_cli.measuring.losses import exposure, exposure_bound, loss_coefficients
from hilore_cli.measuring.options import LOSSES, LossSpec

OPTION_SETS = (
    {},
    {"beta": 0.04},
    {"eps_low": 0.1, "eps_high": 0.28},
    {"delta": 1.5},
    {"delta": 1.1, "beta": 0.1, "eps_high": 0.3},
    {"on_policy": True},
    {"on_policy": True, "beta": 0.04},
    {"accumulation": 4, "tokens_in_batch": 97.0, "max_completion": 32},
)


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


def loss_from_definition(
    spec: LossSpec,
    *,
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    facts: dict[str, Any],
) -> torch.Tensor:
    """The losses as the papers and TRL state them, for autograd."""
    lengths = mask.sum(1)
    log_ratio = logps - (logps.detach() if old_logps is None else old_logps)
    if spec.level == "sequence":
        log_ratio = ((log_ratio * mask).sum(1) / lengths)[:, None].expand_as(mask)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - spec.eps_low, 1 + spec.eps_high)
    capped = ratio if spec.delta is None else ratio.clamp(max=spec.delta)
    per_token = -torch.minimum(capped * advantages[:, None], clipped * advantages[:, None])
    if spec.beta:
        gap = ref_logps - logps
        per_token = per_token + spec.beta * (gap.exp() - gap - 1)
    accumulation = facts.get("accumulation", 1)
    sums = (per_token * mask).sum(1)
    if spec.kind == "grpo":
        return (sums / lengths).mean() / accumulation
    if spec.kind == "bnpo":
        return sums.sum() / mask.sum() / accumulation
    if spec.kind == "dr_grpo":
        return sums.sum() / (mask.shape[0] * facts.get("max_completion", mask.shape[1])) / accumulation
    return sums.sum() / facts.get("tokens_in_batch", mask.sum())


@pytest.mark.parametrize("options", OPTION_SETS, ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", LOSSES)
def test_coefficients_equal_autograd_of_the_loss_written_out(kind: str, level: str, options: dict[str, Any]) -> None:
    names = ("accumulation", "tokens_in_batch", "max_completion")
    facts = {name: options[name] for name in names if name in options}
    spec = LossSpec(kind=kind, level=level, **{k: v for k, v in options.items() if k not in facts and k != "on_policy"})
    data = example(seed=OPTION_SETS.index(options))
    if options.get("on_policy"):
        data["old_logps"] = None
    leaf = data["logps"].clone().requires_grad_()
    loss_from_definition(spec, **{**data, "logps": leaf}, facts=facts).backward()

    g = loss_coefficients(spec, **data, **facts)

    assert g.shape == data["mask"].shape
    assert (g - leaf.grad).abs().max() < 1e-10
    assert leaf.grad.abs().max() > 1e-3


def test_clipping_takes_part_in_the_comparison_above() -> None:
    data = example()
    g = loss_coefficients(LossSpec(), **data)
    assert ((g == 0) & (data["mask"] == 1)).any()


def test_on_policy_coefficients_need_no_log_probs() -> None:
    data = example()
    known = {**data, "old_logps": None, "ref_logps": None}
    before = loss_coefficients(LossSpec(), **{**known, "logps": None})
    assert torch.equal(before, loss_coefficients(LossSpec(), **known))


def test_dapo_spreads_the_generation_batch_over_processes_and_steps() -> None:
    data = example()
    facts = {"accumulation": 2, "steps_per_generation": 4, "world_size": 2}
    g = loss_coefficients(LossSpec(), **data, **facts, tokens_in_batch=100.0)
    alone = loss_coefficients(LossSpec(), **data, tokens_in_batch=1.0)
    assert torch.allclose(g, alone * (2 * 4 / (100 * 2)))


def test_padding_holds_no_coefficient_even_where_its_log_probs_are_garbage() -> None:
    data = example()
    for name in ("logps", "old_logps", "ref_logps"):
        data[name] = data[name].masked_fill(data["mask"] == 0, float("nan"))
    for level in ("token", "sequence"):
        g = loss_coefficients(LossSpec(beta=0.1, level=level), **data)
        assert torch.isfinite(g).all()
        assert (g[data["mask"] == 0] == 0).all()


def test_a_kl_term_without_reference_is_refused() -> None:
    with pytest.raises(HiloreError, match="ref_logps") as caught:
        loss_coefficients(LossSpec(beta=0.1), **{**example(), "ref_logps": None})
    assert "--beta 0" in caught.value.hint


def test_old_log_probs_without_current_ones_are_refused() -> None:
    with pytest.raises(HiloreError, match="logps"):
        loss_coefficients(LossSpec(), **{**example(), "logps": None})


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


def test_the_bound_is_exact_on_policy() -> None:
    data = example()
    facts = {"advantages": data["advantages"], "mask": data["mask"]}
    g = loss_coefficients(LossSpec(), logps=None, old_logps=None, ref_logps=None, **facts)
    assert exposure_bound(LossSpec(), **facts, on_policy=True) == pytest.approx(exposure(g, data["mask"]))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(LOSSES), level=st.sampled_from(["token", "sequence"]))
def test_the_bound_holds_with_a_capped_ratio(seed: int, kind: str, level: str) -> None:
    data = example(seed)
    spec = LossSpec(kind=kind, level=level, delta=2.0)
    bound = exposure_bound(spec, advantages=data["advantages"], mask=data["mask"], on_policy=False)
    assert exposure(loss_coefficients(spec, **data), data["mask"]) <= bound * (1 + 1e-12)
