"""What commands can be told: read from conf/ and from constructors' sources, which is fast, as nothing of them is imported."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PLAIN = {"int", "float", "str", "bool", "list", "tuple", "dict", "Any", "Literal", "Optional", "Union"}
UNSAID = re.compile(r"noqa|type: ignore|fmt:")  # comments for tools


@dataclass(frozen=True)
class Key:
    """One setting."""

    name: str
    type: str
    default: str | None  # None: it must be given
    choices: tuple[str, ...] = ()
    meaning: str = ""
    beside: str = ""  # a sentence that speaks of it and of others


@dataclass
class Schema:
    """What a command's configuration holds."""

    groups: dict[str, str | None] = field(default_factory=dict)  # group -> the choice made by default
    nodes: dict[str, str] = field(default_factory=dict)  # key -> the constructor that its settings are for
    keys: list[Key] = field(default_factory=list)  # that are in no group


def conf_folders(words: Iterable[str] = ()) -> list[Path]:
    """Where configurations are: conf/, and what --config-dir names among the words of a command."""
    words, folders = list(words), [ROOT / "conf"]
    for flag in ("--config-dir", "-cd"):
        if flag in words[:-1]:
            folders.append(Path(words[words.index(flag) + 1]))
        folders += [Path(word.partition("=")[2]) for word in words if word.startswith(f"{flag}=")]
    return [folder for folder in folders if folder.is_dir()]


def choice_files(group: str, folders: Iterable[Path]) -> dict[str, Path]:
    """Every choice of a group, by name."""
    found = {}
    for folder in folders:
        for path in (folder / group).rglob("*.yaml"):
            found[path.relative_to(folder / group).with_suffix("").as_posix()] = path
    return dict(sorted(found.items()))


def header(path: Path) -> str:
    """The comment that a yaml begins with."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines += [] if line.startswith("# @package") else [line[1:].strip()]
    return " ".join(lines)


def load(path: Path) -> dict[str, Any]:
    """A yaml as it stands, references unresolved."""
    return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


def schema(config: str) -> Schema:
    """The configuration of this name."""
    path, found = ROOT / "conf" / f"{config}.yaml", Schema()
    content = load(path)
    for entry in content.get("defaults", ()):
        if isinstance(entry, str) and entry != "_self_":
            found = schema(entry)
        elif isinstance(entry, dict):
            found.groups |= {group: choice for group, choice in entry.items() if not group.startswith("override ")}
    comments = dict(re.findall(r"^(\w+):[^#\n]*# (.*)$", path.read_text(), re.MULTILINE))
    for name, value in content.items():
        if name in ("defaults", "hydra"):
            continue
        if isinstance(value, dict) and "_target_" in value:
            found.nodes[name] = value["_target_"]
        else:
            found.keys.append(
                Key(name, "", written(value), ("true", "false") * isinstance(value, bool), comments.get(name, ""))
            )
    return found


def chosen(asked: Schema, words: list[str]) -> dict[str, str]:
    """Group -> choice, as the words of a command, its recipe and the defaults make it."""
    said = {
        group: choice for word in words for group, equals, choice in [word.partition("=")] if equals and group in asked.groups
    }
    choices = {group: choice or only(group, words) for group, choice in asked.groups.items()}
    choices = {group: choice for group, choice in choices.items() if choice and choice != "???"}
    recipe = choice_files("recipe", conf_folders(words)).get(said.get("recipe", "")) if "recipe" in asked.groups else None
    for entry in load(recipe).get("defaults", ()) if recipe else ():
        choices |= {group.removeprefix("override /"): choice for group, choice in entry.items()}
    return {group: choice.split(",")[0] for group, choice in (choices | said).items() if choice}


def only(group: str, words: Iterable[str]) -> str | None:
    """The choice of a group that leaves none: all others are empty."""
    full = [name for name, path in choice_files(group, conf_folders(words)).items() if load(path).get("_target_")]
    return full[0] if len(full) == 1 else None


def settings(asked: Schema, words: list[str]) -> dict[str, list[Key]]:
    """Group -> its keys, with the values that the choices and the recipe among these words give them."""
    folders, choices = conf_folders(words), chosen(asked, words)
    recipe = choice_files("recipe", folders).get(choices.get("recipe", ""))
    values = load(recipe) if recipe else {}
    found = {name: keys(target) for name, target in asked.nodes.items()}
    for group, choice in choices.items():
        path = choice_files(group, folders).get(choice)
        if path is None or group == "recipe" or not (node := load(path)).get("_target_"):
            continue
        changed = {**node, **values.get(group, {})}
        found[group] = [
            replace(key, default=required(changed[key.name])) if key.name in changed else key for key in keys(node["_target_"])
        ]
    return found


def owners(group: str, name: str, words: Iterable[str] = ()) -> list[str]:
    """The choices of a group that have a setting of this name."""
    if group == "recipe":
        return []
    nodes = {choice: load(path).get("_target_") for choice, path in choice_files(group, conf_folders(words)).items()}
    return [choice for choice, target in nodes.items() if target and any(key.name == name for key in keys(target))]


def required(value: Any) -> str | None:
    return None if value == "???" else written(value)


def written(value: Any) -> str:
    """A value as one writes it on the command line; of two, which depend on the machine, that of a CPU and that of a GPU."""
    if isinstance(value, str) and (both := re.fullmatch(r"\$\{cpu_gpu:(.*),(.*)\}", value)):
        return f"{both[1]} (GPU: {both[2]})" if both[1] != both[2] else both[1]
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


@cache
def keys(target: str) -> list[Key]:
    """The settings of the constructor that `target` names, in its order; none where it cannot be found."""
    module, _, name = target.rpartition(".")
    found = _definition(module, name)
    if found is None:
        return []
    return _keys_of(*found, _docs(*found))


@dataclass(frozen=True)
class Source:
    """A module's text."""

    name: str
    path: Path
    lines: list[str]
    tree: ast.Module


@cache
def _source(module: str) -> Source | None:
    parts = module.split(".")
    for base in [ROOT.parent, Path.cwd(), *map(Path, sys.path)]:
        for path in (base.joinpath(*parts).with_suffix(".py"), base.joinpath(*parts, "__init__.py")):
            if path.is_file():
                text = path.read_text()
                return Source(module, path, text.splitlines(), ast.parse(text))
    return None


def _definition(module: str, name: str) -> tuple[Source, ast.stmt] | None:
    """Where a name of a module is defined, followed through imports."""
    source = _source(module)
    if source is None:
        return None
    for node in source.tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return source, node
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            return source, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(_absolute(source, node), alias.name)
    return None


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    up = node.level - (source.path.name == "__init__.py")
    parts = source.name.split(".")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def _bases(source: Source, node: ast.stmt) -> list[tuple[Source, ast.stmt]]:
    named = [base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)]
    return [found for name in named if (found := _definition(source.name, name)) is not None]


def _docs(source: Source, node: ast.stmt) -> str:
    """What a class and those it is made from say of themselves."""
    own = ast.get_docstring(node) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else None
    return "\n\n".join(filter(None, [own, *(_docs(*base) for base in _bases(source, node))]))


def _keys_of(source: Source, node: ast.stmt, docs: str) -> list[Key]:
    if isinstance(node, ast.FunctionDef):
        return _parameters(source, node, docs)
    assert isinstance(node, ast.ClassDef)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _parameters(source, item, docs)
    inherited = [key for base in _bases(source, node) for key in _keys_of(*base, docs)]
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    fields = [item for item in fields if "init=False" not in ast.unparse(item)]
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return inherited
    own = [
        _key(source, item.target.id, item.annotation, item.value, item, docs)
        for item in fields
        if isinstance(item.target, ast.Name)
    ]
    return [*inherited, *filter(None, own)]


def _parameters(source: Source, function: ast.FunctionDef, docs: str) -> list[Key]:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    defaults = [None] * (len(function.args.args) - len(function.args.defaults)) + [
        *function.args.defaults,
        *function.args.kw_defaults,
    ]
    made = [
        _key(source, one.arg, one.annotation, value, one, docs) for one, value in zip(arguments, defaults) if one.annotation
    ]
    return [key for key in made if key is not None]


def _key(
    source: Source, name: str, annotation: ast.expr | None, default: ast.expr | None, node: ast.AST, docs: str
) -> Key | None:
    """A setting; None where the annotation stands for a runtime object."""
    choices = _choices(source, annotation)
    if choices is None or name == "self":
        return None
    value = None if default is None else _written(default)
    last = source.lines[(getattr(default, "end_lineno", None) or node.end_lineno) - 1]  # type: ignore[attr-defined]
    comment = last.partition("  # ")[2]
    meaning = comment if comment and not UNSAID.search(comment) else _sentence(name, docs, alone=True)
    return Key(name, ast.unparse(annotation) if annotation else "", value, choices, meaning, _sentence(name, docs, alone=False))


def _written(default: ast.expr) -> str:
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(written, value))}]"
    return written(value)


def _sentence(name: str, docs: str, alone: bool) -> str:
    """The first sentence of a docstring that speaks of a name, alone or among others."""
    for paragraph in docs.split("\n\n"):
        for sentence in re.split(r"(?<=[.;])\s+", " ".join(paragraph.split())):
            named = set(re.findall(r"`(\w+)`|\b(\w+)=", sentence))
            names = {one or other for one, other in named}
            if name in names and (names == {name}) == alone:
                return sentence.replace("`", "").rstrip(".;")
    return ""


def _choices(source: Source, annotation: ast.expr | None) -> tuple[str, ...] | None:
    """The values that an annotation allows, where it lists them; None where no setting has such a type."""
    if annotation is None or isinstance(annotation, ast.Constant):
        return ()
    if isinstance(annotation, ast.BinOp):
        parts = [_choices(source, annotation.left), _choices(source, annotation.right)]
        return None if None in parts else tuple(choice for part in parts for choice in part or ())
    if isinstance(annotation, ast.Subscript):
        name = ast.unparse(annotation.value)
        if name == "Annotated" and isinstance(annotation.slice, ast.Tuple):
            return _choices(source, annotation.slice.elts[0])
        if name == "Literal":
            inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            return tuple(written(ast.literal_eval(one)) for one in inner)
        return () if name in PLAIN else None
    name = ast.unparse(annotation)
    if name in PLAIN:
        return ("true", "false") if name == "bool" else ()
    found = _definition(source.name, name)
    return _choices(found[0], found[1].value) if found and isinstance(found[1], ast.Assign) else None
