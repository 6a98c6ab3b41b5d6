"""`spectrain train --print-config`: every setting of a training with the layer that sets it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from spectrain.config.commands import read_command_run
from spectrain.config.grouped import group_settings
from spectrain.config.spec import GROUPS, RunSpec
from spectrain.output.verbosity import print_json, result_output


def print_config(config: Any) -> None:
    """Print the resolved settings of a training, and train nothing."""
    spec = read_command_run(config)[0]
    print_json(collect_settings(spec))
    with result_output():
        print("\n".join(format_settings(spec)))


def collect_settings(spec: RunSpec) -> dict[str, dict[str, Any]]:
    """Return the value and the layer of each setting by its full name."""
    settings: dict[str, dict[str, Any]] = {}
    for group in GROUPS:
        node = getattr(spec, group)
        if not node:
            continue
        settings[group] = {"value": node.choice, "layer": node.find_layer("choice")}
        for key, value in node.with_defaults().items():
            settings[f"{group}.{key}"] = {"value": value, "layer": node.find_layer(key)}
    return settings | {"run": {"value": spec.run}}


def format_settings(spec: RunSpec) -> Iterator[str]:
    """Yield a line of YAML for each setting, with its layer as a comment; empty groups are left
    out.
    """
    for group in GROUPS:
        node = getattr(spec, group)
        if not node:
            continue
        yield f"{group}:"
        yield format_line("choice", node.choice, node.find_layer("choice"))
        settings = group_settings(node.with_defaults(), node.path)
        for key, value in settings.items():
            if key in node.with_defaults():
                yield format_line(key, value, node.find_layer(key))
                continue
            yield f"  {key}:"
            for name, inner in value.items():
                yield f"  {format_line(name, inner, node.find_layer(name))}"
    yield f"run: {json.dumps(spec.run, ensure_ascii=False)}"


def format_line(key: str, value: Any, layer: str) -> str:
    """Return one setting; a value that is no JSON, as a type of the constructor, is its text."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{f'  {key}: {text}':50}  # {layer}"
