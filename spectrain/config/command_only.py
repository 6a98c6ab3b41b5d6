"""Settings that only a command sets: everything that runs code, starts a process, listens, sends,
downloads, or writes outside of the run folder.

A file can come from somebody else: config.yaml of a run folder, a drafter's config.json, an export,
another project's files. What stands in the table below is never saved, and where a file holds it,
it is ignored with one line; `spectrain lint` calls it an error. What a file names on the hub is
read from this machine alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from spectrain.errors import UserError

from .installed import load_entry_points

Effect = Literal["runs code", "starts a process", "sends", "writes"]
ALL = "*"
"""Stands for every setting of a group."""


@dataclass(frozen=True)
class CommandOnlySetting:
    """A setting that no file can set."""

    group: str
    # Name of the setting, or `ALL`.
    key: str
    effect: Effect
    # What it does, as a clause that follows "it".
    reason: str

    @property
    def name(self) -> str:
        """The setting as the command line writes it."""
        return self.group if self.key == ALL else f"{self.group}.{self.key}"

    @property
    def example(self) -> str:
        """How a command gives it."""
        return f"{self.group}=CHOICE" if self.key == ALL else f"{self.name}=VALUE"


COMMAND_ONLY = (
    CommandOnlySetting(
        "target", "trust_remote_code", "runs code", "runs code that lies beside the model"
    ),
    CommandOnlySetting(
        "eval",
        "execute",
        "runs code",
        "runs programs that the target writes, and the tests of the prompts",
    ),
    CommandOnlySetting("eval", "serve_in", "starts a process", "starts an engine"),
    CommandOnlySetting(
        "server",
        ALL,
        "starts a process",
        "sends requests to an address, and starts an engine with its arguments",
    ),
    CommandOnlySetting("tracker", ALL, "sends", "sends a run to an account"),
    CommandOnlySetting("writer", ALL, "sends", "chooses who writes answers"),
    CommandOnlySetting("regenerate", ALL, "writes", "writes a data set"),
    CommandOnlySetting("chat", ALL, "sends", "chooses how a chat begins"),
    CommandOnlySetting("hydra", ALL, "starts a process", "chooses launchers, sweepers and folders"),
    CommandOnlySetting("accelerate", ALL, "starts a process", "starts processes on other machines"),
)
"""Every setting of this package that acts on something beyond the run folder. docs/security.md
shows this table.
"""

DOWNLOADED = {
    "target": ("model", "revision", "path"),
    "drafter": ("model",),
    "data": ("path", "sources"),
    "eval": ("prompts", "calibration", "assistant"),
}
"""Settings that may name something on the hub. A command downloads it; where a file names it, it
must be on this machine.
"""


@dataclass(frozen=True)
class SavedSettings:
    """What an installed package says about the settings that files hold. Its entry point is in
    `spectrain.saved`.
    """

    command_only: tuple[CommandOnlySetting, ...] = ()
    # Group -> settings that may name something on the hub.
    downloaded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Import path of a constructor, or the beginning of several, in older files -> its path today.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # Returns a group's saved settings, with a choice, as they are written today.
    update: Callable[[dict[str, Any]], dict[str, Any]] | None = None


def list_saved_settings() -> list[SavedSettings]:
    """Return what installed packages say about saved settings."""
    return [*load_entry_points("saved")]


def list_command_only() -> list[CommandOnlySetting]:
    """Return the command-only settings of this package and of installed ones."""
    return [
        *COMMAND_ONLY,
        *(setting for saved in list_saved_settings() for setting in saved.command_only),
    ]


def list_downloaded(group: str) -> tuple[str, ...]:
    """Return the settings of a group that may name something on the hub, those of installed
    packages too.
    """
    return (
        *DOWNLOADED.get(group, ()),
        *(key for saved in list_saved_settings() for key in saved.downloaded.get(group, ())),
    )


def names_download(group: str, settings: Mapping[str, Any]) -> bool:
    """Tell whether settings of a group, or those of a choice inside of it, may name something on
    the hub.
    """
    return any(
        next(_find_key(settings, key, group), None) is not None for key in list_downloaded(group)
    )


def find_command_only(content: Any) -> Iterator[tuple[str, CommandOnlySetting]]:
    """Yield each command-only setting that saved groups set, with its full key."""
    for group, node in content.items() if isinstance(content, Mapping) else ():
        for setting in list_command_only():
            if setting.group == group and setting.key == ALL and is_set(node):
                yield str(group), setting
            elif setting.group == group and setting.key != ALL:
                yield from ((path, setting) for path in _find_key(node, setting.key, str(group)))


def _find_key(node: Any, key: str, path: str) -> Iterator[str]:
    """Yield the full keys of a setting in a group, in the drafters inside of a drafter too."""
    entries: Any = (
        node.items()
        if isinstance(node, Mapping)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for name, value in entries:
        if name == key and is_set(value):
            yield f"{path}.{name}"
        elif isinstance(value, (Mapping, list)):
            yield from _find_key(value, key, f"{path}.{name}")


def is_set(value: Any) -> bool:
    """Tell whether a saved value does anything: false, null and an empty group do not."""
    return value not in (None, False, "", "none") and value != {} and value != []


def drop_command_only(content: Mapping[str, Any], path: Path | None = None) -> dict[str, Any]:
    """Return saved groups without command-only settings; with the `path` of their file, print a
    line for each.
    """
    for key, setting in find_command_only(content) if path is not None else ():
        report_ignored(path, key, setting)
    whole = {setting.group for setting in list_command_only() if setting.key == ALL}
    return {
        str(group): _drop_keys(
            node, {entry.key for entry in list_command_only() if entry.group == group}
        )
        for group, node in content.items()
        if group not in whole
    }


def _drop_keys(node: Any, keys: set[str]) -> Any:
    if isinstance(node, Mapping):
        return {name: _drop_keys(value, keys) for name, value in node.items() if name not in keys}
    return [_drop_keys(value, keys) for value in node] if isinstance(node, list) else node


_reported: set[tuple[str, str]] = set()
"""The files and keys that were printed; a command may read a file several times."""


def report_ignored(path: Path | None, key: str, setting: CommandOnlySetting) -> None:
    """Print once that a setting of a file is ignored."""
    if (str(path), key) not in _reported:
        _reported.add((str(path), key))
        print(
            (
                f"{path}: {key} is ignored, because it {setting.reason}; give it in the command, "
                f"as in {setting.example}"
            ),
            file=sys.stderr,
        )


# Downloads


OFFLINE_ERRORS = ("OfflineModeIsEnabled", "LocalEntryNotFoundError")
"""Errors of the hub's client for what is not on this machine."""


@contextmanager
def without_downloads(origin: str | None) -> Iterator[None]:
    """Read models and data sets from this machine alone, if `origin`, the file that names them,
    is given.
    """
    if origin is None:
        yield
        return
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    # Requests of the hub's client ask for this switch each time.
    switch_data_sets(True)
    try:
        yield
    except (UserError, OSError, ValueError) as error:
        if not is_offline_error(error):
            raise
        raise UserError(
            f"{origin}: it names something that is not on this machine, and what a file names is "
            "not downloaded; name it in the command, as in target=hf target.model=NAME"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline
        switch_data_sets(was_offline)


def switch_data_sets(is_offline: bool) -> None:
    """Tell the library of data sets, which keeps a copy of the hub's switch, if it is loaded."""
    if (config := sys.modules.get("datasets.config")) is not None:
        config.HF_HUB_OFFLINE = config.HF_DATASETS_OFFLINE = is_offline  # type: ignore[attr-defined]


def is_offline_error(error: BaseException | None) -> bool:
    """Tell whether an error, or one that led to it, says that something is not on this machine."""
    while error is not None:
        if type(error).__name__ in OFFLINE_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False
