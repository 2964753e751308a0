"""Flags that several verbs share; those of the workload are written once and given to each verb that runs the actor."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

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
WORKLOAD: dict[str, Any] = {
    "model": Annotated[str | None, _flag("--model", "ID_OR_PATH", "Hub id, local folder or GGUF file.")],
    "weights": Annotated[
        str | None,
        _flag("--weights", "pretrained|random", "Random weights need no download, but their errors mean nothing."),
    ],
    "rollouts": Annotated[
        Path | None,
        _flag("--rollouts", "FILE", "Completions to calibrate on (Parquet or JSON lines); else sampled here."),
    ],
    "micro_batch": Annotated[int | None, _flag("--micro-batch", "N", "Sequences in a micro-batch.")],
    "prompt_tokens": Annotated[int | None, _flag("--prompt-tokens", "P", "Tokens of the longest prompt.")],
    "response_tokens": Annotated[int | None, _flag("--response-tokens", "R", "Tokens of the longest response.")],
    "dtype": Annotated[str | None, _flag("--dtype", "float32|bfloat16", "Type of the parameters and the computation.")],
    "attention": Annotated[str | None, _flag("--attn", "sdpa|eager|flash_attention_2", "Attention kernel.")],
    "device": Annotated[str | None, _flag("--device", "cpu|cuda", "Where the actor runs.")],
    "loss": Annotated[
        str | None,
        _flag("--loss", "NAME", "Policy loss by its TRL name, such as dapo, or verl's, such as verl_vanilla."),
    ],
    "loss_level": Annotated[str | None, _flag("--loss-level", "token|sequence", "Level of the importance ratio.")],
    "beta": Annotated[float | None, _flag("--beta", "B", "Weight of the KL term.")],
    "eps_low": Annotated[float | None, _flag("--eps-low", "E", "Lower clipping range.")],
    "eps_high": Annotated[float | None, _flag("--eps-high", "E", "Upper clipping range.")],
    "delta": Annotated[float | None, _flag("--delta", "D", "Upper bound of the ratio for either sign.")],
    "loss_option": Annotated[
        list[str] | None, _flag("--loss-option", "NAME=VALUE", "Another option of the loss, such as tau_neg=1.1.")
    ],
    "optimizer": Annotated[str | None, _flag("--optimizer", "adamw|sgd|none", "Whose state counts as static memory.")],
    "seed": Annotated[int | None, _flag("--seed", "S", "Of sampling and of random weights.")],
}


def with_workload(command: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the workload flags where it takes `workload`: a dictionary of those given, None for the others.

    A flag that the verb declares itself, such as a required `--model`, stays its own and goes along.
    """
    own = inspect.signature(command, eval_str=True).parameters

    @functools.wraps(command)
    def verb(**flags: Any) -> None:
        mine = {name: flags[name] for name in own if name != "workload"}
        command(**mine, workload={name: flags[name] for name in WORKLOAD})

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in WORKLOAD.items()
        if name not in own
    ]
    parameters: list[inspect.Parameter] = []
    for parameter in own.values():
        parameters += added if parameter.name == "workload" else [parameter]
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return verb
