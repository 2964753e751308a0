"""Mistakes on the command line, and machines that are too small, in hilore's own form."""

from collections.abc import Sequence

import typer

from hilore_cli.errors import HiloreError

# Typer carried click as a dependency once and vendors it now; both derive BadParameter from ClickException.
USAGE_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
ABORTED: type[Exception] = typer.Abort


def from_usage_error(error: Exception) -> HiloreError:
    """Say which option, what rule it breaks, and where the help is."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "hilore"
    hint = f"see `{command} --help`"
    message = str(getattr(error, "message", error)).rstrip(".")
    parameter = getattr(error, "param", None)
    if parameter is not None:
        options = [option for option in parameter.opts if option.startswith("--")]
        name = options[0] if options else str(parameter.metavar or parameter.name).upper()
        return HiloreError(name, _lower_first(message) or "is required", hint)
    option = getattr(error, "option_name", None)
    if option is not None:
        near = ", ".join(sorted(getattr(error, "possibilities", None) or ()))
        rule = f"is not an option of `{command}`" if message.startswith("No such option") else _lower_first(message)
        return HiloreError(option, rule, f"did you mean {near}? {hint}" if near else hint)
    return HiloreError(command, _lower_first(message), hint)


def is_out_of_memory(error: BaseException) -> bool:
    """Python's own, CUDA's, or that of torch's CPU allocator, told without importing torch."""
    named = any(kind.__name__ in ("MemoryError", "OutOfMemoryError") for kind in type(error).__mro__)
    return named or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def from_out_of_memory(arguments: Sequence[str]) -> HiloreError:
    """The command did not fit; nothing is written until a command is done."""
    verb = next((word for word in arguments if not word.startswith("-")), "")
    return HiloreError(
        f"hilore {verb}".strip(),
        "needs more memory than this device has free",
        "give fewer --response-tokens, a smaller --micro-batch or --dtype bfloat16; verify also runs the plain step, "
        "which must fit",
    )


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
