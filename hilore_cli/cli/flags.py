"""Flags that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a file with other contents.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write here instead.", show_default=False)]

_WORKLOAD = "Workload"


def _flag(name: str, metavar: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        name, metavar=metavar, help=text, show_default=False, rich_help_panel=_WORKLOAD
    )
    return option


Model = Annotated[str, typer.Option("--model", metavar="ID_OR_PATH", help="Hub id, local folder or GGUF file.")]
OtherModel = Annotated[str | None, _flag("--model", "ID_OR_PATH", "Hub id, local folder or GGUF file.")]
Weights = Annotated[
    str | None,
    _flag("--weights", "pretrained|random", "Random weights need no download, but their errors mean nothing."),
]
Rollouts = Annotated[
    Path | None, _flag("--rollouts", "FILE", "Completions to calibrate on (Parquet or JSON lines); else sampled here.")
]
MicroBatch = Annotated[int | None, _flag("--micro-batch", "N", "Sequences in a micro-batch.")]
PromptTokens = Annotated[int | None, _flag("--prompt-tokens", "P", "Tokens of the longest prompt.")]
ResponseTokens = Annotated[int | None, _flag("--response-tokens", "R", "Tokens of the longest response.")]
Dtype = Annotated[str | None, _flag("--dtype", "float32|bfloat16", "Type of the parameters and the computation.")]
Attention = Annotated[str | None, _flag("--attn", "sdpa|eager|flash_attention_2", "Attention kernel.")]
Device = Annotated[str | None, _flag("--device", "cpu|cuda", "Where the actor runs.")]
Loss = Annotated[str | None, _flag("--loss", "NAME", "Policy loss by its TRL name, such as dapo or grpo.")]
LossLevel = Annotated[str | None, _flag("--loss-level", "token|sequence", "Level of the importance ratio.")]
Beta = Annotated[float | None, _flag("--beta", "B", "Weight of the KL term.")]
EpsLow = Annotated[float | None, _flag("--eps-low", "E", "Lower clipping range.")]
EpsHigh = Annotated[float | None, _flag("--eps-high", "E", "Upper clipping range.")]
Delta = Annotated[float | None, _flag("--delta", "D", "Upper bound of the ratio for either sign.")]
Optimizer = Annotated[str | None, _flag("--optimizer", "adamw|sgd|none", "Whose state counts as static memory.")]
Seed = Annotated[int | None, _flag("--seed", "S", "Of sampling and of random weights.")]
