"""The reference pages of the site: all settings and the Python interface, from the sentences that
`--help` prints.

mkdocs calls `on_files` (mkdocs.yml names this file as a hook), which adds the pages while the site
is built. They are not committed. `python scripts/make_reference.py FOLDER` writes them into a
folder.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from spectrain.cli.help import COMMANDS, first_sentence
from spectrain.config.choices import (
    choice_files,
    conf_folders,
    load_schema,
    load_yaml,
    read_header,
)
from spectrain.config.signatures import SettingKey, list_keys

SETTINGS_PAGE = "reference/settings.md"
INTERFACE_PAGE = "reference/interface.md"
# Methods that users call; the others serve drafters and the decoding loop.
PUBLIC_METHODS = (
    "from_pretrained",
    "save_pretrained",
    "push_to_hub",
    "on_step",
    "on_metrics",
    "on_validation",
    "on_checkpoint",
    "to_dict",
)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the files of the site (a hook of mkdocs)."""
    from mkdocs.structure.files import File

    for name, text in render_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def render_pages() -> dict[str, str]:
    """Return every page: its path in the site and its markdown."""
    return {SETTINGS_PAGE: render_settings(), INTERFACE_PAGE: render_interface()}


def render_settings() -> str:
    """Return the page of all commands, groups, choices and keys."""
    parts = [
        "# Settings",
        "Every setting is `key=value`. A group chooses a file of `conf/`, such as `tree=chain`, "
        "and its keys follow it, such as `tree.depth=4`. This page is generated from the "
        "sentences that `spectrain COMMAND --help` prints. `???` marks a key that must be given; "
        "`(GPU: ..)` is the value on a GPU.",
        "## Commands",
    ]
    parts += [render_command(name) for name in COMMANDS]
    for group in sorted({group for name in configurations() for group in load_schema(name).groups}):
        parts += render_group(group)
    return "\n\n".join(filter(None, parts)) + "\n"


def configurations() -> list[str]:
    return list(
        dict.fromkeys(command.config for command in COMMANDS.values() if command.config is not None)
    )


def render_command(name: str) -> str:
    """Return the section of a command: its purpose, examples, flags, results and the keys that
    belong to no group.
    """
    command = COMMANDS[name]
    lines = [f"### spectrain {name}", command.about]
    examples = "\n".join(
        f"spectrain {name} {words}".rstrip() + f"      # {meaning}"
        for words, meaning in command.examples.items()
    )
    lines.append(f"```sh\n{examples}\n```")
    if command.flags:
        lines.append("\n".join(f"- `{flag}`: {meaning}" for flag, meaning in command.flags.items()))
    lines.append(f"Results: {command.results}")
    if command.config is not None:
        schema = load_schema(command.config)
        lines += [f"Groups: {', '.join(f'`{group}`' for group in sorted(schema.groups))}."] * bool(
            schema.groups
        )
        lines += [render_keys("", schema.keys)] + [
            render_keys(f"{node}.", list_keys(target)) for node, target in schema.nodes.items()
        ]
    return "\n\n".join(filter(None, lines))


def render_group(group: str) -> list[str]:
    """Return the sections of a group and of each of its choices."""
    parts = [f"## {group}=CHOICE"]
    for choice, path in choice_files(group, conf_folders()).items():
        target = load_yaml(path).get("_target_")
        header = read_header(path)
        if group == "recipe":
            parts.append(f"- `recipe={choice}`: {first_sentence(header)}.")
            continue
        parts += [
            f"### {group}={choice}",
            header,
            render_keys(f"{group}.", list_keys(target) if target else []),
        ]
    return parts


def render_keys(prefix: str, keys: list[SettingKey]) -> str:
    """Return a table of keys, their defaults and their descriptions; empty without keys."""
    rows = []
    for key in keys:
        default = "???" if key.default is None else key.default
        values = (
            f" One of {', '.join(f'`{value}`' for value in key.choices)}."
            if key.choices not in ((), ("true", "false"))
            else ""
        )
        rows.append(
            f"| `{prefix}{key.full_name}` | `{default}` | {escape_cell(key.description + values)} |"
        )
    return "\n".join(["| key | default | description |", "|---|---|---|", *rows]) if rows else ""


def escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def render_interface() -> str:
    """Return the page of the public names of the package, with signatures and docstrings."""
    import spectrain

    parts = [
        "# Python interface",
        "The public names of `spectrain`. [The guide](../python.md) shows them in use.",
    ]
    for name in spectrain.__all__:
        value = getattr(spectrain, name)
        parts += [f"## spectrain.{name}", *describe_object(name, value)]
        for method in PUBLIC_METHODS:
            if hasattr(value, method):
                parts += [
                    f"### {name}.{method}",
                    *describe_object(f"{name}.{method}", getattr(value, method)),
                ]
    return "\n\n".join(parts) + "\n"


def describe_object(name: str, value: Any) -> list[str]:
    """Return the signature and the docstring of a function or a class."""
    signature = str(inspect.signature(value)).replace("'", "").replace("(self, ", "(")
    return [
        f"```python\n{name}{signature}\n```",
        (inspect.getdoc(value) or "").replace("<", "&lt;"),
    ]


if __name__ == "__main__":
    for name, text in render_pages().items():
        path = Path(sys.argv[1]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
