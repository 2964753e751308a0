"""What to run: the workload flags that profile, verify and demo share. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path

from hilore_cli.errors import HiloreError
from hilore_cli.tables.profile_table import Shape

DTYPES = ("float32", "bfloat16")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
OPTIMIZERS = ("adamw", "sgd", "none")
WEIGHTS = ("pretrained", "random")
LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpec:
    """A policy-gradient loss by its TRL name and options (LOSSES.md)."""

    kind: str = "dapo"
    level: str = "token"
    beta: float = 0.0
    eps_low: float = 0.2
    eps_high: float = 0.2
    delta: float | None = None

    def __post_init__(self) -> None:
        _one_of("--loss", self.kind, LOSSES)
        _one_of("--loss-level", self.level, ("token", "sequence"))
        if self.beta < 0:
            raise HiloreError(f"--beta {self.beta:g}", "must not be negative", "0 drops the KL term")
        if not (0 < self.eps_low < 1 and self.eps_high > 0):
            raise HiloreError(
                f"--eps-low {self.eps_low:g} --eps-high {self.eps_high:g}",
                "must be above 0, eps-low below 1",
                "TRL's default is 0.2",
            )

    def describe(self) -> str:
        """One line, such as `dapo token beta=0 eps_low=0.2 eps_high=0.2`; what `parse_loss` reads."""
        options = {name: getattr(self, name) for name in ("beta", "eps_low", "eps_high", "delta")}
        given = [f"{name}={value:g}" for name, value in options.items() if value is not None]
        return " ".join((self.kind, self.level, *given))


def parse_loss(line: str) -> LossSpec:
    """The loss that `LossSpec.describe` wrote down."""
    kind, level, *given = line.split()
    return LossSpec(
        kind=kind, level=level, **{name: float(value) for name, _, value in (g.partition("=") for g in given)}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadOptions:
    """One workload: the actor, its data and its shape."""

    model: str
    weights: str = "pretrained"
    rollouts: Path | None = None
    shape: Shape = field(default_factory=lambda: Shape(micro_batch=2, prompt_tokens=64, response_tokens=192))
    dtype: str = "float32"
    attention: str = "sdpa"
    device: str = "cpu"
    loss: LossSpec = field(default_factory=LossSpec)
    optimizer: str = "adamw"
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("--weights", self.weights, WEIGHTS)
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--attn", self.attention, ATTENTIONS)
        _one_of("--optimizer", self.optimizer, OPTIMIZERS)
        for flag, count in (
            ("--micro-batch", self.shape.micro_batch),
            ("--prompt-tokens", self.shape.prompt_tokens),
            ("--response-tokens", self.shape.response_tokens),
        ):
            if count < 1:
                raise HiloreError(f"{flag} {count}", "must be at least 1", "give a positive whole number")
        if not 0 <= self.seed < 2**63:
            raise HiloreError(f"--seed {self.seed}", "must be at least 0 and fit into 64 bits", "0 is the default")


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise HiloreError(f"{flag} {value}", "is not one that hilore knows", "choose one of " + ", ".join(allowed))
