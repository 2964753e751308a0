"""hilore: profile an actor once, solve what to store, compress or recompute, apply the plan anywhere.

The public names below are imported when they are first used, so that `import hilore_cli` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hilore_cli.errors import (
        FileError,
        HiloreError,
        Infeasible,
        PlanMismatch,
        PromiseBroken,
        ReplayError,
        RiskExceeded,
    )
    from hilore_cli.measuring.losses import BatchFacts, exposure, exposure_bound, is_skippable, loss_coefficients
    from hilore_cli.measuring.options import LossSpec
    from hilore_cli.runtime.loader import apply_plan
    from hilore_cli.solving.solve import solve
    from hilore_cli.tables.plan_table import Plan, load_plan
    from hilore_cli.tables.profile_table import Profile, load_profile

__version__ = "0.1.0"

__all__ = [
    "BatchFacts",
    "FileError",
    "HiloreError",
    "Infeasible",
    "LossSpec",
    "Plan",
    "PlanMismatch",
    "Profile",
    "PromiseBroken",
    "ReplayError",
    "RiskExceeded",
    "apply_plan",
    "exposure",
    "exposure_bound",
    "is_skippable",
    "load_plan",
    "load_profile",
    "loss_coefficients",
    "solve",
]

_HOMES = {
    "hilore_cli.errors": (
        "FileError",
        "HiloreError",
        "Infeasible",
        "PlanMismatch",
        "PromiseBroken",
        "ReplayError",
        "RiskExceeded",
    ),
    "hilore_cli.measuring.losses": (
        "BatchFacts",
        "exposure",
        "exposure_bound",
        "is_skippable",
        "loss_coefficients",
    ),
    "hilore_cli.measuring.options": ("LossSpec",),
    "hilore_cli.runtime.loader": ("apply_plan",),
    "hilore_cli.solving.solve": ("solve",),
    "hilore_cli.tables.plan_table": ("Plan", "load_plan"),
    "hilore_cli.tables.profile_table": ("Profile", "load_profile"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
