"""Wrong words of the commands about data and drafters: each ends in one sentence and status 2, and
nothing is written. Those of other commands are in test_main.py and in the tests of the packages.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from spectrain.cli import main as cli
from tests.cli.test_main import check_mistake, folder, run_refused

__all__ = ["folder"]

RUN = "run=smollm2-eagle3"
WRONG: dict[str, tuple[str, ...]] = {
    # a value of another type, of a setting in no group
    "data verify path=taken drop=no": ("drop=no", "true or false"),
    "data verify path=taken drop=1": ("drop=1", "true or false"),
    "data regenerate target=tiny out=out check=maybe": ("check=maybe", "true or false"),
    "data regenerate target=tiny out=out capture=yes": ("capture=yes", "true or false"),
    f"export {RUN} format=vllm out=out private=perhaps": ("private=perhaps", "true or false"),
    "data index target=tiny out=[x]": ("out=['x']", "a text"),
    "data index target=tiny 'out={a: 1}'": ("out={'a': 1}", "a text"),
    "eval run=taken serve=maybe": ("serve=maybe", "true or false"),
    # of a setting in a group
    "data index target=tiny out=out data.limit=many": ("data.limit=many", "a whole number"),
    "data index target=tiny out=out data.limit=-1": ("data.limit=-1",),
    "data regenerate target=tiny out=out sampling.temperature=hot": ("sampling.temperature=hot",),
    "data store recipe=medusa1 target=tiny source.path=s source.dtype=int3": ("source.dtype=int3",),
    # several settings in one word
    "data verify path=taken 'drop=true path=x'": ("drop=true path=x", "one pair of quotes"),
    "data index target=tiny out=out 'data.limit=3 data.max_length=9'": ("one pair of quotes",),
    # a name that does not exist
    "data verify paht=taken": ("paht", "path"),
    "data index target=tiny ouut=out": ("ouut", "out"),
    "data regenerate target=tiny out=out max_new_tokens=3": ("max_new_tokens", "sampling."),
    "data regenerate target=tiny out=out writer.max_new_tokens=3": ("writer.max_new_tokens",),
    "train recipe=eagle3 learning_rate=1": ("learning_rate", "trainer.lr"),
    "train recipe=eagle3 num_train_epochs=1": ("num_train_epochs", "trainer.epochs"),
    "train recipe=eagle3 max_steps=1": ("max_steps", "trainer.max_steps"),
    # another command's
    "data index target=tiny out=out trainer.lr=1": ("trainer", "no such key"),
    "data verify path=taken target=tiny": ("target", "path"),
    "lint taken format=vllm": ("format", "no such key"),
    f"export {RUN} format=vllm out=out trainer.lr=1": ("trainer", "no such key"),
    "lint taken --to vllm": ("--to", "--target"),
    "lint taken --strict": ("--strict", "no such flag"),
    # of a group without a choice
    "lint smollm2-eagle3 target.model=x": ("target.model", "target=hf"),
    # beside --help
    "data index idx=3 --help": ("idx", "out"),
    "data index target=nope --help": ("target=nope", "target=hf"),
    "train recipe=eagle --help": ("recipe=eagle", "eagle3"),
    "train recipe=eagle3 lr=1 --help": ("lr", "trainer.lr"),
    "lint taken --help=x": ("--help=x", "no value"),
    # missing
    "data verify": ("path=DIR",),
    "data verify path=taken path": ("path", "path=VALUE"),
    "data index out": ("out", "KEY=VALUE"),
    "convert taken out --to vllm --target": ("--target",),
    f"export {RUN} format=vllm out=out push=a/b/c": ("push=a/b/c", "ORG/NAME"),
    "completion bash zsh": ("bash zsh", "one shell"),
}


@pytest.mark.sweep(16, free=("words", "expected"))
@pytest.mark.parametrize("words, expected", WRONG.items(), ids=list(WRONG))
def test_a_wrong_word_is_a_single_sentence(
    words: str,
    expected: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    split_words = tuple(shlex.split(words))
    check_mistake(*run_refused(split_words, monkeypatch, capsys), expected, folder)


@pytest.mark.parametrize(
    "words",
    [
        "train recipe=medusa1 --dry-run --help",
        "train -m recipe=eagle3 --help",
        "lint --json --help",
    ],
)
def test_help_with_right_words(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run_command(words.split())
    assert capsys.readouterr().out.startswith(f"spectrain {words.split()[0]}: ")
