"""Commands whose output nobody takes, or that a signal ends: no traceback, nothing half written,
and an exit status that says it.
"""

import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from spectrain.cli import main as cli
from spectrain.cli.termination import raise_terminated
from spectrain.errors import Terminated
from spectrain.files import atomic_write

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def run_in_shell(words: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a shell does, with changed streams."""
    return subprocess.run(
        ["sh", "-c", f'"$0" -m spectrain {words} {redirection}', sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("words", ["--version", "recipes"])
def test_a_closed_output_is_no_failure(words: str) -> None:
    done = run_in_shell(words, "<&- >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_mistake_has_its_status_without_any_stream() -> None:
    assert run_in_shell("trian", "<&- >&- 2>&-").returncode == 2
    assert run_in_shell("trian", "2>/dev/full").returncode == 2


@pytest.mark.parametrize("words", ["--version", "recipes"])
def test_a_full_output_is_one_sentence(words: str) -> None:
    done = run_in_shell(words, ">/dev/full")
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("spectrain: ") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("words", ["--version", "recipes"])
def test_a_reader_that_has_gone_ends_a_command_in_silence(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "spectrain", words],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_removes_what_is_half_written(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit status is what a shell shows of a process that the signal ended."""

    def write_and_stop(arguments: list[str]) -> None:
        with atomic_write(tmp_path / "score.json") as scratch:
            scratch.write_text("{")
            os.kill(os.getpid(), number)

    monkeypatch.setattr(cli, "dispatch_command", write_and_stop)
    # The tests themselves may run under nohup, which ignores SIGHUP.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as stopped:
            cli.run_command(["eval"])
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert stopped.value.code == 128 + number
    assert capsys.readouterr().err == f"spectrain: stopped by {number.name}\n"
    assert list(tmp_path.iterdir()) == []


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command goes on after its terminal has closed, where nohup started it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_terminated():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Collected:
    """What a weak reference refers to."""


def test_a_signal_in_a_callback_is_not_lost() -> None:
    """Python ignores what the callback of a weak reference raises."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    held = Collected()
    reference = weakref.ref(held, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(Terminated), raise_terminated():
            del held
            assert reference() is None
            # The signal that is sent again ends this; without it the test fails here.
            time.sleep(60)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_process_ends_by_the_signal() -> None:
    """What was forked, as workers are, does not unwind the command of its parent."""
    with raise_terminated():
        if (child := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
