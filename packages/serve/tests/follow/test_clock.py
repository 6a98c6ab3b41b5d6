"""A clock of the machine that jumps, by days in either direction, deletes no conversation and
stops nothing.
"""

import json
import time
from pathlib import Path

import pytest

from spectrain.errors import UserError
from spectrain_serve.follow import clock as clock_module
from spectrain_serve.follow.clock import FollowClock
from spectrain_serve.follow.reservoir import Reservoir, read_conversations
from spectrain_serve.follow.state import FollowFolder
from spectrain_serve.follow.traffic import RecordedConversation

DAY = 86400.0
RETENTION = 86400.0


class Machine:
    """The clocks of a machine, as the code under test reads them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.date = 1.8e9
        self.uptime = 5000.0
        self.boot = "first"
        monkeypatch.setattr(time, "time", lambda: self.date)
        monkeypatch.setattr(time, "monotonic", lambda: self.uptime)
        monkeypatch.setattr(clock_module, "read_uptime", lambda: self.uptime)
        monkeypatch.setattr(clock_module, "read_boot", lambda: self.boot)

    def wait(self, seconds: float) -> None:
        self.date += seconds
        self.uptime += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def restart(path: Path) -> FollowClock:
    clock = FollowClock(path)
    clock.load(RETENTION / 2, None)
    return clock


@pytest.mark.parametrize("jump", [4 * DAY, -4 * DAY])
def test_a_jump_changes_no_age(machine: Machine, tmp_path: Path, jump: float) -> None:
    clock = FollowClock(tmp_path / "clock.json")
    began = clock.now()
    machine.wait(100)
    machine.date += jump
    assert clock.now() - began == pytest.approx(100)
    clock.save()
    machine.date -= jump / 2
    machine.wait(50)
    assert restart(clock.path).now() - began == pytest.approx(150)


def test_another_start_of_the_machine_counts_its_date_up_to_a_gap(
    machine: Machine, tmp_path: Path
) -> None:
    clock = FollowClock(tmp_path / "clock.json")
    began = clock.now()
    for seconds, counted in ((1000.0, 1000.0), (30 * DAY, RETENTION / 2), (-30 * DAY, 0.0)):
        clock.save()
        machine.date += seconds
        machine.uptime = 10.0
        machine.boot = machine.boot + "x"
        clock = restart(clock.path)
        assert clock.now() - began == pytest.approx(counted)
        began = clock.now()


def test_conversations_outlive_a_jump_and_a_restart(machine: Machine, tmp_path: Path) -> None:
    """Also those that are about to expire, which they do after their time."""
    folder = FollowFolder(tmp_path)
    folder.root.mkdir()
    reservoir = Reservoir(10, 4, RETENTION)
    reservoir.add(RecordedConversation("a", folder.clock.now(), {"prompt": "p"}, "x"))
    machine.wait(0.9 * RETENTION)
    reservoir.save(folder.recorded)
    folder.clock.save()
    machine.date += 10 * DAY
    again = FollowFolder(tmp_path)
    again.clock.load(RETENTION / 2, None)
    loaded = Reservoir(10, 4, RETENTION)
    loaded.load(read_conversations(again.recorded))
    loaded.delete_expired(again.clock.now())
    assert len(loaded) == 1
    machine.wait(0.2 * RETENTION)
    loaded.delete_expired(again.clock.now())
    assert len(loaded) == 0


def test_copies_in_folders_of_candidates_age_alike(machine: Machine, tmp_path: Path) -> None:
    folder = FollowFolder(tmp_path)
    copy = folder.candidates / "0001" / "new.jsonl"
    copy.parent.mkdir(parents=True)
    copy.write_text("{}\n")
    folder.delete_conversations(RETENTION)
    machine.date += 10 * DAY
    folder.delete_conversations(RETENTION)
    assert copy.exists()
    machine.wait(1.1 * RETENTION)
    folder.delete_conversations(RETENTION)
    assert not copy.exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"time": NaN, "date": 1}',
        '{"time": "x", "date": 1}',
        '{"time": 1e300, "date": 1}',
    ],
)
def test_a_damaged_clock_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "clock.json"
    path.write_text(content)
    with pytest.raises(
        UserError, match=r"clock.json: .*; delete it; then ages count from the newest conversation$"
    ):
        restart(path)


def test_this_machine_tells_its_uptime(tmp_path: Path) -> None:
    clock = FollowClock(tmp_path / "clock.json")
    clock.save()
    saved = json.loads(clock.path.read_text())
    assert saved["boot"] is None or saved["uptime"] > 0
