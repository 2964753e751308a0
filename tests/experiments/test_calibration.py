"""What turns gains into a promise: the bound over checks, the sampled norms, the codecs fitted in a few layers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from hilore_cli.errors import HiloreError
from hilore_cli.experiments.calibration import (
    CHECK_BATCHES,
    SAMPLED_ELEMENTS,
    TYPICAL_SPREAD,
    gradient_norm,
    sampled_gradient,
    upper_bound,
)
from hilore_cli.experiments.profiling import profile_actor
from hilore_cli.experiments.progress import Silent
from hilore_cli.experiments.workloads import prepare
from hilore_cli.measuring.gains import Gain, fit_codecs

pytestmark = pytest.mark.usefixtures("one_thread")


def test_without_checks_gains_stand_as_they_are():
    assert upper_bound(()) == 1.0
    assert upper_bound((0.0,)) == 1.0


def test_checks_that_agree_still_allow_for_the_usual_spread():
    agreeing = upper_bound((0.9,) * 5)
    assert 0.9 < agreeing < 0.9 * math.exp(2 * TYPICAL_SPREAD)
    assert upper_bound((0.9,)) > agreeing


@pytest.mark.parametrize(
    ("times_typical", "in_an_update", "covered"), [(0.7, 1, 0.97), (1.0, 1, 0.95), (2.0, 1, 0.88), (2.0, 8, 0.95)]
)
def test_the_bound_covers_further_ratios_as_often_as_it_says(times_typical, in_an_update, covered):
    draw = torch.Generator().manual_seed(0)
    logs = times_typical * TYPICAL_SPREAD * torch.randn(4000, 5 + in_an_update, generator=draw, dtype=torch.float64)
    under = sum(upper_bound(tuple(row[:5].exp().tolist())) >= math.exp(row[5:].mean()) for row in logs)
    assert under / len(logs) >= covered


def test_few_checks_ask_for_more_margin_than_many():
    few, many = (0.8, 1.0, 1.2), (0.8, 1.0, 1.2) * 5
    assert upper_bound(few) > upper_bound(many) > 1.0


def with_gradients(model: nn.Module, scale: float = 1.0) -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=draw)
    return model


def test_a_sample_keeps_the_norm_of_a_large_gradient():
    model = with_gradients(nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 2048)))
    sample = sampled_gradient(model)
    assert len(sample) < 1.1 * SAMPLED_ELEMENTS
    assert float(sample.norm()) == pytest.approx(gradient_norm(model), rel=0.01)


def test_small_parameters_are_sampled_whole():
    model = with_gradients(nn.LayerNorm(64))
    assert float(sampled_gradient(model).norm()) == pytest.approx(gradient_norm(model), rel=1e-6)


def gain(layer: int, codec: str, error: float, change2: float, *, measured: bool = True) -> Gain:
    return Gain(layer=layer, unit=3, codec=codec, error=error, change2=change2, measured=measured)


def test_fitted_codecs_take_the_median_factor_of_the_layers_that_measured_them():
    found = fit_codecs(
        [
            gain(0, "int8", 0.01, 4.0),
            gain(0, "int4", 0.1, 4.0 * 100 * 1.5),
            gain(1, "int8", 0.01, 1.0),
            gain(1, "int4", 0.1, 1.0 * 100 * 0.9),
            gain(2, "int8", 0.01, 2.0),
            gain(2, "int4", 0.2, 2.0 * 400 * 1.1),
            gain(3, "int4", 0.1, 3.0 * 100, measured=False),
            gain(3, "int8", 0.01, 3.0),
        ],
        layer_class=(0, 0, 0, 0),
    )
    assert [one.change2 for one in found[:6]] == pytest.approx([4.0, 600.0, 1.0, 90.0, 2.0, 880.0])
    assert found[6].change2 == pytest.approx(3.0 * 100 * 1.1)
    assert found[7].change2 == 3.0


def test_without_a_layer_that_measured_it_a_codec_is_scaled_by_its_error_alone():
    found = fit_codecs([gain(0, "int8", 0.01, 2.0), gain(0, "int4", 0.1, 200.0, measured=False)], layer_class=(0,))
    assert found[1].change2 == 200.0


def test_a_profile_tells_the_spread_of_its_gains(tiny_profile):
    calibration = tiny_profile.meta.calibration
    assert len(calibration.ratios) == len(calibration.gammas) == CHECK_BATCHES
    assert all(0.5 < ratio < 2 for ratio in calibration.ratios)
    assert max(calibration.ratios) <= calibration.margin * 1.2 < 3
    assert calibration.gamma == pytest.approx(sorted(calibration.gammas)[2], rel=0.5)


def test_gains_of_every_codec_are_in_the_profile_for_every_layer(tiny_profile):
    codecs = {}
    for row in tiny_profile.rows:
        if row.codec != "none":
            codecs.setdefault((row.layer, row.unit), set()).add(row.codec)
            assert row.gain > 0
    assert {frozenset(found) for found in codecs.values()} == {frozenset({"int8-g64", "int4-g64", "bf16"})}
    assert {layer for layer, _ in codecs} == {0, 1, 2}


def test_a_single_micro_batch_is_checked_on_itself(tiny_options):
    options = replace(tiny_options, shape=replace(tiny_options.shape, micro_batch=1))
    workload = prepare(options, count=1, skip=0, progress=Silent())
    calibration = profile_actor(options, workload=workload, rounds=1).meta.calibration
    assert calibration.micro_batches == 1
    assert len(calibration.ratios) == 1
    assert 0.8 < calibration.ratios[0] < 1.25


def test_advantages_of_zero_leave_nothing_to_calibrate_on(tiny_options):
    workload = prepare(tiny_options, count=2, skip=0, progress=Silent())
    silent = tuple(replace(one, advantages=torch.zeros_like(one.advantages)) for one in workload.micro_batches)
    with pytest.raises(HiloreError, match="all zero"):
        profile_actor(tiny_options, workload=replace(workload, micro_batches=silent), rounds=1)
