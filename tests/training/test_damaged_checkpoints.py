"""A damaged checkpoint is never taken for what was saved: the run goes on from the one before,
or stops in one sentence.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.errors import UserError
from spectrain.models.checked_tensors import DamagedFile, save_tensors
from spectrain.training.checkpoints import (
    checkpoint_path,
    latest_checkpoint,
    load_checkpoint,
    read_progress,
    save_checkpoint,
    set_aside_damaged,
)

WEIGHTS = {"drafter.fc.weight": torch.arange(6.0).reshape(2, 3)}
OPTIMIZER = {"0.exp_avg": torch.ones(2, 3)}


def make_progress(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "stage": 0,
        "stage_began": 0,
        "skipped": 0,
        "tokens": 100 * step,
        "seconds": 1.5,
        "num_steps": 12.0,
        "batches_a_step": 1,
        "stream": {},
        "optimizer": {"0.step": 2.0},
        "spent": {},
        "looks": {},
        "tallies": [{"steps": 1}],
    }


def make_run(run: Path, steps: tuple[int, ...] = (2, 4)) -> Path:
    for step in steps:
        save_checkpoint(checkpoint_path(run, step), WEIGHTS, OPTIMIZER, make_progress(step), keep=3)
    return run


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit_progress(**changes: Any) -> Callable[[Path], None]:
    """Return a function that changes keys of progress.json, or removes those whose value is ...,
    and drops its checksum.
    """

    def edit(checkpoint: Path) -> None:
        path = checkpoint / "progress.json"
        content = json.loads(path.read_text()) | changes
        del content["sha256"]
        path.write_text(
            json.dumps({key: value for key, value in content.items() if value is not ...})
        )

    return edit


def write_progress(text: str) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / "progress.json").write_text(text) and None


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of the weights": lambda checkpoint: flip_bit(checkpoint / "model.safetensors"),
    "a bit of the optimizer": lambda checkpoint: flip_bit(checkpoint / "optimizer.safetensors"),
    "no weights": lambda checkpoint: (checkpoint / "model.safetensors").unlink(),
    "cut": write_progress('{"step": 4, "sta'),
    "nested": write_progress("[" * 100_000),
}
CHANGES: dict[str, Callable[[Path], None]] = {
    "another number of tokens": lambda checkpoint: (
        (checkpoint / "progress.json").write_text(
            (checkpoint / "progress.json").read_text().replace('"tokens": 400', '"tokens": 401')
        )
        and None
    ),
    "{}": write_progress("{}"),
    "a list": write_progress("[1]"),
    "no step": edit_progress(step=...),
    "a step as text": edit_progress(step="x"),
    "the step of another checkpoint": edit_progress(step=2),
    "no tallies": edit_progress(tallies=[]),
    "tallies of numbers": edit_progress(tallies=[3]),
    "a negative stage": edit_progress(stage=-1),
    "no optimizer": edit_progress(optimizer=...),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    DAMAGES[name](checkpoint_path(run, 4))
    set_aside_damaged(run)
    assert latest_checkpoint(run) == checkpoint_path(run, 2)
    message = capsys.readouterr().err
    assert "step-000004" in message and f"goes on from {checkpoint_path(run, 2)}" in message
    assert (run / "checkpoints" / "step-000004.damaged").is_dir()
    # The next save of that step is intact.
    make_run(run, (4,))
    assert torch.equal(
        load_checkpoint(checkpoint_path(run, 4))[0]["drafter.fc.weight"],
        WEIGHTS["drafter.fc.weight"],
    )


@pytest.mark.parametrize("name", CHANGES)
def test_progress_that_somebody_has_changed_is_refused(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    CHANGES[name](checkpoint_path(run, 4))
    with pytest.raises(
        UserError, match=r"step-000004/progress\.json: it was changed: .*; delete the checkpoint"
    ):
        set_aside_damaged(run)
    assert latest_checkpoint(run) == checkpoint_path(run, 4)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_tensors_of_another_checkpoint_are_refused(name: str, tmp_path: Path) -> None:
    """They are what was saved in them, for another step or another run."""
    run = make_run(tmp_path)
    path = checkpoint_path(run, 4) / name
    save_tensors({"drafter.fc.weight": torch.zeros(2, 3)}, path)
    with pytest.raises(
        UserError, match=rf"step-000004/{name}: it was changed: it is not of this checkpoint"
    ):
        set_aside_damaged(run)
    assert latest_checkpoint(run) == checkpoint_path(run, 4)


def test_intact_checkpoints_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    set_aside_damaged(run)
    assert latest_checkpoint(run) == checkpoint_path(run, 4)
    assert not capsys.readouterr().err
    weights, optimizer, progress = load_checkpoint(checkpoint_path(run, 4))
    assert torch.equal(optimizer["0.exp_avg"], OPTIMIZER["0.exp_avg"])
    assert make_progress(4).items() <= progress.items()
    assert torch.equal(weights["drafter.fc.weight"], WEIGHTS["drafter.fc.weight"])


def test_a_run_without_an_intact_checkpoint_stops(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (2, 4):
        flip_bit(checkpoint_path(run, step) / "model.safetensors")
    with pytest.raises(
        DamagedFile, match=r"step-000004/model\.safetensors.*no other checkpoint.*trains anew"
    ):
        set_aside_damaged(run)
    assert latest_checkpoint(run) == checkpoint_path(run, 4)


def test_a_run_that_has_no_checkpoint_begins(tmp_path: Path) -> None:
    set_aside_damaged(tmp_path)
    assert latest_checkpoint(tmp_path) is None


def test_checkpoints_of_earlier_versions_have_no_checksum(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    edit_progress()(checkpoint_path(run, 4))
    assert read_progress(checkpoint_path(run, 4))["step"] == 4
