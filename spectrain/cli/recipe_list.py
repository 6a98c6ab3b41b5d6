"""`spectrain recipes`: every recipe in a line, or one recipe with its settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from spectrain.config.choices import choice_files, load_yaml, read_header
from spectrain.config.grouped import GROUPS_WITH_PARTS
from spectrain.config.signatures import format_literal
from spectrain.errors import UserError, suggest_nearest
from spectrain.output.verbosity import OUTPUT_FLAGS, print_json

from .help import first_sentence, format_list, format_section, list_experimental, wrap_text


def recipes_command(words: list[str]) -> None:
    """Print every recipe in a line, or one recipe in full."""
    if flag := next((word for word in words if word.startswith("-")), None):
        raise UserError(
            f"recipes {flag}: there is no such flag; {suggest_nearest(flag, OUTPUT_FLAGS)}"
        )
    if words[1:]:
        raise UserError(f"recipes {' '.join(words)}: give one name, as in recipes {words[0]}")
    print(describe_recipe(words[0]) if words else list_recipes())


def recipe_advice(text: str) -> str:
    """Return the sentence that says when to choose a recipe."""
    return "".join(text.partition("Choose it")[1:])


def list_recipes() -> str:
    """Describe every recipe in a line, those that no inference engine supports last."""
    files = choice_files("recipe")
    entries = {
        name: f"{first_sentence(read_header(path))}. {recipe_advice(read_header(path))}".strip()
        for name, path in files.items()
    }
    experimental = list_experimental("recipe", files)
    print_json(
        {
            name: {"about": text, "experimental": name in experimental}
            for name, text in entries.items()
        }
    )
    shelves = {
        "recipe": {name: text for name, text in entries.items() if name not in experimental},
        "experimental: no inference engine supports what these train": {
            name: entries[name] for name in sorted(experimental)
        },
    }
    lists = [format_section(title, format_list(shelf)) for title, shelf in shelves.items()]
    return "\n\n".join([*lists, "spectrain recipes NAME says more; spectrain compare measures."])


def describe_recipe(word: str) -> str:
    """Describe a recipe with its settings."""
    files = choice_files("recipe")
    name = word.removeprefix("recipe=")
    if name not in files:
        raise UserError(f"recipes {word}: there is no such recipe; {suggest_nearest(name, files)}")
    values = {key: value for key, value in load_yaml(files[name]).items() if key != "defaults"}
    settings = {
        key: value for group, node in values.items() for key, value in list_values(group, node)
    }
    about = read_header(files[name])
    shown = {key: format_value(value, values) for key, value in settings.items()}
    print_json(
        {
            "recipe": name,
            "about": about,
            "settings": {
                key: shown[key] if "${" in str(value) else value for key, value in settings.items()
            },
        }
    )
    lines = [f"  {key}={value}" for key, value in shown.items()]
    return "\n".join([f"recipe={name}", wrap_text(about, "  "), "", "Settings", *lines])


def list_values(group: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the full names and the values of a group's settings, those of its parts too."""
    for key, value in node.items():
        if group in GROUPS_WITH_PARTS and isinstance(value, Mapping):
            yield from list_values(f"{group}.{key}", value)
        else:
            yield f"{group}.{key}", value


def format_value(value: Any, recipe: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a recipe's value as the command line writes it; a reference is replaced by the
    value that it refers to.
    """
    other = re.fullmatch(r"\$\{(\w+)\.(\w+)\}", str(value))
    if other and other[2] in recipe.get(other[1], {}):
        value = recipe[other[1]][other[2]]
    return format_literal(value)
