"""Progress without a terminal: a line now and then."""

import pytest

from spectrain.output import count_progress
from spectrain.output.count_progress import CountProgress


def test_a_line_says_what_is_done_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time left follows from the pace so far, and a time limit ends it earlier."""
    clock = 0.0
    monkeypatch.setattr("time.monotonic", lambda: clock)
    with CountProgress("fitting", 400, unit="tokens") as progress:
        clock = 1.0
        progress.advance(50)
        assert capsys.readouterr().err == ""
        clock = 2 * count_progress.LINE_SECONDS
        progress.advance(50)
        assert capsys.readouterr().err == "fitting: 100 of 400 tokens; 60 s left\n"
        clock = 4 * count_progress.LINE_SECONDS
        progress.advance(100, seconds_at_most=5.0)
        assert capsys.readouterr().err == "fitting: 200 of 400 tokens; 5 s left\n"
