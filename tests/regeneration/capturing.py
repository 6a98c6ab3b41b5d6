"""Conversations to answer, and a training on answers whose states are stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spectrain.runs.train import train_and_score
from tests.features.test_capture import SETTINGS, composed, losses


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Write conversations of one or two questions."""
    rows = []
    blank = {"role": "assistant", "content": "?"}
    for number in range(6):
        turns = [f"Tell me about {number}."] + ["And then?"] * (number % 2)
        rows.append([part for turn in turns for part in ({"role": "user", "content": turn}, blank)])
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return path


def train_on(out: Path, run: Path, *more: str) -> list[float]:
    settings = [
        word for word in SETTINGS if not word.startswith(("data.limit", "+data.max_length"))
    ]
    words = (
        "data=jsonl",
        f"+data.path={out}",
        f"run={run}",
        "+trainer.max_steps=4",
        "+trainer.log_every=1",
    )
    train_and_score(composed(*settings, *words, *more))
    return losses(run)
