"""The ledger: a line is complete or absent."""

import json
import os
from pathlib import Path

import pytest

from spectrain.errors import UserError
from spectrain_serve.follow.ledger import Ledger, read_ledger
from spectrain_serve.follow.state import ActiveDrafter, FollowFolder, hash_weights


def test_entries_come_back_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=lambda: 5.0)
    ledger.record("drift", kind="a", number=1.5)
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"event": "cut')
    ledger.record("training")
    assert [entry["event"] for entry in read_ledger(tmp_path / "ledger.jsonl")] == [
        "drift",
        "training",
    ]
    assert next(read_ledger(tmp_path / "ledger.jsonl")) == {
        "time": 5.0,
        "event": "drift",
        "kind": "a",
        "number": 1.5,
    }


def test_no_secret_of_a_message_is_recorded(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.record(
        "error", message="http://user:Pa55word@host/v1?token=Pa55word", api_key="Pa55word"
    )
    (entry,) = read_ledger(tmp_path / "ledger.jsonl")
    assert entry["message"] == "http://***@host/v1?token=***" and entry["api_key"] == "***"


def test_a_full_disk_leaves_the_file_and_the_entries_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    write = os.write
    ledger.record("first")

    def fail(handle: int, content: bytes) -> int:
        if len(content) > 5:
            return write(handle, content[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    ledger.record("second")
    monkeypatch.undo()
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["first"]
    ledger.record("third")
    assert [entry["event"] for entry in read_ledger(tmp_path / "ledger.jsonl")] == [
        "first",
        "second",
        "third",
    ]


def test_one_process_follows_a_run_and_a_damaged_drafter_is_not_taken(tmp_path: Path) -> None:
    folder = FollowFolder(tmp_path)
    first = tmp_path / "first"
    second = tmp_path / "second"
    for path in (first, second):
        path.mkdir()
        (path / "config.json").write_text(path.name)
        (path / "model.safetensors").write_bytes(path.name.encode())
    with folder.lock():
        with (
            pytest.raises(UserError, match=r"another process follows this run \(process"),
            FollowFolder(tmp_path).lock(),
        ):
            pass
        folder.write_active(ActiveDrafter(str(second), hash_weights(second) or "", 1.0, str(first)))
        assert folder.read_active(first).path == str(second)
        (second / "model.safetensors").write_bytes(b"cut")
        assert folder.read_active(first).path == str(first)


def test_follow_serves_drafters_of_its_own_run(tmp_path: Path) -> None:
    folder = FollowFolder(tmp_path / "run")
    first = tmp_path / "run" / "drafter"
    elsewhere = tmp_path / "elsewhere"
    for directory in (first, elsewhere, folder.candidates / "0001" / "drafter"):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(str(directory))
    for path, expected in ((elsewhere, first), (folder.candidates / "0001" / "drafter", None)):
        folder.write_active(ActiveDrafter(str(path), hash_weights(path) or "", 1.0, str(first)))
        assert Path(folder.read_active(first).path) == (expected or path)
