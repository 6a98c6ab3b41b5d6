"""Coding questions that score drafters of coding models."""

from __future__ import annotations

import json
from pathlib import Path

from spectrain.data.chat import tokenize_question
from spectrain.data.messages import Conversation
from spectrain.models.target import Target

QUESTIONS = Path(__file__).with_name("coding_prompts.jsonl")


def read_questions(target: Target, count: int, path: Path = QUESTIONS) -> list[list[int]]:
    """Return the first questions of a file, rows of {"prompt": ..}, in tokens."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    return [
        tokenize_question(
            target.template, Conversation([{"role": "user", "content": row["prompt"]}])
        )
        for row in rows
    ]
