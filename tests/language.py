"""Measures of the language: function names, dialect words, sentences. `python tests/language.py
PATH..` prints them.
"""

from __future__ import annotations

import ast
import io
import keyword
import re
import sys
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path

DIALECT = frozenset(
    [
        "found",
        "said",
        "asked",
        "told",
        "theirs",
        "mine",
        "place",
        "places",
        "known",
        "kept",
        "one",
        "beside",
        "behind",
        "seen",
        "wants",
        "whole",
    ]
)  # words that stood for something else in this project than in the field

PREPOSITIONS = frozenset(
    [
        "about",
        "above",
        "across",
        "after",
        "against",
        "ahead",
        "along",
        "among",
        "apart",
        "around",
        "aside",
        "at",
        "before",
        "behind",
        "below",
        "beneath",
        "beside",
        "besides",
        "between",
        "beyond",
        "by",
        "down",
        "during",
        "for",
        "from",
        "in",
        "inside",
        "into",
        "near",
        "of",
        "off",
        "on",
        "onto",
        "out",
        "outside",
        "over",
        "past",
        "since",
        "through",
        "to",
        "toward",
        "towards",
        "under",
        "until",
        "up",
        "upon",
        "with",
        "within",
        "without",
    ]
)
PRONOUNS = frozenset(
    [
        "all",
        "another",
        "any",
        "anything",
        "both",
        "each",
        "either",
        "everything",
        "few",
        "he",
        "her",
        "hers",
        "him",
        "his",
        "it",
        "its",
        "itself",
        "many",
        "me",
        "mine",
        "most",
        "my",
        "neither",
        "nobody",
        "none",
        "nothing",
        "one",
        "ones",
        "other",
        "others",
        "our",
        "ours",
        "she",
        "some",
        "somebody",
        "something",
        "such",
        "that",
        "their",
        "theirs",
        "them",
        "these",
        "they",
        "this",
        "those",
        "us",
        "we",
        "what",
        "whatever",
        "which",
        "who",
        "whoever",
        "whom",
        "whose",
        "you",
        "your",
        "yours",
    ]
)
ADVERBS = frozenset(
    [
        "alone",
        "almost",
        "already",
        "anew",
        "apart",
        "away",
        "here",
        "how",
        "quietly",
        "there",
        "together",
        "when",
        "where",
        "whether",
        "why",
    ]
)
IRREGULAR = frozenset(
    [
        "begun",
        "bent",
        "born",
        "borne",
        "bought",
        "bound",
        "broken",
        "brought",
        "built",
        "caught",
        "chosen",
        "come",
        "cut",
        "dealt",
        "done",
        "drawn",
        "driven",
        "fallen",
        "fed",
        "felt",
        "forgotten",
        "fought",
        "found",
        "frozen",
        "given",
        "gone",
        "grown",
        "heard",
        "held",
        "hidden",
        "hit",
        "hung",
        "kept",
        "known",
        "laid",
        "led",
        "left",
        "lent",
        "lit",
        "lost",
        "made",
        "meant",
        "met",
        "paid",
        "put",
        "reached",
        "rung",
        "said",
        "seen",
        "sent",
        "set",
        "shown",
        "shut",
        "sold",
        "sought",
        "spent",
        "spoken",
        "spread",
        "stood",
        "stuck",
        "struck",
        "sung",
        "swept",
        "taken",
        "taught",
        "thought",
        "thrown",
        "told",
        "torn",
        "understood",
        "won",
        "worn",
        "wound",
        "written",
    ]
)  # participles that do not end in -ed
NOUNS = frozenset(
    ["bound", "cut", "embed", "feed", "need", "seed", "set", "speed", "spread", "string", "timing"]
)
"""Words of the lists above, or with their endings, that are nouns or verbs of the field."""


def words(name: str) -> list[str]:
    """Split an identifier into lower-case words, at underscores and capitals."""
    return [
        word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name)
    ]


def is_single_word(name: str) -> bool:
    """Tell whether a function's name is a single word."""
    return len(words(name)) == 1


def is_bare(name: str) -> bool:
    """Tell whether a name is nothing but a participle, a preposition, a pronoun or an adverb."""
    if not is_single_word(name):
        return False
    (word,) = words(name)
    if word in NOUNS:
        return False
    ends = word.endswith("ed") or word.endswith("ing")
    return word in PREPOSITIONS | PRONOUNS | ADVERBS | IRREGULAR or (ends and len(word) > 4)


def function_names(paths: Iterable[Path]) -> set[str]:
    """Collect the distinct names of functions and methods, dunder methods left out."""
    return set().union(*map(file_functions, paths))


@cache
def file_functions(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = (
        node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return frozenset(name for name in functions if not name.startswith("__"))


def identifiers(path: Path) -> list[str]:
    """List every identifier of a file, in order, keywords left out."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [
        token.string
        for token in tokens
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string)
    ]


def dialect_per_thousand(paths: Iterable[Path]) -> float:
    """Count identifiers that contain a dialect word, per thousand identifiers."""
    names = [name for path in paths for name in identifiers(path)]
    return 1000 * sum(not DIALECT.isdisjoint(words(name)) for name in names) / max(1, len(names))


def is_sentence(text: str) -> bool:
    """Tell whether a description starts with a capital letter and ends with a full stop."""
    return bool(text) and (text[0].isupper() or not text[0].isalpha()) and text.endswith(".")


def print_measures(paths: list[Path]) -> None:
    """Print the measures of some files, with the names that break a rule."""
    names = function_names(paths)
    single = sorted(name for name in names if is_single_word(name))
    findings = [
        (path, name)
        for path in paths
        for name in identifiers(path)
        if not DIALECT.isdisjoint(words(name))
    ]
    print(
        f"one-word function names: {len(single)} of {len(names)} "
        f"({len(single) / max(1, len(names)):.0%}): {' '.join(single)}"
    )
    print(f"bare names: {' '.join(sorted(filter(is_bare, names)))}")
    print(f"dialect words per 1,000 identifiers: {dialect_per_thousand(paths):.1f}")
    for path in paths:
        names_here = [name for file, name in findings if file == path]
        if names_here:
            print(f"  {path}: {len(names_here)}: {' '.join(sorted(set(names_here)))}")


if __name__ == "__main__":
    arguments = [Path(argument) for argument in sys.argv[1:]]
    print_measures(
        [
            path
            for each in arguments
            for path in (sorted(each.rglob("*.py")) if each.is_dir() else [each])
        ]
    )
