"""The text of `--help`: examples, choices and the keys used most, on two screens; `--help all` has
every key with its default and description, and `--help GROUP` those of one group.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from spectrain.config.choices import (
    CommandSchema,
    choice_files,
    load_schema,
    load_yaml,
    read_header,
    select_choices,
    settings_by_group,
)
from spectrain.config.commands import Command, add_installed_commands
from spectrain.config.installed import list_conf_folders
from spectrain.config.signatures import SettingKey
from spectrain.errors import UserError, suggest_nearest
from spectrain.export.engine_support import describe_format
from spectrain.export.layouts import EXPORT_FORMATS, FORMATS

# Groups with choices that no serving engine supports.
EXPERIMENTAL_GROUPS = ("recipe", "drafter", "acceptance", "tree")
HELP_WORDS = ("-h", "--help", "help")
# Its values are shown where a command chooses no recipe.
EXAMPLE_RECIPE = "eagle3"
ALL = "all"
"""The topic of help that shows everything."""
MAX_LINES = 48
"""Lines of help without a topic: two screens of 24 lines."""
MAX_SETTING = 40
"""Characters of a key with its value in a line of its own."""


HELP_DATA = load_yaml(Path(__file__).with_suffix(".yaml"))
# In the order of a project.
COMMANDS = {
    name: replace(
        command,
        flags=command.flags | {flag: HELP_DATA["output"][flag] for flag in command.output},
    )
    for name, command in add_installed_commands(
        {name: Command(**entry) for name, entry in HELP_DATA["commands"].items()}
    ).items()
}


def format_overview(group: str | None = None) -> str:
    """List all commands, or those whose first word is the group, with what each one does."""
    words = HELP_DATA["overview" if group is None else "group_overview"]
    commands = {
        name: command.about
        for name, command in COMMANDS.items()
        if group is None or name.startswith(f"{group} ")
    }
    return "\n\n".join(
        [
            wrap_text(words["about"].format(group=group), "  ", ""),
            *([format_list(words["first"], widest=44)] if "first" in words else []),
            format_section("Commands", format_list(commands)),
            wrap_text(words["note"].format(group=group), ""),
        ]
    )


def split_help_topic(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the word after `--help`, which names what to explain, and the words without both."""
    at = next(number for number, word in enumerate(words) if word in HELP_WORDS[:2])
    topic = words[at + 1] if at + 1 < len(words) and words[at + 1].isidentifier() else None
    rest = words[:at] + words[at + (1 if topic is None else 2) :]
    return topic, [word for word in rest if word not in HELP_WORDS[:2]]


def explain_command(name: str, words: list[str], topic: str | None = None) -> str:
    """Return the help of one command; the choices and the recipe among `words` decide whose keys
    are shown. The topic is a group or "all"; None shows what fits two screens.
    """
    command = COMMANDS[name]
    config = None if command.config is None else ConfigHelp(name, command, words)
    groups = set() if config is None else {*config.schema.groups, *config.schema.nodes}
    if topic not in (None, ALL, *groups):
        nearest = suggest_nearest(str(topic), [ALL, *sorted(groups)])
        raise UserError(f"--help {topic}: there is no such group; {nearest}")
    title = wrap_text(f"spectrain {name}: {command.about}", "  ", "")
    if config is not None and topic not in (None, ALL):
        return "\n\n".join([title, *config.describe_group(str(topic))])
    examples = [
        f"{wrap_command(f'spectrain {name} {words}'.rstrip())}\n{wrap_text(meaning, '      ')}"
        for words, meaning in command.examples.items()
    ]
    head = [title, format_section("Examples", "\n".join(examples))]
    flags = [format_section("Flags", format_list(command.flags))] if command.flags else []
    results = format_section("Results", wrap_text(command.results, "  "))
    readers = list_readers_section(name)
    every = [] if config is None else config.describe()
    text = "\n\n".join([*head, *every, *readers, *flags, results])
    if topic == ALL or config is None or len(text.splitlines()) <= MAX_LINES:
        return text
    if command.flags:
        flags = [format_section("Flags", format_lines(command.flags))]
    readers = list_readers_section(name, format_lines)
    return "\n\n".join([*head, *config.summarize(), *readers, *flags, results])


class ConfigHelp:
    """The sections of help about a command's groups and keys."""

    def __init__(self, name: str, command: Command, words: list[str]) -> None:
        self.name = name
        self.command = command
        self.schema = load_schema(str(command.config))
        # The choices that the command has without the recipe of its example.
        self.choices = select_choices(self.schema, words)
        self.groups = sorted(self.schema.groups, key=lambda group: group != "recipe")
        # The recipe whose values are shown where the words choose none.
        self.example = ""
        if "recipe" in self.schema.groups and not {"recipe", "drafter"} & self.choices.keys():
            self.example = f"recipe={EXAMPLE_RECIPE}"
            words = [*words, self.example]
        self.shown_choices = select_choices(self.schema, words)
        self.values = settings_by_group(self.schema, words)
        self.keys = {key.name: key for key in command_keys(name, self.schema)}

    def summarize(self) -> list[str]:
        """Describe in a line each the groups of the examples and of the keys that are used most;
        name the other groups, and list these keys.
        """
        sections = []
        if self.groups:
            used = " ".join([*self.command.examples, *self.command.keys])
            lines = []
            others = []
            for group in self.groups:
                files = choice_files(group)
                experimental = list_experimental(group, files)
                if len(files) > 1 and re.search(rf"\b{group}[=.]", used):
                    # A line is cut at its end: what a reader wants first comes first.
                    first = [str(self.choices.get(group)), *find_choices(group, used)]
                    names = [
                        each for each in sort_choices(files, first) if each not in experimental
                    ]
                    lines.append(cut_line(f"  {group}={' | '.join(names)}"))
                elif len(files) > 1:
                    others.append(group)
            if others:
                lines.append(wrap_text(f"also {', '.join(others)}", "  "))
            sections.append(format_section("Groups: GROUP=CHOICE", "\n".join(lines)))
        settings = self.keys | {
            f"{group}.{key.name}": key for group, keys in self.values.items() for key in keys
        }
        names_used = [key for key in self.command.keys if key in settings] or [*settings][:10]
        entries = {
            shorten_setting(format_setting(name, settings[name])): settings[name].description
            for name in names_used
        }
        sections.append(format_section("Keys used most: KEY=VALUE", format_lines(entries)))
        topics = ["--help all shows every choice and key"]
        if self.values:
            group = next(iter(self.values))
            topics.append(f"--help {group} those of a group")
        return [*sections, wrap_text(f"{', '.join(topics)}.", "")]

    def describe(self) -> list[str]:
        """Describe the groups with their choices, and every key with its value, from the recipe or
        the constructor.
        """
        sections = []
        if self.groups:
            lines = []
            for group in self.groups:
                lines.append(f"  {group}={self.choices.get(group, '')}")
                lines.append(format_choices(group))
            title = "Groups: GROUP=CHOICE (current choice shown)"
            sections.append(format_section(title, "\n".join(lines)))
        note = self.command.note
        if self.example:
            note = (
                f"values are those of {self.example}; spectrain {self.name} recipe=NAME --help has "
                "another's"
            )
        if note:
            sections.append(wrap_text(f"{note[0].upper()}{note[1:]}.", ""))
        if self.keys:
            sections.append(format_section("Keys: KEY=VALUE", format_keys(self.keys)))
        for group in self.values:
            sections += self.describe_group(group)
        if "drafter" in self.schema.groups and "drafter" not in self.shown_choices:
            sections.append(
                f"To see the keys of a drafter, run: spectrain {self.name} drafter=ngram --help"
            )
        return sections

    def describe_group(self, group: str) -> list[str]:
        """Describe the keys of a group, a section for each of its parts."""
        keys = self.values.get(group, [])
        has_choice = group in self.shown_choices and len(choice_files(group)) > 1
        whose = f" ({group}={self.shown_choices[group]})" if has_choice else ""
        sections = []
        for part in dict.fromkeys(key.part for key in keys):
            named = {
                f"{group}.{key.name}": replace(
                    key, default=resolve_reference(key.default, self.values)
                )
                for key in keys
                if key.part == part
            }
            of_part = f", or {group}.{part}.KEY=VALUE" if part else ""
            title = f"{group}.KEY=VALUE{of_part}{whose}"
            sections.append(format_section(title, format_keys(named)))
        return sections


def command_keys(name: str, schema: CommandSchema) -> list[SettingKey]:
    """Return the keys of a command that are in no group; the values of `format` are those of the
    table of layouts.
    """
    formats = EXPORT_FORMATS if name == "export" else FORMATS
    return [replace(key, choices=formats) if key.name == "format" else key for key in schema.keys]


def list_readers_section(
    name: str, format_entries: Callable[[Mapping[str, str]], str] | None = None
) -> list[str]:
    """Return the section of a command's formats, each with the programs that read it; [] for a
    command that writes none. Without `format_entries`, long entries are wrapped.
    """
    if name not in ("export", "convert"):
        return []
    formats = EXPORT_FORMATS if name == "export" else FORMATS
    readers = {name: describe_format(name) or "spectrain" for name in formats}
    body = format_list(readers) if format_entries is None else format_entries(readers)
    return [format_section("Formats, and what reads them", body)]


def format_choices(group: str) -> str:
    """List the choices of a group, those that no inference engine supports under "experimental"."""
    files = choice_files(group)
    experimental = list_experimental(group, files)
    shelves = [
        [name for name in files if name not in experimental],
        [name for name in files if name in experimental],
    ]
    lists = [
        format_list({name: first_sentence(read_header(files[name])) for name in shelf}, "    ")
        for shelf in shelves
    ]
    return (
        lists[0]
        if not experimental
        else f"{lists[0]}\n    experimental: no inference engine supports these\n{lists[1]}"
    )


def find_choices(group: str, text: str) -> list[str]:
    """Return the choices of a group that a text sets, in its order."""
    return [
        name for names in re.findall(rf"\b{group}=([\w.,-]+)", text) for name in names.split(",")
    ]


def sort_choices(files: Mapping[str, Path], first: list[str]) -> list[str]:
    """Return choices in the order of `first`, then the others: those of conf/ before those of
    installed packages.
    """
    added = list_installed(files)
    positions = {name: number for number, name in reversed([*enumerate(first)])}
    return sorted(files, key=lambda name: (positions.get(name, len(first)), name in added))


def list_experimental(group: str, files: Mapping[str, Path]) -> set[str]:
    """Return the choices and recipes of a group that no inference engine supports."""
    return list_installed(files) if group in EXPERIMENTAL_GROUPS else set()


def list_installed(files: Mapping[str, Path]) -> set[str]:
    """Return the choices that installed packages add."""
    return {
        name
        for name, path in files.items()
        if any(path.is_relative_to(folder) for folder in list_conf_folders())
    }


def resolve_reference(default: str | None, values: Mapping[str, list[SettingKey]]) -> str | None:
    """Return the value of a default that refers to another key."""
    other = re.fullmatch(r"\$\{(\w+)\.(\w+)\}", default or "")
    keys = values.get(other[1], []) if other else []
    return next((key.default for key in keys if other and key.name == other[2]), default)


def format_keys(keys: Mapping[str, SettingKey]) -> str:
    """List keys, each with its value and description."""
    entries = {}
    for name, key in keys.items():
        values = (
            f"One of {' | '.join(key.choices)}."
            if key.choices and key.choices != ("true", "false")
            else ""
        )
        description = ("Must be given." if key.default is None else "", key.description, values)
        entries[format_setting(name, key)] = " ".join(filter(None, description))
    return format_list(entries)


def format_setting(name: str, key: SettingKey) -> str:
    """Return a key with its value, which is ??? where it must be given."""
    return f"{name}={'???' if key.default is None else key.default}"


def shorten_setting(setting: str) -> str:
    """Return a key with its value; a long value is left out."""
    name, _, _ = setting.partition("=")
    return setting if len(setting) <= MAX_SETTING else f"{name}=.."


def format_lines(entries: Mapping[str, str]) -> str:
    """List names with their descriptions, one line each. Where a description does not fit, what
    follows its first sentence or a semicolon is left out, and what still does not fit is cut.
    """
    column = min(30, max((len(name) for name in entries), default=0) + 2)
    lines = []
    for name, meaning in entries.items():
        opening = f"  {name.ljust(column - 2)}  "
        if len(opening + meaning) > help_width():
            meaning = f"{first_sentence(meaning).partition('; ')[0].rstrip('.')}."
        lines.append(cut_line(opening + meaning))
    return "\n".join(lines)


def cut_line(text: str) -> str:
    """Return a line that fits; one that was cut ends with two points."""
    width = help_width()
    if len(text) <= width:
        return text
    kept = text[: width - 3]
    words = kept.rpartition(" ")[0]
    return f"{words if len(words) > width / 2 else kept} .."


def format_list(entries: Mapping[str, str], indent: str = "  ", widest: int = 30) -> str:
    """List names with their descriptions in a column that begins at `widest` or before; the
    description of a longer name goes below it.
    """
    column = min(widest, max((len(name) for name in entries), default=0) + 2)
    lines = []
    for name, meaning in entries.items():
        if len(name) + 2 > column and meaning:
            lines += [indent + name, wrap_text(meaning, indent + " " * column)]
        else:
            lines.append(wrap_text(meaning, indent + " " * column, indent + name.ljust(column)))
    return "\n".join(line.rstrip() for line in lines)


def help_width() -> int:
    """Return the number of characters of a line."""
    return max(60, min(120, shutil.get_terminal_size((120, 24)).columns))


def wrap_text(text: str, indent: str, first: str | None = None) -> str:
    width = help_width()
    opening = indent if first is None else first
    return (
        textwrap.fill(
            text, width, initial_indent=opening, subsequent_indent=indent, break_on_hyphens=False
        )
        or opening
    )


def wrap_command(text: str) -> str:
    """Return a command in lines that a shell reads as one."""
    lines = textwrap.wrap(
        text,
        help_width() - 2,
        initial_indent="  ",
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(lines)


def format_section(title: str, body: str) -> str:
    return f"{title}\n{body}"


def first_sentence(text: str) -> str:
    """Return a text up to its first full stop."""
    return text.partition(". ")[0]
