"""What to run: the workload flags that profile, verify and demo share. Imports no torch."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hilore_cli.errors import HiloreError
from hilore_cli.tables.profile_table import Shape

DTYPES = ("float32", "bfloat16")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
OPTIMIZERS = ("adamw", "sgd", "none")
WEIGHTS = ("pretrained", "random")
MAX_TOKENS = 2**24
TRL_LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "sapo", "cispo", "vespo")
VERL_LOSSES = ("verl_vanilla", "verl_gspo", "verl_cispo", "verl_sapo", "verl_gpg", "verl_clip_cov")
LOSSES = (*TRL_LOSSES, *VERL_LOSSES)
LEVELS = ("token", "sequence")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
_VERL_KL_NAMES = {"low_var_kl": "k3", "low_var_kl+": "k3+", "kl": "k1", "kl+": "k1+", "mse": "k2", "mse+": "k2"}
KL_ESTIMATORS = ("k3", "k1", "k2", "abs", "k1+", "k3+", "abs+")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpec:
    """A policy-gradient loss by its name in TRL, or in verl after `verl_`, and its options (LOSSES.md).

    Defaults are the trainers' own. Options that a loss does not have are ignored, as in the trainers, except where
    that would change what is meant: `kl_bias_correction` and `level` are TRL's, other estimators than k3 verl's.
    """

    kind: str = "dapo"
    level: str = "token"
    """Of TRL's importance ratio; sequence with `grpo` is GSPO."""
    aggregation: str = "token-mean"
    """verl's `loss_agg_mode`; TRL's losses bring their own."""
    beta: float = 0.0
    kl: str = "k3"
    """verl's `kl_loss_type`; a + takes the gradient of k2."""
    kl_bias_correction: bool = False
    """TRL's `use_bias_correction_kl`: the KL term is multiplied by the ratio."""
    eps_low: float = 0.2
    eps_high: float = 0.2
    """For `cispo` the ratio's absolute upper bound, as in TRL."""
    delta: float | None = None
    """TRL's upper bound on the ratio."""
    dual_clip: float = 3.0
    """verl's `clip_ratio_c`."""
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        _one_of("--loss", self.kind, LOSSES)
        _one_of("--loss-level", self.level, LEVELS)
        _one_of("--loss-option aggregation", self.aggregation, AGGREGATIONS)
        _one_of("--loss-option kl", self.kl, KL_ESTIMATORS)
        for name in _REALS:
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise HiloreError(f"{flag_of(name)} {value:g}", "is not a finite number", "give a number")
        if self.beta < 0:
            raise HiloreError(f"--beta {self.beta:g}", "must not be negative", "0 drops the KL term")
        if not (0 < self.eps_low < 1 and self.eps_high > 0):
            raise HiloreError(
                f"--eps-low {self.eps_low:g} --eps-high {self.eps_high:g}",
                "must be above 0, eps-low below 1",
                "TRL's default is 0.2",
            )
        for name, low in _ABOVE.items():
            value = getattr(self, name)
            if value is not None and value <= low:
                raise HiloreError(f"{flag_of(name)} {value:g}", f"must be above {low}", "leave it out for the default")
        for name in ("vespo_k_pos", "vespo_k_neg"):
            if getattr(self, name) < 0:
                raise HiloreError(f"{flag_of(name)} {getattr(self, name):g}", "must not be negative", "leave it out")
        self._check_trainer()

    def _check_trainer(self) -> None:
        if self.verl and (self.level != "token" or self.kl_bias_correction):
            raise HiloreError(
                f"--loss {self.kind}",
                "is verl's, which has neither --loss-level sequence nor kl_bias_correction",
                "leave them out; verl_gspo is the loss with sequence ratios",
            )
        if not self.verl and self.kl != "k3":
            raise HiloreError(f"--loss-option kl={self.kl}", f"is verl's, {self.kind} is TRL's", "TRL has k3 alone")

    @property
    def verl(self) -> bool:
        """The loss follows verl, not TRL."""
        return self.kind in VERL_LOSSES

    def describe(self) -> str:
        """One line, such as `dapo token beta=0 eps_low=0.2 eps_high=0.2`; what `parse_loss` reads."""
        usual = LossSpec()
        shown = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        told = {
            name: value
            for name, value in shown.items()
            if value is not None and (name in _ALWAYS_TOLD or value != getattr(usual, name))
        }
        return " ".join((self.kind, self.level, *(f"{name}={_written(value)}" for name, value in told.items())))


_ALWAYS_TOLD = ("beta", "eps_low", "eps_high")
_POSITIVE = ("tau_pos", "tau_neg", "vespo_lambda_pos", "vespo_lambda_neg")
_ABOVE = {"delta": 1, "dual_clip": 1, **dict.fromkeys(_POSITIVE, 0)}
_FLAGS = ("beta", "eps_low", "eps_high", "delta")
_REALS = tuple(field.name for field in fields(LossSpec) if field.type in (float, "float", float | None, "float | None"))
LOSS_OPTIONS = tuple(field.name for field in fields(LossSpec) if field.name not in ("kind", "level", *_FLAGS))


def flag_of(name: str) -> str:
    """How an option of a loss is given on the command line."""
    return f"--loss-option {name}" if name in LOSS_OPTIONS else f"--{name.replace('_', '-')}"


def parse_option(name: str, text: str) -> str | float | bool:
    """One option of a loss from its written form. Raises HiloreError."""
    if name in ("aggregation", "kl"):
        return _VERL_KL_NAMES.get(text, text) if name == "kl" else text
    if name == "kl_bias_correction":
        if text.lower() not in ("true", "false"):
            raise HiloreError(f"{flag_of(name)}={text}", "is neither true nor false", "write true or false")
        return text.lower() == "true"
    if name not in _REALS:
        raise HiloreError(f"--loss-option {name}", "is not one that hilore knows", "choose one of " + _listed())
    try:
        return float(text)
    except ValueError as error:
        raise HiloreError(f"{flag_of(name)}={text}", "is not a number", "write it as in 0.2") from error


def parse_loss(line: str) -> LossSpec:
    """The loss that `LossSpec.describe` wrote down."""
    kind, level, *given = line.split()
    options: dict[str, Any] = {name: parse_option(name, value) for name, _, value in (g.partition("=") for g in given)}
    return LossSpec(kind=kind, level=level, **options)


def _listed() -> str:
    return ", ".join(LOSS_OPTIONS)


def _written(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value).lower()


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
        tokens = self.shape.micro_batch * self.shape.tokens
        if tokens > MAX_TOKENS:
            raise HiloreError(
                f"--micro-batch {self.shape.micro_batch}",
                f"makes {tokens:,} tokens a micro-batch, more than any device holds ({MAX_TOKENS:,})",
                "a micro-batch is one forward and backward, often 1 to 16 sequences",
            )
        if not 0 <= self.seed < 2**63:
            raise HiloreError(f"--seed {self.seed}", "must be at least 0 and fit into 64 bits", "0 is the default")


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise HiloreError(f"{flag} {value}", "is not one that hilore knows", "choose one of " + ", ".join(allowed))
