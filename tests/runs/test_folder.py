"""Run folders: resuming under the settings that a run began with, and where scores go."""

import errno
import json
import os
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from spectrain.config.choices import list_constructors
from spectrain.config.signatures import list_keys
from spectrain.config.spec import GROUPS, RunSpec
from spectrain.drafters.capabilities import SavedFiles
from spectrain.errors import UserError
from spectrain.files import LockTaken
from spectrain.models.target import Target
from spectrain.provenance import describe_command, read_launch
from spectrain.runs.drafters import find_named_files
from spectrain.runs.folder import find_results_folder, require_drafter_directory
from spectrain.runs.lock import claim_folder, claim_new_folder, lock_run
from spectrain.runs.resume import (
    CHANGEABLE_GROUPS,
    CHANGEABLE_SETTINGS,
    InputFacts,
    check_inputs,
    check_settings,
    collect_facts,
)
from spectrain.runs.train import choose_folder, write_settings


def test_a_run_goes_on_under_its_own_settings_only(tmp_path: Path) -> None:
    """Another optimizer or schedule is refused; what changes nothing that is learned may change."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        specs = {
            words: RunSpec.from_config(
                compose("train", overrides=["recipe=eagle3", "target=tiny", *words])
            )
            for words in [(), ("++trainer.log_every=3",), ("optimizer=muon",), ("schedule=wsd",)]
        }
    (tmp_path / "config.yaml").write_text(specs[()].to_yaml())
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    check_settings(tmp_path, specs[()])
    check_settings(tmp_path, specs["++trainer.log_every=3",])
    for words, message in (
        (("optimizer=muon",), "optimizer=muon: .*began with adamw"),
        (("schedule=wsd",), "schedule=wsd: .*cosine"),
    ):
        with pytest.raises(UserError, match=message):
            check_settings(tmp_path, specs[words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("source=store", "++source.path=x"), "source=store: the run in .* began with live"),
        (("++source.keep_gb=1",), None),
        (("++trainer.packing=false",), None),
        (("tree=chain",), None),
        (("eval=none",), None),
        (("++trainer.batch_tokens=100",), "trainer.batch_tokens=100"),
        (("++trainer.seed=9",), "trainer.seed=9"),
        (("++target.dtype=bfloat16",), "target.dtype=bfloat16"),
        (("++drafter.init=x",), "drafter.init=x"),
    ],
)
def test_what_decides_the_weights_may_not_change(
    tmp_path: Path, words: tuple[str, ...], message: str | None
) -> None:
    """Source, target, drafter, data and trainer stay as they were; a default that is written out
    is no change.
    """
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        began, now = (
            RunSpec.from_config(compose("train", overrides=["recipe=eagle3", "target=tiny", *more]))
            for more in ((), words)
        )
    (tmp_path / "config.yaml").write_text(began.to_yaml())
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        check_settings(tmp_path, now)


def test_every_changeable_setting_exists() -> None:
    """The table names groups and settings that there are, in the core and in spectrain-serve."""
    pytest.importorskip("spectrain_serve")
    assert CHANGEABLE_GROUPS.keys() <= set(GROUPS)
    known = {
        f"{group}.{key.name}"
        for group in ("trainer", "target", "source")
        for path in list_constructors(group).values()
        for key in list_keys(path)
    }
    assert CHANGEABLE_SETTINGS.keys() <= known


# What is read and is no setting

FACTS = InputFacts(
    "path",
    "name",
    {"fingerprint": "a", "tokens": 10},
    {
        "target_weights": "w",
        "chat_template": "t",
        "drafters": {"0": "d"},
        "files": {"labels": "f"},
    },
)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"data": {"fingerprint": "b", "tokens": 12}},
            "data: it has 12 tokens, and had 10 when the run began",
        ),
        (
            {"data": {"fingerprint": "b", "tokens": 10}},
            "data: it has 10 tokens as when the run began, but other ones",
        ),
        ({"inputs": {**FACTS.inputs, "target_weights": "v"}}, "target: path holds other weights"),
        ({"inputs": {**FACTS.inputs, "chat_template": "u"}}, "target: the chat template"),
        ({"inputs": {**FACTS.inputs, "drafters": {"0": "e"}}}, "drafter: the files of the drafter"),
        ({"inputs": {**FACTS.inputs, "files": {"labels": "g"}}}, "drafter: a file that its"),
    ],
)
def test_other_inputs_are_refused_or_recorded(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    """A training goes on with what it began with; trainer.resume=changed accepts a change, once,
    and records it.
    """
    (tmp_path / "provenance.json").write_text(json.dumps({**FACTS.to_provenance(), "commit": "c"}))
    checkpoint = tmp_path / "checkpoints" / "step-000004"
    now = replace(FACTS, **changed)
    check_inputs(tmp_path, FACTS, checkpoint, accepts_changes=False)
    with pytest.raises(UserError, match=message):
        check_inputs(tmp_path, now, checkpoint, accepts_changes=False)
    check_inputs(tmp_path, now, checkpoint, accepts_changes=True)
    check_inputs(tmp_path, now, checkpoint, accepts_changes=False)
    saved = json.loads((tmp_path / "provenance.json").read_text())
    assert saved["commit"] == "c"
    assert saved["changes"] == [{"step": 4, "data": FACTS.data, "inputs": FACTS.inputs}]


def test_a_file_that_a_drafter_reads_is_one_of_its_inputs(tmp_path: Path, tiny: Target) -> None:
    """The labels of a judge may change while its conversations stay the same."""
    labels = tmp_path / "labels.jsonl"
    settings = {"labels": str(labels), "model": str(labels), "window": 3}
    assert find_named_files(settings) == {}
    data: Any = SimpleNamespace(provenance_facts=dict)
    hashes = []
    for text in ("a", "b", "a"):
        labels.write_text(text)
        drafter: Any = SimpleNamespace(saved=SavedFiles(read=find_named_files(settings)))
        hashes.append(collect_facts(tiny, None, data, drafter, data).inputs["files"])
    assert hashes[0] == hashes[2] != hashes[1] and hashes[0].keys() == {"labels"}


def test_provenance_that_says_nothing_is_one_sentence(tmp_path: Path) -> None:
    for content in (
        "{}",
        '{"data": 3}',
        '{"data": {"tokens": 1}, "inputs": []}',
        '{"data": {"tokens": 1}, "changes": 3}',
    ):
        (tmp_path / "provenance.json").write_text(content)
        with pytest.raises(UserError, match="does not say what the run began with"):
            check_inputs(tmp_path, FACTS, tmp_path / "step-000001", accepts_changes=False)


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    """Its configuration and its provenance are those of the new launch, and old metrics are
    gone.
    """
    old, new = (
        RunSpec.from_nodes(
            {"trainer": {"_target_": "spectrain.training.trainer.Trainer", "lr": lr}}
        )
        for lr in (1e-3, 1e-2)
    )
    write_settings(tmp_path, old, FACTS)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "checkpoints" / "best-000001").mkdir(parents=True)
    write_settings(tmp_path, new, replace(FACTS, target_name="other"))
    assert RunSpec.load(tmp_path / "config.yaml").trainer.settings.get("lr") == 1e-2
    assert json.loads((tmp_path / "provenance.json").read_text())["target_name"] == "other"
    assert not (tmp_path / "metrics.jsonl").exists() and not list(
        (tmp_path / "checkpoints").iterdir()
    )


def test_scores_of_a_shipped_drafter_go_below_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is no folder of the user's; a folder of that name is."""
    monkeypatch.chdir(tmp_path)
    assert find_results_folder(Path("smollm2-eagle3")) == Path("runs/smollm2-eagle3")
    (tmp_path / "smollm2-eagle3").mkdir()
    for run in (Path("smollm2-eagle3"), Path("runs/mine"), tmp_path / "other"):
        assert find_results_folder(run) == run


def test_a_second_launch_is_refused(tmp_path: Path) -> None:
    """While a process holds the lock of a run folder, another one names it; afterwards the lock
    is free.
    """
    with (
        lock_run(tmp_path),
        pytest.raises(UserError, match=rf"another launch trains .*\(process {os.getpid()} on"),
    ):
        lock_run(tmp_path, seconds=0.0).__enter__()
    with lock_run(tmp_path, seconds=0.0):
        pass


def test_launches_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    """While a launch holds a folder, the next one takes the next name; a folder in which nothing
    was written is free again.
    """
    names = [tmp_path / "runs" / name for name in ("a", "a-2", "a-3")]
    with claim_new_folder(names) as first:
        with claim_new_folder(names) as second, claim_new_folder(names) as third:
            assert [first, second, third] == names
            (second / "config.yaml").touch()
        with claim_new_folder(names) as again:
            assert again == names[2]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a-2"]
    # A killed launch leaves its lock.
    names[0].mkdir()
    (names[0] / ".lock").touch()
    with claim_new_folder(names) as again:
        assert again == names[0]


def test_a_failed_launch_leaves_nothing(tmp_path: Path) -> None:
    """Folders that a launch has created and not used are removed, others stay as they were."""
    (tmp_path / "own").mkdir()
    for run in (tmp_path / "above" / "run", tmp_path / "own"):
        with pytest.raises(ValueError, match="mistake"), claim_folder(run):
            raise ValueError("mistake")
    assert [*tmp_path.rglob("*")] == [tmp_path / "own"]
    (tmp_path / "file").touch()
    for run, message in (
        (tmp_path / "file", "this is a file"),
        (tmp_path / "file" / "run", "cannot be written"),
    ):
        with pytest.raises(UserError, match=message):
            claim_folder(run).__enter__()


CLAIM = "import sys; from pathlib import Path; from spectrain.runs.lock import claim_folder\n"
CLAIM += "with claim_folder(Path(sys.argv[1])): print('held', flush=True); input()"


def test_a_killed_launch_releases_its_folder(tmp_path: Path) -> None:
    """A folder is refused while another process holds it, with the name of that process, and is
    free once that is killed.
    """
    run = tmp_path / "run"
    command = [sys.executable, "-c", CLAIM, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(
            LockTaken, match=rf"another launch trains in this folder \(process {holder.pid} on"
        ):
            claim_folder(run).__enter__()
        holder.kill()
        holder.wait()
        with claim_folder(run):
            pass


def test_without_locks_a_launch_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a file system without locks a run can begin and go on, and names that another launch
    has created are left alone.
    """
    monkeypatch.setattr("spectrain.files.fcntl.flock", raise_no_locks)
    with claim_folder(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").touch()
    assert "this file system has no locks" in capsys.readouterr().out
    names = [tmp_path / name for name in ("a", "a-2")]
    with claim_new_folder(names) as first, claim_new_folder(names) as second:
        assert [first, second] == names


def raise_no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("resume", [None, "auto"])
def test_two_launches_name_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str | None
) -> None:
    """The second of two launches with run=NAME is refused, although the first has written
    nothing yet.
    """
    monkeypatch.setattr("spectrain.runs.train.LOCK_SECONDS", 0.0)
    settings = {"_target_": "spectrain.training.trainer.Trainer", "resume": resume}
    spec = RunSpec.from_nodes({"trainer": settings, "run": str(tmp_path / "run")})
    with ExitStack() as first, ExitStack() as second:
        choose_folder(spec, first)
        with pytest.raises(UserError, match="another launch trains in this folder"):
            choose_folder(spec, second)
        first.close()
        assert choose_folder(spec, second) == tmp_path / "run"


def test_checkpoints_without_settings_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows with which settings they were trained."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    monkeypatch.setattr("spectrain.runs.train.set_aside_damaged", lambda run: None)
    monkeypatch.setattr("spectrain.runs.train.latest_checkpoint", lambda run: checkpoint)
    settings = {"_target_": "spectrain.training.trainer.Trainer", "resume": "auto"}
    spec = RunSpec.from_nodes({"trainer": settings, "run": str(tmp_path / "run")})
    with ExitStack() as stack, pytest.raises(UserError, match=r"config\.yaml: .*step-000004"):
        choose_folder(spec, stack)
    assert checkpoint.is_dir()


def test_the_recorded_command_can_be_typed_again() -> None:
    assert (
        describe_command(["python", "/bin/spectrain", "train", "target=tiny"])
        == "spectrain train target=tiny"
    )
    assert (
        describe_command(["python", "-m", "spectrain", "train", "target=tiny"])
        == "spectrain train target=tiny"
    )
    assert (
        describe_command(["python", "-u", "-m", "spectrain", "train", "target=tiny"])
        == "spectrain train target=tiny"
    )
    assert (
        describe_command(["python", "-m", "lab.benchmarks.axes", "rows=2"])
        == "python -m lab.benchmarks.axes rows=2"
    )
    launched = ["--nproc-per-node", "2", "-m", "spectrain", "train", "target=tiny"]
    assert describe_command(["python", "/bin/torchrun", *launched]) == " ".join(
        ["torchrun", *launched]
    )


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_launcher_is_part_of_the_recorded_command(
    monkeypatch: pytest.MonkeyPatch, is_launched: bool
) -> None:
    """The command of the parent is recorded where it is a launcher, and otherwise the own one."""
    command = [
        sys.executable,
        "-c",
        "print(flush=True); input()",
        *(["torchrun"] if is_launched else []),
        "train",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # Linux shows an empty command for a moment after the start
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        # a process that a worker started inherits it
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        assert read_launch() == (command if is_launched else sys.orig_argv)
        parent.communicate(b"\n")


def test_a_run_that_does_not_exist_names_those_that_may_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand beside it, or its name is that of a run in runs/."""
    monkeypatch.chdir(tmp_path)
    drafter = tmp_path / "runs" / "eagle3-tiny" / "drafter"
    drafter.mkdir(parents=True)
    (drafter / "config.json").touch()
    (drafter / "model.safetensors").touch()
    (tmp_path / "runs" / "empty").mkdir()
    for name in ("eagle3-tiny", "runs/egle3-tiny"):
        with pytest.raises(UserError, match="the nearest is runs/eagle3-tiny$"):
            require_drafter_directory("run", name)
    with pytest.raises(UserError, match="or a drafter directory$"):
        require_drafter_directory("run", "runs/empty")
