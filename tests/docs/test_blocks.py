"""Every code block of the documents is run, composed or parsed, by the language that it names.

`sh` blocks are checked in test_docs.py and composed in test_golden_commands.py, those of `python`
run in test_python.py. Here the others are read as their readers would read them.
"""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from spectrain.cli.overrides import write_overrides
from spectrain.cli.settings_file import split_settings_file
from spectrain.config.build import register_resolvers
from spectrain.config.spec import read_run
from tests.docs.test_docs import DOCUMENTS, FENCE, ROOT, find_line_fault, shell_lines

BLOCKS = [
    (name, language, body)
    for name, text in DOCUMENTS.items()
    for language, body in FENCE.findall(text)
]
# Whose blocks test_python.py runs.
PYTHON_PAGE = "docs/python.md"


def check_json(body: str) -> None:
    """Read one value, or a value per line as in a JSONL file."""
    try:
        json.loads(body)
    except ValueError:
        for line in body.splitlines():
            json.loads(line)


def check_settings_file(body: str, folder: Path) -> None:
    """Compose a training from a settings file with this text."""
    (folder / "my.yaml").write_text(body)
    file, words = split_settings_file("train", ["my.yaml"])
    assert file is not None and not words
    GlobalHydra.instance().clear()
    register_resolvers()
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        composed = compose("train", overrides=write_overrides(file.words))
    read_run(composed, (), list(file.words), yaml.safe_load(body)["recipe"], file=file)


def check_output(body: str) -> None:
    """Refuse commands: what a reader may paste is in a block of the language sh."""
    lines = [line.removeprefix("$ ").split() for line in body.splitlines()]
    first_words = {words[0] for words in lines if words}
    assert not first_words & {"$", "spectrain", "make", "python", "pip", "vllm"}


def test_every_block_names_its_language() -> None:
    assert {language for _, language, _ in BLOCKS} <= {
        "sh",
        "python",
        "json",
        "toml",
        "yaml",
        "text",
    }
    assert not [name for name, text in DOCUMENTS.items() if has_unread_block(text)]


def has_unread_block(text: str) -> bool:
    """Tell whether a page has a block that the tests do not see: a fence within a list, one of
    tildes, one that says more than a language, or lines that are code because they are indented.
    """
    outside = FENCE.sub("", text)
    return re.search(r"^\s*(```|~~~)|^[ \t]*\n {4,}\S", outside, re.M) is not None


@pytest.mark.parametrize(
    "text",
    [
        "~~~sh\nspectrain doctor\n~~~\n",
        "```sh title=x\nspectrain doctor\n```\n",
        "- so:\n  ```sh\n  spectrain doctor\n  ```\n",
        "So:\n\n    spectrain doctor\n",
    ],
)
def test_unread_blocks_are_found(text: str) -> None:
    assert has_unread_block(f"# Page\n\n{text}") and not has_unread_block(
        "# Page\n\n```sh\nspectrain doctor\n\n    spectrain plan\n```\n"
    )


@pytest.mark.parametrize(
    ("language", "check"), [("json", check_json), ("text", check_output)], ids=["json", "text"]
)
def test_blocks_of_data_and_output(language: str, check: Callable[[str], None]) -> None:
    bodies = [body for _, own, body in BLOCKS if own == language]
    assert bodies
    for body in bodies:
        check(body)


def test_projects_of_packages_are_toml() -> None:
    """An entry point of a documented package is one that spectrain reads."""
    tomllib = pytest.importorskip("tomllib", reason="Python reads toml from 3.11 on")
    bodies = [body for _, language, body in BLOCKS if language == "toml"]
    assert bodies
    for body in bodies:
        groups = tomllib.loads(body)["project"]["entry-points"]
        assert all(f"`{group}`" in DOCUMENTS["docs/adding.md"] for group in groups)


def test_settings_files_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bodies = [body for _, language, body in BLOCKS if language == "yaml"]
    assert bodies
    for body in bodies:
        check_settings_file(body, tmp_path)


def test_python_blocks_stand_where_a_test_runs_them() -> None:
    assert {name for name, language, _ in BLOCKS if language == "python"} == {PYTHON_PAGE}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_of_engines_are_json(document: str) -> None:
    """The value of --speculative-config names a method, and an engine can read it."""
    for words in shell_lines(DOCUMENTS[document]):
        for flag, value in zip(words, words[1:]):
            if flag == "--speculative-config":
                assert "method" in json.loads(value)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_extras_that_are_installed_exist(document: str) -> None:
    """`.[dev]` and `spectrain[docs]` name extras of the package."""
    tomllib = pytest.importorskip("tomllib", reason="Python reads toml from 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    words = [word for line in shell_lines(DOCUMENTS[document]) for word in line]
    extras = re.findall(r"(?:^|\s)(?:\.|spectrain)\[([\w,-]+)\]", " ".join(words))
    named = {extra for part in extras for extra in part.split(",")}
    assert named <= {*project["optional-dependencies"]}


@pytest.mark.parametrize(
    ("check", "body"),
    [
        (check_json, '{"messages": [..]}'),
        (check_output, "spectrain train recipe=eagle3\n"),
        (check_output, "loss 1.2\n$ spectrain train recipe=eagle3\n"),
    ],
)
def test_the_checks_refuse_mistakes(check: Callable[[str], None], body: str) -> None:
    with pytest.raises((ValueError, AssertionError)):
        check(body)


def test_a_settings_file_with_a_mistake_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="trainr"):
        check_settings_file("recipe: eagle3\ntrainr: {lr: 1}\n", tmp_path)


def test_every_package_has_commands_that_exist() -> None:
    """The pages of the packages have blocks too."""
    for path in sorted((ROOT / "packages").glob("*/README.md")):
        body = "".join(text for language, text in FENCE.findall(path.read_text()) if language)
        faults = [find_line_fault(line) for line in body.replace("\\\n", " ").splitlines()]
        assert shlex.split(body, comments=True) and not [fault for fault in faults if fault]
