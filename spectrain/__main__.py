"""The command `spectrain`, and `python -m spectrain`."""

import sys

from spectrain.errors import explain_missing_module
from spectrain.output.version import read_version


def main() -> None:
    """Run the command in sys.argv.

    `--version` needs no other package, so that it answers in a broken environment too. Where a
    package is missing, one sentence says so.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"spectrain {read_version()}")
        return
    try:
        from .cli.main import main as run_main
    except ModuleNotFoundError as error:
        if (message := explain_missing_module(error)) is None:
            raise
        sys.exit(f"spectrain: {message}")
    run_main()


if __name__ == "__main__":
    main()
