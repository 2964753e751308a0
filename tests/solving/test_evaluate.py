import dataclasses

import pytest

from hilore_cli.errors import HiloreError
from hilore_cli.solving.canonical import canonical, drop_worthless_keeps
from hilore_cli.solving.evaluate import PLAIN, RECOMPUTE_ALL, LayerPlan, evaluate, replayed_ops
from hilore_cli.solving.problem import Choice, Layer, Op, Point, Problem, Unit, problem_from_profile
from tests.solving.toys import toy_profile

INT8 = Choice(codec="int8", held_bytes=6, codec_us=2.0, risk2=0.04)


def stored(size: int) -> Choice:
    return Choice(codec="none", held_bytes=size, codec_us=0.0, risk2=0.0)


def unit(op: int, size: int, *, saved: bool = False) -> Unit:
    return Unit(op=op, bytes=size, saved=saved, choices=(stored(size), INT8))


def op(us: float, *reads: int, forced: bool = False) -> Op:
    return Op(recompute_us=us, forced=forced, reads=reads)


# projection -> rope half -> rope sum, the sum saved: keeping it kills all three ops
CHAIN = Layer(
    ops=(op(10.0), op(2.0, 0), op(3.0, 1)),
    units=(unit(0, 20), unit(1, 10), unit(2, 12, saved=True)),
    points=(Point(bytes=42, alive=frozenset({0, 1, 2})), Point(bytes=30, alive=frozenset({2}))),
    forward_peak_bytes=50,
    backward_base_bytes=5,
    plain_extra_bytes=8,
)
PROBLEM = Problem(
    layers=(CHAIN, CHAIN),
    static_bytes=1000,
    head_peak_bytes=60,
    tail_peak_bytes=0,
    plain_us=100.0,
    checkpoint_us=1.0,
    mode_us=0.5,
)


def kept(**codecs: str) -> LayerPlan:
    return LayerPlan(plain=False, kept={int(name[1:]): codec for name, codec in codecs.items()})


def test_with_nothing_kept_what_autograd_saves_is_rebuilt_from_the_start() -> None:
    assert replayed_ops(CHAIN, {}) == {0, 1, 2}


def test_ops_that_only_feed_a_kept_unit_are_dead() -> None:
    assert replayed_ops(CHAIN, {2: "none"}) == frozenset()


def test_a_kept_unit_in_the_middle_ends_the_rebuilding_there() -> None:
    assert replayed_ops(CHAIN, {1: "int8"}) == {2}


def test_an_op_that_feeds_nothing_needed_is_dead() -> None:
    layer = dataclasses.replace(CHAIN, ops=(*CHAIN.ops, op(50.0, 2)), units=(*CHAIN.units, unit(3, 9)))
    assert 3 not in replayed_ops(layer, {})


def test_a_forced_op_runs_and_needs_what_it_reads() -> None:
    layer = dataclasses.replace(CHAIN, ops=(op(10.0), op(2.0, 0, forced=True), op(3.0, 1)))
    assert replayed_ops(layer, {2: "none"}) == {0, 1}


def test_an_op_runs_while_one_of_its_outputs_is_needed_and_not_kept() -> None:
    layer = dataclasses.replace(CHAIN, ops=(op(4.0),), units=(unit(0, 5, saved=True), unit(0, 5, saved=True)))
    assert replayed_ops(layer, {0: "none"}) == {0}
    assert replayed_ops(layer, {0: "none", 1: "none"}) == frozenset()


def test_step_time_adds_checkpoint_ops_codecs_and_mode() -> None:
    outcome = evaluate(PROBLEM, (kept(u1="int8"), RECOMPUTE_ALL))
    assert outcome.step_us == 100.0 + (1.0 + 3.0 + 2.0 + 0.5) + (1.0 + 15.0)


def test_a_plain_layer_adds_no_time_and_no_risk() -> None:
    outcome = evaluate(PROBLEM, (PLAIN, PLAIN))
    assert (outcome.step_us, outcome.risk2, outcome.replays) == (100.0, 0.0, (frozenset(), frozenset()))


def test_risk_adds_up_over_layers() -> None:
    assert evaluate(PROBLEM, (kept(u2="int8"), kept(u1="int8"))).risk2 == 0.08


def test_held_bytes_are_packed_bytes_or_what_autograd_saves() -> None:
    assert evaluate(PROBLEM, (kept(u0="none", u2="int8"), PLAIN)).held_bytes == (26, 12)


def test_the_peak_without_keeps_is_the_highest_point_or_the_head() -> None:
    assert evaluate(PROBLEM, (RECOMPUTE_ALL, RECOMPUTE_ALL)).peak_bytes == 1000 + 60


def test_a_stored_unit_counts_once_where_it_is_alive() -> None:
    tight = dataclasses.replace(PROBLEM, head_peak_bytes=0)
    # second layer's backward: base 5, held 12, points 42 - 12 and 30 - 12; forward: 50 + 12
    assert evaluate(tight, (RECOMPUTE_ALL, kept(u2="none"))).peak_bytes == 1000 + 62
    low = dataclasses.replace(CHAIN, forward_peak_bytes=0)
    assert evaluate(dataclasses.replace(tight, layers=(low,)), (kept(u2="none"),)).peak_bytes == 1000 + 5 + 12 + 30


def test_a_compressed_unit_is_rebuilt_beside_its_packed_bytes() -> None:
    low = dataclasses.replace(CHAIN, forward_peak_bytes=0)
    problem = dataclasses.replace(PROBLEM, layers=(low,), head_peak_bytes=0)
    assert evaluate(problem, (kept(u2="int8"),)).peak_bytes == 1000 + 5 + 6 + 42


def test_later_layers_add_to_the_head_but_not_to_the_backward_of_earlier_ones() -> None:
    assert evaluate(PROBLEM, (kept(u2="none"), kept(u2="none"))).peak_bytes == 1000 + 60 + 24


def test_a_plain_layer_rises_by_its_extra_above_what_it_holds() -> None:
    low = dataclasses.replace(CHAIN, forward_peak_bytes=0)
    problem = dataclasses.replace(PROBLEM, layers=(low,), head_peak_bytes=0)
    assert evaluate(problem, (PLAIN,)).peak_bytes == 1000 + 5 + 12 + 8


def test_an_assignment_must_name_a_choice_of_the_unit() -> None:
    with pytest.raises(ValueError, match="cannot be kept as 'int2'"):
        evaluate(PROBLEM, (kept(u0="int2"), PLAIN))


def test_a_keep_that_feeds_only_another_keep_is_worthless() -> None:
    assert drop_worthless_keeps(PROBLEM, CHAIN, kept(u0="none", u2="none")).kept == {2: "none"}


def test_keeps_that_do_not_pay_for_the_mode_are_dropped_together() -> None:
    dear = dataclasses.replace(PROBLEM, mode_us=100.0)
    assert drop_worthless_keeps(dear, CHAIN, kept(u2="none")).kept == {}


def test_like_layers_take_their_schedules_in_one_order() -> None:
    plans = (kept(u2="none"), RECOMPUTE_ALL)
    assert canonical(PROBLEM, plans, cap_bytes=2000, risk=0.0) == (RECOMPUTE_ALL, kept(u2="none"))
    assert canonical(PROBLEM, plans[::-1], cap_bytes=2000, risk=0.0) == (RECOMPUTE_ALL, kept(u2="none"))


def test_a_profile_whose_rows_skip_a_unit_is_refused() -> None:
    profile = toy_profile()
    rows = tuple(row for row in profile.rows if (row.layer, row.unit) != (0, 3))
    with pytest.raises(HiloreError, match="does not follow the layer's op stream"):
        problem_from_profile(dataclasses.replace(profile, rows=rows))
