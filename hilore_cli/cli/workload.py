"""From workload flags to WorkloadOptions: what a flag leaves open comes from the defaults or from a profile."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hilore_cli.errors import FileError, HiloreError
from hilore_cli.measuring.options import LOSS_OPTIONS, VERL_LOSSES, LossSpec, WorkloadOptions, parse_loss, parse_option
from hilore_cli.tables.plan_table import Plan
from hilore_cli.tables.profile_table import Profile, Shape, load_profile

_SAMPLED_HERE = ("builtin", "random")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadFlags:
    """The flags as given; None where one was left out."""

    model: str | None = None
    weights: str | None = None
    rollouts: Path | None = None
    micro_batch: int | None = None
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    dtype: str | None = None
    attention: str | None = None
    device: str | None = None
    loss: str | None = None
    loss_level: str | None = None
    beta: float | None = None
    eps_low: float | None = None
    eps_high: float | None = None
    delta: float | None = None
    loss_option: list[str] | None = None
    optimizer: str | None = None
    seed: int | None = None

    def over(self, base: WorkloadOptions) -> WorkloadOptions:
        """The base with every given flag in its place. Raises HiloreError naming the flag."""
        if self.rollouts is not None and not self.rollouts.is_file():
            raise FileError(f"--rollouts {self.rollouts}", "is not a file", "check the path")
        loss = _given(
            kind=self.loss,
            level=self.loss_level,
            beta=self.beta,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            delta=self.delta,
            **dict(_loss_option(text) for text in self.loss_option or ()),
        )
        shape = _given(
            micro_batch=self.micro_batch, prompt_tokens=self.prompt_tokens, response_tokens=self.response_tokens
        )
        rest = _given(
            model=self.model,
            weights=self.weights,
            rollouts=self.rollouts,
            dtype=self.dtype,
            attention=self.attention,
            device=self.device,
            optimizer=self.optimizer,
            seed=self.seed,
        )
        # the other trainer's options mean nothing here
        crossed = self.loss is not None and (self.loss in VERL_LOSSES) != base.loss.verl
        base_loss = LossSpec() if crossed else base.loss
        return dataclasses.replace(
            base, loss=dataclasses.replace(base_loss, **loss), shape=dataclasses.replace(base.shape, **shape), **rest
        )

    def as_command(self) -> dict[str, object]:
        """Flag names and values, for the command that a file records."""
        renamed = {"attention": "attn"}
        return {
            f"--{renamed.get(field.name, field.name).replace('_', '-')}": getattr(self, field.name)
            for field in dataclasses.fields(self)
        }


def _loss_option(text: str) -> tuple[str, str | float | bool]:
    name, equals, value = text.partition("=")
    if not equals or name not in LOSS_OPTIONS:
        raise HiloreError(
            f"--loss-option {text}", "is not NAME=VALUE with a known name", "the names are " + ", ".join(LOSS_OPTIONS)
        )
    return name, parse_option(name, value)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def find_profile(plan: Plan, *folders: Path) -> Profile | None:
    """The profile that a plan was solved on, if it lies in one of the folders."""
    for path in (path for folder in dict.fromkeys(folders) for path in sorted(folder.glob("*.parquet"))):
        try:
            profile = load_profile(path)
        except FileError:
            continue
        if profile.digest == plan.meta.profile_digest:
            return profile
    return None


def options_from_profile(profile: Profile) -> WorkloadOptions:
    """What the profile was measured on. Raises HiloreError if its rollouts are not here."""
    workload, identity = profile.meta.workload, profile.meta.identity
    return WorkloadOptions(
        model=workload.model,
        weights=workload.weights,
        rollouts=None if workload.rollouts in _SAMPLED_HERE else Path(workload.rollouts),
        shape=profile.meta.shape,
        dtype=identity.dtype,
        attention=identity.attention,
        device="cpu" if workload.device == "cpu" else "cuda",
        loss=_loss(workload.loss),
        optimizer=workload.optimizer,
        seed=workload.seed,
    )


def options_from_plan(plan: Plan) -> WorkloadOptions:
    """As much of the workload as the plan alone tells: a quarter of its tokens taken as prompt."""
    prompt = max(1, plan.meta.tokens // 4)
    shape = Shape(
        micro_batch=plan.meta.micro_batch, prompt_tokens=prompt, response_tokens=max(1, plan.meta.tokens - prompt)
    )
    return WorkloadOptions(model=plan.meta.model, shape=shape, dtype=plan.meta.dtype, attention=plan.meta.attention)


def check_rollouts(options: WorkloadOptions) -> WorkloadOptions:
    """Rollouts that a profile names must lie here. Raises HiloreError."""
    if options.rollouts is not None and not options.rollouts.is_file():
        raise HiloreError(
            str(options.rollouts), "holds the profile's rollouts, but is not here", "name them with --rollouts FILE"
        )
    return options


def _loss(line: str) -> LossSpec:
    """A loss that this hilore does not know is asked for, not guessed."""
    try:
        return parse_loss(line)
    except (TypeError, ValueError) as error:
        raise HiloreError("the profile's loss", f"'{line}' cannot be read", "name it with --loss") from error
