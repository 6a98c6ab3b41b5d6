"""Tab completion: what may stand where the cursor is, and the scripts (completion.bash and so on) by which shells ask for it.

It is our own, as others lose what a user sees. `shtab` writes a script once, from a parser of fixed words: keys that depend on
the recipe or choice named before, run folders and --config-dir are beyond it. Hydra's own composes the configuration at every
press, 3 seconds where this takes 0.4, and has no key whose default is a constructor's, no command and no flag.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from spectrain.config.schema import choice_files, conf_folders, load_schema, settings_by_group
from spectrain.errors import UserError, suggest_nearest

from .help import COMMANDS

WORD_END = " "  # behind a word that is finished
PATH_KEYS = ("path", "out", "init", "prompts", "calibration", "model", "assistant", "results")  # keys of files or folders
SHELL_SCRIPTS = {path.suffix[1:]: path for path in sorted(Path(__file__).parent.glob("completion.*")) if path.suffix != ".py"}
LAYOUT_NAMES = (
    "vllm",
    "sglang",
    "flat",
    "hf",
    "eagle",
    "medusa",
    "mtp",
    "peft",
    "uno",
    "spectrain",
)  # ours last: not exported to


def read_script(shell: str) -> str:
    """What a shell must read to complete the words of spectrain."""
    if shell not in SHELL_SCRIPTS:
        raise UserError(f"completion {shell}: there is no such shell here; {suggest_nearest(shell, SHELL_SCRIPTS)}")
    return SHELL_SCRIPTS[shell].read_text()


def complete_word(words: list[str]) -> list[str]:
    """What the last of these words, which follow `spectrain`, may become."""
    *before, word = words or [""]
    found = sorted({one for one in list_candidates(before, word) if one.startswith(word)})
    return [one for one in found if one.rstrip() != word] or found


def list_candidates(before: list[str], word: str) -> Iterable[str]:
    name = next((name for name in (" ".join(before[:2]), " ".join(before[:1])) if name in COMMANDS), None)
    if name is None:
        depth = len(before)
        return [one.split()[depth] + WORD_END for one in COMMANDS if one.split()[:depth] == before and len(one.split()) > depth]
    config, rest = COMMANDS[name].config, before[len(name.split()) :]
    if word.startswith("-"):
        flags = (*COMMANDS[name].flags, *(["--config-dir"] if config else []), "--help")
        return [flag.split()[0] + WORD_END for flag in flags]
    found = list(positional_words(name, rest, word))
    return (
        found if config is None or rest[-1:] in (["--to"], ["--target"]) else [*found, *setting_words(name, config, rest, word)]
    )


def positional_words(name: str, rest: list[str], word: str) -> Iterable[str]:
    """What stands without a key: a shell, a recipe, a format, a folder."""
    previous = rest[-1] if rest else ""
    if name == "completion":
        return [shell + WORD_END for shell in SHELL_SCRIPTS] if not rest else []
    if name == "recipes":
        return [recipe + WORD_END for recipe in choice_files("recipe", conf_folders(rest))]
    if previous == "--to":
        return [layout + WORD_END for layout in LAYOUT_NAMES]
    if previous == "--target":
        return [*(target + WORD_END for target in ("tiny", "smollm2")), *path_words("", word)]
    return (
        path_words("", word) if name in ("convert", "lint") or (name == "compare" and "/" in word and "=" not in word) else []
    )


def setting_words(name: str, config: str, rest: list[str], word: str) -> Iterable[str]:
    """Groups, their choices, the keys in them, and values."""
    asked, folders = load_schema(config), conf_folders(rest)
    key, equals, value = word.partition("=")
    group, dot, name_in_group = key.rpartition(".")
    known = settings_by_group(asked, rest)
    if not equals and not dot:
        plain = [*asked.groups, *(one.name for one in asked.keys)]
        return [*(f"{name}=" for name in plain), *(f"{group}." for group, keys in known.items() if keys)]
    if not equals:
        return [f"{group}.{one.name}=" for one in known.get(group, [])]
    earlier = value.rpartition(",")[0]  # of a sweep
    start = f"{key}={earlier}," if earlier else f"{key}="
    if key in asked.groups:
        return [f"{start}{choice}{WORD_END}" for choice in choice_files(key, folders)]
    if key == "run":
        return run_words(word)
    options = next((one.choices for one in (known.get(group, []) if dot else asked.keys) if one.name == name_in_group), ())
    if key == "format":
        options = LAYOUT_NAMES if name == "convert" else LAYOUT_NAMES[:-1]
    return [f"{start}{option}{WORD_END}" for option in options] or (
        path_words(f"{key}=", value) if name_in_group in PATH_KEYS else []
    )


def run_words(word: str) -> list[str]:
    """Run folders below runs/, and any other folder that is begun."""
    made = [path for path in sorted(Path("runs").glob("*")) if (path / "config.yaml").exists() or (path / "drafter").is_dir()]
    return [f"run={path.as_posix()}{WORD_END}" for path in made] + path_words("run=", word.removeprefix("run="), folders=True)


def path_words(start: str, value: str, folders: bool = False) -> list[str]:
    """Files and folders whose path begins so."""
    head, _, tail = value.rpartition("/")
    place = Path(os.path.expanduser(head + "/" if head or value.startswith("/") else "."))
    shown = f"{head}/" if "/" in value else ""
    try:
        found = [one for one in place.iterdir() if one.name.startswith(tail) and (tail or not one.name.startswith("."))]
    except OSError:
        return []
    return [f"{start}{shown}{one.name}{'/' if one.is_dir() else WORD_END}" for one in found if one.is_dir() or not folders]
