"""The command line of a benchmark, `python -m lab.benchmarks.NAME key=value ..`: each argument of
its constructor is a key.

It imports nothing outside the standard library but `UserError`, because a GPU machine may have
torch, triton and rich only.
"""

import inspect
import json
import sys
from collections.abc import Iterable
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from spectrain.errors import UserError


def run_benchmark(benchmark: type) -> None:
    """Construct a benchmark from the words of the command line and run it; exit with status 2
    after a mistake in a word.
    """
    words = sys.argv[1:]
    if "--help" in words or "-h" in words:
        return print(describe_settings(benchmark))
    try:
        benchmark(**parse_settings(benchmark, words)).run()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def describe_settings(benchmark: type) -> str:
    """Return the documentation of the benchmark and one line for each key with its default."""
    lines = [
        f"  {name}" if parameter.default is parameter.empty else f"  {name}={parameter.default}"
        for name, parameter in inspect.signature(benchmark).parameters.items()
    ]
    return "\n".join([inspect.getdoc(benchmark) or "", "", *lines])


def parse_settings(benchmark: type, words: list[str]) -> dict[str, Any]:
    """Return the arguments that `key=value` words give, each converted to the type of the
    benchmark's parameter.
    """
    parameters = inspect.signature(benchmark).parameters
    types = get_type_hints(vars(benchmark)["__init__"])
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in parameters:
            raise UserError(f"{word}: write key=value, where key is {', '.join(parameters)}")
        settings[key] = convert_value(key, text, types[key])
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in settings
    ]
    if missing:
        raise UserError(f"{missing[0]}: it has no default; add {missing[0]}=VALUE")
    return settings


def list_defaults(defaults: Iterable[str], words: Iterable[str]) -> list[str]:
    """Return the `key=value` words among the defaults whose keys no other word sets."""
    keys = {word.partition("=")[0] for word in words}
    return [word for word in defaults if word.partition("=")[0] not in keys]


def convert_value(key: str, text: str, expected: Any) -> Any:
    """Return the value that `text` stands for: null for None, true or false, a number, a word,
    or a list in brackets.
    """
    options = get_args(expected)
    if get_origin(expected) is Literal:
        if text not in options:
            raise UserError(f"{key}={text}: use {', '.join(options)}")
        return text
    if NoneType in options:
        return None if text == "null" else convert_value(key, text, options[0])
    if expected is str:
        return text
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{key}={text}: give a number, true, false, or a list in brackets"
        ) from error
    is_right = (
        isinstance(value, list)
        if get_origin(expected) is tuple
        else isinstance(value, (expected, int))
    )
    if not is_right or isinstance(value, bool) != (expected is bool):
        raise UserError(
            f"{key}={text}: give a value of the type {getattr(expected, '__name__', expected)}"
        )
    return tuple(value) if isinstance(value, list) else value
