"""What trackers are given and keep: read back from their own offline files, and equal to
metrics.jsonl and summary.json.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module

from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import UserError
from spectrain.eval.columns import tracked_comparison, tracked_systems, tracked_values
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.runs import tracking
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.runs.score import evaluate
from spectrain.runs.tracking import TensorBoard, Wandb, flatten
from spectrain.runs.train import train_and_score
from spectrain.training.checkpoints import checkpoint_step, latest_checkpoint
from spectrain.training.metrics import MetricsFile, Tracker, read_last_step, track_run
from spectrain.training.trainer import Trainer
from tests.runs.wandb_file import read_records

CONFIG = {
    "target": {"_target_": "spectrain.models.loading.load_tiny"},
    "drafter": {"_target_": "spectrain.drafters.eagle3.Eagle3", "ttt_steps": 2},
    "recipe_name": "eagle3",
}
LOSSLESS = {"rule": "greedy", "checked": 2, "identical": 2}
SYSTEM = {
    "label": "drafter, chain",
    "acceptance_length": {"pooled": 1.5, "ci95": [1.25, 1.75]},
    "speedup": {"ratio": 1.2, "ci95": None, "predicted": 1.3},
    "tokens_per_second": {"autoregressive": 50.0, "drafted": 60.0},
    "lossless": LOSSLESS,
}
SUMMARY: dict[str, Any] = {
    **SYSTEM,
    "acceptance_by_depth": [0.4, 0.25],
    "compared": {"ngram": {**SYSTEM, "label": "n-gram lookup", "lossless": None}},
    "setting": {"prompts": 2},
}
COMPARISON: dict[str, Any] = {
    "setting": {},
    "rows": [
        {
            "name": name,
            "label": name,
            "family": name,
            "trained": True,
            "systems": [{**SYSTEM, "label": "chain"}, {**SYSTEM, "label": "tree"}],
            "batched": None,
            "trained_parameters": 7,
            "extra_memory": 28,
            "training_seconds": 1.5,
            "training_tokens": 64,
            "lossless_to": "tiny",
        }
        for name in ("eagle3", "medusa1")
    ],
    "recommendations": [{"goal": "latency", "choice": "eagle3", "because": "it is fastest"}],
    "caveats": ["2 prompts"],
}
HEADLINE = {
    "acceptance_length": 1.5,
    "acceptance_length_low": 1.25,
    "acceptance_length_high": 1.75,
    "speedup": 1.2,
    "speedup_predicted": 1.3,
    "tokens_per_second": 60.0,
    "tokens_per_second_autoregressive": 50.0,
    "identical": 2,
    "checked": 2,
}
DEPTHS = {"acceptance_at_depth/1": 0.4, "acceptance_at_depth/2": 0.25}

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


def wandb_records(run: Path) -> list[Any]:
    """Return every record of a run folder's offline files, oldest first."""
    import wandb

    wandb.teardown()  # as at exit: its service may still be writing
    files = sorted(
        run.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns
    )
    return [record for file in files for record in read_records(file)]


def parse_items(entries: Any) -> dict[str, Any]:
    return {
        entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries
    }


def wandb_curves(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the history that belong to training, without what W&B adds."""
    rows = [
        parse_items(record.history.item)
        for record in wandb_records(run)
        if record.HasField("history")
    ]
    assert all(row["_step"] == row["step"] for row in rows if "loss" in row)
    return [
        {k: v for k, v in row.items() if not k.startswith(("_", "eval/"))}
        for row in rows
        if "loss" in row
    ]


def wandb_summary(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for record in wandb_records(run):
        if record.HasField("summary"):
            summary |= parse_items(record.summary.update)
    return summary


def wandb_artifacts(run: Path) -> dict[str, set[str]]:
    """Return the names of the files of all artifacts by type, without W&B's own artifacts for
    tables.
    """
    artifacts: dict[str, set[str]] = {}
    for record in wandb_records(run):
        if record.HasField("artifact") and record.artifact.type != "run_table":
            contents = record.artifact.manifest.contents
            # a run folder holds all of its run
            assert all(Path(entry.local_path).is_relative_to(run) for entry in contents)
            artifacts.setdefault(record.artifact.type, set()).update(
                entry.path for entry in contents
            )
    return artifacts


def wandb_table(run: Path, name: str) -> list[dict[str, Any]]:
    (file,) = run.glob(f"wandb/offline-run-*/files/media/table/{name}_*.table.json")
    table = json.loads(file.read_text())
    return [dict(zip(table["columns"], row)) for row in table["data"]]


def load_events(results_folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(results_folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def read_scalars(results_folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = load_events(results_folder)
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def read_texts(results_folder: Path) -> dict[str, str]:
    events = load_events(results_folder)
    tags = events.Tags()["tensors"]
    return {
        tag.removesuffix("/text_summary"): events.Tensors(tag)[-1]
        .tensor_proto.string_val[0]
        .decode()
        for tag in tags
    }


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl as trackers get it."""
    return [flatten(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


class ProcessKilled(Exception):
    """Stands for the end of a process."""


def train_drafter(
    target: Target,
    run: Path,
    tracker: Tracker,
    die_at: int | None = None,
    finish: Callable[[Tracker], None] = lambda tracker: None,
) -> None:
    """Train and track six steps with a checkpoint every second one; `die_at` ends it there,
    `finish` comes last.
    """

    def on_step(step: int) -> None:
        if step == die_at:
            raise ProcessKilled

    torch.manual_seed(0)
    rows = torch.randint(3, 250, (6, 16)).tolist()
    dataset = Dataset(
        [Example(row, [position >= 6 for position in range(16)]) for row in rows], len(rows), 0, 0
    )
    drafter = Eagle3(target, ttt_steps=2, vocab_size=256)
    drafter.prepare(target, torch.arange(target.head.vocab_size, 0, -1))
    checkpoint = latest_checkpoint(run)
    trainer = Trainer(lr=1e-3, max_steps=6, save_every=2, log_every=1, batch_tokens=32)
    with track_run(
        tracker, run, CONFIG, step=0 if checkpoint is None else checkpoint_step(checkpoint)
    ):
        trainer.fit(drafter, target, dataset, LiveSource(), run, tracker, on_step=on_step)
        finish(tracker)


@pytest.fixture
def results_folder(tmp_path: Path) -> Path:
    """Write what an evaluation or a comparison leaves behind."""
    results_folder = tmp_path / "heldout"
    results_folder.mkdir()
    (results_folder / "summary.json").write_text(json.dumps(SUMMARY))
    (results_folder / "report.html").write_text("<!doctype html><p>A report</p>")
    return results_folder


def test_wandb_holds_what_metrics_and_summary_hold(
    shallow: Target, tmp_path: Path, results_folder: Path
) -> None:
    """Every number of metrics.jsonl and every setting is in the offline file, exactly; so is
    what an evaluation found.
    """
    run = tmp_path / "run"
    train_drafter(
        shallow,
        run,
        Wandb(),
        finish=lambda tracker: tracker.log_evaluation(
            SUMMARY, tracked_systems(SUMMARY), results_folder
        ),
    )
    assert len(read_metrics(run)) == 6 and wandb_curves(run) == read_metrics(run)
    (started,) = [record.run for record in wandb_records(run) if record.HasField("run")]
    assert {k: v for k, v in parse_items(started.config.update).items() if k != "_wandb"} == CONFIG
    assert (started.run_group, started.job_type, started.display_name) == (
        "tiny/eagle3",
        "train",
        "run",
    )
    assert set(started.tags) == {"tiny", "eagle3"}
    summary = wandb_summary(run)
    for name, value in {**HEADLINE, **DEPTHS}.items():
        assert summary[f"eval/heldout/{name}"] == value
    drafter, ngram = wandb_table(run, "eval/heldout/systems")
    assert drafter == {"system": "drafter", "label": "drafter, chain", **HEADLINE, **DEPTHS}
    assert ngram["system"] == "ngram" and ngram["checked"] is None and ngram["speedup"] == 1.2
    (page,) = run.glob("wandb/offline-run-*/files/media/html/eval/heldout/report_*.html")
    assert page.read_text() == (results_folder / "report.html").read_text()
    assert wandb_artifacts(run) == {"evaluation": {"summary.json", "report.html"}}
    (exit_record,) = [record.exit for record in wandb_records(run) if record.HasField("exit")]
    assert exit_record.exit_code == 0


def test_wandb_goes_on_in_the_same_run(shallow: Target, tmp_path: Path) -> None:
    """A resumed run keeps its id and shows every step once; weights are sent if the settings say
    so.
    """
    run = tmp_path / "run"
    with pytest.raises(ProcessKilled):
        train_drafter(shallow, run, Wandb(checkpoints=True), die_at=5)
    (exit_code,) = [
        record.exit.exit_code for record in wandb_records(run) if record.HasField("exit")
    ]
    assert exit_code == 1
    (run / "drafter").mkdir()
    (run / "drafter" / "config.json").write_text("{}")
    (run / "drafter" / "model.safetensors").write_bytes(b"weights")
    train_drafter(
        shallow,
        run,
        Wandb(checkpoints=True),
        finish=lambda tracker: tracker.log_drafter(run / "drafter"),
    )
    run_id = json.loads((run / "tracker.json").read_text())["train"]
    records = wandb_records(run)
    assert {record.run.run_id for record in records if record.HasField("run")} == {run_id}
    assert [record.exit.exit_code for record in records if record.HasField("exit")][-1] == 0
    for key in ("step", "loss", "lr", "agreement/1"):
        assert [row[key] for row in wandb_curves(run)] == [row[key] for row in read_metrics(run)]
    sent = wandb_artifacts(run)
    assert sent["drafter"] == {"config.json", "model.safetensors"}
    aliases = [
        list(record.artifact.aliases) for record in records if record.artifact.type == "checkpoint"
    ]
    assert [name for names in aliases for name in names if name != "latest"] == ["step-2", "step-4"]
    assert sent["checkpoint"] == {"model.safetensors", "optimizer.safetensors", "progress.json"}


def test_wandb_shows_a_comparison_around_its_runs(tmp_path: Path, results_folder: Path) -> None:
    """A comparison stays open while its families train; one row for each way of drafting, the
    report and the advice.
    """
    outer = Wandb()
    inner = Wandb()
    runs = tmp_path / "all"
    outer.start_run(runs, {"target": CONFIG["target"]}, "compare")
    inner.start_run(runs / "eagle3", CONFIG)
    inner.log_metrics({"loss": 0.5}, 1)
    inner.finish_run()
    results_folder = results_folder.rename(runs / "result")
    (results_folder / "comparison.json").write_text(json.dumps(COMPARISON))
    outer.log_comparison(COMPARISON, tracked_comparison(COMPARISON), results_folder)
    outer.finish_run()
    (started,) = [record.run for record in wandb_records(runs) if record.HasField("run")]
    assert (started.run_group, started.job_type) == ("tiny", "compare")
    assert wandb_curves(runs / "eagle3") == [{"step": 1, "loss": 0.5}]
    rows = wandb_table(runs, "comparison")
    assert [(row["name"], row["drafting"]) for row in rows] == [
        (name, drafting) for name in ("eagle3", "medusa1") for drafting in ("chain", "tree")
    ]
    assert all(row[key] == value for row in rows for key, value in HEADLINE.items())
    assert all(row["trained_parameters"] == 7 and row["lossless_to"] == "tiny" for row in rows)
    assert wandb_table(runs, "recommendations") == COMPARISON["recommendations"]
    assert wandb_summary(runs)["recommended/latency"] == "eagle3"
    expected = {"comparison.json", "report.html", "summary.json", "comparison.table.json"}
    assert wandb_artifacts(runs) == {"comparison": expected}


def test_wandb_runs_of_the_same_name_differ(tmp_path: Path) -> None:
    """Two folders of one name have runs of their own; so has every evaluation, while training
    and comparison keep theirs.
    """
    first, second = (
        Wandb()._identify_run(tmp_path / parent / "eagle3-tiny", "train") for parent in "ab"
    )
    again = Wandb()._identify_run(tmp_path / "a" / "eagle3-tiny", "train")
    assert first[0] != second[0] and not first[1] and again == (first[0], True)
    scores = [Wandb()._identify_run(tmp_path / "a" / "eagle3-tiny", "eval") for _ in range(2)]
    assert len({first[0], scores[0][0], scores[1][0]}) == 3 and not scores[1][1]


@pytest.mark.parametrize(
    "mode, machine, key, wandb_mode, expected",
    [
        (None, None, None, "online", "offline"),
        (None, "github.com", None, "online", "offline"),  # a key for something else
        (None, "api.wandb.ai", None, "online", "online"),
        (None, None, "KEY", "online", "online"),
        (None, None, "KEY", "offline", "offline"),  # wandb offline, or WANDB_MODE
        ("offline", None, "KEY", "online", "offline"),
        ("online", None, None, "offline", "offline"),  # it would have to ask
        ("disabled", None, None, "online", "disabled"),
    ],
)
def test_wandb_is_online_only_with_an_account(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
    machine: str | None,
    key: str | None,
    wandb_mode: str,
    expected: str,
) -> None:
    """Settings come before the environment, and nobody is asked for a key; a server that is away
    means offline.
    """
    if machine:
        (tmp_path / "netrc").write_text(f"machine {machine} login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    settings = SimpleNamespace(
        mode=wandb_mode, api_key=key, identity_token_file=None, base_url="https://api.wandb.ai"
    )
    monkeypatch.setattr("wandb.setup", lambda: SimpleNamespace(settings=settings))
    monkeypatch.setattr(httpx, "get", lambda url, timeout: None)
    assert Wandb(mode=mode)._choose_mode() == expected

    def refuse_connection(url: str, timeout: float) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "get", refuse_connection)
    assert Wandb(mode=mode)._choose_mode() == ("offline" if expected == "online" else expected)


@pytest.mark.sweep(1)
@needs_tensorboard
@pytest.mark.parametrize("die_at", [None, 1, 4, 5])
def test_tensorboard_equals_metrics(shallow: Target, tmp_path: Path, die_at: int | None) -> None:
    """Every number of metrics.jsonl is a point of a curve, in float32, and after a resume no
    step appears twice.
    """
    run = tmp_path / "run"
    if die_at is not None:
        with pytest.raises(ProcessKilled):
            train_drafter(shallow, run, TensorBoard(), die_at)
    train_drafter(shallow, run, TensorBoard())
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(run):
        for name, value in row.items():
            if name != "step" and value is not None:
                expected.setdefault(name, []).append((row["step"], float(np.float32(value))))
    assert len(expected["loss"]) == 6 and read_scalars(run / "tensorboard") == expected
    assert (
        "ttt_steps: 2" in read_texts(run / "tensorboard")["config"]
        and read_texts(run / "tensorboard")["status"] == "finished"
    )


@needs_tensorboard
def test_tensorboard_shows_scores_and_comparisons(tmp_path: Path, results_folder: Path) -> None:
    """What an evaluation or a comparison found is scalars and tables, in a folder of its own."""
    for _ in range(2):
        tracker = TensorBoard()
        tracker.start_run(tmp_path, CONFIG, "eval")
        tracker.log_evaluation(SUMMARY, tracked_systems(SUMMARY), results_folder)
        tracker.finish_run()
    for number in (1, 2):
        values = {
            tag: points[0][1]
            for tag, points in read_scalars(tmp_path / "tensorboard" / f"eval-{number}").items()
        }
        expected = {**HEADLINE, **DEPTHS}
        assert values == {
            f"eval/heldout/{name}": float(np.float32(value)) for name, value in expected.items()
        }
    table = read_texts(tmp_path / "tensorboard" / "eval-1")["eval/heldout/systems"].splitlines()
    assert table[0].startswith("| system | label | acceptance_length |") and table[3].startswith(
        "| ngram | n-gram lookup | 1.5 |"
    )
    tracker = TensorBoard()
    tracker.start_run(tmp_path, {}, "compare")
    tracker.log_comparison(COMPARISON, tracked_comparison(COMPARISON), results_folder)
    tracker.finish_run(failed=True)
    texts = read_texts(tmp_path / "tensorboard" / "compare-1")
    assert (
        len(texts["comparison"].splitlines()) == 2 + 4
        and "it is fastest" in texts["recommendations"]
    )
    assert texts["caveats"] == "- 2 prompts" and texts["status"] == "failed"


@pytest.mark.parametrize("kind, package", [(Wandb, "wandb"), (TensorBoard, "tensorboard")])
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: Any, package: str
) -> None:
    """A tracker without its package says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=rf"tracker={package}: .*pip install 'spectrain\[{package}\]'"
    ):
        kind()


def test_nothing_measured_leaves_a_gap() -> None:
    """A system without interval, identity or speed keeps what it has; nested metrics become
    curves of their own.
    """
    summary = {
        "acceptance_length": {"pooled": 1.0, "ci95": None},
        "speedup": {"ratio": 0.5},
        "lossless": None,
    }
    assert tracked_values(summary) == {"acceptance_length": 1.0, "speedup": 0.5}
    flat = flatten(
        {"loss": 1.0, "agreement": [0.5, 0.25], "time_share": {"target": 0.4}, "a": {"b": [1]}}
    )
    assert flat == {
        "loss": 1.0,
        "agreement/1": 0.5,
        "agreement/2": 0.25,
        "time_share/target": 0.4,
        "a/b/1": 1,
    }


def test_later_and_broken_lines_are_dropped(tmp_path: Path) -> None:
    """Steps that will be done again, and a line that a kill cut short, go; earlier ones stay."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n{"step": 3, "lo')
    assert read_last_step(path) == 2 and read_last_step(tmp_path / "none.jsonl") == 0
    MetricsFile(path, 1).write({"step": 2, "loss": 0.5})
    assert path.read_text() == '{"step": 1, "loss": 2}\n{"step": 2, "loss": 0.5}\n'


class RecordingTracker(Tracker):
    """Records its calls."""

    calls: ClassVar[list[Any]] = []

    def start_run(
        self, run: Path, config: dict[str, Any], kind: str = "train", step: int = 0
    ) -> None:
        self.calls.append(("start", kind, step))

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.calls.append(("log", step))

    def log_evaluation(self, summary: dict[str, Any], rows: Any, folder: Path) -> None:
        assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
        self.calls.append(("scored", folder.name))

    def log_checkpoint(self, path: Path, step: int) -> None:
        assert (path / "model.safetensors").exists()
        self.calls.append(("checkpoint", step))

    def log_drafter(self, path: Path) -> None:
        assert (path / "model.safetensors").exists()
        self.calls.append("drafter")

    def finish_run(self, failed: bool = False) -> None:
        self.calls.append(("finish", failed))


def test_a_run_tells_its_tracker_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training, checkpoints, drafter and score reach the same tracker; an evaluation opens its
    own; a failure is reported.
    """
    monkeypatch.setattr(tracking, "TensorBoard", RecordingTracker)
    monkeypatch.setattr(RecordingTracker, "calls", calls := [])
    quick = [
        "++eval.baselines=[]",
        "++eval.oracle=false",
        "++eval.report=false",
        "++eval.repeats=1",
    ]
    scoring = [
        "++eval.limit=1",
        "++eval.max_new_tokens=4",
        *quick,
        "++data.held_out=0",
        "++drafter.vocab_size=64",
    ]
    words = [
        "recipe=medusa1",
        "target=tiny",
        "tracker=tensorboard",
        f"run={tmp_path / 'run'}",
        "++data.limit=4",
        "++trainer.max_steps=2",
        "++trainer.save_every=1",
        "++trainer.log_every=1",
        "tree=chain",
        *scoring,
    ]
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        spec = RunSpec.from_config(compose("train", overrides=words))
        run = train_and_score(spec)
        training_calls = [
            ("start", "train", 0),
            ("log", 1),
            ("checkpoint", 1),
            ("log", 2),
            "drafter",
        ]
        assert calls == [*training_calls, ("scored", "heldout"), ("finish", False)]
        calls.clear()
        again, _ = resolve_eval_spec(
            compose("eval", overrides=[f"run={run}", "tracker=tensorboard", "++eval.name=again"])
        )
        evaluate(again, run)
        assert calls == [("start", "eval", 0), ("scored", "again"), ("finish", False)]
    calls.clear()
    shutil.rmtree(run / "drafter")
    monkeypatch.setattr(Trainer, "fit", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_and_score(spec.with_settings("trainer", resume="auto"))
    assert calls == [("start", "train", 1), ("finish", True)]


class StuckServer(BaseHTTPRequestHandler):
    """A W&B server that opens runs and then answers nothing."""

    def do_GET(self) -> None:
        self.send_json({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        operation = json.loads(body).get("operationName") if body[:1] == b"{" else None
        project = {"id": "p", "name": "spectrain", "entity": {"id": "e", "name": "me"}}
        bucket = {
            "id": "b",
            "name": "run",
            "displayName": "run",
            "config": "{}",
            "project": project,
            "historyLineCount": 0,
        }
        answers: dict[str | None, Any] = {
            "Viewer": {
                "viewer": {
                    "id": "u",
                    "entity": "me",
                    "username": "me",
                    "flags": "{}",
                    "teams": {"edges": []},
                }
            },
            "ServerFeaturesQuery": {"serverInfo": {"features": []}},
            "UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": True}},
        }
        if operation in answers:
            self.send_json({"data": answers[operation]})
        else:
            threading.Event().wait()

    def send_json(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.slow
def test_wandb_never_hangs_at_exit(tmp_path: Path) -> None:
    """With a server that stops answering, a run is tracked, `patience` goes by, and the process
    ends as it should.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), StuckServer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "import sys; from pathlib import Path; from spectrain.runs.tracking import Wandb\nfrom "
        "spectrain.training.metrics import track_run\nwith track_run(Wandb(patience=20), "
        "Path(sys.argv[1]), {}) as tracker: tracker.log_metrics({'loss': 1.0}, 1)"
    )
    account = {
        "WANDB_MODE": "online",
        "WANDB_API_KEY": "a" * 40,
        "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
    }
    try:
        process = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, **account},
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        server.shutdown()
    assert process.returncode == 0 and "Timed out finishing run" in process.stderr, process.stderr
    (file,) = tmp_path.glob("wandb/run-*/*.wandb")
    assert [
        parse_items(record.history.item)["loss"]
        for record in read_records(file)
        if record.HasField("history")
    ] == [1.0]


@pytest.mark.parametrize("content", ['{"train": 3}', '{"train": "a", "last_step": "x"}', "[]"])
def test_a_damaged_file_of_ids_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tracker.json").write_text(content)
    with pytest.raises(UserError, match=r"tracker\.json: it holds no"):
        Wandb()._identify_run(tmp_path, "train")
