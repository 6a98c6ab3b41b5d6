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

PACKAGE_ROOT = Path(__file__).parents[1]
PLAIN_TYPES = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "tuple": tuple, "dict": dict, "Any": Any}
CONTAINER_TYPES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "Optional": typing.Optional,
    "Union": typing.Union,
}
TOOL_COMMENT = re.compile(r"noqa|type: ignore|fmt:")  # comments for tools


@dataclass(frozen=True)
class SettingKey:
    """One setting."""

    name: str
    type: str
    default: str | None  # None: it must be given
    choices: tuple[str, ...] = ()
    description: str = ""
    shared_description: str = ""  # a sentence that speaks of it and of others
    hint: Any = None  # the type itself


def format_literal(value: Any) -> str:
    """A value as one writes it on the command line; of two, which depend on the machine, that of a CPU and that of a GPU."""
    if isinstance(value, str) and (both := re.fullmatch(r"\$\{cpu_gpu:(\[[^]]*\]|[^,]*),(.*)\}", value)):
        return f"{both[1]} (GPU: {both[2]})" if both[1] != both[2] else both[1]
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def list_keys(target: str) -> list[SettingKey]:
    """The settings of the constructor that `target` names, in its order; none where it cannot be found."""
    return _read_keys(target) if has_source(target) else []


def has_source(target: str) -> bool:
    """Whether there is a source of this constructor."""
    module, _, name = target.rpartition(".")
    return _find_definition(module, name) is not None


@cache
def _read_keys(target: str) -> list[SettingKey]:
    module, _, name = target.rpartition(".")
    found = _find_definition(module, name)
    assert found is not None, "what is not found may be later, so it is not remembered"
    return _constructor_keys(*found, _collect_docs(*found))


@dataclass(frozen=True)
class ParsedModule:
    """A module's text."""

    name: str
    is_package: bool
    lines: list[str]
    tree: ast.Module


def _find_module(module: str) -> ParsedModule | None:
    parts = module.split(".")
    for base in [PACKAGE_ROOT.parent, Path.cwd(), *map(Path, sys.path)]:
        for path in (base.joinpath(*parts).with_suffix(".py"), base.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return _parse_module(module, path)
    return None


@cache
def _parse_module(module: str, path: Path) -> ParsedModule:
    text = path.read_text()
    return ParsedModule(module, path.name == "__init__.py", text.splitlines(), ast.parse(text))


def _find_definition(module: str, name: str) -> tuple[ParsedModule, ast.stmt] | None:
    """Where a name of a module is defined, followed through imports."""
    source = _find_module(module)
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
                    return _find_definition(".".join([*above, *filter(None, [node.module])]), alias.name)
    return None


def _find_bases(source: ParsedModule, node: ast.stmt) -> list[tuple[ParsedModule, ast.stmt]]:
    named = [base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)]
    return [found for name in named if (found := _find_definition(source.name, name)) is not None]


def _collect_docs(source: ParsedModule, node: ast.stmt) -> str:
    """What a class and those it is made from say of themselves."""
    own = ast.get_docstring(node) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else None
    return "\n\n".join(filter(None, [own, *(_collect_docs(*base) for base in _find_bases(source, node))]))


def _constructor_keys(source: ParsedModule, node: ast.stmt, docs: str) -> list[SettingKey]:
    """The settings of a function, of a class by its __init__, or of a dataclass and what it inherits."""
    found: list[SettingKey | None] = []
    body = getattr(node, "body", ())
    made = next((item for item in body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if isinstance(node, ast.ClassDef) and made is None:
        found += [
            key for base in reversed(_find_bases(source, node)) for key in _constructor_keys(*base, docs)
        ]  # as a dataclass has them
        is_data = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        for item in body:
            if is_data and isinstance(item, ast.AnnAssign) and "init=False" not in ast.unparse(item):
                found.append(_make_key(source, ast.arg(ast.unparse(item.target), item.annotation), item.value, item, docs))
    elif isinstance(function := made or node, ast.FunctionDef):
        given = function.args
        defaults = [*[None] * (len(given.args) - len(given.defaults)), *given.defaults, *given.kw_defaults]
        for one, default in zip([*given.args, *given.kwonlyargs], defaults):
            found += [_make_key(source, one, default, one, docs)] if one.annotation else []
    return [key for key in found if key is not None]


def _make_key(source: ParsedModule, one: ast.arg, default: ast.expr | None, node: Any, docs: str) -> SettingKey | None:
    """A setting; None where the annotation stands for a runtime object."""
    hint = _resolve_hint(source, one.annotation)
    if hint is None:
        return None
    last: Any = default or node
    comment = source.lines[last.end_lineno - 1].partition("  # ")[2]
    meaning = _comment_above(source, node)
    if not meaning:
        meaning = comment if comment and not TOOL_COMMENT.search(comment) else _find_sentence(one.arg, docs, is_only_name=True)
    value = None if default is None else _format_default(default)
    beside = _find_sentence(one.arg, docs, is_only_name=False)
    written_type = ast.unparse(one.annotation) if one.annotation else ""
    return SettingKey(one.arg, written_type, value, list_choices(hint), meaning, beside, hint)


def _comment_above(source: ParsedModule, node: Any) -> str:
    """The comment lines directly above a parameter or a field, joined: the description of the setting."""
    lines: list[str] = []
    for line in reversed(source.lines[: node.lineno - 1]):
        text = line.strip()
        if not text.startswith("# "):
            break
        lines.insert(0, text.removeprefix("# "))
    return " ".join(lines)


def _format_default(default: ast.expr) -> str:
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)
    return f"[{','.join(map(format_literal, value))}]" if isinstance(value, (tuple, list)) else format_literal(value)


def _find_sentence(name: str, docs: str, is_only_name: bool) -> str:
    """The first sentence of a docstring that speaks of a name, alone or among others."""
    for paragraph in docs.split("\n\n"):
        for sentence in re.split(r"(?<=[.;])\s+", " ".join(paragraph.split())):
            named = set(re.findall(r"`(\w+)`|\b(\w+)=", sentence))
            names = {one or other for one, other in named}
            if name in names and (names == {name}) == is_only_name:
                return sentence.replace("`", "").rstrip(".;")
    return ""


def _resolve_hint(source: ParsedModule, annotation: ast.expr | None) -> Any:
    """The type that an annotation names, made without importing its module; None where it is a runtime object's."""
    if annotation is None:
        return Any
    if isinstance(annotation, ast.Constant):
        if isinstance(annotation.value, str):
            return _resolve_hint(source, ast.parse(annotation.value, mode="eval").body)
        return types.NoneType if annotation.value is None else annotation.value  # the dots of a tuple
    if isinstance(annotation, ast.BinOp):
        parts = [_resolve_hint(source, annotation.left), _resolve_hint(source, annotation.right)]
        return None if None in parts else typing.Union[tuple(parts)]  # noqa: UP007  (of what is not known here)
    name = ast.unparse(getattr(annotation, "value", annotation))
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if name == "Literal":
            return typing.Literal[tuple(ast.literal_eval(one) for one in inner)]
        kind = CONTAINER_TYPES.get(name)
        parts = [_resolve_hint(source, one) for one in inner]
        return None if kind is None or None in parts else kind[tuple(parts)]
    if name in PLAIN_TYPES:
        return PLAIN_TYPES[name]
    found = _find_definition(source.name, name)
    if found is None or not isinstance(found[1], ast.Assign):
        return None
    return getattr(values, name) if found[0].name == values.__name__ else _resolve_hint(found[0], found[1].value)


def list_choices(hint: Any) -> tuple[str, ...]:
    """The values that a type allows, where it lists them."""
    if hint is bool:
        return ("true", "false")
    if typing.get_origin(hint) is typing.Literal:
        return tuple(map(format_literal, typing.get_args(hint)))
    several = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(choice for part in typing.get_args(hint) for choice in list_choices(part)) if several else ()
