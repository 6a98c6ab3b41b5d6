"""The settings of constructors. Their sources are parsed instead of imported, which is fast."""

from __future__ import annotations

import ast
import operator
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import values
from .installed import list_entry_points, list_package_roots

PACKAGE_ROOT = Path(__file__).parents[1]
# The names that annotations of settings may use beside those of types of settings.
TYPE_NAMES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict)},
    **{name: getattr(typing, name) for name in ("Any", "Literal", "Optional", "Union")},
}
TOOL_COMMENT = re.compile(r"noqa|type: ignore|fmt:")  # comments for tools
# What a default that is computed from numbers may use.
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Div: operator.truediv,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
}
# The factories of empty defaults, as literals.
EMPTY_LITERALS = {"list": "[]", "tuple": "[]", "dict": "{}"}


@dataclass(frozen=True)
class SettingKey:
    """One setting."""

    name: str
    type: str
    default: str | None  # None: it must be given
    choices: tuple[str, ...] = ()
    description: str = ""
    # The type itself.
    hint: Any = None
    # The default as a Python value; meaningless for a setting that must be given.
    value: Any = None
    # Whether the constructor takes it by keyword only, after its other fields.
    is_keyword_only: bool = False
    # The part of the group that it belongs to; empty in a group without parts.
    part: str = ""

    @property
    def full_name(self) -> str:
        """Return the name within its group: PART.NAME in a group with parts."""
        return f"{self.part}.{self.name}" if self.part else self.name


def format_literal(value: Any) -> str:
    """Format a value as the command line writes it; a value that depends on the machine shows
    its CPU and its GPU form.
    """
    if isinstance(value, str) and (embedded := re.fullmatch(r"\$\{embedded:(.*)\}", value)):
        return format_literal(embedded[1])
    if isinstance(value, str) and (
        both := re.fullmatch(r"\$\{cpu_gpu:(\[[^]]*\]|[^,]*),(.*)\}", value)
    ):
        return f"{both[1]} (GPU: {both[2]})" if both[1] != both[2] else both[1]
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def list_keys(target: str) -> list[SettingKey]:
    """Return the settings of the constructor that `target` names, in order; none if it does not
    exist.
    """
    return _read_keys(target) if has_source(target) else []


def has_source(target: str) -> bool:
    """Tell whether the source of this constructor exists."""
    module, _, name = target.rpartition(".")
    return _find_definition(module, name) is not None


@cache
def _read_keys(target: str) -> list[SettingKey]:
    keys = {key.name: key for key in list_own_keys(target)}
    of_parts = dict[str, SettingKey]()
    for path in _list_parts(target):
        for key in _read_keys(path):
            first = of_parts.get(key.name)
            of_parts[key.name] = key if first is None else join_declarations(first, key)
    # A setting that a part declares too is the part's.
    return list((keys | of_parts).values())


def join_declarations(first: SettingKey, second: SettingKey) -> SettingKey:
    """Return a setting that two parts declare: the first one's, which also takes the values that
    the second lists, with the sentences of both; the second's, where a type lists no values.
    """
    if not (_list_literals(first.hint) and _list_literals(second.hint)):
        return second
    values = tuple(dict.fromkeys([*_list_literals(first.hint), *_list_literals(second.hint)]))
    literal: Any = typing.Literal
    hint = literal[values]
    written = f"Literal[{', '.join(map(repr, values))}]"
    if type(None) in (*typing.get_args(first.hint), *typing.get_args(second.hint)):
        hint = hint | None
        written += " | None"
    known = first.description.split(". ")
    more = [text for text in second.description.split(". ") if text not in known]
    return replace(
        first,
        type=written,
        hint=hint,
        choices=list_choices(hint),
        description=" ".join([first.description, *([". ".join(more)] if more else [])]),
    )


def _list_literals(hint: Any) -> tuple[Any, ...]:
    """Return the values of a type that lists its values, without None."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(value for part in typing.get_args(hint) for value in _list_literals(part))


@cache
def list_own_keys(target: str) -> list[SettingKey]:
    """Return the settings of a constructor that exists, without those of parts that installed
    packages add.
    """
    module, _, name = target.rpartition(".")
    definition = _find_definition(module, name)
    assert definition is not None, "what is not found may be later, so it is not remembered"
    return _constructor_keys(*definition)


def _list_parts(target: str) -> list[str]:
    """Return the import paths of the parts whose settings join those of a class, which names
    their entry points.
    """
    module, _, class_name = target.rpartition(".")
    definition = _find_definition(module, class_name)
    body = getattr(definition[1], "body", ()) if definition is not None else ()
    assigned = [item for item in body if isinstance(item, ast.AnnAssign)]
    groups = [
        item.value
        for item in assigned
        if isinstance(item.target, ast.Name) and item.target.id == "part_group"
    ]
    names = [group.value for group in groups if isinstance(group, ast.Constant)]
    return [
        entry.value.replace(":", ".") for name in names for entry in list_entry_points(str(name))
    ]


@dataclass(frozen=True)
class ParsedModule:
    """The source of a module."""

    name: str
    is_package: bool
    lines: list[str]
    tree: ast.Module

    @property
    def statements(self) -> list[ast.stmt]:
        """Return the statements of the module, and those that type checkers alone see."""
        return [
            statement
            for node in self.tree.body
            for statement in (
                node.body
                if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
                else [node]
            )
        ]


def _find_module(module: str) -> ParsedModule | None:
    parts = module.split(".")
    for base in [PACKAGE_ROOT.parent, *list_package_roots(), Path.cwd(), *map(Path, sys.path)]:
        for path in (
            base.joinpath(*parts).with_suffix(".py"),
            base.joinpath(*parts, "__init__.py"),
        ):
            if path.is_file():
                return _parse_module(module, path)
    return None


@cache
def _parse_module(module: str, path: Path) -> ParsedModule:
    text = path.read_text()
    return ParsedModule(module, path.name == "__init__.py", text.splitlines(), ast.parse(text))


def _find_definition(module: str, name: str) -> tuple[ParsedModule, ast.stmt] | None:
    """Return the definition of a module's name, followed through imports."""
    source = _find_module(module)
    if source is None:
        return None
    for node in source.statements:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return source, node
        if isinstance(node, ast.Assign) and any(
            isinstance(to, ast.Name) and to.id == name for to in node.targets
        ):
            return source, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    above = (
                        module.split(".")[: -node.level + source.is_package or None]
                        if node.level
                        else []
                    )
                    return _find_definition(
                        ".".join([*above, *filter(None, [node.module])]), alias.name
                    )
    return None


def _find_bases(source: ParsedModule, node: ast.stmt) -> list[tuple[ParsedModule, ast.stmt]]:
    named = [base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)]
    return [
        definition
        for name in named
        if (definition := _find_definition(source.name, name)) is not None
    ]


def _constructor_keys(source: ParsedModule, node: ast.stmt) -> list[SettingKey]:
    """Return the settings of a function, of a class by its __init__, or of a dataclass with
    inherited fields.
    """
    result: list[SettingKey | None] = []
    body = getattr(node, "body", ())
    made = next(
        (item for item in body if isinstance(item, ast.FunctionDef) and item.name == "__init__"),
        None,
    )
    if isinstance(node, ast.ClassDef) and made is None:
        # A dataclass takes the fields of its bases first, and keyword-only fields last.
        result += [
            key for base in reversed(_find_bases(source, node)) for key in _constructor_keys(*base)
        ]
        is_data = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        part = _read_part(node)
        for item in body:
            if (
                is_data
                and isinstance(item, ast.AnnAssign)
                and "init=False" not in ast.unparse(item)
            ):
                parameter = ast.arg(ast.unparse(item.target), item.annotation)
                key = _make_key(source, parameter, _field_default(item.value), item)
                result.append(None if key is None else replace(key, part=part))
        result.sort(key=lambda key: key is not None and key.is_keyword_only)
    elif isinstance(function := made or node, ast.FunctionDef):
        given = function.args
        defaults = [
            *[None] * (len(given.args) - len(given.defaults)),
            *given.defaults,
            *given.kw_defaults,
        ]
        for parameter, default in zip([*given.args, *given.kwonlyargs], defaults):
            config = _find_config(source, parameter)
            result += _constructor_keys(*config) if config else []
            result += (
                [_make_key(source, parameter, default, parameter)]
                if parameter.annotation and not config
                else []
            )
    # A field that is declared again replaces that of a base.
    return list({key.name: key for key in result if key is not None}.values())


def _read_part(node: ast.ClassDef) -> str:
    """Return the part of a group that a dataclass declares as `part`; "" without one."""
    values = [
        item.value.value
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and ast.unparse(item.target) == "part"
        and isinstance(item.value, ast.Constant)
    ]
    return str(values[0]) if values else ""


def _find_config(source: ParsedModule, parameter: ast.arg) -> tuple[ParsedModule, ast.stmt] | None:
    """Return the dataclass that a parameter `config` takes, whose fields are the settings; None
    for any other parameter.
    """
    if parameter.arg != "config" or not isinstance(parameter.annotation, ast.Name):
        return None
    return _find_definition(source.name, parameter.annotation.id)


def _field_default(value: ast.expr | None) -> ast.expr | None:
    """Return the default of a dataclass field, also of `field(default=..)` and
    `field(default_factory=lambda: ..)`.
    """
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return value
    options = {option.arg: option.value for option in value.keywords}
    factory = options.get("default_factory")
    if isinstance(factory, ast.Name) and factory.id in EMPTY_LITERALS:
        return ast.parse(EMPTY_LITERALS[factory.id], mode="eval").body
    return factory.body if isinstance(factory, ast.Lambda) else options.get("default", factory)


def _make_key(
    source: ParsedModule, parameter: ast.arg, default: ast.expr | None, node: Any
) -> SettingKey | None:
    """Return a setting; None if the annotation is the type of a runtime object."""
    hint = _resolve_hint(source, parameter.annotation)
    if hint is None:
        return None
    last: Any = default or node
    comment = source.lines[last.end_lineno - 1].partition("  # ")[2]
    meaning = _comment_above(source, node) or ("" if TOOL_COMMENT.search(comment) else comment)
    value = None if default is None else _evaluate_default(source, default)
    written_default = None if default is None else _format_default(value)
    is_named = isinstance(node, ast.AnnAssign) and "kw_only=True" in ast.unparse(node)
    written_type = ast.unparse(parameter.annotation) if parameter.annotation else ""
    return SettingKey(
        parameter.arg,
        written_type,
        written_default,
        list_choices(hint),
        meaning,
        hint,
        value,
        is_named,
    )


def _comment_above(source: ParsedModule, node: Any) -> str:
    """Join the comment lines directly above a parameter or a field: the description of the
    setting.
    """
    lines: list[str] = []
    for line in reversed(source.lines[: node.lineno - 1]):
        text = line.strip()
        if not text.startswith("# "):
            break
        lines.insert(0, text.removeprefix("# "))
    return " ".join(lines)


def _evaluate_default(source: ParsedModule, default: ast.expr) -> Any:
    """Return the value of a default: a literal, or a name that is assigned a literal, here or
    where it is imported from, or a product or power of such.
    """
    if isinstance(default, (ast.Tuple, ast.List)):
        elements = list[Any]()
        for element in default.elts:
            if isinstance(element, ast.Starred):
                elements += _evaluate_default(source, element.value)
            else:
                elements.append(_evaluate_default(source, element))
        return elements
    if isinstance(default, ast.BinOp) and type(default.op) in OPERATORS:
        left = _evaluate_default(source, default.left)
        right = _evaluate_default(source, default.right)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            return OPERATORS[type(default.op)](left, right)
    try:
        return ast.literal_eval(default)
    except ValueError:
        definition = (
            _find_definition(source.name, default.id) if isinstance(default, ast.Name) else None
        )
        if definition is None or not isinstance(definition[1], ast.Assign):
            return ast.unparse(default)
        return _evaluate_default(definition[0], definition[1].value)


def _format_default(value: Any) -> str:
    return (
        f"[{','.join(map(format_literal, value))}]"
        if isinstance(value, (tuple, list))
        else format_literal(value)
    )


class _AnnotationNames(dict[str, Any]):
    """The names in the annotations of a module: types of settings, which their assignments give."""

    def __init__(self, source: ParsedModule) -> None:
        super().__init__(TYPE_NAMES)
        self.source = source

    def __missing__(self, name: str) -> Any:
        definition = _find_definition(self.source.name, name)
        if definition is None or not isinstance(definition[1], ast.Assign):
            raise KeyError(name)
        if definition[0].name == values.__name__:
            return getattr(values, name)
        hint = _resolve_hint(definition[0], definition[1].value)
        if hint is None:
            raise KeyError(name)
        return hint


def _resolve_hint(source: ParsedModule, annotation: ast.expr | None) -> Any:
    """Return the type of an annotation without importing its module; None for the type of a
    runtime object.
    """
    if annotation is None:
        return Any
    text = ast.unparse(annotation)
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        text = annotation.value
    try:
        return eval(text, {"__builtins__": {}}, _AnnotationNames(source))
    # A name that is no type of settings, or an expression that is no type, as of an alias.
    except (NameError, AttributeError, SyntaxError, TypeError):
        return None


def list_choices(hint: Any) -> tuple[str, ...]:
    """Return the values that a type allows, if it lists them."""
    if hint is bool:
        return ("true", "false")
    if typing.get_origin(hint) is typing.Literal:
        return tuple(map(format_literal, typing.get_args(hint)))
    several = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return (
        tuple(choice for part in typing.get_args(hint) for choice in list_choices(part))
        if several
        else ()
    )
