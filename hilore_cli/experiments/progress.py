"""How a long job tells where it is; the command line shows it, a library caller may ignore it."""

from typing import Protocol


class Progress(Protocol):
    """Stages of known length."""

    def stage(self, text: str, total: int) -> None:
        """A new stage of `total` steps begins."""

    def advance(self) -> None:
        """One step of the stage is done."""


class Silent:
    """Tells nobody."""

    def stage(self, text: str, total: int) -> None:
        """See Progress."""

    def advance(self) -> None:
        """See Progress."""
