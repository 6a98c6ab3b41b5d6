"""A training of a few steps that measures something, in a folder that nobody goes on with."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

from spectrain.config.spec import RunSpec
from spectrain.errors import RunError, RunInterrupted
from spectrain.training.trainer import Trainer


@contextmanager
def trial_folder(name: str) -> Iterator[Path]:
    """Give a temporary folder to a trial, which prints nothing that looks like a training.

    What ends the trial is an error of the command `name`: none advises to go on in the folder,
    which is deleted.
    """
    try:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            yield Path(folder)
    except RunInterrupted as stopped:
        sentence = (
            f"{name}: stopped while it timed steps; nothing is kept, use the same command again"
        )
        raise stopped.interrupt_whole(sentence) from stopped
    except RunError as error:
        cause, advice, _ = str(error).partition("; go on with the same command")
        raise (
            RunError(f"{name}: {cause}; use the same command again") if advice else error
        ) from error


def make_trial(spec: RunSpec, steps: int) -> Trainer:
    """Return the trainer of a run for a few steps of a measurement, on one process, without
    checkpoints and validation.
    """
    return replace(
        Trainer.from_spec(spec),
        max_steps=steps,
        max_minutes=None,
        save_every=None,
        eval_every=None,
        keep_best=False,
        stop_after=None,
        resume=None,
        context_parallel=1,
    )
