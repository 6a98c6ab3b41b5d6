"""Evaluation prompts, in the field's own formats."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """One prompt: the user's turns, each answered in its order, after any fixed earlier messages."""

    id: str
    category: str
    turns: list[str]
    before: list[dict[str, str]]

    @property
    def opening(self) -> list[dict[str, str]]:
        """The messages up to the first answer that is wanted."""
        return [*self.before, {"role": "user", "content": self.turns[0]}]


def read_prompts(path: str | None, limit: int | None) -> list[Prompt]:
    """Prompts of a JSON Lines file, or the held-out ones that ship with the project.

    A line is {"id" or "question_id", "category", "turns": [..]} as in Spec-Bench, {"messages": [..]} or {"prompt": ".."}.
    With a limit, categories are taken in turn, so that a few prompts still cover all of them.
    """
    file = _heldout() if path is None else Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"eval.prompts={path}: there is no such file; give a JSON Lines file of prompts")
    prompts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            prompts.append(_prompt(json.loads(line), number, where))
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: it is not JSON ({error.msg}); write one prompt a line") from error
    if not prompts:
        raise UserError(f"eval.prompts={path}: the file holds no prompt; write at least one line")
    return prompts if limit is None else _spread(prompts, limit)


def _heldout() -> Path:
    import spectrain

    return Path(spectrain.__file__).parent / "data" / "heldout.jsonl"


def _prompt(row: Any, number: int, where: str) -> Prompt:
    if not isinstance(row, dict):
        raise UserError(f'{where}: it is not an object; write {{"prompt": ".."}}')
    name = str(row.get("id", row.get("question_id", number)))
    category = str(row.get("category", "all"))
    if isinstance(row.get("turns"), list) and row["turns"] and all(isinstance(turn, str) for turn in row["turns"]):
        return Prompt(name, category, row["turns"], [])
    if isinstance(row.get("prompt"), str):
        return Prompt(name, category, [row["prompt"]], [])
    messages = row.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        if messages and isinstance(messages[-1].get("content"), str):
            return Prompt(name, category, [messages[-1]["content"]], messages[:-1])
    raise UserError(f'{where}: it holds no prompt; write {{"turns": [..]}}, {{"messages": [..]}} or {{"prompt": ".."}}')


def _spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """The first `limit` prompts when categories are taken in turn."""
    seen: dict[str, int] = {}
    ranks = []
    for index, prompt in enumerate(prompts):
        rank = seen.get(prompt.category, 0)
        seen[prompt.category] = rank + 1
        ranks.append((rank, index))
    return [prompts[index] for _, index in sorted(sorted(ranks)[:limit], key=lambda pair: pair[1])]
