"""`spectrain train --dry-run` checks and shows, and leaves nothing behind."""

import sys
from pathlib import Path

import pytest

from spectrain.cli.main import main
from tests.models.checkpoints import save_gguf_file


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["spectrain", "train", *words, "--dry-run"])
    main()


def test_samples_are_shown_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three samples are printed, and the folder stays empty."""
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, "recipe=medusa1", "target=tiny", "data.limit=4", "eval=none", "run=new")
    printed = capsys.readouterr().out
    assert [printed.count(f"sample {number}: ") for number in (1, 2, 3, 4)] == [1, 1, 1, 0]
    assert "nothing was trained or written" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_ends_as_in_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that holds a run is refused before anything is loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("recipe_name: medusa1\n")
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "recipe=medusa1", "target=tiny", "eval=none", "run=old")
    assert stopped.value.code == 2
    assert "old" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("run=/dev/null",), ("run=/dev/null", "trainer.resume=auto")])
def test_a_device_is_no_run_folder(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "recipe=medusa1", "target=tiny", "eval=none", *words)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "spectrain: run=/dev/null: this is a file; choose a folder\n"


def test_no_weights_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a GGUF file only the keys are read, as long as no command has written its weights."""
    gguf = save_gguf_file(tmp_path)[0]
    cache = tmp_path / "cache"
    monkeypatch.setenv("SPECTRAIN_CACHE", str(cache))
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "one two three four five six seven eight"}\n' * 40)
    words = ("recipe=medusa1", "target=hf", f"target.model={gguf}", "data=text", "eval=none")
    run(monkeypatch, *words, f"data.path={text}", "data.max_length=64")
    printed = capsys.readouterr().out
    assert "neither read nor checked here" in printed and "sample 1: " in printed
    assert [path for path in cache.rglob("*") if path.suffix == ".safetensors"] == []
