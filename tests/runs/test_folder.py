"""Run folders: resuming under the settings that a run began with, and where scores go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.provenance import describe_command, read_launch
from spectrain.runs.folder import find_results_folder
from spectrain.runs.lock import lock_run
from spectrain.runs.train import check_resumable


def test_a_run_goes_on_under_its_own_settings_only(tmp_path: Path) -> None:
    """Another optimizer or schedule is refused; what changes nothing that is learned may change."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        specs = {words: RunSpec.from_config(compose("train", overrides=["recipe=eagle3", "target=tiny", *words]))
                 for words in [(), ("++trainer.log_every=3",), ("optimizer=muon",), ("schedule=wsd",)]}  # fmt: skip
    (tmp_path / "config.yaml").write_text(specs[()].to_yaml())
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    check_resumable(tmp_path, specs[()])
    check_resumable(tmp_path, specs["++trainer.log_every=3",])
    for words, message in (
        (("optimizer=muon",), "optimizer=muon: .*began with adamw"),
        (("schedule=wsd",), "schedule=wsd: .*cosine"),
    ):
        with pytest.raises(UserError, match=message):
            check_resumable(tmp_path, specs[words])


def test_scores_of_a_shipped_drafter_go_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is no folder of the user's; a folder of that name is."""
    monkeypatch.chdir(tmp_path)
    assert find_results_folder(Path("smollm2-eagle3")) == Path("runs/smollm2-eagle3")
    (tmp_path / "smollm2-eagle3").mkdir()
    for run in (Path("smollm2-eagle3"), Path("runs/mine"), tmp_path / "other"):
        assert find_results_folder(run) == run


def test_a_second_launch_is_refused(tmp_path: Path) -> None:
    """While a process holds the lock of a run folder, another one names it; afterwards the lock is free."""
    with lock_run(tmp_path), pytest.raises(UserError, match=rf"another launch trains .*\(process {os.getpid()} on"):
        lock_run(tmp_path, seconds=0.0).__enter__()
    with lock_run(tmp_path, seconds=0.0):
        pass


def test_the_recorded_command_can_be_typed_again() -> None:
    assert describe_command(["python", "/bin/spectrain", "train", "target=tiny"]) == "spectrain train target=tiny"
    assert describe_command(["python", "-m", "spectrain", "train", "target=tiny"]) == "spectrain train target=tiny"
    assert describe_command(["python", "-u", "-m", "spectrain", "train", "target=tiny"]) == "spectrain train target=tiny"
    assert describe_command(["python", "-m", "benchmarks.axes", "rows=2"]) == "python -m benchmarks.axes rows=2"
    launched = ["--nproc-per-node", "2", "-m", "spectrain", "train", "target=tiny"]
    assert describe_command(["python", "/bin/torchrun", *launched]) == " ".join(["torchrun", *launched])


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_launcher_is_part_of_the_recorded_command(monkeypatch: pytest.MonkeyPatch, is_launched: bool) -> None:
    """The command of the parent is recorded where it is a launcher, and otherwise the own one."""
    command = [sys.executable, "-c", "print(flush=True); input()", *(["torchrun"] if is_launched else []), "train"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # Linux shows an empty command for a moment after the start
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # a process that a worker started inherits it
        assert read_launch() == (command if is_launched else sys.orig_argv)
        parent.communicate(b"\n")
