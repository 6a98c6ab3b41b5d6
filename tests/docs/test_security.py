"""The page about security shows every command-only setting, those of packages too."""

import re
from pathlib import Path

from spectrain.config.command_only import DOWNLOADED, list_command_only

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"


def test_the_page_shows_the_table() -> None:
    text = DOCUMENT.read_text()
    rows = re.findall(
        r"^\| `([\w.]+)`(?: and all of its settings)? \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE
    )
    assert rows == [
        (setting.name, setting.effect, setting.reason) for setting in list_command_only()
    ]
    assert all(f"`{group}.{key}`" in text for group, keys in DOWNLOADED.items() for key in keys)
