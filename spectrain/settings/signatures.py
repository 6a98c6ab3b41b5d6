"""The settings of constructors, read from their sources, which is fast, as nothing of them is imported."""

from __future__ import annotations

import ast
import re
import sys
import types
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from . import values

ROOT = Path(__file__).parents[1]
PLAIN = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "tuple": tuple, "dict": dict, "Any": Any}
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict, "Optional": typing.Optional, "Union": typing.Union}
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
    hint: Any = None  # the type itself


def written(value: Any) -> str:
    """A value as one writes it on the command line; of two, which depend on the machine, that of a CPU and that of a GPU."""
    if isinstance(value, str) and (both := re.fullmatch(r"\$\{cpu_gpu:(\[[^]]*\]|[^,]*),(.*)\}", value)):
        return f"{both[1]} (GPU: {both[2]})" if both[1] != both[2] else both[1]
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def keys(target: str) -> list[Key]:
    """The settings of the constructor that `target` names, in its order; none where it cannot be found."""
    return _keys_in(target) if is_found(target) else []


def is_found(target: str) -> bool:
    """Whether there is a source of this constructor."""
    module, _, name = target.rpartition(".")
    return _definition(module, name) is not None


@cache
def _keys_in(target: str) -> list[Key]:
    module, _, name = target.rpartition(".")
    found = _definition(module, name)
    assert found is not None, "what is not found may be later, so it is not remembered"
    return _keys_of(*found, _docs(*found))


@dataclass(frozen=True)
class ParsedModule:
    """A module's text."""

    name: str
    is_package: bool
    lines: list[str]
    tree: ast.Module


def _source(module: str) -> ParsedModule | None:
    parts = module.split(".")
    for base in [ROOT.parent, Path.cwd(), *map(Path, sys.path)]:
        for path in (base.joinpath(*parts).with_suffix(".py"), base.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return _parsed(module, path)
    return None


@cache
def _parsed(module: str, path: Path) -> ParsedModule:
    text = path.read_text()
    return ParsedModule(module, path.name == "__init__.py", text.splitlines(), ast.parse(text))


def _definition(module: str, name: str) -> tuple[ParsedModule, ast.stmt] | None:
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
                    above = module.split(".")[: -node.level + source.is_package or None] if node.level else []
                    return _definition(".".join([*above, *filter(None, [node.module])]), alias.name)
    return None


def _bases(source: ParsedModule, node: ast.stmt) -> list[tuple[ParsedModule, ast.stmt]]:
    named = [base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)]
    return [found for name in named if (found := _definition(source.name, name)) is not None]


def _docs(source: ParsedModule, node: ast.stmt) -> str:
    """What a class and those it is made from say of themselves."""
    own = ast.get_docstring(node) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else None
    return "\n\n".join(filter(None, [own, *(_docs(*base) for base in _bases(source, node))]))


def _keys_of(source: ParsedModule, node: ast.stmt, docs: str) -> list[Key]:
    """The settings of a function, of a class by its __init__, or of a dataclass and what it inherits."""
    found: list[Key | None] = []
    body = getattr(node, "body", ())
    made = next((item for item in body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if isinstance(node, ast.ClassDef) and made is None:
        found += [key for base in reversed(_bases(source, node)) for key in _keys_of(*base, docs)]  # as a dataclass has them
        is_data = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        for item in body:
            if is_data and isinstance(item, ast.AnnAssign) and "init=False" not in ast.unparse(item):
                found.append(_key(source, ast.arg(ast.unparse(item.target), item.annotation), item.value, item, docs))
    elif isinstance(function := made or node, ast.FunctionDef):
        given = function.args
        defaults = [*[None] * (len(given.args) - len(given.defaults)), *given.defaults, *given.kw_defaults]
        for one, default in zip([*given.args, *given.kwonlyargs], defaults):
            found += [_key(source, one, default, one, docs)] if one.annotation else []
    return [key for key in found if key is not None]


def _key(source: ParsedModule, one: ast.arg, default: ast.expr | None, node: Any, docs: str) -> Key | None:
    """A setting; None where the annotation stands for a runtime object."""
    hint = _hint(source, one.annotation)
    if hint is None:
        return None
    last: Any = default or node
    comment = source.lines[last.end_lineno - 1].partition("  # ")[2]
    meaning = comment if comment and not UNSAID.search(comment) else _sentence(one.arg, docs, alone=True)
    value = None if default is None else _written(default)
    beside = _sentence(one.arg, docs, alone=False)
    written_type = ast.unparse(one.annotation) if one.annotation else ""
    return Key(one.arg, written_type, value, choices_of(hint), meaning, beside, hint)


def _written(default: ast.expr) -> str:
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)
    return f"[{','.join(map(written, value))}]" if isinstance(value, (tuple, list)) else written(value)


def _sentence(name: str, docs: str, alone: bool) -> str:
    """The first sentence of a docstring that speaks of a name, alone or among others."""
    for paragraph in docs.split("\n\n"):
        for sentence in re.split(r"(?<=[.;])\s+", " ".join(paragraph.split())):
            named = set(re.findall(r"`(\w+)`|\b(\w+)=", sentence))
            names = {one or other for one, other in named}
            if name in names and (names == {name}) == alone:
                return sentence.replace("`", "").rstrip(".;")
    return ""


def _hint(source: ParsedModule, annotation: ast.expr | None) -> Any:
    """The type that an annotation names, made without importing its module; None where it is a runtime object's."""
    if annotation is None:
        return Any
    if isinstance(annotation, ast.Constant):
        if isinstance(annotation.value, str):
            return _hint(source, ast.parse(annotation.value, mode="eval").body)
        return types.NoneType if annotation.value is None else annotation.value  # the dots of a tuple
    if isinstance(annotation, ast.BinOp):
        parts = [_hint(source, annotation.left), _hint(source, annotation.right)]
        return None if None in parts else typing.Union[tuple(parts)]  # noqa: UP007  (of what is not known here)
    name = ast.unparse(getattr(annotation, "value", annotation))
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if name == "Literal":
            return typing.Literal[tuple(ast.literal_eval(one) for one in inner)]
        kind = CONTAINERS.get(name)
        parts = [_hint(source, one) for one in inner]
        return None if kind is None or None in parts else kind[tuple(parts)]
    if name in PLAIN:
        return PLAIN[name]
    found = _definition(source.name, name)
    if found is None or not isinstance(found[1], ast.Assign):
        return None
    return getattr(values, name) if found[0].name == values.__name__ else _hint(found[0], found[1].value)


def choices_of(hint: Any) -> tuple[str, ...]:
    """The values that a type allows, where it lists them."""
    if hint is bool:
        return ("true", "false")
    if typing.get_origin(hint) is typing.Literal:
        return tuple(map(written, typing.get_args(hint)))
    several = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(choice for part in typing.get_args(hint) for choice in choices_of(part)) if several else ()
