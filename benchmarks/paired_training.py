"""A paired training run: GRPO under a plan against GRPO without, from the same start, with the same seeds.

    python benchmarks/paired_training.py [--seeds 5] [--steps 200] [--risk 0.01] [--docs docs]

A Llama of 1.2 M parameters first learns to add two-digit numbers (units first) from examples, until it has four in
five. Then GRPO takes it on, at a learning rate that falls to 0: 32 questions a step, 8 answers each, reward 1 for the
right sum, one update of 8 micro-batches whose rungs `Applied.choose` picks by exposure. Both arms of a pair draw the
same questions and the same random numbers; they part only where a rounded gradient changes a sampled digit. The score
is greedy accuracy on sums that neither phase has seen, a mean over the last evaluations. Writes `paired-training.md`
with the table, and `paired-training.svg` with the curves.
"""

import copy
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from held_out_risk import free_codecs, layers_alone
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hilore_cli import apply_plan
from hilore_cli.experiments.profiling import profile_actor
from hilore_cli.measuring.completions import MicroBatch, group_advantages
from hilore_cli.measuring.options import LossSpec, WorkloadOptions
from hilore_cli.measuring.step import actor_step, exposure_before, facts_of
from hilore_cli.solving.evaluate import PLAIN, evaluate
from hilore_cli.solving.nearest import smallest_cap
from hilore_cli.solving.problem import problem_from_profile
from hilore_cli.solving.solve import solve
from hilore_cli.tables.plan_table import Plan
from hilore_cli.tables.profile_table import Shape

PLUS, EQUALS, END = 10, 11, 12
PROMPT, ANSWER = 6, 4
GROUP, QUESTIONS, MICRO_BATCHES = 8, 32, 8
EVALUATE_EVERY, SCORED = 10, 4
CAP_SHARE = 0.2
LEARNING_RATE = 1.5e-4
LOSS = LossSpec()


@dataclass
class Run:
    """One arm with one seed."""

    scores: list[float] = field(default_factory=list)
    seconds: float = 0.0
    rungs: list[int] = field(default_factory=list)

    @property
    def final(self) -> float:
        return statistics.fmean(self.scores[-SCORED:])


def question(a: int, b: int) -> list[int]:
    return [a // 10, a % 10, PLUS, b // 10, b % 10, EQUALS]


def answer(a: int, b: int) -> list[int]:
    total = a + b
    return [total % 10, total // 10 % 10, total // 100, END]


def pairs(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Sums to learn from and sums to be scored on, apart."""
    every = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(every)  # noqa: S311 - a fixed split
    return every[2000:], every[:2000]


def new_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=END,
        eos_token_id=END,
        bos_token_id=END,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def answers(model: Any, prompts: torch.Tensor, draw: torch.Generator | None) -> torch.Tensor:
    """[B, ANSWER] tokens, sampled at temperature 1, or the likeliest where `draw` is None."""
    model.eval()
    ids = unread = prompts
    cache = DynamicCache()
    for _ in range(ANSWER):
        # the cache by its place: its name differs between releases of transformers
        logits = model(unread, None, None, cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        if draw is None:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            cumulative = logits.softmax(-1).cumsum(-1)
            chosen = torch.searchsorted(cumulative, torch.rand(len(ids), 1, generator=draw)).clamp(max=15)
        unread = chosen
        ids = torch.cat([ids, chosen], dim=1)
    model.train()
    return ids[:, PROMPT:]


def score(model: Any, sums: Sequence[tuple[int, int]]) -> float:
    prompts = torch.tensor([question(a, b) for a, b in sums])
    right = torch.tensor([answer(a, b) for a, b in sums])
    return float((answers(model, prompts, None) == right).all(1).float().mean())


def learn_from_examples(
    model: Any, sums: Sequence[tuple[int, int]], held_out: Sequence[tuple[int, int]], until: float
) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    draw = random.Random(0)  # noqa: S311 - a fixed order
    reached = 0.0
    model.train()
    for step in range(1, 4001):
        batch = draw.sample(sums, 256)
        ids = torch.tensor([question(a, b) + answer(a, b) for a, b in batch])
        logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            reached = score(model, held_out[:500])
            if reached >= until:
                break
    return reached


def sampled_update(
    model: Any, sums: Sequence[tuple[int, int]], order: random.Random, draw: torch.Generator
) -> tuple[list[MicroBatch], pd.DataFrame]:
    """The micro-batches of one update, and the same as rows that `hilore profile --rollouts` reads."""
    chosen = order.sample(sums, QUESTIONS)
    prompts = torch.tensor([question(a, b) for a, b in chosen for _ in range(GROUP)])
    sampled = answers(model, prompts, draw)
    right = torch.tensor([answer(a, b) for a, b in chosen for _ in range(GROUP)])
    rewards = (sampled == right).all(1).float()
    groups = rewards.reshape(-1, GROUP).tolist()
    advantages = torch.tensor([value for group in groups for value in group_advantages(group)])
    ids = torch.cat([prompts, sampled], dim=1)
    shuffled = list(range(len(ids)))
    order.shuffle(shuffled)
    size = len(ids) // MICRO_BATCHES
    batches = [
        MicroBatch(
            input_ids=ids[rows],
            attention_mask=torch.ones_like(ids[rows]),
            completion_mask=torch.ones(size, ANSWER),
            advantages=advantages[rows],
            old_logps=None,
            ref_logps=None,
        )
        for rows in (shuffled[start : start + size] for start in range(0, len(ids), size))
    ]
    frame = pd.DataFrame(
        {
            "group": [number // GROUP for number in range(len(ids))],
            "prompt_ids": prompts.tolist(),
            "completion_ids": sampled.tolist(),
            "advantage": advantages.tolist(),
        }
    )
    return batches, frame


def plan_for(model: Any, sums: Sequence[tuple[int, int]], folder: Path, risk: float) -> Plan:
    """Profile the start of the training on its own answers, and solve under a cap near what the layers need at least.

    Codecs count as free, so that the plan compresses all that its risk allows: this run is about gradients, not time.
    """
    model.save_pretrained(folder)
    frames = []
    for number in range(4):
        _, frame = sampled_update(model, sums, random.Random(900 + number), torch.Generator().manual_seed(number))  # noqa: S311
        frames.append(frame.assign(group=frame["group"] + number * QUESTIONS))
    pd.concat(frames).to_parquet(folder / "rollouts.parquet")
    options = WorkloadOptions(
        model=str(folder),
        rollouts=folder / "rollouts.parquet",
        shape=Shape(micro_batch=QUESTIONS * GROUP // MICRO_BATCHES, prompt_tokens=PROMPT, response_tokens=ANSWER),
        loss=LOSS,
    )
    profile = free_codecs(layers_alone(profile_actor(options, rounds=5)))
    problem = problem_from_profile(profile)
    lowest, highest = smallest_cap(problem), evaluate(problem, (PLAIN,) * len(problem.layers)).peak_bytes
    return solve(
        profile,
        cap_bytes=int(lowest + CAP_SHARE * (highest - lowest)),
        risk=risk,
        time_limit_s=60,
    )


def train(start: Any, plan: Plan | None, *, seed: int, steps: int, sums: Any, held_out: Any) -> Run:
    model = copy.deepcopy(start)
    model.train()
    applied = None if plan is None else apply_plan(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    order, draw = random.Random(seed), torch.Generator().manual_seed(seed)  # noqa: S311 - both arms' own
    run = Run(scores=[score(model, held_out)])
    started = time.perf_counter()
    for step in range(1, steps + 1):
        batches, _ = sampled_update(model, sums, order, draw)
        facts = facts_of(batches)
        rungs = [] if applied is None else applied.choose([exposure_before(one, LOSS, facts) for one in batches])
        optimizer.zero_grad()
        for number, batch in enumerate(batches):
            if applied is not None:
                applied.rung = rungs[number]
            actor_step(model, batch, LOSS, facts=facts, audit=None if applied is None else applied.audit)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        run.rungs += rungs
        if step % EVALUATE_EVERY == 0:
            run.scores.append(score(model, held_out))
    run.seconds = time.perf_counter() - started
    return run


def main(
    *,
    seeds: int = 5,
    steps: int = 200,
    risk: float = 0.01,
    start_score: float = 0.8,
    docs: Annotated[Path, typer.Option()] = Path("docs"),
) -> None:
    sums, held_out = pairs(0)
    model = new_model(0)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    reached = learn_from_examples(model, sums, held_out, start_score)
    print(f"{parameters / 1e6:.2f} M parameters, {reached:.1%} of held-out sums after the examples", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_for(copy.deepcopy(model), sums, Path(folder), risk)
    rungs = plan.meta.rungs
    print("rungs", [(one.risk, round(one.predicted_risk, 5), one.stored, one.compressed) for one in rungs], flush=True)
    runs: dict[str, list[Run]] = {"exact": [], "plan": []}
    for seed in range(seeds):
        for arm, members in runs.items():
            chosen = None if arm == "exact" else plan
            members.append(train(model, chosen, seed=seed, steps=steps, sums=sums, held_out=held_out))
        print(seed, *(f"{arm} {run[-1].final:.4f} ({run[-1].seconds:.0f} s)" for arm, run in runs.items()), flush=True)
    text = report(runs, plan, parameters, reached, steps=steps)
    print(text)
    (docs / "paired-training.md").write_text(text)
    draw_curves(docs / "paired-training.svg", runs)


def report(runs: dict[str, list[Run]], plan: Plan, parameters: int, reached: float, *, steps: int) -> str:
    differences = [
        100 * (with_plan.final - exact.final) for exact, with_plan in zip(runs["exact"], runs["plan"], strict=True)
    ]
    used = [rung for run in runs["plan"] for rung in run.rungs]
    lines = [
        "# A paired training run",
        "",
        "`python benchmarks/paired_training.py` makes this page and the curves.",
        "",
        f"A Llama of {parameters / 1e6:.2f} M parameters that adds {reached:.0%} of unseen two-digit sums rightly is",
        f"trained by GRPO for {steps} updates of {MICRO_BATCHES} micro-batches, once exactly and once under a plan at",
        f"risk {plan.meta.risk:g} whose rungs `Applied.choose` picks by exposure. Score: greedy accuracy on 2,000",
        f"unseen sums, the mean of the last {SCORED} evaluations, one every {EVALUATE_EVERY} updates.",
        "",
        "| seed | exact | plan | difference |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {seed} | {exact.final:.2%} | {with_plan.final:.2%} | {difference:+.2f} points |"
        for seed, (exact, with_plan, difference) in enumerate(
            zip(runs["exact"], runs["plan"], differences, strict=True)
        )
    ]
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    shares = ", ".join(
        f"{used.count(rung.rung) / len(used):.0%} at {rung.predicted_risk:.4f} ({rung.compressed} units compressed)"
        for rung in plan.meta.rungs
        if rung.rung in used
    )
    lines += [
        "",
        f"Paired mean difference {statistics.fmean(differences):+.2f} points, standard deviation {spread:.2f}.",
        f"Micro-batches by predicted risk of their rung: {shares}.",
        "",
        "![accuracy over updates, every seed](paired-training.svg)",
        "",
    ]
    return "\n".join(lines)


def draw_curves(path: Path, runs: dict[str, list[Run]]) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for color, (arm, members) in zip(("C0", "C1"), runs.items(), strict=True):
        for number, run in enumerate(members):
            at = [place * EVALUATE_EVERY for place in range(len(run.scores))]
            axes.plot(at, [100 * value for value in run.scores], color=color, alpha=0.35, linewidth=0.9)
            if number == 0:
                axes.plot([], [], color=color, label=arm)
        mean = [100 * statistics.fmean(values) for values in zip(*(run.scores for run in members), strict=True)]
        axes.plot([place * EVALUATE_EVERY for place in range(len(mean))], mean, color=color, linewidth=2.2)
    axes.set(xlabel="updates", ylabel="greedy accuracy on unseen sums, %")
    axes.legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
