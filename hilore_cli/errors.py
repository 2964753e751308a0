"""Errors that a user can act on: what is wrong, the rule it breaks, and how to mend it."""


class HiloreError(Exception):
    """A user's mistake or a broken input; shown as one `error:` line and one `hint:` line."""

    exit_code = 2

    def __init__(self, thing: str, rule: str, hint: str = "") -> None:
        super().__init__(f"{thing}: {rule}")
        self.thing = thing
        self.rule = rule
        self.hint = hint


class FileError(HiloreError):
    """A file is missing, damaged, foreign, or cannot be written."""


class PlanMismatch(HiloreError):
    """A plan and a model (or a shape) that do not belong together; the rule names both sides."""


class ReplayError(HiloreError):
    """Replay would give a wrong gradient (mutated tensor, diverging op stream), so it stops instead."""


class RiskExceeded(HiloreError):
    """An update's exact exposures spend more risk than its budget."""

    exit_code = 1


class PromiseBroken(HiloreError):
    """Measured numbers do not hold what the plan predicts."""

    exit_code = 1


class Infeasible(HiloreError):
    """No plan exists under this cap and risk; the hint carries the nearest feasible numbers."""

    exit_code = 3
