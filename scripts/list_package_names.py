"""Write the names that the packages of this repository add: spectrain/config/packages.json.

    python -m scripts.list_package_names

Where a package is not installed, the command line says by this list which one has a name that it
does not know.
"""

import json
from pathlib import Path
from typing import Any

from spectrain.config.choices import choice_files, load_yaml
from spectrain.config.installed import (
    PREFIX,
    list_conf_folders,
    list_entry_points,
    load_entry_points,
    read_entry_points,
)
from spectrain.config.missing import NAMES
from spectrain.config.signatures import list_keys, list_own_keys
from spectrain.export.layouts import CORE_LAYOUTS

DEFAULT = "spectrain.eval.default.DefaultEvaluation"
PACKAGES = Path(__file__).parents[1] / "packages"


def list_names() -> dict[str, dict[str, list[str]]]:
    """Return package -> group -> names, of every installed package that lies in packages/."""
    names: dict[str, dict[str, list[str]]] = {}
    for folder in list_conf_folders():
        if folder.is_relative_to(PACKAGES):
            groups: dict[str, Any] = {
                group.name: list(choice_files(group.name, [folder]))
                for group in sorted(folder.iterdir())
                if group.is_dir()
            }
            package = folder.relative_to(PACKAGES).parts[0]
            chosen = {group: choices for group, choices in groups.items() if choices}
            names[f"spectrain-{package}"] = chosen | list_settings(package)
    return names


def list_settings(package: str) -> dict[str, list[str]]:
    """Return the settings that the parts of a package add to `eval`, the formats that only its
    layouts have, the drafters that it exports without a run, its commands, and the groups of its
    entry points.
    """
    module = f"spectrain_{package}."
    parts = [
        entry.value.replace(":", ".")
        for entry in list_entry_points("eval")
        if entry.value.startswith(module)
    ]
    own = {key.name: key for key in list_own_keys(DEFAULT)}
    rows = [
        row
        for layouts in load_entry_points("export")
        for row in layouts.rows
        if row.path.startswith(module)
    ]
    formats = {name for row in rows for name in row.formats}
    formats -= {name for row in CORE_LAYOUTS for name in row.formats}
    keys = {key.name: key for part in parts for key in list_keys(part)}
    others = [
        key.name
        for entry in list_entry_points("eval")
        if not entry.value.startswith(module)
        for key in list_keys(entry.value.replace(":", "."))
    ]
    values = {
        f"eval.{name}": sorted({*keys[name].choices} - {*own[name].choices})
        for name in own.keys() & keys.keys()
    }
    # Of a setting that several packages declare, each has its own values.
    values |= {
        f"eval.{name}": sorted(keys[name].choices) for name in keys if name in {*others} - {*own}
    }
    commands = [
        name
        for entry in list_entry_points("commands")
        if entry.value.startswith(module)
        for name in load_yaml(entry.load().help)["commands"]
    ]
    settings = {"eval.": sorted(keys.keys() - own.keys()), **values}
    provided = [
        group.removeprefix(PREFIX)
        for group, entries in read_entry_points().items()
        if any(entry.value.startswith(module) for entry in entries)
    ]
    weightless = [
        name
        for layouts in load_entry_points("export")
        for export in layouts.weightless
        if export.path.startswith(module)
        for name in export.drafters
    ]
    entries = {"command.": sorted(commands), "group.": sorted(provided)}
    exported = {"format": sorted(formats), "export.drafter": sorted(weightless)}
    return {**settings, **exported, **entries}


def render_names() -> str:
    """Return the text of packages.json."""
    return json.dumps(list_names(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    NAMES.write_text(render_names())
    print(f"{NAMES}: written")
