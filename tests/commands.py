"""The command line in processes of its own, forked from one that has imported everything: importing takes longer than what most
tests let a process do."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

IMPORTED = ["pytest", "hydra", "transformers.models.llama.modeling_llama", "spectrain.runs.train", "spectrain.eval.run"]


@dataclass
class Command:
    """`spectrain`, or another program, with some words, running; what it says goes to files."""

    process: BaseProcess
    said: "TemporaryDirectory[str]"

    def poll(self) -> int | None:
        """The exit status, None while it runs; that of what a signal killed is negative."""
        return self.process.exitcode

    def signal(self, number: int) -> None:
        """Nothing happens where it is over."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait(self, timeout: float = 600) -> tuple[int, str, str]:
        """The exit status and what was said on stdout and on stderr; one that takes longer is killed, which is an error."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(self.texts())
        return self.process.exitcode, *self.texts()

    def texts(self) -> tuple[str, str]:
        out, err = (Path(self.said.name, name).read_text() for name in ("out", "err"))
        return out, err


def spectrain() -> None:
    from spectrain.cli.main import main

    main()


def spectrain_there() -> None:
    """As python -m starts it: what lies in the working folder can be imported."""
    sys.path.insert(0, os.getcwd())
    spectrain()


def start(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    program: Callable[[], None] = spectrain,
) -> Command:
    """Start a program with these words, in this directory and with these variables, by default those of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    said = TemporaryDirectory(prefix="spectrain-said-")
    variables = dict(os.environ if environment is None else environment)
    arguments = (list(words), variables, str(cwd or Path.cwd()), said.name, program)
    process = context.Process(target=run, args=arguments)
    process.start()
    return Command(process, said)


def run(words: list[str], environment: dict[str, str], cwd: str, said: str, program: Callable[[], None]) -> None:
    """What the process does."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(said, name), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["spectrain", *words]
    program()
