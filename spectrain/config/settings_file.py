"""A settings file that a command names, as in `spectrain train my.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SettingsFile:
    """A settings file that a command names: a layer below the command's own words."""

    path: Path
    # Its settings as words, without those that the command replaces.
    words: tuple[str, ...]
