import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilore_cli.measuring.prompts import Problem, numbers_in, problems, reward


def test_the_list_is_the_same_every_time() -> None:
    first = problems()
    problems.cache_clear()
    assert problems() == first


def test_there_are_ten_distinct_questions_a_level_easy_ones_first() -> None:
    levels = [problem.level for problem in problems()]
    assert levels == sorted(levels)
    assert {levels.count(level) for level in levels} == {10}
    assert len({problem.text for problem in problems()}) == len(levels)


def test_more_rounds_continue_the_list_with_new_questions() -> None:
    longer = problems(6)
    assert longer[:50] == problems()
    assert len({problem.text for problem in longer}) == len(longer)
    assert len(longer) > 250


@pytest.mark.parametrize("problem", problems(2), ids=lambda problem: problem.text[:30])
def test_answers_are_right(problem: Problem) -> None:
    numbers = [int(number) for number in re.findall(r"\d+", problem.text)]
    right = {
        0: lambda a, b: a + b,
        1: lambda a, b: a + b,
        2: lambda a, b: a - b,
        3: lambda boxes, each, lost: boxes * each - lost,
        4: lambda a, b, c: a * b + c,
    }[problem.level](*numbers)
    assert problem.answer == right


def test_no_question_contains_its_answer() -> None:
    assert all(reward(problem.text, problem.answer) == 0 for problem in problems())


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("3 + 4 = 7", 1.0),
        ("The answer is 7.", 1.0),
        ("It is 7, so we have 3 left.", 0.5),
        ("17", 0.0),
        ("I do not know.", 0.0),
        ("", 0.0),
        ("-7", 0.0),
        ("10-7", 1.0),
    ],
)
def test_reward_checks_the_last_number_then_any(completion: str, value: float) -> None:
    assert reward(completion, 7) == value


def test_thousands_may_be_grouped() -> None:
    assert numbers_in("1,200 and 3, 4 and 12,34") == [1200, 3, 4, 12, 34]


def test_endless_digits_are_no_number() -> None:
    assert numbers_in("1" * 10_000) == []


@given(st.text(), st.integers(-999, 999))
def test_any_text_has_a_reward_of_nothing_half_or_one(text: str, answer: int) -> None:
    assert reward(text, answer) in (0.0, 0.5, 1.0)
    assert reward(f"{text}. The answer is {answer}", answer) == 1.0
