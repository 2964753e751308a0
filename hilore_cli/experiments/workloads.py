"""A workload made ready: the actor loaded, its data in micro-batches, its static bytes counted."""

from dataclasses import dataclass

from hilore_cli.errors import HiloreError
from hilore_cli.experiments.progress import Progress
from hilore_cli.measuring import identity
from hilore_cli.measuring.models import Actor, load_actor
from hilore_cli.measuring.options import WorkloadOptions
from hilore_cli.measuring.rollouts import (
    MicroBatch,
    Rollouts,
    micro_batches,
    random_rollouts,
    read_rollouts,
    sample_rollouts,
)

GROUP_SIZE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedWorkload:
    """Everything a measurement needs."""

    options: WorkloadOptions
    actor: Actor
    rollouts: Rollouts
    micro_batches: tuple[MicroBatch, ...]


def prepare(options: WorkloadOptions, *, micro_batches: int, skip: int, progress: Progress) -> PreparedWorkload:
    """Load the actor and make its micro-batches, leaving out the first `skip` (a profile's). Raises HiloreError."""
    progress.stage(f"Loading {options.model}", 1)
    actor = load_actor(options)
    progress.advance()
    rollouts = _rollouts(options, actor, micro_batches=micro_batches + skip, progress=progress)
    identity.decoder_layers(actor.model)
    actor.model.train()
    return PreparedWorkload(options=options, actor=actor, rollouts=rollouts, micro_batches=())
