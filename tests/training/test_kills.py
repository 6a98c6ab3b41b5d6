"""A killed run loses nothing: after SIGTERM it has saved itself and exits 0, after SIGKILL it goes on from a checkpoint."""

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
    *("recipe=eagle3", "target=hf", "data.limit=20", "data.max_length=64", "drafter.vocab_size=256", "eval=none"),
    *("drafter.ttt_steps=2", "trainer.max_steps=40", "trainer.batch_tokens=128", "trainer.log_every=1", "trainer.save_every=5"),
    "data.held_out=0",  # what was measured on it survives a kill in test_held_out.py
]


def start(run: Path, model: Path) -> commands.Command:
    return commands.start(["train", *SETTINGS, f"target.model={model}", f"run={run}", "trainer.resume=auto"])


def finish(run: Path, model: Path) -> str:
    """Let the command end; what it said."""
    status, out, err = start(run, model).wait()
    assert status == 0, err
    return out


def steps(run: Path) -> int:
    """How many steps were logged so far."""
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def curve(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def assert_equal(run: Path, whole: Path) -> None:
    """The same loss curve, bit by bit, each step once; the same drafter; every file that is left can be read."""
    assert curve(run) == curve(whole)
    one, two = (load_file(folder / "drafter" / "model.safetensors") for folder in (run, whole))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    for file in run.rglob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.keys() is not None
    for file in run.rglob("*.json"):
        json.loads(file.read_text())
    assert not list(run.rglob("*.part")) and not list(run.rglob("*.old"))


@pytest.fixture(scope="module")
def whole(shallow_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    run = tmp_path_factory.mktemp("kills") / "whole"
    finish(run, shallow_folder)
    return run


def test_a_schedulers_signal_saves_and_exits_with_0(whole: Path, shallow_folder: Path, tmp_path: Path) -> None:
    """SIGTERM in mid-run: the step ends, a checkpoint of it is saved, the exit status is 0, and the run goes on bit by bit."""
    run = tmp_path / "run"
    process = start(run, shallow_folder)
    while steps(run) < 7:
        assert process.poll() is None
        time.sleep(0.05)
    process.signal(signal.SIGTERM)
    status, _, err = process.wait(120)
    assert status == 0, err
    done = curve(run)[-1][0]
    assert f"stopped by SIGTERM after step {done}, which is saved" in err
    assert (run / "checkpoints" / f"step-{done:06d}").is_dir()
    assert "is finished" not in finish(run, shallow_folder)
    assert_equal(run, whole)
    assert "is finished" in finish(run, shallow_folder)


def killed_runs(whole: Path, model: Path, folder: Path, kills: int, seed: int) -> None:
    """Kill a run at random moments, as often as asked, each time going on; then compare it with the undisturbed one."""
    chance, run = random.Random(seed), folder / "run"
    for _ in range(kills):
        process = start(run, model)
        while steps(run) == 0 and process.poll() is None:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 1.5))  # while loading, training, or saving
        process.signal(signal.SIGKILL)
        process.wait()
    finish(run, model)
    assert_equal(run, whole)


def test_killed_runs_go_on(whole: Path, shallow_folder: Path, tmp_path: Path) -> None:
    """A kill at a random moment: one loss curve, no broken file."""
    killed_runs(whole, shallow_folder, tmp_path, 1, seed=1)


@pytest.mark.slow
def test_twenty_kills(whole: Path, shallow_folder: Path, tmp_path: Path) -> None:
    """Twenty kills at random moments, twenty resumes: one loss curve, no broken file."""
    for round in range(4):  # a run is over after a few
        killed_runs(whole, shallow_folder, tmp_path / f"{round}", 5, seed=round)
