"""Completions where the user brings none: sampled by the actor on the built-in questions, or random ids.

GRPO learns from groups whose rewards differ, so groups are sampled until enough of them do. Decoding is plain: one
batch, the model's own KV cache, and rows that have ended leave the batch. Random ids serve `--weights random` only;
they are good for shapes and times and say nothing about compression errors.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hilore_cli.errors import HiloreError
from hilore_cli.measuring.completions import (
    GROUP_SIZE,
    SHUFFLE_WINDOW,
    Completion,
    Rollouts,
    group_advantages,
    rollouts_of,
)
from hilore_cli.measuring.models import quiet_transformers
from hilore_cli.measuring.prompts import Problem, problems, reward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hilore_cli.measuring.models import Actor
    from hilore_cli.measuring.options import WorkloadOptions
    from hilore_cli.tables.profile_table import Shape

BUILTIN = "builtin"
RANDOM = "random"
_GROUPS_AT_ONCE = SHUFFLE_WINDOW // GROUP_SIZE
_TRIES_PER_GROUP = 4
_TOO_EASY = 0.9


def random_rollouts(vocab_size: int, options: WorkloadOptions, *, groups: int = 4) -> Rollouts:
    """Full-length completions of random ids with random advantages: for shapes and times, never for errors."""
    draw = random.Random(options.seed)  # noqa: S311 - test data, not secrets
    shape = options.shape
    with_kl = options.loss.beta > 0
    completions = []
    for group in range(groups):
        prompt = tuple(draw.randrange(vocab_size) for _ in range(shape.prompt_tokens))
        for advantage in group_advantages([draw.random() for _ in range(GROUP_SIZE)]):
            ids = tuple(draw.randrange(vocab_size) for _ in range(shape.response_tokens))
            reference = tuple(draw.gauss(-math.log(vocab_size), 0.1) for _ in ids) if with_kl else None
            completions.append(
                Completion(group=group, prompt_ids=prompt, completion_ids=ids, advantage=advantage, ref_logps=reference)
            )
    return rollouts_of(completions, source=RANDOM, mean_reward=0.0)


@dataclass(slots=True)
class _Group:
    problem: Problem
    prompt_ids: tuple[int, ...]
    completion_ids: list[tuple[int, ...]]
    logps: list[tuple[float, ...]]
    rewards: list[float]

    @property
    def differs(self) -> bool:
        return len(set(self.rewards)) > 1


def sample_rollouts(
    actor: Actor, options: WorkloadOptions, *, groups_wanted: int, progress: Callable[[float], None] | None = None
) -> Rollouts:
    """Groups of 8 that the actor samples at temperature 1 on the built-in questions, with differing rewards.

    Starts with the easiest questions and jumps a level when nearly all answers are right. At most four times
    `groups_wanted` questions are tried; fewer groups may come back. If no answer sets any group apart, the share of
    distinct tokens in a completion is the reward instead (`criterion` says so). With a KL term the reference is the
    actor itself, as in the first step of a run. The random state of torch is neither used nor changed. `progress`
    hears the share done. Raises HiloreError without a tokenizer.
    """
    if actor.tokenizer is None:
        raise HiloreError(
            f"--model {options.model}",
            "has no tokenizer, so it cannot answer the built-in questions",
            "give --rollouts FILE with prompt_ids and completion_ids, or use --weights random",
        )
    generator = torch.Generator(device="cpu").manual_seed(options.seed)
    tell = progress or (lambda _: None)
    tries = _TRIES_PER_GROUP * groups_wanted
    waiting = list(problems(rounds=-(-tries // len(problems()))))
    groups: list[_Group] = []
    kept: list[_Group] = []
    was_training = actor.model.training
    actor.model.eval()
    try:
        while waiting and len(kept) < groups_wanted and len(groups) < tries:
            batch = waiting[
                :_GROUPS_AT_ONCE
            ]  # always as many, so that asking for more groups gives the same first ones
            waiting = waiting[len(batch) :]
            done = len(kept) / groups_wanted
            partly = functools.partial(_tell_part, tell, done, min(len(batch) / groups_wanted, 1 - done))
            new = _sample_groups(actor, options.shape, batch, generator, partly)
            groups += new
            kept += [group for group in new if group.differs]
            if sum(sum(group.rewards) for group in new) > _TOO_EASY * GROUP_SIZE * len(new):
                waiting = [problem for problem in waiting if problem.level > batch[-1].level]
        kept = kept[:groups_wanted]
    finally:
        actor.model.train(was_training)
    tell(1.0)
    criterion = "reward"
    if not kept:
        criterion, kept = "repetition", groups[:groups_wanted]
        for group in kept:
            group.rewards = [len(set(ids)) / len(ids) for ids in group.completion_ids]
    if not any(group.differs for group in kept):
        rule = "gives the same completion every time: there is no advantage to learn from"
        raise HiloreError(f"--model {options.model}", rule, "give --rollouts FILE with completions of your own run")
    completions = [
        Completion(group=number, prompt_ids=group.prompt_ids, completion_ids=ids, advantage=advantage, ref_logps=logps)
        for number, group in enumerate(kept)
        for ids, logps, advantage in zip(
            group.completion_ids,
            group.logps if options.loss.beta > 0 else [None] * len(group.logps),
            group_advantages(group.rewards),
            strict=True,
        )
    ]
    rewards = [value for group in kept for value in group.rewards]
    return rollouts_of(completions, source=BUILTIN, mean_reward=sum(rewards) / len(rewards), criterion=criterion)


def _tell_part(tell: Callable[[float], None], done: float, share: float, part: float) -> None:
    tell(done + share * part)


def _sample_groups(
    actor: Actor,
    shape: Shape,
    batch: Sequence[Problem],
    generator: torch.Generator,
    tell: Callable[[float], None],
) -> list[_Group]:
    prompts = [_prompt_ids(actor, problem)[-shape.prompt_tokens :] for problem in batch]
    rows = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
    sampled = sample_completions(actor, rows, max_tokens=shape.response_tokens, generator=generator, tell=tell)
    groups = []
    for number, (problem, prompt) in enumerate(zip(batch, prompts, strict=True)):
        part = sampled[number * GROUP_SIZE : (number + 1) * GROUP_SIZE]
        texts = [_decoded(actor, ids) for ids, _ in part]
        groups.append(
            _Group(
                problem=problem,
                prompt_ids=prompt,
                completion_ids=[ids for ids, _ in part],
                logps=[logps for _, logps in part],
                rewards=[reward(text, problem.answer) for text in texts],
            )
        )
    return groups


def _prompt_ids(actor: Actor, problem: Problem) -> tuple[int, ...]:
    tokenizer: Any = actor.tokenizer
    with quiet_transformers():
        if getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": problem.text}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        return tuple(tokenizer(f"Question: {problem.text}\nAnswer:")["input_ids"])


def _decoded(actor: Actor, ids: tuple[int, ...]) -> str:
    tokenizer: Any = actor.tokenizer
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def sample_completions(
    actor: Actor,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_tokens: int,
    generator: torch.Generator,
    tell: Callable[[float], None] = lambda _: None,
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """One completion (ids, log-probs) a prompt, at temperature 1, batched, with the KV cache.

    Rows that have ended leave the batch, so late steps are cheap. Every row has its own draw in every step, so what one
    row samples does not depend on when another ends. No gradient, but no inference mode either: what a model caches
    while sampling must stay usable in training.
    """
    model = actor.model
    device = model.get_input_embeddings().weight.device
    ends = _end_ids(actor)
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[actor.pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    alive = list(range(len(prompts)))
    tokens: list[list[int]] = [[] for _ in prompts]
    logps: list[list[float]] = [[] for _ in prompts]
    cache: dict[str, Any] = {}
    with torch.no_grad():
        for step in range(max_tokens):
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **cache,
            )
            # transformers renamed the argument, and the output with it.
            name = "cache" if getattr(output, "cache", None) is not None else "past_key_values"
            cache = {name: getattr(output, name)}
            table = output.logits[:, -1].float().log_softmax(-1)
            draws = torch.rand(len(prompts), 1, generator=generator, dtype=torch.float64)[alive].to(device)
            chosen = _inverse_cdf(table, draws)
            for row, token, logp in zip(
                alive, chosen[:, 0].tolist(), table.gather(1, chosen)[:, 0].tolist(), strict=True
            ):
                tokens[row].append(token)
                logps[row].append(logp)
            places = [place for place, row in enumerate(alive) if tokens[row][-1] not in ends]
            tell((step + 1) / max_tokens)
            if not places:
                break
            ids, positions = chosen, positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            if len(places) < len(alive):
                index = torch.tensor(places, device=device)
                cache[name].batch_select_indices(index)
                ids, positions, mask = ids[index], positions[index], mask[index]
                alive = [alive[place] for place in places]
    return [(tuple(row), tuple(values)) for row, values in zip(tokens, logps, strict=True)]


def _inverse_cdf(table: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """[rows, 1] ids drawn from log-probs [rows, vocab] by uniform draws [rows, 1]."""
    cumulative = table.exp().cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True).clamp(max=table.shape[1] - 1)


def _end_ids(actor: Actor) -> set[int]:
    found: set[int] = set()
    generation = getattr(actor.model, "generation_config", None)
    for source in (actor.tokenizer, generation, actor.model.config):
        value = getattr(source, "eos_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return found
