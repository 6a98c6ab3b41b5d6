"""The words of a command, looked at before hydra sees them: each mistake has one sentence, with what was meant."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from spectrain.errors import UserError, nearest
from spectrain.settings.schema import Schema, choice_files, conf_folders, owners, schema
from spectrain.settings.signatures import keys

from .help import COMMANDS, Command

ALONE = (
    "-m", "--multirun", "--resolve", "--hydra-help", "-r", "--run", "-sc", "--shell-completion", "--help", "-h", "--version",
)  # fmt: skip
VALUED = (
    "--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--info", "-i",
    "--experimental-rerun",
)  # fmt: skip
SHOWN = ("job", "hydra", "all")
SETTING = re.compile(r"(?:\+\+|\+|~)?([\w./@:]*)=(.*)", re.DOTALL)


def check_words(command: str, config: str, words: list[str]) -> None:
    """Raise a UserError at the first word that no configuration could be composed with."""
    asked, folders = schema(config), conf_folders(words)
    asked.groups |= {folder.name: None for place in folders[1:] for folder in place.iterdir() if folder.is_dir()}
    known = [*asked.groups, *asked.nodes, *(key.name for key in asked.keys)]
    sweeps = any(word in ("-m", "--multirun") for word in words)
    rest = iter(words)
    for word in rest:
        if word.startswith("-"):
            check_flag(word, next(rest, None) if word in VALUED else None, known, asked, COMMANDS[command])
            continue
        setting = SETTING.fullmatch(word)
        if setting is None or not setting[1]:
            if not word.startswith("~"):
                raise UserError(f"{word}: settings are KEY=VALUE without spaces{meant(command, word, known, folders)}")
            continue
        name, value = setting[1], setting[2]
        if not value and any(key.name == name for key in asked.keys):
            raise UserError(f"{name}=: it is empty; write {name}=VALUE, or leave it out")
        head = re.split(r"[./@]", name)[0]
        if name in asked.groups and not word.startswith("~"):
            check_choice(name, value, folders, sweeps)
        elif head not in known and head != "hydra":
            raise UserError(f"{head}: there is no such key{likely(name, head, asked, known)}")


def check_flag(word: str, following: str | None, known: list[str], asked: Schema, command: Command) -> None:
    """A flag is hydra's, or the user meant a setting."""
    name, equals, value = word.partition("=")
    value = value if equals else following or ""
    if name in ("--config-dir", "-cd") and not Path(value).is_dir():
        raise UserError(f"{name} {value}: there is no such folder; give one that holds groups of yaml files")
    if name in ("--cfg", "-c") and value not in SHOWN:
        raise UserError(f"{name} {value}: there is no such part of the configuration; {nearest(value, SHOWN)}")
    if name in (*ALONE, *VALUED):
        return
    key = name.lstrip("-").replace("-", "_")
    full = key if re.split(r"\.", key)[0] in known else next(iter(homes(key, asked)), None)
    if full is not None:
        raise UserError(f"{word}: settings have no dashes; write {full}=VALUE")
    ours = [flag.split()[0] for flag in command.flags]
    raise UserError(f"{word}: there is no such flag; {nearest(name, [*ours, '--help', '--multirun', '--cfg', '--config-dir'])}")


def check_choice(group: str, value: str, folders: list[Path], sweeps: bool) -> None:
    """A choice is one of the group's files, or in a sweep several."""
    files = choice_files(group, folders)
    if value.startswith("[") or value in (*files, "null", "None"):
        return
    chosen = value.split(",")
    if len(chosen) > 1 and not sweeps and all(one in files for one in chosen):
        raise UserError(f"{group}={value}: several values are a sweep, which wants -m; or choose one")
    if re.search(r"\s\w+[\w.]*=", value):
        raise UserError(f"{group}={value}: these are several settings in one pair of quotes; quote them one by one")
    unknown = next((one.strip() for one in chosen if one.strip() not in files), None)
    if unknown is None or re.search(r"[()*]", value):  # hydra's own ways of writing a sweep
        return
    if group in ("target", "data") and re.search(r"[./]", unknown):
        choice, key = ("hf", "model") if group == "target" else ("jsonl", "path")
        raise UserError(f"{group}={unknown}: there is no such choice; write {group}={choice} {group}.{key}={unknown}")
    other = ", and target=hf target.model=NAME is any other model" if group == "target" else ""
    raise UserError(f"{group}={unknown}: there is no such choice; {nearest(unknown, files)}{other}")


def meant(command: str, word: str, known: list[str], folders: list[Path]) -> str:
    """What a word without = may have been."""
    if word in known:
        return f", as in {word}={next(iter(choice_files(word, folders)), 'VALUE')}"
    if "run" in known and (command in ("eval", "chat", "export") or Path(word).is_dir()):
        return f"; write run={word}"
    recipe = word if "recipe" in known and word in choice_files("recipe", folders) else None
    return f"; write recipe={recipe}" if recipe else f"; {nearest(word, known)}"


def likely(name: str, head: str, asked: Schema, known: list[str]) -> str:
    """Which key may have been meant by one whose first part is unknown."""
    last = name.rpartition(".")[2]
    close = get_close_matches(head, known, n=3, cutoff=0.6)
    found = homes(last, asked)
    near = [one for one in found if one.partition(".")[0] in close]
    if near and "." in name:
        return f"; write {near[0]}"
    if close and "." not in name:
        return f"; {nearest(head, known)}"
    return f"; write {' or '.join(found[:3])}" if found else f"; {nearest(head, known)}"


def homes(name: str, asked: Schema) -> list[str]:
    """The full names of a key: the groups whose choices have one of this name."""
    found = [node for node, target in asked.nodes.items() if any(key.name == name for key in keys(target))]
    found += [group for group in asked.groups if owners(group, name)]
    return [f"{group}.{name}" for group in dict.fromkeys(found)]
