"""Tab completion: the words that fit at the cursor, and the scripts (completion.bash and so on)
that connect it to a shell.

It is our own, because others lose what a user needs. `shtab` writes a script once, from a parser of
fixed words; it cannot know keys that depend on the recipe or choice before the cursor, run folders,
or --config-dir. Hydra's own completion composes the configuration at every press, 3 seconds where
this takes 0.4, and knows no key whose default is a constructor's, no command and no flag.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from spectrain.config.choices import (
    choice_files,
    load_schema,
    named_folders,
    set_choice_folders,
    settings_by_group,
)
from spectrain.errors import UserError, suggest_nearest
from spectrain.export.layouts import FORMATS
from spectrain.models.published import MODELS

from .help import COMMANDS, command_keys
from .run_table import SORT_KEYS
from .settings_file import SUFFIXES

# Follows a complete word.
WORD_END = " "
# keys of files or folders
PATH_KEYS = ("path", "out", "init", "prompts", "calibration", "model", "assistant", "results")
SHELL_SCRIPTS = {
    path.suffix[1:]: path
    for path in sorted(Path(__file__).parent.glob("completion.*"))
    if path.suffix != ".py"
}


def read_script(shell: str) -> str:
    """Return the script that a shell must load to complete the words of spectrain."""
    if shell not in SHELL_SCRIPTS:
        raise UserError(
            f"completion {shell}: there is no such shell here; "
            f"{suggest_nearest(shell, SHELL_SCRIPTS)}"
        )
    return SHELL_SCRIPTS[shell].read_text()


def complete_word(words: list[str]) -> list[str]:
    """Return the completions of the last of these words, which follow `spectrain`."""
    set_choice_folders(named_folders(words))
    *before, word = words or [""]
    matches = sorted({match for match in list_candidates(before, word) if match.startswith(word)})
    return [match for match in matches if match.rstrip() != word] or matches


def list_candidates(before: list[str], word: str) -> Iterable[str]:
    name = next(
        (name for name in (" ".join(before[:2]), " ".join(before[:1])) if name in COMMANDS), None
    )
    if name is None:
        depth = len(before)
        return [
            entry.split()[depth] + WORD_END
            for entry in COMMANDS
            if entry.split()[:depth] == before and len(entry.split()) > depth
        ]
    config = COMMANDS[name].config
    rest = before[len(name.split()) :]
    if word.startswith("-"):
        flags = (*COMMANDS[name].flags, *(["--config-dir"] if config else []), "--help")
        return [flag.split()[0] + WORD_END for flag in flags]
    words = list(positional_words(name, rest, word))
    return (
        words
        if config is None or rest[-1:] in (["--to"], ["--target"])
        else [*words, *setting_words(name, config, rest, word)]
    )


def positional_words(name: str, rest: list[str], word: str) -> Iterable[str]:
    """Return words without a key: a shell, a recipe, a format, a folder."""
    previous = rest[-1] if rest else ""
    if name == "completion":
        return [shell + WORD_END for shell in SHELL_SCRIPTS] if not rest else []
    if name == "recipes":
        return [recipe + WORD_END for recipe in choice_files("recipe")]
    if name == "runs" and "=" in word:
        return [f"sort={column}{WORD_END}" for column in SORT_KEYS]
    if name == "runs":
        return ["sort=", *path_words("", word, folders=True)]
    if COMMANDS[name].takes_file and not rest and word and "=" not in word:
        paths = path_words("", word)
        return [path for path in paths if path.rstrip().endswith(("/", *SUFFIXES))]
    if previous == "--to":
        return [layout + WORD_END for layout in FORMATS]
    if previous == "--target":
        return [
            *(target + WORD_END for target in ("tiny", "smollm2", *MODELS)),
            *path_words("", word),
        ]
    return (
        path_words("", word)
        if name in ("convert", "lint") or (name == "compare" and "/" in word and "=" not in word)
        else []
    )


def setting_words(name: str, config: str, rest: list[str], word: str) -> Iterable[str]:
    """Return groups, their choices, the keys in them, and values."""
    schema = load_schema(config)
    key, equals, value = word.partition("=")
    group, dot, name_in_group = key.rpartition(".")
    settings = settings_by_group(schema, rest)
    if not equals and not dot:
        plain = [*schema.groups, *(item.name for item in schema.keys)]
        return [
            *(f"{name}=" for name in plain),
            *(f"{group}." for group, keys in settings.items() if keys),
        ]
    group, _, part = group.partition(".")
    if not equals:
        names = [item.full_name if part else item.name for item in settings.get(group, [])]
        parts = {item.part for item in settings.get(group, []) if item.part and not part}
        return [*(f"{group}.{name}=" for name in names), *(f"{group}.{name}." for name in parts)]
    earlier = value.rpartition(",")[0]  # of a sweep
    start = f"{key}={earlier}," if earlier else f"{key}="
    if key in schema.groups:
        return [f"{start}{choice}{WORD_END}" for choice in choice_files(key)]
    if key == "run":
        return run_words(word)
    keys = settings.get(group, []) if dot else command_keys(name, schema)
    options = next((item.choices for item in keys if item.name == name_in_group), ())
    return [f"{start}{option}{WORD_END}" for option in options] or (
        path_words(f"{key}=", value) if name_in_group in PATH_KEYS else []
    )


def run_words(word: str) -> list[str]:
    """Return run folders below runs/, and any other folder that matches."""
    made = [
        path
        for path in sorted(Path("runs").glob("*"))
        if (path / "config.yaml").exists() or (path / "drafter").is_dir()
    ]
    return [f"run={path.as_posix()}{WORD_END}" for path in made] + path_words(
        "run=", word.removeprefix("run="), folders=True
    )


def path_words(start: str, value: str, folders: bool = False) -> list[str]:
    """Return files and folders whose path begins with `value`."""
    head, _, tail = value.rpartition("/")
    directory = Path(os.path.expanduser(head + "/" if head or value.startswith("/") else "."))
    shown = f"{head}/" if "/" in value else ""
    try:
        paths = [
            entry
            for entry in directory.iterdir()
            if entry.name.startswith(tail) and (tail or not entry.name.startswith("."))
        ]
    except OSError:
        return []
    return [
        f"{start}{shown}{entry.name}{'/' if entry.is_dir() else WORD_END}"
        for entry in paths
        if entry.is_dir() or not folders
    ]
