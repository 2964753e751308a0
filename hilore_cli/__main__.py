"""The `hilore` command: the one place where errors become lines on stderr and exit codes."""

import sys
from collections.abc import Sequence

from hilore_cli.cli.app import app
from hilore_cli.cli.usage import ABORTED, USAGE_ERROR, from_out_of_memory, from_usage_error, is_out_of_memory
from hilore_cli.errors import HiloreError

INTERRUPTED = 130


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own); returns its exit code."""
    try:
        result = app(args=arguments, prog_name="hilore", standalone_mode=False)
    except HiloreError as error:
        return _report(error)
    except USAGE_ERROR as error:
        return _report(from_usage_error(error))
    except (KeyboardInterrupt, ABORTED):
        return INTERRUPTED
    except Exception as error:
        if is_out_of_memory(error):
            return _report(from_out_of_memory(sys.argv[1:] if arguments is None else arguments))
        raise
    return result if isinstance(result, int) else 0


def _report(error: HiloreError) -> int:
    sys.stderr.write(f"error: {_one_line(str(error))}\n")
    if error.hint:
        sys.stderr.write(f"hint: {_one_line(error.hint)}\n")
    return error.exit_code


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
