"""A workload made ready: the actor loaded, its rollouts found or sampled, and micro-batches made of them."""

from dataclasses import dataclass

from hilore_cli.errors import HiloreError
from hilore_cli.experiments.progress import Progress
from hilore_cli.measuring import identity
from hilore_cli.measuring.models import Actor, load_actor
from hilore_cli.measuring.options import WorkloadOptions
from hilore_cli.measuring.rollouts import (
    GROUP_SIZE,
    SHUFFLE_WINDOW,
    MicroBatch,
    Rollouts,
    micro_batches,
    random_rollouts,
    read_rollouts,
    sample_rollouts,
)

_PERCENT = 100
_WINDOW_GROUPS = SHUFFLE_WINDOW // GROUP_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedWorkload:
    """Everything a measurement needs."""

    options: WorkloadOptions
    actor: Actor
    rollouts: Rollouts
    micro_batches: tuple[MicroBatch, ...]


def prepare(options: WorkloadOptions, *, count: int, skip: int, progress: Progress) -> PreparedWorkload:
    """Load the actor and make `count` micro-batches, after the first `skip`. Raises HiloreError."""
    progress.stage(f"Loading {options.model}", 1)
    actor = load_actor(options)
    identity.decoder_layers(actor.model)  # before anything slow, an error if there are none
    _check_positions(actor, options)
    progress.advance()
    rollouts = _rollouts(options, actor, sequences=(count + skip) * options.shape.micro_batch, progress=progress)
    actor.model.train()
    device = next(actor.model.parameters()).device
    batches = micro_batches(rollouts, options.shape, pad_id=actor.pad_id, count=count, device=device, skip=skip)
    return PreparedWorkload(options=options, actor=actor, rollouts=rollouts, micro_batches=tuple(batches))


def _check_positions(actor: Actor, options: WorkloadOptions) -> None:
    positions = getattr(actor.model.config.get_text_config(), "max_position_embeddings", None)
    tokens = options.shape.tokens
    if positions is not None and tokens > positions:
        raise HiloreError(
            f"--prompt-tokens {options.shape.prompt_tokens} --response-tokens {options.shape.response_tokens}",
            f"make {tokens} tokens, but the model has {positions} positions",
            "give fewer tokens, or a model with a longer context",
        )


def _rollouts(options: WorkloadOptions, actor: Actor, *, sequences: int, progress: Progress) -> Rollouts:
    if options.rollouts is not None:
        return read_rollouts(options.rollouts, actor.tokenizer, vocab_size=actor.vocab_size)
    # whole windows, so that what a profile calibrates on a later verification can leave out
    groups = _WINDOW_GROUPS * -(-sequences // SHUFFLE_WINDOW)
    if options.weights == "random":
        return random_rollouts(actor.vocab_size, options, groups=groups)
    progress.stage("Sampling rollouts", _PERCENT)
    told = 0

    def tell(share: float) -> None:
        nonlocal told
        while told < share * _PERCENT:
            told += 1
            progress.advance()

    return sample_rollouts(actor, options, groups_wanted=groups, progress=tell)
