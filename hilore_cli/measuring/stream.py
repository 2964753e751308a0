"""The op stream of a decoder layer: which dispatched ops count, so that forward and replay number them alike.

Views share their base's storage and detach differs in number between forward and replay, so neither counts. A cast
of a parameter does not count either: under autocast the first forward casts, and a replay may find it cached.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

UNMARKED_VIEWS = {torch.ops.aten._unsafe_view.default}  # noqa: SLF001 - an op's name, not a private attribute
_CASTS = {torch.ops.aten._to_copy.default}  # noqa: SLF001

# Both are asked for at every dispatch of every layer.
_KINDS: dict[Any, str] = {}
NAMES: dict[Any, str] = {}
"""Of every op that `counts` has seen."""


def counts(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a dispatched op takes a place in the stream."""
    kind = _KINDS.get(func)
    if kind is None:
        kind = "view" if func.is_view or func in UNMARKED_VIEWS else "cast" if func in _CASTS else "op"
        _KINDS[func] = kind
        NAMES[func] = str(func)
    return kind == "op" or (kind == "cast" and not isinstance(args[0], nn.Parameter))


def leaves(values: Any) -> Iterator[Any]:
    """The values of nested tuples, lists and dicts, in order."""
    if isinstance(values, tuple | list):
        for value in values:
            yield from leaves(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from leaves(value)
    else:
        yield values


def tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among `leaves(values)`."""
    return [value for value in leaves(values) if isinstance(value, torch.Tensor)]


def mutates(func: Any) -> bool:
    """Whether the op writes into one of its arguments."""
    return bool(func._schema.is_mutable)  # noqa: SLF001 - the only place an overload says so
