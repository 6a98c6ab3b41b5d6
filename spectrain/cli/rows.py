"""Conversations and prompts of Python as rows of files, which every command reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spectrain.data.messages import check_text, parse_conversation
from spectrain.errors import UserError, first_line
from spectrain.eval.prompts import FORMATS
from spectrain.files import write_text

Prompt = str | list[dict[str, str]]
"""What a user says, or a chat of such messages as {"role": .., "content": ..}."""


PROMPT_COLUMNS = {"messages", "conversations", *(columns[0] for columns in FORMATS)}
"""The columns by which a row holds a prompt."""


def store_conversations(data: Iterable[Any], folder: Path) -> Path:
    """Write conversations to FOLDER/data/HASH.jsonl and return this path; the same conversations
    have the same file.

    A conversation is a list of messages, or a row as of `data=jsonl`.
    """
    rows = []
    for number, entry in enumerate(require_rows("data", data)):
        row = {"messages": entry} if isinstance(entry, list) else entry
        # Raises the error of a row that no training could read.
        parse_conversation(row, f"data[{number}]")
        rows.append(to_json(row, f"data[{number}]"))
    if not rows:
        raise UserError("data: it holds no conversation; give at least one")
    text = "\n".join([*rows, ""])
    path = folder / "data" / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def write_prompts(prompts: Iterable[Any], folder: Path) -> Path:
    """Write prompts to FOLDER/prompts.jsonl and return this path.

    A prompt is a text, a list of messages, or a row as of a file of prompts.
    """
    rows = []
    for number, entry in enumerate(require_rows("prompts", prompts)):
        row = {"prompt": entry} if isinstance(entry, str) else entry
        row = {"messages": entry} if isinstance(entry, list) else row
        if not isinstance(row, Mapping) or not PROMPT_COLUMNS & row.keys():
            raise UserError(
                f"prompts[{number}]: it is no prompt; give a text, a chat, or a row with one of "
                f"the columns {', '.join(sorted(PROMPT_COLUMNS))}"
            )
        rows.append(to_json(row, f"prompts[{number}]"))
    if not rows:
        raise UserError("prompts: there is none; give at least one")
    path = folder / "prompts.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join([*rows, ""]))
    return path


def require_rows(name: str, rows: Any) -> Iterable[Any]:
    """Return rows that have an end and an order; raise a UserError for anything else, such as all
    splits of a data set.
    """
    if isinstance(rows, Mapping):
        example = next(iter(rows), "train")
        raise UserError(
            f"{name}: this is a {type(rows).__name__} with the keys {', '.join(map(str, rows))}; "
            f"give one of its values, as in {name}[{example!r}]"
        )
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise UserError(
            f"{name}: what is of type {type(rows).__name__} has no length; give a list or a "
            "datasets.Dataset"
        )
    return (rows[number] for number in range(len(rows)))


def to_json(row: Any, location: str) -> str:
    """Return a row as a line of JSON."""
    try:
        return json.dumps(row)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{location}: JSON cannot hold it ({first_line(error)}); leave this column out, or "
            "save the set by save_to_disk and give its folder to data=hub"
        ) from error


def to_chat(prompt: Prompt, location: str) -> list[dict[str, str]]:
    """Return a text as the user's first message; raise a UserError for what is neither text nor
    chat.
    """
    chat: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(chat, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str) for turn in chat
    ):
        raise UserError(
            f'{location}: it is no prompt; give a text, or messages [{{"role": .., "content": '
            f"..}}, ..]"
        )
    for message in chat:
        check_text(message["content"], location)
    return chat
