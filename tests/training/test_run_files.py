"""A resumed training goes on with the files beside its checkpoints only if they are what they were:
metrics.jsonl, the weights that it began with and those of the best validation.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from spectrain.errors import UserError
from spectrain.models.checked_tensors import save_tensors
from spectrain.training.checkpoints import (
    best_weights_path,
    checkpoint_path,
    save_best,
    save_checkpoint,
    start_weights_path,
)
from spectrain.training.metrics import MetricsFile
from spectrain.training.run_files import check_run_files, describe_files, hash_beginning

from .test_damaged_checkpoints import OPTIMIZER, WEIGHTS, flip_bit, make_progress


def make_run(run: Path) -> Path:
    """Write a run with a checkpoint after step 4, and a line of metrics after it; return the
    checkpoint.
    """
    metrics = MetricsFile(run / "metrics.jsonl", 0)
    for step in range(1, 5):
        metrics.write({"step": step, "loss": 1 / step})
    start = start_weights_path(run)
    start.parent.mkdir(parents=True)
    save_tensors(nn.Linear(3, 2).state_dict(), start)
    save_best(run, 3, WEIGHTS)
    checkpoint = checkpoint_path(run, 4)
    progress = make_progress(4) | {"looks": {"best_step": 3}} | describe_files(run, 3)
    save_checkpoint(checkpoint, WEIGHTS, OPTIMIZER, progress, keep=3)
    metrics.write({"step": 5, "loss": 0.1})
    return checkpoint


def test_files_that_are_what_they_were_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line after the checkpoint changes nothing, nor does one that a kill has cut short; what a
    resumed run leaves of the file is what the checkpoint counted."""
    checkpoint = make_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    check_run_files(tmp_path, checkpoint)
    MetricsFile(path, 4)
    check_run_files(tmp_path, checkpoint)
    saved = json.loads((checkpoint / "progress.json").read_text())["files"]["metrics"]
    assert saved["bytes"] == path.stat().st_size and len(path.read_text().splitlines()) == 4
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "content",
    ["", '{"step": 1}\n', '{"step": 1, "loss": 1.0}\n' * 8, "\0" * 4000, "[1]\n"],
    ids=["empty", "cut", "other lines", "zeros", "a list"],
)
def test_changed_metrics_are_refused(content: str, tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl: it was changed: .* step-000004; put"):
        check_run_files(tmp_path, checkpoint)


def test_a_number_that_was_changed_in_the_metrics_is_refused(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.25", "0.26"))
    with pytest.raises(UserError, match=r"metrics\.jsonl: it was changed"):
        check_run_files(tmp_path, checkpoint)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: this is no file"):
        check_run_files(tmp_path, checkpoint)


def test_damaged_or_exchanged_weights_of_the_start_are_refused(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path)
    start = start_weights_path(tmp_path)
    content = start.read_bytes()
    flip_bit(start)
    with pytest.raises(UserError, match=r"start/model\.safetensors: it is damaged: .*delete its"):
        check_run_files(tmp_path, checkpoint)
    start.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"start/model\.safetensors: it cannot be read"):
        check_run_files(tmp_path, checkpoint)
    save_tensors({"weight": torch.ones(2, 3)}, start)
    with pytest.raises(UserError, match=r"start/model\.safetensors: the run began with other"):
        check_run_files(tmp_path, checkpoint)


def test_damaged_weights_of_the_best_validation_are_refused(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path)
    flip_bit(best_weights_path(tmp_path, 3) / "model.safetensors")
    with pytest.raises(UserError, match=r"best-000003/model\.safetensors: it is damaged"):
        check_run_files(tmp_path, checkpoint)
    save_tensors(OPTIMIZER, best_weights_path(tmp_path, 3) / "model.safetensors")
    with pytest.raises(UserError, match=r"best-000003/model\.safetensors: the best validation had"):
        check_run_files(tmp_path, checkpoint)


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = make_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    shutil.rmtree(start_weights_path(tmp_path).parent)
    check_run_files(tmp_path, checkpoint)
    message = capsys.readouterr().err
    assert "metrics.jsonl: it is missing; the metrics up to step-000004 are lost" in message
    assert "start/model.safetensors: it is missing; the score leaves the start out" in message


def test_a_checkpoint_of_an_earlier_version_is_accepted(tmp_path: Path) -> None:
    make_run(tmp_path)
    save_checkpoint(checkpoint_path(tmp_path, 6), WEIGHTS, OPTIMIZER, make_progress(6), keep=3)
    (tmp_path / "metrics.jsonl").write_text("")
    check_run_files(tmp_path, checkpoint_path(tmp_path, 6))


def test_a_file_shorter_than_its_beginning_has_no_hash(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert hash_beginning(path, 4) is None
    assert hash_beginning(path, 2) == hash_beginning(path, 2) != hash_beginning(path, 3)
    assert hash_beginning(tmp_path / "none", 0) == hash_beginning(path, 0)
