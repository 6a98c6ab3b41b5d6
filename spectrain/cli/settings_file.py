"""A settings file of one's own, as in `spectrain train my.yaml`: it is read as words that stand
before those of the command.

The file may come from somebody else, so it sets nothing that `config/command_only.py` lists, and
names no output outside of the working directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spectrain.config.choices import choice_files
from spectrain.config.command_only import find_command_only
from spectrain.config.grouped import flatten_settings
from spectrain.config.plain_files import read_yaml
from spectrain.config.settings_file import SettingsFile
from spectrain.errors import UserError

from .help import COMMANDS
from .overrides import SETTING_PATTERN, check_words, quote_text, to_setting

SUFFIXES = (".yaml", ".yml")
NAME_PATTERN = re.compile(r"[A-Za-z_]\w*")
# YAML 1.1 reads 1e-3 as a text.
NUMBER_PATTERN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# Settings that name what a training writes.
OUTPUT_KEYS = ("run", "source.path")


def split_settings_file(name: str, words: list[str]) -> tuple[SettingsFile | None, list[str]]:
    """Return the settings file that the first word names, without what the other words replace,
    and the other words; (None, words) where there is none.
    """
    if not (COMMANDS[name].takes_file and words and is_settings_file(words[0])):
        return None, words
    path = Path(words[0])
    own = words[1:]
    second = next((word for word in own if is_settings_file(word)), None)
    if second is not None:
        raise UserError(f"{second}: a command takes one settings file; leave one out")
    if not path.exists():
        raise UserError(f"{path}: there is no such file; give a yaml with recipe, target and data")
    of_file = read_settings(path)
    try:
        check_words(name, of_file)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return SettingsFile(path, tuple(drop_replaced(of_file, own))), own


def is_settings_file(word: str) -> bool:
    """Tell whether a word names a settings file: a yaml, and no setting or flag."""
    return word.endswith(SUFFIXES) and "=" not in word and not word.startswith("-")


def read_settings(path: Path) -> list[str]:
    """Return the settings of a file as words; a UserError names the first that a file may not
    set.
    """
    from spectrain.config.saved import check_no_directives

    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: it holds no settings; write KEY: VALUE lines, as recipe: eagle3")
    check_no_directives(content, path)
    for key, setting in find_command_only(content):
        raise UserError(
            f"{path}: {key} {setting.reason}, which a file cannot ask for; give it in the command, "
            f"as in {setting.example}"
        )
    words = [word for key, value in content.items() for word in list_words(path, str(key), value)]
    for word in words:
        check_output(path, word)
    return words


def list_words(path: Path, key: str, value: Any) -> Iterator[str]:
    """Yield the words of a key of the file: a group is the name of its choice, or a mapping of
    settings, the choice among them. Empty groups are left out.
    """
    if not NAME_PATTERN.fullmatch(key):
        raise UserError(f"{path}: {key}: this is no name of a setting; write groups as mappings")
    # The config.yaml of a run folder has this name.
    key = "recipe" if key == "recipe_name" else key
    if value is None or value == {}:
        return
    if isinstance(value, Mapping):
        if "choice" in value:
            yield from choice_words(key, str(value["choice"]))
        value = flatten_settings(key, value)
        for name, inner in value.items():
            if not NAME_PATTERN.fullmatch(str(name)):
                raise UserError(
                    f"{path}: {key}.{name}: this is no name of a setting; write groups as mappings"
                )
            if name != "choice":
                yield f"{key}.{name}={format_word(path, f'{key}.{name}', inner)}"
    elif isinstance(value, str) and key != "run":
        yield from choice_words(key, value)
    else:
        yield f"{key}={format_word(path, key, value)}"


def choice_words(group: str, value: str) -> list[str]:
    """Return the words for a group's choice; a target may be a model, and data a file."""
    if group == "target":
        return to_setting(group, value)
    if group == "data" and value not in choice_files("data"):
        return ["data=jsonl", f"data.path={quote_text(value)}"]
    return [f"{group}={value}"]


def format_word(path: Path, key: str, value: Any) -> str:
    """Return a value in hydra's form."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return value if NUMBER_PATTERN.fullmatch(value) else quote_text(value)
    if isinstance(value, list):
        return f"[{','.join(format_word(path, key, entry) for entry in value)}]"
    if isinstance(value, dict) and all(NAME_PATTERN.fullmatch(str(name)) for name in value):
        pairs = (f"{name}:{format_word(path, key, entry)}" for name, entry in value.items())
        return f"{{{','.join(pairs)}}}"
    raise UserError(
        f"{path}: {key}: a file holds texts, numbers, lists and mappings by name; put quotes "
        "around it"
    )


def check_output(path: Path, word: str) -> None:
    """Raise a UserError where a word of the file names an output outside of the working
    directory.
    """
    key, _, value = word.partition("=")
    if key not in OUTPUT_KEYS:
        return
    output = Path(value.strip("'")).expanduser().resolve()
    if not output.is_relative_to(Path.cwd().resolve()):
        raise UserError(
            f"{path}: {key} leads out of the working directory, where a file cannot write; give it "
            f"in the command, as in {key}=DIR"
        )


def drop_replaced(of_file: Iterable[str], words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a file that no word of the command replaces; another choice of a group
    replaces all settings of it.
    """
    named = [match[1] for word in words if (match := SETTING_PATTERN.fullmatch(word))]
    for word in of_file:
        key = word.partition("=")[0]
        if not any(key == name or key.startswith(f"{name}.") for name in named):
            yield word
