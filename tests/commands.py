"""The command line in processes of its own, forked from one that has imported everything: importing
takes longer than what most tests let a process do."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

IMPORTED = [
    "pytest",
    "hydra",
    "transformers.models.llama.modeling_llama",
    "spectrain.runs.train",
    "spectrain.eval.run",
]


@dataclass
class Command:
    """A running process of `spectrain` or another program, whose output goes to files."""

    process: BaseProcess
    output: "TemporaryDirectory[str]"

    def poll(self) -> int | None:
        """Return the exit status: None while the process runs, negative after a signal killed
        it.
        """
        return self.process.exitcode

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens where the process has ended."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait(self, timeout: float = 600) -> tuple[int, str, str]:
        """Return the exit status, stdout and stderr; a process that takes longer is killed,
        which is an error.
        """
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(self.texts())
        return self.process.exitcode, *self.texts()

    def texts(self) -> tuple[str, str]:
        out, err = (Path(self.output.name, name).read_text() for name in ("out", "err"))
        return out, err


def spectrain() -> None:
    from spectrain.cli.main import main

    main()


def spectrain_in_folder() -> None:
    """Run spectrain as python -m does: modules in the working folder can be imported."""
    sys.path.insert(0, os.getcwd())
    spectrain()


def start(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    program: Callable[[], None] = spectrain,
) -> Command:
    """Start a program with these words, in this directory and with these variables, by default
    those of this process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    output = TemporaryDirectory(prefix="spectrain-said-")
    variables = dict(os.environ if environment is None else environment)
    arguments = (list(words), variables, str(cwd or Path.cwd()), output.name, program)
    process = context.Process(target=run, args=arguments)
    process.start()
    return Command(process, output)


def run(
    words: list[str],
    environment: dict[str, str],
    cwd: str,
    output: str,
    program: Callable[[], None],
) -> None:
    """Run the program in the forked process."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(output, name), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["spectrain", *words]
    program()
