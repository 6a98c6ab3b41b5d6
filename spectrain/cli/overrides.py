"""The words of a command: turned into settings, checked before hydra reads them, and written in
hydra's form.

Each mistake is reported in one sentence, with a suggestion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from spectrain.config.choices import (
    FOLDER_KEYS,
    CommandSchema,
    choice_files,
    conf_folders,
    find_owners,
    list_config_groups,
    load_schema,
    shipped_folders,
)
from spectrain.config.commands import Command
from spectrain.config.grouped import drop_parts
from spectrain.config.missing import explain_missing
from spectrain.config.signatures import list_keys
from spectrain.errors import UserError, suggest_nearest
from spectrain.runs.folder import require_drafter_directory

from .help import COMMANDS, EXAMPLE_RECIPE, HELP_DATA

BARE_FLAGS = HELP_DATA["hydra"]["alone"]
VALUE_FLAGS = HELP_DATA["hydra"]["valued"]
CFG_PARTS = ("job", "hydra", "all")
SETTING_PATTERN = re.compile(r"(?:\+\+|\+|~)?([\w./@:]*)=(.*)", re.DOTALL)

# Values that hydra reads as something else than a name.
NO_NAMES = ("null", "true", "false", "nan", "inf")
MAX_DIGITS = 300
MAX_BRACKETS = 64


def to_settings(name: str, words: list[str]) -> list[str]:
    """Return the words of a command with flags and positional words written as settings, and
    with implied settings added.
    """
    command = COMMANDS[name]
    settings = list[str]()
    rest = iter(words)
    stands = command.stands
    positional = list(command.places)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in stands and "=" not in stands[flag]:
            following = value if equals else next(rest, None)
            if following is None:
                example = next(example for example in command.examples if flag in example)
                raise UserError(f"{flag}: say what, as in spectrain {name} {example}")
            settings += to_setting(stands[flag], following)
        elif word in VALUE_FLAGS:
            settings += [word, *islice(rest, 1)]
        elif positional and not word.startswith("-") and ("=" not in word or Path(word).exists()):
            settings += to_setting(positional.pop(0), word)
        else:
            settings.append(stands.get(word, word))
    settings = drop_parts(settings)
    settings = compare_settings(settings) if name == "compare" else settings
    keys_given = {word.partition("=")[0] for word in settings}
    return [
        *(setting for setting, groups in command.implied.items() if not keys_given & {*groups}),
        *settings,
    ]


def to_setting(key: str, value: str) -> list[str]:
    """Return a key with any text as its value; a target is a choice, or else the path or name of
    a model.
    """
    if key != "target":
        return [f"{key}={quote_text(value)}"]
    return (
        [f"target={value}"]
        if value in choice_files("target")
        else ["target=hf", f"target.model={quote_text(value)}"]
    )


def compare_settings(words: list[str]) -> list[str]:
    """Write folders of finished runs as runs=[..], and recipes=a,b as a list, which hydra would
    take for a sweep.
    """
    runs = [word for word in words if "=" not in word and not word.startswith("-")]
    rest = [
        re.sub(r"^(recipes|runs)=([^\[].*,.*)$", r"\1=[\2]", word)
        for word in words
        if word not in runs
    ]
    return [*rest, f"runs=[{','.join(json.dumps(run) for run in runs)}]"] if runs else rest


def write_overrides(words: Iterable[str]) -> list[str]:
    """Return the words of a command as hydra's overrides, `a.b=c` as `++a.b=c`: defaults live in
    constructors, so a key need not stand in a yaml. Hydra's own flags come first, because hydra
    refuses settings on both sides of a flag.

    `check_config`, which knows the constructors, reports unknown keys later.
    """
    groups = list_config_groups(conf_folders())
    flags = list[str]()
    settings = list[str]()
    rest = iter(words)
    for word in rest:
        if word in VALUE_FLAGS:
            flags += [word, *islice(rest, 1)]
        elif word.startswith("-"):
            flags.append(word)
        else:
            settings.append(_allow_new_key(word, groups))
    return [*flags, *settings]


def _allow_new_key(word: str, groups: set[str]) -> str:
    match = re.match(r"([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL)
    if match is None or match[1] in groups:
        return word
    key, value = match.groups()
    # A folder may be named by a number.
    is_numbered = key in FOLDER_KEYS and re.match(r"[\d.+-]", value) and "," not in value
    return f"++{key}={quote_text(value) if is_numbered else quote_if_needed(value)}"


def quote_if_needed(value: str) -> str:
    """Quote a value that hydra's grammar refuses, such as a sentence."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(f"key={value}")
    except HydraException:
        return quote_text(value)
    return value


def quote_text(value: str) -> str:
    """Return a text in hydra's quotes."""
    return (
        "'"
        + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)
        + "'"
    )


def check_words(command: str, words: list[str]) -> None:
    """Raise a UserError for the first word that fits no configuration, or that its constructor
    refuses.
    """
    from spectrain.config.check import check_overrides

    schema = load_schema(COMMANDS[command].config or "")
    own_groups = list_config_groups(conf_folders()) - list_config_groups(shipped_folders())
    schema.groups |= dict.fromkeys(own_groups)
    allowed = [*schema.groups, *schema.nodes, *(key.name for key in schema.keys)]
    sweeps = any(word in ("-m", "--multirun") for word in words)
    rest = iter(words)
    for word in rest:
        if word.startswith("-"):
            check_flag(
                word,
                next(rest, None) if word in VALUE_FLAGS else None,
                allowed,
                schema,
                COMMANDS[command],
            )
            continue
        setting = SETTING_PATTERN.fullmatch(word)
        if setting is None or not setting[1]:
            if word.startswith("~") and word[1:] in schema.groups:
                raise UserError(
                    f"{word}: a group cannot be left out; choose another by {word[1:]}=NAME, or "
                    "leave out this word"
                )
            if not word.startswith("~"):
                raise UserError(
                    f"{word}: settings are KEY=VALUE without "
                    f"spaces{suggest_word(command, word, allowed)}"
                )
            continue
        name = setting[1]
        value = setting[2]
        check_length(name, value)
        if not value and any(key.name == name for key in schema.keys):
            raise UserError(f"{name}=: it is empty; write {name}=VALUE, or leave it out")
        head = re.split(r"[./@]", name)[0]
        if name in schema.groups and not (word.startswith("~") and value in ("", "null")):
            check_choice(name, value, sweeps)
        elif name.startswith("hydra/"):
            check_hydra_choice(word, value)
        elif head not in allowed and head != "hydra":
            raise UserError(
                f"{head}: there is no such key{suggest_key(setting[1], head, schema, allowed)}"
            )
    check_overrides(schema, words)


def find_repeated(words: Iterable[str]) -> list[str]:
    """Return a sentence for each key that is given several values, of which the last one holds."""
    values: dict[str, list[str]] = {}
    for word in words:
        setting = None if word.startswith(("-", "~")) else SETTING_PATTERN.fullmatch(word)
        if setting is not None and setting[1]:
            values.setdefault(setting[1], []).append(setting[2])
    return [
        f"{key} is given {len(given)} times; {key}={given[-1]} holds"
        for key, given in values.items()
        if len({*given}) > 1
    ]


def check_drafters(name: str, words: list[str]) -> None:
    """Raise a UserError if a folder from which a drafter is to be read holds none, before
    anything heavy is imported.
    """
    command = COMMANDS[name]
    settings = {
        match[1]: match[2]
        for word in words
        if word not in command.implied and (match := SETTING_PATTERN.fullmatch(word))
    }
    read = [] if command.drafter is None or "drafter" in settings else [command.drafter]
    for key in {*read, "drafter.init"} & settings.keys():
        folder = settings[key].strip("'\"")
        if not {",", "$"} & {*folder}:  # of a sweep, or of another key
            require_drafter_directory(key, folder)


def check_flag(
    word: str,
    following: str | None,
    allowed_keys: list[str],
    schema: CommandSchema,
    command: Command,
) -> None:
    """Raise a UserError for a flag that is neither hydra's nor the command's."""
    name, equals, value = word.partition("=")
    value = value if equals else following or ""
    if name in ("--config-dir", "-cd") and not Path(value).is_dir():
        raise UserError(
            f"{name} {value}: there is no such folder; give one that holds groups of yaml files"
        )
    if name in ("--cfg", "-c") and value not in CFG_PARTS:
        raise UserError(
            f"{name} {value}: there is no such part of the configuration; "
            f"{suggest_nearest(value, CFG_PARTS)}"
        )
    if name in BARE_FLAGS and equals:
        raise UserError(f"{word}: this flag takes no value; write {name}")
    if name in (*BARE_FLAGS, *VALUE_FLAGS):
        return
    key = name.lstrip("-").replace("-", "_")
    full = (
        key if key.split(".")[0] in allowed_keys else next(iter(find_full_names(key, schema)), None)
    )
    if full is not None:
        raise UserError(f"{word}: settings have no dashes; write {full}=VALUE")
    ours = [flag.split()[0] for flag in command.flags]
    raise UserError(
        f"{word}: there is no such flag; "
        f"{suggest_nearest(name, [*ours, '--help', '--multirun', '--cfg', '--config-dir'])}"
    )


def check_length(name: str, value: str) -> None:
    """Raise a UserError for a number with more digits than Python reads, and for brackets that
    nest deeper than settings do.
    """
    if re.search(rf"\d{{{MAX_DIGITS + 1}}}", value):
        raise UserError(
            f"{name}={value[:20]}..: a number has at most {MAX_DIGITS} digits; write a smaller one"
        )
    if re.search(rf"[\[{{(]{{{MAX_BRACKETS + 1}}}", value):
        raise UserError(
            f"{name}={value[:20]}..: its brackets are nested too deeply; write a plain value"
        )


def check_hydra_choice(word: str, value: str) -> None:
    """Raise a UserError unless the choice of one of hydra's own groups is a name, or several of
    a sweep.
    """
    if (
        word.startswith("~")
        or value.lower() in NO_NAMES
        or not re.fullmatch(r"[A-Za-z][\w/,-]*", value)
    ):
        raise UserError(
            f"{word}: hydra takes the name of a choice here, as in hydra/launcher=basic"
        )


def check_choice(group: str, value: str, sweeps: bool) -> None:
    """Raise a UserError unless the choice is one of the group's files or, in a list or a sweep,
    several of them.
    """
    files = choice_files(group)
    if value in (*files, "[]"):
        return
    is_list = value.startswith("[")
    chosen = (
        [entry.strip(" '\"") for entry in value.strip("[]").split(",")]
        if is_list
        else value.split(",")
    )
    if not is_list and len(chosen) > 1 and not sweeps and all(entry in files for entry in chosen):
        raise UserError(f"{group}={value}: several values are a sweep; add -m, or choose one")
    if re.search(r"\s\w+[\w.]*=", value):
        raise UserError(
            f"{group}={value}: these are several settings in one pair of quotes; quote them one "
            "by one"
        )
    unknown = next((entry.strip() for entry in chosen if entry.strip() not in files), None)
    # hydra's forms of a sweep
    if unknown is None or re.match(r"(choice|range|glob|sort|shuffle|tag|interval)\(|\*$", value):
        return
    if (missing := explain_missing(group, unknown)) is not None:
        raise UserError(missing)
    if group in ("target", "data") and re.search(r"[./]", unknown):
        choice, key = ("hf", "model") if group == "target" else ("jsonl", "path")
        raise UserError(
            f"{group}={unknown}: there is no such choice; write {group}={choice} "
            f"{group}.{key}={unknown}"
        )
    other = ", and target=hf target.model=NAME is any other model" if group == "target" else ""
    raise UserError(
        f"{group}={unknown}: there is no such choice; {suggest_nearest(unknown, files)}{other}"
    )


def suggest_word(command: str, word: str, allowed_keys: list[str]) -> str:
    """Suggest the setting that a word without = may mean."""
    if word in allowed_keys:
        first = next(iter(choice_files(word)), "VALUE")
        example = EXAMPLE_RECIPE if word == "recipe" else first
        return f", as in {word}={example}"
    if re.fullmatch(r"\w+(\.\w+)+", word) and word.partition(".")[0] in allowed_keys:
        return f"; write {word}=VALUE"
    if "run" in allowed_keys and (command in ("eval", "chat", "export") or Path(word).is_dir()):
        return f"; write run={word}"
    recipe = word if "recipe" in allowed_keys and word in choice_files("recipe") else None
    return f"; write recipe={recipe}" if recipe else f"; {suggest_nearest(word, allowed_keys)}"


def suggest_key(name: str, head: str, schema: CommandSchema, allowed_keys: list[str]) -> str:
    """Suggest the key that one with an unknown first part may mean."""
    from spectrain.config.check import OTHER_NAMES

    if (ours := OTHER_NAMES.get(name)) is not None and (full := find_full_names(ours, schema)):
        return f"; write {full[0]}"
    close = get_close_matches(head, allowed_keys, n=3, cutoff=0.6)
    matches = find_full_names(name.rpartition(".")[2], schema)
    near = [match for match in matches if match.partition(".")[0] in close]
    if near and "." in name:
        return f"; write {near[0]}"
    if not matches or (close and "." not in name):
        return f"; {suggest_nearest(head, allowed_keys)}"
    return f"; write {' or '.join(matches[:3])}"


def find_full_names(name: str, schema: CommandSchema) -> list[str]:
    """Return the full names of a key, with the groups whose choices have it."""
    names = [
        node
        for node, target in schema.nodes.items()
        if any(key.name == name for key in list_keys(target))
    ]
    names += [group for group in schema.groups if find_owners(group, name)]
    return [f"{group}.{name}" for group in dict.fromkeys(names)]
