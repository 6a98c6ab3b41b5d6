"""A page is written whatever the metrics.jsonl of a run folder holds."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from spectrain.errors import UserError
from spectrain.eval.page import read_lines, read_metrics, write_report

LINE: dict[str, Any] = {"step": 3, "loss": 1.5, "agreement": [0.5, 0.25], "lr": 0.001}
HELD_OUT = {"forecast": 1.75, "forecast_interval": [1.7, 1.8], "agreement": [0.5]}
DAMAGES: list[Any] = [
    5, [LINE], "x", None, {}, {"step": 3}, {"loss": 1.0},
    *({**LINE, "step": value} for value in ("3", -1, 1.5, True, None, [3], 10**30)),
    *({**LINE, "loss": value} for value in ("x", None, [1.0], True, float("nan"))),
    *({**LINE, "agreement": value} for value in (0.5, [None], [[0.5]], ["x"], {"a": 1})),
    *({**LINE, "held_out": value} for value in (5, [HELD_OUT], {"forecast": "x"})),
    *({**LINE, "held_out": {**HELD_OUT, "forecast_interval": ends}} for ends in ([1], 5, ["a", 1])),
]  # fmt: skip


def test_the_page_shows_the_lines_that_are_intact(tmp_path: Path) -> None:
    score = tmp_path / "run" / "eval" / "heldout"
    score.mkdir(parents=True)
    path = tmp_path / "run" / "metrics.jsonl"
    intact = [LINE, {**LINE, "step": 4, "held_out": HELD_OUT, "held_out_at_start": HELD_OUT}]
    texts = [json.dumps(line) for line in (intact[0], *DAMAGES, intact[1])]
    path.write_bytes("\n".join([*texts, "[" * 100_000, "{"]).encode() + b"\n\xff\xfe\n")
    assert read_metrics(path) == intact
    write_report(score / "report.html", [score])
    assert "Loss on training text" in (score / "report.html").read_text()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="this is no file"):
        read_lines(tmp_path / "metrics.jsonl")
