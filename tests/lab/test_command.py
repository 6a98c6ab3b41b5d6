"""The words of a benchmark's command line become the arguments of its constructor."""

import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest

from lab.benchmarks.command import describe_settings, parse_settings, run_benchmark
from spectrain.errors import UserError


@dataclass
class Example:
    """Measure nothing."""

    out: str
    part: Literal["all", "one"] = "all"
    toy: bool = False
    seconds: float = 1
    target: str | None = None
    lengths: tuple[int, ...] = field(default=(1, 2))


def test_words_are_converted_to_the_types_of_the_constructor() -> None:
    words = ["out=a", "part=one", "toy=true", "seconds=60", "target=null", "lengths=[3]"]
    assert Example(**parse_settings(Example, words)) == Example("a", "one", True, 60, None, (3,))
    assert parse_settings(Example, ["out=a", "target=tiny"]) == {"out": "a", "target": "tiny"}


@pytest.mark.parametrize(
    "word",
    [
        "part=two",
        "toy=1",
        "seconds=fast",
        "seconds=true",
        "lengths=3",
        "other=1",
        "toy",
        "target=a",
    ],
)
def test_mistakes_are_named(word: str) -> None:
    """The last word is right, but `out`, which has no default, is missing."""
    with pytest.raises(UserError, match="out=VALUE" if word == "target=a" else word):
        parse_settings(Example, [word])


def test_help_lists_the_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--help"])
    run_benchmark(Example)
    assert capsys.readouterr().out.rstrip("\n") == describe_settings(Example)
    assert "  part=all\n" in describe_settings(Example) and "  out\n" in describe_settings(Example)
