"""The log has a line every half minute, with the loss, the speed and the time that is left."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.output.streams import CleanStream
from spectrain.training import metrics
from spectrain.training.metrics import (
    MetricsFile,
    Pace,
    TrainingProgress,
    read_last_step,
    read_metrics,
)
from spectrain.training.parallel import step_timer
from spectrain.training.parallel.step_timer import STEP_PARTS, StepTimer, summarize_processes


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def make_metrics(loss: float | None, **more: Any) -> dict[str, Any]:
    return {"loss": loss, "agreement": [0.5, 0.25], "tokens_per_second": 120.0, **more}


@pytest.mark.parametrize("logged", [1, 7, 40])
def test_a_log_has_a_line_every_half_minute(
    clock: Clock, capsys: pytest.CaptureFixture[str], logged: int
) -> None:
    """A line is printed after the first step, every 30 s with the newest metrics, and after the
    last step.
    """
    progress = TrainingProgress(100, 0, enabled=True)
    with progress:
        for step in range(1, 101):
            clock.now += 4.0
            progress.update(
                step, make_metrics(step / 10) if step % logged == 0 or step in (1, 100) else None
            )
    lines = capsys.readouterr().out.splitlines()
    assert [int(printed.split()[1]) for printed in lines] == [1, *range(8, 100, 8), 100]
    newest = max(1, 8 - 8 % logged) if logged < 8 else 1
    assert lines[1] == (
        f"step 8 of 100  on training text: loss {newest / 10:.3f}, agreement 0.50 0.25; "
        "120 tokens/s  6 min left"
    )
    assert lines[-1].startswith("step 100 of 100  on training text: loss 10.000") and lines[
        -1
    ].endswith("0 s left")


def test_a_resumed_run_counts_its_own_steps(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time left follows from the steps since the resume; a loss that is not finite is
    printed so.
    """
    progress = TrainingProgress(100, 80, enabled=True)
    clock.now = 40.0
    progress.update(90, make_metrics(None, left_out=3))
    assert capsys.readouterr().out.endswith(
        "loss not finite, agreement 0.50 0.25; 120 tokens/s  3 rows left out  40 s left\n"
    )


class Screen(io.StringIO):
    """A terminal of 80 columns that remembers what it was told."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_always_shows_step_loss_and_time_left(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """However long the rest of the line is, it is cut at its end; a validation gets a line of its
    own, and the bar leaves none behind.
    """
    screen = Screen()
    # As the command line has it, and rich puts a stream of its own before it.
    monkeypatch.setattr("sys.stdout", CleanStream(screen))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    held_out = {"agreement": [0.4, 0.3, 0.2], "forecast": 1.45}
    share = {"data": 0.2, "target": 0.13, "drafter": 0.1, "others": 0.56, "rest": 0.01}
    with TrainingProgress(600, 0, enabled=True) as progress:
        progress.update(
            336,
            make_metrics(2.135, held_out=held_out, time_share=share, left_out=3),
            seconds_left=155.0,
        )
        drawn = progress.bar.live.console.render_lines(progress.bar.render(), pad=False)
    text = "".join(segment.text for segment in drawn[0])
    assert len(drawn) == 1 and len(text) <= width
    assert "336/600  loss 2.135  3 min left" in text
    output = screen.getvalue()
    assert "step 336: held out: agreement 0.40 0.30 0.20, forecast 1.45 tokens per forward" in (
        " ".join(output.split())
    )
    # The cursor returns to the bar's line, which is erased, and then the last state is printed.
    assert "\x1b[2K" in output and output.rstrip().endswith("3 rows left out")


def test_waits_and_the_slowest_process_are_printed(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the shares of time for data, target and other processes; the slowest is the
    one that waits least.
    """
    times = [{"data": 0.1, "target": 0.5, "drafter": 0.4, "others": 3.0}] * 3 + [
        {"data": 3.0, "target": 0.6, "drafter": 0.4}
    ]
    summary = summarize_processes(times, [f"machine{rank}" for rank in range(4)], steps=2)
    assert summary["step_seconds"] == {
        "data": 0.4125,
        "target": 0.2625,
        "drafter": 0.2,
        "others": 1.125,
    }
    assert summary["slowest"] == {"rank": 3, "host": "machine3", "busy": 2.0, "others_busy": 0.5}
    share = {"data": 0.2, "target": 0.13, "drafter": 0.1, "others": 0.56, "rest": 0.01}
    TrainingProgress(1, 0, enabled=True).update(1, make_metrics(1.0, time_share=share, **summary))
    line = (
        "; waits: data 20%, target 13%, other processes 56%; slowest: rank 3 (machine3), 4.0x "
        "the others' time"
    )
    assert line in capsys.readouterr().out
    alone = summarize_processes(times[:1], ["machine0"], steps=1)
    assert alone == {"step_seconds": {"data": 0.1, "target": 0.5, "drafter": 0.4}}


class Event:
    """Stands for an event of a GPU, which is read only after its step has ended."""

    ticks: Iterator[float]
    synchronized = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = next(Event.ticks)

    def synchronize(self) -> None:
        Event.synchronized += 1

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.time - self.time)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_times_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Parts are the times between marks, each step is read once, and the newest only if it may
    be waited for.
    """
    Event.ticks = ticks = iter([10.0, 11.0, 13.0, 16.0, 20.0, 25.0, 30.0, 31.0, 32.0, 33.0])
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device(device))
    timer.start(0.5)
    for name in ("features", "together", "computed", "exchanged"):
        timer.mark(name)
    timer.end()
    assert timer.take_times(with_newest=False) == dict.fromkeys(STEP_PARTS, 0)
    timer.start(0.0)
    for name in ("features", "together"):
        timer.mark(name)
    timer.end()
    assert timer.take_times(with_newest=False) == {
        "data": 0.5,
        "target": 1.0,
        "others": 2.0 + 4.0,
        "drafter": 3.0 + 5.0,
    }
    assert timer.take_times(with_newest=True) == {
        "data": 0.0,
        "target": 1.0,
        "others": 1.0,
        "drafter": 1.0,
    }


def test_other_processes_are_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the main process prints."""
    clock.now = 99.0
    TrainingProgress(100, 0, enabled=False).update(1, make_metrics(1.0))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "expected"), [(10, "90 s left"), (60, "9 min left"), (3600, "9.0 h left")]
)
def test_time_left_is_printed_in_fitting_units(clock: Clock, seconds: float, expected: str) -> None:
    """With one of ten steps done, nine times its seconds are left."""
    pace = Pace(10)
    clock.now = seconds
    assert pace.time_left(1) == expected and pace.is_due() == (seconds >= 30)


def test_damaged_lines_of_metrics_are_left_out(tmp_path: Path) -> None:
    """Lines that are no step's, whatever they hold, neither end a resume nor count."""
    path = tmp_path / "metrics.jsonl"
    steps = [b'{"step": 1, "loss": 2.0}', b'{"step": 2, "loss": 1.0}', b'{"step": 9, "loss": 1.0}']
    others = [b"[1]", b"3", b"null", b'{"step": null}', b'{"step": 1e999}', b"\xff\xfe", b'{"st']
    path.write_bytes(b"\n".join([*steps, *others]))
    assert read_last_step(path) == 9
    assert [line["loss"] for line in read_metrics(path, 2)] == [2.0, 1.0]
    MetricsFile(path, 2)
    assert path.read_bytes().splitlines() == steps[:2]
