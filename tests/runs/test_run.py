"""Complete runs on the tiny target: what they leave, how they go on, and how they are scored
again.
"""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from spectrain.cli.main import dispatch_command, main
from spectrain.trees.base import RoundReason
from tests import commands
from tests.installed import load_cases

QUICK = [
    "target=tiny",
    "recipe=eagle3",
    "drafter.vocab_size=256",
    "drafter.ttt_steps=3",
    "data.limit=12",
    "data.max_length=64",
    "eval.limit=2",
    "eval.max_new_tokens=8",
    "eval.calibration_limit=1",
    "eval.repeats=1",
    "trainer.log_every=1",
]


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Return the exit status of `spectrain ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["spectrain", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a short, complete run."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    argv = sys.argv
    try:
        dispatch_command(
            ["train", *QUICK, "trainer.max_steps=4", "trainer.save_every=2", f"run={run}"]
        )
    finally:
        sys.argv = argv
    return run


# Cases of installed packages.
CASES = load_cases(__name__)


def test_what_has_nothing_to_train_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a drafter is refused by the name that the command line knows, before a folder is
    made.
    """
    for name in ("ngram", *CASES.get("test_what_has_nothing_to_train_leaves_nothing", ())):
        run = tmp_path / name
        assert (
            run_command(
                monkeypatch, "train", f"drafter={name}", "target=tiny", "data.limit=4", f"run={run}"
            )
            == 2
        )
        stderr = capsys.readouterr().err
        assert (
            f"drafter={name}: it has nothing to train; score it with spectrain eval drafter={name}"
            in stderr
        )
        assert not run.exists()


def test_a_run_leaves_what_the_readme_says(finished_run: Path) -> None:
    """A run leaves its configuration, provenance, metrics, a checkpoint, the drafter and its
    score, each readable.
    """
    for name in (
        "config.yaml",
        "provenance.json",
        "metrics.jsonl",
        "checkpoints/step-000002/progress.json",
        "drafter/config.json",
        "drafter/model.safetensors",
    ):
        assert (finished_run / name).exists(), name
    assert [
        json.loads(line)["step"]
        for line in (finished_run / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 4]
    summary = json.loads((finished_run / "eval/heldout/summary.json").read_text())
    for key in (
        "acceptance_length",
        "acceptance_by_depth",
        "tokens_per_second",
        "speedup",
        "time_share",
        "lossless",
        "by_category",
        "setting",
    ):
        assert key in summary
    assert set(summary["compared"]) == {"own", "auto", "copies", "retrieval", "untrained", "ngram"}
    assert (
        summary["setting"]["tree"]["name"] == "chain"
        and summary["compared"]["own"]["tree"]["name"] == "eagle2"
    )
    auto = summary["compared"]["auto"]
    rounds = pq.read_table(finished_run / "eval/heldout/rounds.parquet").to_pylist()
    depths = [row["depth"] for row in rounds if row["system"] == "auto"]
    assert len(depths) == auto["rounds"]
    assert sum(depth > 0 for depth in depths) == auto["drafted_rounds"]
    assert sum(auto["tree"]["undrafted_because"].values()) == depths.count(0)
    assert auto["tree"]["undrafted_share"] == pytest.approx(depths.count(0) / len(depths), abs=1e-4)
    reasons: dict[str, dict[str, Any]] = {row["system"]: {} for row in rounds}
    for row in rounds:
        reasons[row["system"]][row["reason"]] = row["gain"]
    assert None not in reasons["auto"] and reasons["auto"].keys() <= {*get_args(RoundReason)}
    assert reasons["drafter"] == {"always": None}
    assert (
        set(summary["acceptance"]) == {"chain", "tree"}
        and summary["acceptance"]["tree"]["tree"]["budget"] == 16
    )
    for entry in summary["acceptance"].values():
        assert entry["gain"]["over"] == "start" and "untrained" in entry["drafters"]
        before, after = (entry["drafters"][name] for name in (entry["gain"]["over"], "drafter"))
        assert after["rounds"] == after["drafted_rounds"] > 0
        assert entry["gain"]["ratio"] == pytest.approx(after["pooled"] / before["pooled"], abs=1e-3)
    assert (
        summary["acceptance"]["chain"]["drafters"]["drafter"]["pooled"]
        == summary["acceptance_length"]["pooled"]
    )
    for system in (summary, *summary["compared"].values()):
        assert system["lossless"]["identical"] == system["lossless"]["checked"] == 2
    assert summary["setting"]["target"] == "tiny" and summary["setting"]["recipe"] == "eagle3"
    assert (
        not list(finished_run.rglob("*.bin"))
        + list(finished_run.rglob("*.pt"))
        + list(finished_run.rglob("*.pkl"))
    )


def test_a_finished_run_says_so(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """resume=auto on a finished run does nothing and exits with 0; without it the folder is
    refused.
    """
    before = (finished_run / "drafter/model.safetensors").stat().st_mtime_ns
    settings = [*QUICK, "trainer.max_steps=4", f"run={finished_run}"]
    assert run_command(monkeypatch, "train", *settings, "trainer.resume=auto") == 0
    assert "finished" in capsys.readouterr().out
    assert run_command(monkeypatch, "train", *settings) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert (finished_run / "drafter/model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
def test_eval_of_a_run_and_of_a_drafter_directory_agree(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overrides set other trees, rules and prompts; the same drafter scores the same from either
    folder.
    """
    summaries = []
    for folder in (finished_run, finished_run / "drafter"):
        shared = [
            f"run={folder}",
            "tree=chain",
            "tree.depth=2",
            "eval.name=again",
            "eval.limit=2",
            "eval.max_new_tokens=12",
        ]
        assert (
            run_command(
                monkeypatch, "eval", *shared, "acceptance=match", "acceptance.temperature=0.7"
            )
            == 0
        )
        summaries.append(json.loads((folder / "eval/again/summary.json").read_text()))
    # by another rule: the earlier score is kept beside the new one
    assert run_command(monkeypatch, "eval", *shared) == 0
    earlier, new = (
        json.loads((finished_run / f"drafter/eval/{name}/summary.json").read_text())
        for name in ("again.1", "again")
    )
    assert earlier == summaries[1] and new["setting"]["rule"] == "greedy"
    assert summaries[0]["acceptance_length"] == summaries[1]["acceptance_length"]
    assert summaries[0]["setting"]["tree"] == {
        "name": "chain",
        "depth": 2,
        "budget": 3,
        "children": "deterministic",
    }
    assert (
        summaries[0]["lossless"]["rule"] == "match" and summaries[0]["lossless"]["identical"] == 2
    )


def test_init_goes_on_from_another_drafter(
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """drafter.init takes weights and vocabulary from a directory. The command may set what weights
    do not depend on; a setting that conflicts with them is refused."""
    shared = [
        "target=tiny",
        "recipe=eagle3",
        "data.limit=12",
        "data.max_length=64",
        "data.held_out=0",
        "eval=none",
        "trainer.max_steps=1",
        "trainer.lr=1e-30",
        f"drafter.init={finished_run}",
    ]
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    rope = (
        "drafter.architecture={rope_parameters: {rope_type: linear, rope_theta: 10000.0, "
        "factor: 8.0}}"
    )
    assert (
        run_command(
            monkeypatch, "train", *shared, "drafter.window=16", rope, f"run={tmp_path / 'next'}"
        )
        == 0
    )
    old, new = (
        load_file(run / "drafter/model.safetensors") for run in (finished_run, tmp_path / "next")
    )
    assert all(torch.equal(old[key], new[key]) for key in old)
    saved = json.loads((tmp_path / "next/drafter/config.json").read_text())["drafter"]
    assert saved["window"] == 16 and saved["architecture"] == {"rope_parameters": scaled}
    capsys.readouterr()
    for setting in ("drafter.vocab_size=128", "drafter.architecture.head_dim=16"):
        words = [*shared, f"+{setting}" if "architecture" in setting else setting]
        assert run_command(monkeypatch, "train", *words, f"run={tmp_path / 'other'}") == 2
        assert setting in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_resuming_with_other_settings_is_refused(
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that began with one learning rate does not silently go on with another."""
    settings = [
        *QUICK,
        "eval=none",
        "data.held_out=0",
        "trainer.save_every=1",
        "trainer.max_steps=2",
        f"run={tmp_path / 'run'}",
    ]
    assert run_command(monkeypatch, "train", *settings) == 0
    (tmp_path / "run/drafter/config.json").unlink()
    capsys.readouterr()
    assert (
        run_command(monkeypatch, "train", *settings, "trainer.resume=auto", "trainer.lr=0.5") == 2
    )
    assert "trainer.lr=0.5" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_process_goes_on(tmp_path: Path) -> None:
    """SIGKILL after the first checkpoint, then resume: the same drafter as a run that nobody
    disturbed.
    """
    settings = [*QUICK, "eval=none", "trainer.max_steps=40", "trainer.save_every=5"]

    def start_training(run: Path, *more: str) -> commands.Command:
        return commands.start(["train", *settings, f"run={run}", *more])

    assert start_training(tmp_path / "whole").wait()[0] == 0
    process = start_training(tmp_path / "cut")
    while not (tmp_path / "cut/checkpoints/step-000005").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cut/drafter").exists()
    assert start_training(tmp_path / "cut", "trainer.resume=auto").wait()[0] == 0
    full, cut = (
        load_file(tmp_path / name / "drafter/model.safetensors") for name in ("whole", "cut")
    )
    for key, value in full.items():
        # features are captured in other batches
        torch.testing.assert_close(value, cut[key], rtol=1e-3, atol=1e-5)
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "cut/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 41))
