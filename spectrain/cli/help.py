"""What `--help` says: examples first, then every key with its default and its meaning, then where results go."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spectrain.errors import UserError, nearest
from spectrain.settings.schema import choice_files, chosen, conf_folders, header, load, schema, settings
from spectrain.settings.signatures import Key, written

HELP = ("-h", "--help", "help")


@dataclass(frozen=True)
class Command:
    """What a command is for, in a line; examples, each with what it does; where its results go; its configuration in conf/."""

    about: str
    examples: dict[str, str]
    results: str
    config: str | None = None  # None: it takes its words as they are
    flags: dict[str, str] = field(default_factory=dict)
    note: str = ""
    stands: dict[str, str] = field(default_factory=dict)  # flag -> a setting, or the key whose value follows it
    places: list[str] = field(default_factory=list)  # keys of words without one
    drafter: str | None = None  # the key of the drafter that it reads, where no drafter=CHOICE is said
    implied: dict[str, list[str]] = field(default_factory=dict)  # setting -> groups of which one makes it needless


SAID = load(Path(__file__).with_suffix(".yaml"))
COMMANDS = {name: Command(**entry) for name, entry in SAID["commands"].items()}  # in the order of a project


def overview() -> str:
    """All commands, a line each."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  spectrain {name:{width}}{command.about}" for name, command in COMMANDS.items()]
    return str(SAID["overview"]).format(commands="\n".join(lines).strip()).rstrip()


def explain(name: str, words: list[str]) -> str:
    """The help of one command; choices and a recipe among its other `words` say whose keys are shown."""
    command = COMMANDS[name]
    examples = [f"  spectrain {name} {words}".rstrip() + f"\n      {meaning}" for words, meaning in command.examples.items()]
    parts = [f"spectrain {name}: {command.about}", titled("Examples", "\n".join(examples))]
    if command.config is not None:
        parts += described(name, command, words)
    if command.flags:
        parts.append(titled("Flags", listed(command.flags)))
    parts.append(titled("Results", wrapped(command.results, "  ")))
    return "\n\n".join(parts)


def described(name: str, command: Command, words: list[str]) -> list[str]:
    """The groups with their choices, and every key with the value that it has, of the recipe or of its constructor."""
    asked, folders, note = schema(command.config or ""), conf_folders(words), command.note
    choices, parts = chosen(asked, words), []
    if "recipe" in asked.groups and not {"recipe", "drafter"} & choices.keys():
        recipe = next(word for word in " ".join(command.examples).split() if word.startswith("recipe="))
        words, note = [*words, recipe], f"values are those of {recipe}; spectrain {name} recipe=NAME --help has another's"
    if asked.groups:
        found = []
        for group in sorted(asked.groups, key=lambda group: group != "recipe"):
            found.append(f"  {group}={choices.get(group, '')}")
            files = choice_files(group, folders)
            found.append(listed({choice: first_sentence(header(path)) for choice, path in files.items()}, "    "))
        parts.append(titled("Groups: GROUP=CHOICE, each with what it is now", "\n".join(found)))
    if note:
        parts.append(wrapped(f"{note[0].upper()}{note[1:]}.", ""))
    if asked.keys:
        parts.append(titled("Keys: KEY=VALUE", keys_of({key.name: key for key in asked.keys})))
    choices, values = chosen(asked, words), settings(asked, words)
    for group, keys in values.items():
        whose = f" ({group}={choices[group]})" if group in choices and len(choice_files(group, folders)) > 1 else ""
        named = {f"{group}.{key.name}": replace(key, default=resolved(key.default, values)) for key in keys}
        parts += [titled(f"{group}.KEY=VALUE{whose}", keys_of(named))] if keys else []
    if "drafter" in asked.groups and "drafter" not in choices:
        parts.append(f"The keys of a drafter: spectrain {name} drafter=ngram --help")
    return parts


def resolved(default: str | None, values: Mapping[str, list[Key]]) -> str | None:
    """What a value is that a recipe takes from another key."""
    other = re.fullmatch(r"\$\{(\w+)\.(\w+)\}", default or "")
    keys = values.get(other[1], []) if other else []
    return next((key.default for key in keys if other and key.name == other[2]), default)


def keys_of(keys: Mapping[str, Key]) -> str:
    """Keys, each with its value and what it means."""
    found = {}
    for name, key in keys.items():
        values = " | ".join(key.choices) if key.choices and key.choices != ("true", "false") else ""
        said = ("must be given" if key.default is None else "", meaning_of(key), values)
        found[f"{name}={'???' if key.default is None else key.default}"] = "; ".join(filter(None, said))
    return listed(found)


def meaning_of(key: Key) -> str:
    """A line on a key, from where most is said of it."""
    return key.meaning or SAID["keys"].get(key.name) or key.beside


def listed(entries: Mapping[str, str], indent: str = "  ") -> str:
    """Names with what they mean beside them, or below where a name is long."""
    column = min(30, max((len(name) for name in entries), default=0) + 2)
    lines = []
    for name, meaning in entries.items():
        if len(name) + 2 > column and meaning:
            lines += [indent + name, wrapped(meaning, indent + " " * column)]
        else:
            lines.append(wrapped(meaning, indent + " " * column, indent + name.ljust(column)))
    return "\n".join(line.rstrip() for line in lines)


def wrapped(text: str, indent: str, first: str | None = None) -> str:
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    opening = indent if first is None else first
    return textwrap.fill(text, width, initial_indent=opening, subsequent_indent=indent, break_on_hyphens=False) or opening


def titled(title: str, body: str) -> str:
    return f"{title}\n{body}"


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends one."""
    return text.partition(". ")[0]


def advice(text: str) -> str:
    """The sentence that says when to choose a recipe."""
    return "".join(text.partition("Choose it")[1:])


def recipes(words: list[str]) -> str:
    """What every recipe is for, or all about one."""
    files = choice_files("recipe", conf_folders(words))
    if not words:
        found = {name: f"{first_sentence(header(path))}. {advice(header(path))}".strip() for name, path in files.items()}
        return f"{titled('recipe', listed(found))}\n\nspectrain recipes NAME says more; spectrain compare measures."
    name = words[0].removeprefix("recipe=")
    if name not in files:
        raise UserError(f"recipes {words[0]}: there is no such recipe; {nearest(name, files)}")
    values = {key: value for key, value in load(files[name]).items() if key != "defaults"}
    lines = [f"  {group}.{key}={told(value, values)}" for group, node in values.items() for key, value in node.items()]
    return f"recipe={name}\n{wrapped(header(files[name]), '  ')}\n\nSettings\n" + "\n".join(lines)


def told(value: Any, recipe: Mapping[str, Mapping[str, Any]]) -> str:
    """A recipe's value as one writes it, where it refers to another key that key's."""
    other = re.fullmatch(r"\$\{(\w+)\.(\w+)\}", str(value))
    if other and other[2] in recipe.get(other[1], {}):
        value = recipe[other[1]][other[2]]
    return written(value)


def version() -> str:
    """spectrain's own version."""
    import importlib.metadata

    try:
        return importlib.metadata.version("spectrain")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
