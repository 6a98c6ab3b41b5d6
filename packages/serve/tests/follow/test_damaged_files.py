"""Files of follow that somebody has damaged: one sentence that names the file and the remedy,
and never a traceback.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain_serve.engines.own import OwnServer
from spectrain_serve.follow.follower import TrafficFollower
from spectrain_serve.follow.ledger import Ledger
from spectrain_serve.follow.logs import RequestLogs
from spectrain_serve.follow.proxy import Recorder
from spectrain_serve.follow.reservoir import write_conversations
from spectrain_serve.follow.settings import FollowSettings, ListenSettings
from spectrain_serve.follow.state import ActiveDrafter, FollowFolder, hash_weights
from spectrain_serve.follow.status import format_status, status_command
from spectrain_serve.follow.traffic import RecordedConversation
from spectrain_serve.servers.settings import EngineSettings

DAMAGES = [
    b"", b"{", b"[1]", b"{}", b"null", b"5", b'"x"', b"\xff\xfd", b"\x00" * 40, b"[" * 20_000,
    b'{"a": ' * 20_000, b"NaN",
    b'{"time": NaN, "event": "x"}', b'{"time": 1e400, "event": "x"}',
    b'{"time": "x", "event": "x"}', b'{"event": "x"}',
    b'{"time": 1, "event": 5}', b'{"time": -1, "event": "x"}', b'{"time": true, "event": "x"}',
    b"9" * 5000,
    b'{"path": "a", "digest": "b", "since": "x"}', b'{"path": ["a"], "digest": "b", "since": 1}',
    b'{"5": {"offset": -1}}',
    b'{"x": {"offset": 1}}', b'{"5": {"offset": 1, "more": 1}}', b'{"5": [1]}',
    b'{"path": "\\ud800", "digest": "b", "since": 1}',
]  # fmt: skip


def make_folder(root: Path) -> FollowFolder:
    """Return the folder of a run that was followed."""
    (root / "drafter").mkdir()
    for name in ("config.json", "model.safetensors"):
        (root / "drafter" / name).write_text(name)
    folder = FollowFolder(root)
    folder.root.mkdir()
    folder.ledger.write_text('{"time": 1, "event": "started"}\n')
    write_conversations(folder.recorded, [RecordedConversation("a", 1.0, {"prompt": "p"}, "x")])
    return folder


def load_all(folder: FollowFolder) -> TrafficFollower:
    """Read every file, as the commands do at their start."""
    format_status(folder)
    first = folder.run / "drafter"
    with folder.lock():
        active = folder.read_active(first)
    logs = RequestLogs(ListenSettings(), folder.run, folder.logs)
    logs.load_positions()
    swapper: Any = None
    settings = FollowSettings(old=str(folder.old) if folder.old.exists() else None)
    follower = TrafficFollower(
        RunSpec(), settings, folder, OwnServer(EngineSettings()), Recorder(1.0), swapper, active
    )
    follower.load()
    follower.save()
    return follower


SINGLE = ("status.json", "serving.json", "clock.json", "logs.json")
LINES = ("ledger.jsonl", "recorded.jsonl", "old.jsonl")


@pytest.mark.parametrize("name", SINGLE)
def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path)
    # No position yet, and a key of a later version.
    accepted = [b"{}", b'{"5": {"offset": 1, "more": 1}}'] if name == "logs.json" else []
    for damage in DAMAGES:
        (folder.root / name).write_bytes(damage)
        if damage in accepted:
            continue
        with pytest.raises(UserError) as raised:
            load_all(folder)
        message = str(raised.value)
        assert (
            message.startswith(f"{folder.root / name}: ")
            and "; delete it" in message
            and "\n" not in message
        )
        assert len(message) < 400


@pytest.mark.parametrize("name", LINES)
def test_damaged_lines_are_left_out_and_named(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path)
    file = folder.root / name
    intact = {"ledger.jsonl": folder.ledger}.get(name, folder.recorded).read_bytes()
    for damage in DAMAGES:
        file.write_bytes(damage + b"\n" + intact)
        follower = load_all(folder)
        assert len(follower.old if name == "old.jsonl" else follower.reservoir) == 1
        reported = capsys.readouterr().err
        if damage:
            assert reported.startswith(f"{file}: line 1 is left out") and reported.count("\n") == 1
        (folder.root / "status.json").unlink()


SPECIAL: list[Callable[[Path], None]] = [os.mkfifo, Path.mkdir]


@pytest.mark.parametrize("name", [*SINGLE, *LINES, "lock"])
@pytest.mark.parametrize("make", SPECIAL)
def test_pipes_and_folders_in_place_of_files_are_named(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    folder = make_folder(tmp_path)
    file = folder.root / name
    file.unlink(missing_ok=True)
    make(file)
    with pytest.raises(UserError, match=name) as raised:
        load_all(folder)
    assert "this is no file" in str(raised.value)


def start_and_ask(folder: FollowFolder) -> None:
    """Do what follow and a roll-back do before the first request."""
    with folder.lock():
        pass
    status_command(str(folder.run), rollback=True)


@pytest.mark.parametrize("name", ["lock", "ledger.jsonl", "rollback", "candidates"])
def test_a_link_in_a_run_of_somebody_else_changes_nothing_outside(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "run").mkdir()
    folder = make_folder(tmp_path / "run")
    outside = tmp_path / "mine.jsonl"
    outside.write_text("mine")
    (folder.root / name).unlink(missing_ok=True)
    (folder.root / name).symlink_to(outside)
    with pytest.raises(UserError, match=f"{name}: this is a link.*delete it"):
        start_and_ask(folder)
    Ledger(folder.root / name).record("started")
    assert outside.read_text() == "mine" and len([*tmp_path.iterdir()]) == 2


def test_a_candidate_that_is_a_link_loses_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").mkdir()
    folder = make_folder(tmp_path / "run")
    outside = tmp_path / "mine" / "data.jsonl"
    outside.write_text("{}\n")
    folder.candidates.mkdir()
    (folder.candidates / "0001").symlink_to(outside.parent)
    folder.delete_conversations(-1.0)
    assert [*outside.parent.iterdir()] == [outside]


def test_a_name_that_is_no_number_of_a_candidate_counts_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    for name in ("0007", "9" * 200, "12x"):
        (folder.candidates / name).mkdir(parents=True)
    assert folder.next_candidate().name == "0008"


@pytest.mark.parametrize("name", LINES)
def test_an_endless_line_is_named_before_it_fills_the_memory(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path)
    monkeypatch.setattr("spectrain.files.MAX_LINE_LENGTH", 1000)
    (folder.root / name).write_bytes(b"\n" + b"\0" * 2000)
    with pytest.raises(UserError, match=f"{name}, line 2: it has 1000 characters or more"):
        load_all(folder)


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    folder = FollowFolder(tmp_path)
    folder.root.write_text("")
    with pytest.raises(UserError, match="follow: it cannot be written"), folder.lock():
        pass


def test_a_serving_drafter_is_one_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path)
    first = tmp_path / "drafter"
    digest = hash_weights(first) or ""
    for path in ("/", "../..", "a\0b", "x" * 5000, "", str(tmp_path.parent)):
        folder.write_active(ActiveDrafter(path, digest, 1.0))
        assert folder.read_active(first).path == str(first)
        assert "the run's own drafter serves" in capsys.readouterr().err


def test_when_a_folder_was_seen_is_written_anew_where_it_is_damaged(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    copies = folder.candidates / "0001" / "new.jsonl"
    copies.parent.mkdir(parents=True)
    copies.write_text("{}\n")
    for damage in [*DAMAGES, json.dumps(folder.clock.now() + 1e9).encode()]:
        (copies.parent / "seen.json").write_bytes(damage)
        folder.delete_conversations(100.0)
        assert copies.exists() == (damage != b"5"), damage
        copies.write_text("{}\n")


def test_a_pipe_among_request_logs_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    assert RequestLogs(ListenSettings(), tmp_path, tmp_path / "logs.json").take_all() == []


def test_a_page_with_odd_decisions(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    odd: list[dict[str, Any]] = [
        {"event": "promoted"},
        {"event": "promoted", "candidate": [1], "reason": {}},
        {"event": "a\nb", "x": float("inf")},
        {"event": "drift", "kind": {"a": [1] * 1000}},
    ]
    folder.ledger.write_text(
        "".join(json.dumps({"time": 253402300799, **entry}) + "\n" for entry in odd)
    )
    lines = format_status(folder)
    assert len(lines) == 5 and all("\n" not in line for line in lines)
