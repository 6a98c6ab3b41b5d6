"""Ratchets: plain names, described settings, no import circles, no import of experimental code from the core.

Each ceiling is the count of today and may only fall. The goals are stated beside them.
"""

from graphlib import CycleError, TopologicalSorter

from spectrain.config.choices import list_constructors
from spectrain.config.signatures import list_keys
from tests.language import dialect_per_thousand, function_names, is_bare, is_one_word, is_sentence
from tests.test_house import ROOT, code, imports, inside

MAX_ONE_WORD = 0.10  # share of the distinct function names that are one word; goal 0.20
MAX_BARE = 3  # function names that are a bare participle, preposition or pronoun; goal 0
MAX_DIALECT = 1  # dialect words per 1,000 identifiers; goal 2
MAX_UNDESCRIBED = 0  # settings without a full sentence; goal 0
CIRCLES: set[str] = set()
"""Modules on an import circle: none."""


def modules() -> dict[str, set[str]]:
    """Map every module to the modules that it imports, local and type-only imports counted."""
    names = {inside(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in code()}
    found = {}
    for name, path in names.items():
        imported = {
            max((other for other in names if f"{each}.".startswith(f"{other}.")), key=len, default="") for each in imports(path)
        }
        found[name] = imported - {name, ""}
    return found


def test_function_names_are_verbs_with_objects() -> None:
    names = function_names(code())
    assert sum(map(is_one_word, names)) / len(names) <= MAX_ONE_WORD


def test_no_more_bare_names() -> None:
    bare = sorted(filter(is_bare, function_names(code())))
    assert len(bare) <= MAX_BARE, bare


def test_dialect_words_fall() -> None:
    assert dialect_per_thousand(code()) <= MAX_DIALECT


def test_settings_are_described_by_sentences() -> None:
    groups = sorted(folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir())
    targets = {target for group in groups for target in list_constructors(group).values()}
    missing = {f"{target}.{key.name}" for target in targets for key in list_keys(target) if not is_sentence(key.description)}
    assert len(missing) <= MAX_UNDESCRIBED, sorted(missing)


def test_no_new_import_circles() -> None:
    """Files on an import circle are those of the list and no others."""
    graph, circles = modules(), set()
    while True:
        try:
            TopologicalSorter(graph).prepare()
            break
        except CycleError as error:
            circle = error.args[1]
            circles |= set(circle)
            graph[circle[1]] = graph[circle[1]] - {circle[0]}
            graph[circle[0]] = graph[circle[0]] - {circle[1]}
    assert circles <= CIRCLES, sorted(circles - CIRCLES)


def test_core_never_imports_experimental() -> None:
    core = [path for path in code() if "experimental" not in path.parts]
    assert not [inside(path) for path in core if any(name.startswith("experimental") for name in imports(path))]
