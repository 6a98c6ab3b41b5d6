"""The command `spectrain`, and `python -m spectrain`."""

import sys

from spectrain.errors import explain_missing_module
from spectrain.output.streams import drop_output, open_closed_streams
from spectrain.output.version import read_version


def main() -> None:
    """Run the command in sys.argv.

    `--version` needs no other package, so that it answers in a broken environment too. Where a
    package is missing, one sentence says so.
    """
    open_closed_streams()
    if sys.argv[1:] == ["--version"]:
        return print_version()
    try:
        from .cli.main import main as run_main
    except KeyboardInterrupt:
        sys.exit("spectrain: stopped")
    except ModuleNotFoundError as error:
        if (message := explain_missing_module(error)) is None:
            raise
        sys.exit(f"spectrain: {message}")
    run_main()


def print_version() -> None:
    """Print the version; an output that takes nothing is a failure without a traceback."""
    try:
        print(f"spectrain {read_version()}", flush=True)
    except BrokenPipeError:
        drop_output()
        sys.exit(1)
    except OSError as error:
        drop_output()
        sys.exit(f"spectrain: standard output: {error.strerror}")


if __name__ == "__main__":
    main()
