"""What a name of a drafter means in Python, and the sentence for one that means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrain.cli.locate import locate_drafter
from spectrain.errors import UserError


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("./none", "there is no such folder; give a run folder"),
        ("a b", "there is no such folder; give a run folder"),
        ("org/none", "there is no such folder, and the hub cannot be reached"),
        ("file.txt", "this is a file"),
        ("empty", "there is no drafter in it"),
        ("begun", "this run has no drafter in it yet; .*trainer.resume=auto"),
        ("adapter", "it holds an adapter alone, .*merge_and_unload"),
    ],
)
def test_each_mistake_has_its_sentence(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("file.txt").write_text("")
    for folder, files in {
        "empty": [],
        "begun": ["config.yaml"],
        "adapter": ["adapter_config.json", "adapter_model.safetensors"],
    }.items():
        Path(folder).mkdir()
        for file in files:
            (Path(folder) / file).write_text("{}")
    with pytest.raises(UserError, match=f"^drafter {name}: .*{sentence}"):
        locate_drafter(name)


def test_a_shipped_name_and_a_drafter_directory_stay_as_they_are(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_text("{}")
    assert locate_drafter(tmp_path) == tmp_path
    assert locate_drafter("smollm2-eagle3") == Path("smollm2-eagle3")
