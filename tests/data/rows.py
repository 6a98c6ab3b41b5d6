"""Rows of data that several tests read, and what writes them."""

import json
from pathlib import Path
from typing import Any

CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": "tide"}},
}
THINKING = [
    {"role": "user", "content": "What is a tide?"},
    {
        "role": "assistant",
        "reasoning_content": "I look it up.",
        "content": "One moment.",
        "tool_calls": [CALL],
    },
    {"role": "tool", "content": "The rise and fall of the sea.", "tool_call_id": "call00001"},
    {
        "role": "assistant",
        "reasoning_content": "Now I know it.",
        "content": "It is the rise and fall of the sea.",
    },
]


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)
