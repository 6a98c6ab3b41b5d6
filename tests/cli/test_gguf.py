"""A GGUF file is a target and a drafter like any other, in every command."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

import spectrain
from spectrain.cli.main import main
from spectrain.models.bundled import load_tiny_tokenizer
from tests.installed import select_formats
from tests.models.checkpoints import save_gguf_file

SCORE = ["eval.limit=1", "eval.max_new_tokens=6", "eval.baselines=[]", "eval.report=false"]
SCORE += ["eval.repeats=1", "eval.oracle=false", "tree=chain"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = load_tiny_tokenizer().chat_template
    return save_gguf_file(tmp_path_factory.mktemp("gguf"), template)[0]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def run(*words: object, input: str = "") -> str:
    """Run a command; return what it printed."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["spectrain", *map(str, words)])
        patch.setattr(sys, "stdin", io.StringIO(input))
        try:
            main()
        except SystemExit as stopped:
            assert not stopped.code, (words, printed.getvalue())
    return printed.getvalue()


@pytest.fixture(scope="module")
def trained(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that trained and scored a drafter of the file."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["recipe=eagle3", "target=hf", f"target.model={file}", "data.limit=12"]
    words += ["drafter.vocab_size=256", "drafter.fit_tokens=100", "trainer.max_steps=1"]
    run("train", *words, *SCORE, f"run={folder}")
    return folder


def test_a_drafter_of_it_is_trained_and_scored(trained: Path) -> None:
    summary = json.loads(next(trained.glob("eval/*/summary.json")).read_text())
    assert summary["lossless"]["identical"] == summary["lossless"]["checked"] == 1
    assert summary["setting"]["target"] == "small-q8_0"


def test_its_drafter_is_linted_exported_and_scored(trained: Path, file: Path) -> None:
    for name in select_formats("vllm", "gguf"):
        run("export", f"run={trained}", f"format={name}", f"out={trained.parent / name}")
    run("lint", trained.parent / "vllm", "target=hf", f"target.model={file}")
    run("eval", f"run={trained}", *SCORE, "eval.name=again")
    assert (trained / "eval" / "again" / "summary.json").exists()


def test_its_drafter_chats(trained: Path) -> None:
    run("chat", f"run={trained}", "chat.max_new_tokens=4", input="Hello\n")


def test_it_drafts_for_itself(file: Path, tmp_path: Path) -> None:
    words = ["drafter=causal", f"drafter.model={file}", "target=hf", f"target.model={file}"]
    run("eval", *words, *SCORE, f"run={tmp_path / 'run'}")
    summary = json.loads(next(tmp_path.glob("run/eval/*/summary.json")).read_text())
    assert summary["acceptance_length"]["pooled"] > 3


def test_python_reads_it(file: Path) -> None:
    target = spectrain.Target.from_pretrained(str(file))
    assert target.name == "small-q8_0"


def test_lint_says_where_a_model_that_drafts_is_checked(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["spectrain", "lint", str(file)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "no drafter's directory; a GGUF model drafts as" in capsys.readouterr().err
