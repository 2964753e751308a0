"""How a layer is checkpointed, everywhere alike: torch's non-reentrant checkpoint with every flag named."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import checkpoint


def checkpointed(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None = None,
) -> Any:
    """The layer under torch's non-reentrant checkpoint; `contexts` gives those around its forward and its replay."""
    context: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(
        original,
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        determinism_check="default",
        early_stop=True,
        **context,
        **kwargs,
    )
