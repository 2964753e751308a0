"""Arithmetic prompts with answers that a rule can check, in levels of difficulty.

GRPO learns from groups whose rewards differ, so the sampler needs questions that the actor sometimes gets right: the
smallest actors fail at two-digit sums, larger ones only at long products. The list is made from templates with a
fixed seed, so it is the same everywhere. No question contains its own answer: repeating the question earns nothing.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)")
_PER_LEVEL = 10
_TRIES = 30
_NAMES = ("Mia", "Omar", "Lena", "Ravi", "Ines", "Jonas", "Aiko", "Tessa")
_THINGS = ("marbles", "stamps", "pears", "shells", "tickets", "buttons")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A question and the integer that answers it."""

    text: str
    answer: int
    level: int
    """0 (single-digit sums) to 4 (long products)."""


@cache
def problems(rounds: int = 1) -> tuple[Problem, ...]:
    """The built-in questions: in each round ten a level, easy ones first, none twice.

    More rounds continue the list; a level that has no more questions to ask is left out.
    """
    draws = [random.Random(20 + level) for level in range(len(_LEVELS))]  # noqa: S311 - questions, not secrets
    texts: set[str] = set()
    made: list[Problem] = []
    for _ in range(rounds):
        for level, template in enumerate(_LEVELS):
            made += _new_questions(level, template, draws[level], texts)
    return tuple(made)


def _new_questions(
    level: int, template: Callable[[random.Random], tuple[str, int]], draw: random.Random, texts: set[str]
) -> list[Problem]:
    made: list[Problem] = []
    for _ in range(_PER_LEVEL * _TRIES):
        text, answer = template(draw)
        if text not in texts and answer not in numbers_in(text):
            texts.add(text)
            made.append(Problem(text=text, answer=answer, level=level))
        if len(made) == _PER_LEVEL:
            break
    return made


def reward(completion: str, answer: int) -> float:
    """1 if the last number in the completion is the answer, 0.5 if it only occurs before, 0 if it does not occur.

    Partial credit keeps groups apart for small actors, which often name the right number and then ramble on.
    """
    found = numbers_in(completion)
    if not found:
        return 0.0
    if found[-1] == answer:
        return 1.0
    return 0.5 if answer in found else 0.0


def numbers_in(text: str) -> list[int]:
    """The integers of a text in order; `1,200` is one number, and the parts of `3.50` are two."""
    found = []
    for match in _NUMBER.finditer(text):
        digits = match.group().replace(",", "")
        # In "12-5" the sign is an operator; and no number that counts has forty digits.
        if digits.startswith("-") and match.start() > 0 and text[match.start() - 1].isalnum():
            digits = digits[1:]
        if len(digits) <= 40:
            found.append(int(digits))
    return found


def _single_digit_sum(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(2, 7), draw.randint(2, 7)
    return f"What is {a} + {b}? Solve it step by step, then give the answer as a number.", a + b


def _small_story(draw: random.Random) -> tuple[str, int]:
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    a, b = draw.randint(2, 9), draw.randint(2, 9)
    return f"{name} has {a} {thing} and gets {b} more. How many {thing} is that? Solve it step by step.", a + b


def _two_digit_difference(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(40, 99), draw.randint(11, 39)
    return f"Work out {a} - {b} step by step and end with the result.", a - b


def _three_step_story(draw: random.Random) -> tuple[str, int]:
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    boxes, each, lost = draw.randint(3, 9), draw.randint(12, 25), draw.randint(5, 20)
    text = (
        f"{name} fills {boxes} boxes with {each} {thing} each and then loses {lost} {thing}. How many {thing} are left?"
    )
    return f"{text} Solve it step by step.", boxes * each - lost


def _long_product(draw: random.Random) -> tuple[str, int]:
    a, b, c = draw.randint(112, 989), draw.randint(23, 98), draw.randint(1013, 9876)
    return f"Without a calculator, work out {a} * {b} + {c} step by step and end with the result.", a * b + c


_LEVELS: tuple[Callable[[random.Random], tuple[str, int]], ...] = (
    _single_digit_sum,
    _small_story,
    _two_digit_difference,
    _three_step_story,
    _long_product,
)
