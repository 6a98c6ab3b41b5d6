"""Printed lines as records of the logger `spectrain`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from spectrain.output.console import make_console
from spectrain.output.logs import redirect_output, use_logging


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Return the records of the logger, which takes over what is printed."""
    use_logging()
    with caplog.at_level(logging.INFO, "spectrain"):
        yield caplog
    use_logging(False)


def test_lines_have_the_level_of_their_stream(logs: pytest.LogCaptureFixture) -> None:
    """Of a line that is drawn anew the last state is logged, and a secret is masked."""
    with redirect_output():
        print("step 1")
        print("10%\r100%", file=sys.stderr)
        make_console().print("a [table]")
        print("token=abcdefgh password=hunter22", end="")
    assert [(record.name, record.levelname, record.message) for record in logs.records] == [
        ("spectrain", "INFO", "step 1"),
        ("spectrain", "WARNING", "100%"),
        ("spectrain", "INFO", "a [table]"),
        ("spectrain", "INFO", "token=abcdefgh password=***"),
    ]


def test_a_handler_on_the_printed_stream_logs_once(
    logs: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a handler writes to sys.stderr of that moment reaches the real stream."""

    class CurrentStream(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(record.getMessage(), file=sys.stderr)

    handler = CurrentStream()
    logging.getLogger("spectrain").addHandler(handler)
    try:
        with redirect_output():
            print("saved", file=sys.stderr)
    finally:
        logging.getLogger("spectrain").removeHandler(handler)
    assert capsys.readouterr().err == "saved\n" and len(logs.records) == 1


def test_lines_are_printed_without_the_switch(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with redirect_output():
        print("step 1")
    assert capsys.readouterr().out == "step 1\n" and not caplog.records
