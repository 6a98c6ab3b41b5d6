"""What a test speaks of: the package's functions and classes that it names, itself or through helpers beside it, and the words
that it writes or is given as parameters."""

from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

PACKAGE = "spectrain"


def reached(item: pytest.Function) -> set[str]:
    """Names as spectrain.trees.chain.Chain, and words as eagle3 or recipe=eagle3."""
    found: set[str] = set()
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    fixtures = [fixture.func for each in item._fixtureinfo.name2fixturedefs.values() for fixture in each]
    follow([item.function, *fixtures, *given], found, set())
    return found


def follow(things: list[Any], found: set[str], seen: set[int]) -> None:
    """Add what `things` and all behind them name."""
    while things:
        thing = things.pop()
        if isinstance(thing, str):
            found.add(thing)
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, (list, tuple, set, frozenset)):
            things += thing
        elif isinstance(thing, dict):
            things += [*thing.keys(), *thing.values()]
        elif (name := name_of(thing)).startswith(f"{PACKAGE}."):
            found.add(name)
        elif name.startswith("tests."):
            things += behind(thing)


def name_of(thing: Any) -> str:
    """Of a function or a class, or of the class of anything else; "" for a module."""
    if isinstance(thing, ModuleType):
        return ""
    named = thing if isinstance(thing, (type, FunctionType)) else type(thing)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"


def behind(thing: Any) -> list[Any]:
    """What a helper of the tests is made of."""
    if isinstance(thing, type):
        return [value for value in vars(thing).values() if callable(value)]
    if not isinstance(thing, FunctionType):
        return [type(thing)]
    found: list[Any] = [cell.cell_contents for cell in thing.__closure__ or () if cell.cell_contents is not thing]
    for code in codes(thing.__code__):
        found += code.co_consts
        for name in code.co_names:
            value = thing.__globals__.get(name)
            if isinstance(value, ModuleType):  # as in module.name
                found += [getattr(value, other) for other in code.co_names if hasattr(value, other)]
            elif value is not None:
                found.append(value)
    return found


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)
