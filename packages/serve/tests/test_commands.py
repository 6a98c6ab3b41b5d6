"""The commands of this package, as the core's command line reads them."""

from pathlib import Path

import pytest

from packages.serve.tests.follow.test_damaged_files import make_folder
from spectrain.cli.help import COMMANDS, explain_command
from spectrain.cli.main import COMMAND_TASKS
from spectrain.cli.overrides import to_settings
from spectrain_serve.commands import COMMANDS as OWN
from tests.cli.test_main import check_mistake, folder, regenerate_words, run_refused
from tests.cli.test_output_flags import check_json

__all__ = ["folder"]

SERVER_MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no such engine": (("serve", "target=tiny", "server=vlm"), ("server=vlm", "vllm")),
    "a setting of no server": (
        ("serve", "target=tiny", "server=vllm", "server.prot=3"),
        ("server.prot", "port"),
    ),
    "a port of letters": (
        ("serve", "target=tiny", "server=vllm", "server.port=80x", "--print"),
        ("server.port=80x", "without a unit"),
    ),
    "a switch that is no truth value": (
        ("serve", "target=tiny", "server=vllm", "print_only=perhaps"),
        ("print_only=perhaps", "true or false"),
    ),
    "an export into a folder of others": (
        ("serve", "run=smollm2-eagle3", "server=vllm", "out=taken", "--print"),
        ("taken", "choose another folder"),
    ),
    "a flag that follow lacks": (
        ("follow", "run=taken", "server=vllm", "--notes"),
        ("--notes", "no such flag"),
    ),
    "follow, a setting misspelt": (
        ("follow", "run=taken", "server=vllm", "follow.lisen=x"),
        ("follow.lisen", "listen"),
    ),
    "follow, minutes as a text": (
        ("follow", "run=taken", "server=vllm", "follow.train_minutes=long"),
        ("follow.train_minutes=long",),
    ),
    "status, a switch that is no truth value": (
        ("follow", "status", "run=taken", "rollback=x"),
        ("rollback=x", "true or false"),
    ),
    "status without its key": (("follow", "status", "taken"), ("taken", "run=taken")),
    "rows as a text": (
        ("bench", "engine", "server=vllm", "target=tiny", "bench.rows=x"),
        ("bench.rows=x",),
    ),
    "times into a folder": (
        ("bench", "engine", "server=llamacpp", "target=tiny", "out=taken"),
        ("out=taken", "a folder"),
    ),
    "a server and a target": (regenerate_words("server=vllm"), ("target", "server.model")),
    "a server and a tree": (
        regenerate_words("server=vllm", "tree=chain", "target"),
        ("tree", "server.model"),
    ),
    "no server": (
        regenerate_words(
            "server=openai", "server.model=m", "server.url=http://127.0.0.1:9/v1", "target"
        ),
        ("server.url=http://127.0.0.1:9/v1", "no server answers"),
    ),
}


@pytest.mark.parametrize(
    "command, words, expected",
    [
        ("bench engine", "server=vllm", ["drafter=ngram", "server=vllm"]),
        (
            "serve",
            "target=tiny --print",
            ["drafter=ngram", "server=vllm", "target=tiny", "print_only=true"],
        ),
        ("serve", "run=a server=sglang", ["drafter=ngram", "run=a", "server=sglang"]),
    ],
)
def test_words_that_stand_for_settings(command: str, words: str, expected: list[str]) -> None:
    """Flags and implied settings become settings."""
    assert to_settings(command, words.split()) == expected


@pytest.mark.parametrize(
    "words, keys",
    [
        (("serve", "target=tiny", "server=vllm", "--print"), ("command", "export_command")),
        (("follow", "status", "run=."), ("status", "decisions")),
        (("follow", "status", "run=.", "rollback=true"), ("rollback",)),
    ],
)
def test_json_is_one_document(
    words: tuple[str, ...],
    keys: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path)
    check_json(words, keys, capsys)


def test_commands_stand_where_a_project_needs_them() -> None:
    names = [*COMMANDS]
    assert {*OWN.tasks} <= COMMAND_TASKS.keys()
    start = names.index("data verify")
    assert names[start : start + 5] == [
        "data verify",
        "serve",
        "follow",
        "follow status",
        "bench decode",
    ]
    assert names[names.index("bench decode") + 1] == "bench engine"


@pytest.mark.parametrize("name", OWN.tasks)
def test_every_command_explains_itself(name: str) -> None:
    words = explain_command(name, []).split()
    first = f"spectrain {name}: {COMMANDS[name].about}".split()
    assert words[: len(first)] == first


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("words, expected", SERVER_MISTAKES.values(), ids=list(SERVER_MISTAKES))
def test_a_mistake_about_a_server_is_a_single_sentence(
    words: tuple[str, ...],
    expected: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_mistake(*run_refused(words, monkeypatch, capsys), expected, tmp_path)
