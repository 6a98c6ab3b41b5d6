"""Every setting has an effect: its constructor reads it, and what the constructor stores is read by
other code.

Sources are read and not imported, so the test finds settings that no other test sets.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_object

from spectrain.config.choices import _read_constructors, conf_folders
from spectrain.config.installed import (
    find_package_folder,
    list_conf_modules,
)
from spectrain.config.parts import find_config_type
from spectrain.config.signatures import PACKAGE_ROOT, list_keys

CONSTRUCTORS = sorted(
    {
        path
        for group in _read_constructors(tuple(conf_folders())).values()
        for path in group.values()
    }
)
STORED = re.compile(r"^ *self\.\w+(?:, self\.\w+)*(?:: [^=\n]+)? = ", re.MULTILINE)
# the first two are links, which the walk of the package does not follow
FOLDERS = ("eval", "kernels", ".")


def list_folders() -> list[Path]:
    """Return the folders of the core's code, and those of installed packages of choices."""
    packages = {module.partition(".")[0] for module in list_conf_modules()}
    installed = [
        folder
        for package in sorted(packages)
        if (folder := find_package_folder(package)) is not None
    ]
    return [(PACKAGE_ROOT / folder).resolve() for folder in FOLDERS] + installed


@cache
def read_attributes() -> frozenset[str]:
    """Return the names of all attributes that the code reads."""
    names: set[str] = set()
    for folder in list_folders():
        for path in folder.rglob("*.py"):
            names |= {*re.findall(r"\.([a-z]\w*)", STORED.sub("", path.read_text()))}
    return frozenset(names)


def list_dead_settings(
    function: ast.FunctionDef, settings: set[str], attributes: frozenset[str]
) -> list[str]:
    """Return the settings that a constructor does not read, or stores in an attribute that no
    code reads.
    """
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    uses = {setting: 0 for setting in settings}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in settings:
            uses[node.id] += 1
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for stored, value in pairs:
                if (
                    isinstance(stored, ast.Attribute)
                    and isinstance(value, ast.Name)
                    and value.id in settings
                ):
                    # Storing alone is no use.
                    uses[value.id] -= stored.attr not in attributes
    return [setting for setting, count in uses.items() if not count]


@pytest.mark.parametrize("target", CONSTRUCTORS)
def test_every_setting_is_read(target: str) -> None:
    constructor: Any = get_object(target)
    constructor = find_config_type(constructor) or constructor
    settings = {key.name for key in list_keys(target)}
    if not settings:
        return
    if dataclasses.is_dataclass(constructor):
        assert not settings - read_attributes()
        return
    function = constructor.__init__ if inspect.isclass(constructor) else constructor
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert not list_dead_settings(tree, settings, read_attributes())


def test_dead_settings_are_found() -> None:
    """A setting that is not read is found, and one that is stored under a name that nothing
    reads; a checked one is read.
    """
    source = """
def __init__(self, unread, stored, pair, used, checked):
    self.lost = stored
    self.gone, self.kept = pair, used
    if checked < 1:
        raise ValueError
"""
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    settings = {"unread", "stored", "pair", "used", "checked"}
    assert sorted(list_dead_settings(function, settings, frozenset({"kept"}))) == [
        "pair",
        "stored",
        "unread",
    ]
