"""A killed run loses nothing: after SIGTERM it saves and exits 0, after SIGKILL it resumes from
a checkpoint.
"""

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests import commands

SETTINGS = [
    *(
        "recipe=eagle3",
        "target=hf",
        "data.limit=20",
        "data.max_length=64",
        "drafter.vocab_size=256",
        "eval=none",
    ),
    *(
        "drafter.ttt_steps=2",
        "trainer.max_steps=40",
        "trainer.batch_tokens=128",
        "trainer.log_every=1",
        "trainer.save_every=5",
    ),
    "data.held_out=0",  # test_held_out.py tests that validation survives a kill
]


def start_run(run: Path, model: Path) -> commands.Command:
    return commands.start(
        ["train", *SETTINGS, f"target.model={model}", f"run={run}", "trainer.resume=auto"]
    )


def finish_run(run: Path, model: Path) -> str:
    """Let the command end and return its output."""
    status, out, err = start_run(run, model).wait()
    assert status == 0, err
    return out


def count_steps(run: Path) -> int:
    """Count the steps that were logged so far."""
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def loss_curve(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def assert_equal(run: Path, undisturbed_run: Path) -> None:
    """Check that loss curve, steps and drafter are the same, bit by bit, and that every
    remaining file can be read.
    """
    assert loss_curve(run) == loss_curve(undisturbed_run)
    resumed, undisturbed = (
        load_file(folder / "drafter" / "model.safetensors") for folder in (run, undisturbed_run)
    )
    assert all(torch.equal(value, undisturbed[name]) for name, value in resumed.items())
    for file in run.rglob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.keys() is not None
    for file in run.rglob("*.json"):
        json.loads(file.read_text())
    assert not list(run.rglob("*.part")) and not list(run.rglob("*.old"))


@pytest.fixture(scope="module")
def undisturbed_run(shallow_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finish a run that is not killed."""
    run = tmp_path_factory.mktemp("kills") / "whole"
    finish_run(run, shallow_folder)
    return run


def test_a_schedulers_signal_saves_and_exits_with_0(
    undisturbed_run: Path, shallow_folder: Path, tmp_path: Path
) -> None:
    """After SIGTERM the step ends, its checkpoint is saved, the exit status is 0, and the run
    resumes bit by bit.
    """
    run = tmp_path / "run"
    process = start_run(run, shallow_folder)
    while count_steps(run) < 7:
        assert process.poll() is None
        time.sleep(0.05)
    process.signal(signal.SIGTERM)
    status, _, err = process.wait(120)
    assert status == 0, err
    done = loss_curve(run)[-1][0]
    assert f"stopped by SIGTERM after step {done}, which is saved" in err
    assert (run / "checkpoints" / f"step-{done:06d}").is_dir()
    assert "is finished" not in finish_run(run, shallow_folder)
    assert_equal(run, undisturbed_run)
    assert "is finished" in finish_run(run, shallow_folder)


def kill_and_resume(
    undisturbed_run: Path, model: Path, folder: Path, kills: int, seed: int
) -> None:
    """Kill a run `kills` times at random moments and resume it each time; compare it with the
    undisturbed one.
    """
    draw = random.Random(seed)
    run = folder / "run"
    for _ in range(kills):
        process = start_run(run, model)
        while count_steps(run) == 0 and process.poll() is None:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 1.5))  # while loading, training, or saving
        process.signal(signal.SIGKILL)
        process.wait()
    finish_run(run, model)
    assert_equal(run, undisturbed_run)


def test_killed_runs_go_on(undisturbed_run: Path, shallow_folder: Path, tmp_path: Path) -> None:
    """After a kill at a random moment there is one loss curve and no broken file."""
    kill_and_resume(undisturbed_run, shallow_folder, tmp_path, 1, seed=1)


@pytest.mark.slow
def test_twenty_kills(undisturbed_run: Path, shallow_folder: Path, tmp_path: Path) -> None:
    """After twenty kills at random moments and resumes there is one loss curve and no broken
    file.
    """
    for round in range(4):  # a run is over after a few
        kill_and_resume(undisturbed_run, shallow_folder, tmp_path / f"{round}", 5, seed=round)
