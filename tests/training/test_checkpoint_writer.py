"""Checkpoints that a thread writes while the training goes on, as on a GPU."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.features.live_source import LiveSource
from spectrain.training import run as training_run
from spectrain.training.checkpoint_writer import CheckpointWriter
from spectrain.training.checkpoints import latest_checkpoint, load_checkpoint, save_checkpoint
from spectrain.training.trainer import Trainer
from tests.targets import cut_tiny
from tests.training import worker


def train(folder: Path, steps: int = 6) -> dict[str, Tensor]:
    target = cut_tiny(4)
    drafter = worker.make("eagle3", target)
    Trainer(max_steps=steps, batch_tokens=48, save_every=2, log_every=1, lr=1e-3).fit(
        drafter, target, worker.dataset(), LiveSource(), folder
    )
    return drafter.state_dict()


def write_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checkpoints be written in the background on a CPU too."""
    monkeypatch.setattr(
        training_run, "CheckpointWriter", lambda in_background: CheckpointWriter(True)
    )


def test_steps_run_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint is written only after two more steps; each holds the weights of its own
    step."""
    plain = train(tmp_path / "plain")
    write_behind(monkeypatch)
    released = threading.Event()
    finish = training_run.TrainingRun.finish_checkpoint
    during: list[int] = []

    def save_slowly(path: Path, *arguments: Any) -> None:
        released.wait()
        save_checkpoint(path, *arguments)

    def finish_checkpoint(run: training_run.TrainingRun) -> None:
        if run.unfinished is not None:
            is_first = not released.is_set()
            assert latest_checkpoint(run.run) is None or not is_first
            during.append(run.step - run.unfinished[0])
            released.set()
        finish(run)

    monkeypatch.setattr(training_run, "save_checkpoint", save_slowly)
    monkeypatch.setattr(training_run.TrainingRun, "finish_checkpoint", finish_checkpoint)
    behind = train(tmp_path / "behind")
    assert all(torch.equal(behind[name], value) for name, value in plain.items())
    assert during and max(during) == 2
    for step in (2, 4):
        saved = [
            load_checkpoint(tmp_path / name / "checkpoints" / f"step-{step:06d}")[:2]
            for name in ("plain", "behind")
        ]
        for expected, actual in zip(*saved):
            assert expected.keys() == actual.keys()
            same = (torch.equal(actual[name], value) for name, value in expected.items())
            assert all(same)


def test_an_error_of_a_write_ends_the_training() -> None:
    writer = CheckpointWriter(in_background=True)

    def fail() -> None:
        raise OSError("no space is left")

    writer.start_write(fail)
    with pytest.raises(OSError, match="no space is left"):
        writer.wait_for_write()
    writer.wait_for_write()


KILLED = """
import os, signal, sys, threading
from pathlib import Path
import pytest
from spectrain.training import checkpoints, run as training_run
from tests.training import test_checkpoint_writer as tests

saved = []
save_tensors = checkpoints.save_tensors

def save(tensors, path):
    save_tensors(tensors, path)
    saved.append(path)
    if len(saved) == 3:  # the weights of the second checkpoint, without its optimizer
        os.kill(os.getpid(), signal.SIGKILL)

checkpoints.save_tensors = save
tests.write_behind(pytest.MonkeyPatch())
tests.train(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_kill_in_the_midst_of_a_write_loses_nothing(tmp_path: Path) -> None:
    """A process that is killed while its thread writes the second checkpoint leaves the first one,
    from which the run goes on to the weights of the undisturbed run."""
    undisturbed = train(tmp_path / "undisturbed")
    run = tmp_path / "killed"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(run)], capture_output=True, text=True, env={**os.environ}
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    newest = latest_checkpoint(run)
    assert newest is not None and newest.name == "step-000002"
    resumed = train(run)
    assert all(torch.equal(resumed[name], value) for name, value in undisturbed.items())
