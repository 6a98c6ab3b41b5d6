"""What processes conclude from each other's heartbeats; test_processes.py tests the same with
real processes.
"""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from spectrain.training.parallel.monitor import WAITING, Heartbeat, ProcessMonitor


def make_monitor(rank: int, ages: dict[int, float], **beats: Any) -> ProcessMonitor:
    """Make a monitor on four machines that read the heartbeat of each rank `ages` seconds ago,
    and its own just now.
    """
    single: Any = SimpleNamespace(rank=rank, num_processes=1)
    monitor = ProcessMonitor(single, patience=5.0)
    monitor.step = 7
    now = time.monotonic()
    for other in range(4):
        beat = {
            "beat": 1,
            "step": 7,
            "activity": WAITING,
            "seconds": 0.0,
            "host": f"machine{other}",
            "pid": 100 + other,
            "farewell": None,
            "is_about_another": False,
            **beats.get(f"rank{other}", {}),
        }
        monitor.heartbeats[other] = Heartbeat(**beat, read_time=now - ages.get(other, 0.0))
    return monitor


def test_a_silent_process_is_dead() -> None:
    """A process is dead after the given seconds without a heartbeat."""
    monitor = make_monitor(0, {2: 12.0})
    assert monitor.find_dead(30.0) is None
    assert (
        monitor.find_dead(10.0)
        == "rank 2 (machine2, process 102) died in step 8, or the network to it is cut"
    )


def test_a_machine_that_hears_nobody_is_cut_off() -> None:
    """Rank 0 stores the heartbeats and then reads only its own; the others get no answer from
    it.
    """
    first = make_monitor(0, {1: 40.0, 2: 40.0, 3: 40.0}).find_dead(30.0)
    assert (
        first is not None
        and first.startswith("no other process has answered for 30 s, so ")
        and "cut off" in first
    )
    other = make_monitor(3, {})
    assert other.find_dead(30.0) is None
    other.answer_time -= 31
    assert other.find_dead(30.0) == (
        "rank 0 (machine0, process 100) has not answered for 30 s, so it died or the network is cut"
    )


def test_the_first_failure_is_named() -> None:
    """Processes that stopped because of another pass on its name; one that finished is no
    failure.
    """
    passed_on = {
        "farewell": "rank 2 (machine2, process 102) died in step 8",
        "is_about_another": True,
    }
    assert (
        make_monitor(0, {}, rank1=passed_on, rank3={"farewell": ""}).find_dead(30.0)
        == passed_on["farewell"]
    )
    own = {"farewell": "RunError: no space is left"}
    message = make_monitor(0, {}, rank1=passed_on, rank2=own).find_dead(30.0)
    assert message == "rank 2 (machine2, process 102) stopped at step 8: RunError: no space is left"


def read_messages(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [
        line.removeprefix("spectrain: training: ") for line in capsys.readouterr().err.splitlines()
    ]


@pytest.mark.parametrize("activity", [WAITING, "computing"])
def test_a_frozen_process_is_named_by_its_silence(
    capsys: pytest.CaptureFixture[str], activity: str
) -> None:
    """Whatever the others wait for, the first running process names the frozen one once, and
    reports when it is back.
    """
    others = {f"rank{rank}": {"activity": activity, "seconds": 9.0} for rank in range(3)}
    for reporter, frozen in ((0, 3), (1, 0)):
        monitor = make_monitor(reporter, {frozen: 9.0}, **others)
        monitor.answer_time -= 9.0 if frozen == 0 else 0.0
        for _ in range(2):
            monitor._report_silent(monitor._silent_processes())
        name = f"rank {frozen} (machine{frozen}, process 10{frozen})"
        assert read_messages(capsys) == [
            f"{name} has sent no heartbeat for 9 s in step 8, so it is frozen or its network is cut"
        ]
        monitor._report_silent({})
        assert read_messages(capsys) == [f"{name} sends heartbeats again, after about 9 s"]
    other = make_monitor(2, {3: 9.0})
    other._report_silent(other._silent_processes())
    assert read_messages(capsys) == []


def test_a_frozen_process_blames_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """The time in which a process did not run itself does not count as silence of the others."""
    monitor = make_monitor(0, {1: 15.0, 2: 15.0, 3: 15.0})
    monitor._forgive_pause(14.5)
    assert monitor._silent_processes() == {}
    assert len(messages := read_messages(capsys)) == 1 and "did not run for 14 s" in messages[0]


def test_a_slow_process_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A slow process sends its activity in heartbeats, and the first waiting process names it
    once for each step.
    """
    slow = {"rank0": {"activity": "reading data", "seconds": 6.0}}
    for reporter in (1, 2):
        monitor = make_monitor(reporter, {}, **slow)
        monitor._report_slow()
        monitor._report_slow()
        name = (
            "rank 0 (machine0, process 100) keeps the others waiting at step 8: 6 s of reading data"
        )
        assert read_messages(capsys) == [name] * (reporter == 1)
