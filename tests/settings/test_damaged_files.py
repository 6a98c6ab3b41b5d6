"""Files that are written and read back, damaged in every way: each is named in one sentence with
what to do, or made anew and that is said. docs/security.md lists the kinds."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spectrain.data.datastore import Datastore, write_store
from spectrain.data.shards import ShardSet
from spectrain.errors import UserError
from spectrain.models import bundled
from spectrain.models.checkpoint_files import CheckpointFiles, check_index, list_weight_files
from spectrain.runs.tracking import Wandb


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def enlarge(path: Path) -> None:
    os.truncate(path, 10**10)


def write_list(path: Path) -> None:
    path.write_text("[1]")


def write_no_keys(path: Path) -> None:
    path.write_text("{}")


ODD = (empty, truncate, replace_by_pipe, replace_by_folder)
TEXT = (*ODD, enlarge, write_list)


class Vocabulary:
    """A tokenizer of 100 tokens."""

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(100)}

    def __len__(self) -> int:
        return 100


@pytest.mark.parametrize("name", ["tokens", "suffixes", "questions", "answers", "phrases"])
@pytest.mark.parametrize("damage", [*ODD, flip_bit])
def test_a_data_store(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    from spectrain.data.datastore import hash_vocabulary

    facts = {"tokenizer": hash_vocabulary(Vocabulary())}
    write_store(tmp_path / "store", [list(range(50))], ["what is it"], ["a harbour town"], facts)
    Datastore(str(tmp_path / "store"), Vocabulary())
    damage(tmp_path / "store" / f"{name}.npy")
    with pytest.raises(UserError, match=rf"{name}\.npy: [^\n]*index the data again$"):
        Datastore(str(tmp_path / "store"), Vocabulary())


@pytest.mark.parametrize("damage", [*TEXT, write_no_keys])
def test_the_index_of_a_data_store(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write_store(tmp_path / "store", [[1, 2]], ["a"], ["b"], {"tokenizer": "x"})
    damage(tmp_path / "store" / "index.json")
    with pytest.raises(UserError, match=r"store[^\n]*$"):
        Datastore(str(tmp_path / "store"), Vocabulary())


@pytest.mark.parametrize("damage", [empty, truncate, flip_bit, replace_by_pipe])
def test_a_converted_model_is_made_again(
    tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture
) -> None:
    """The damaged model is named and deleted, and converted once more."""
    made: list[Path] = []

    def save(gguf: Path, scratch: Path, name: str) -> None:
        made.append(scratch)
        (scratch / "config.json").write_text("{}")
        (scratch / "model.safetensors").write_bytes(bytes(100))

    folder = tmp_path / "model"
    for _ in range(2):
        bundled._write_converted(tmp_path / "m.gguf", folder, "m", save)
    assert len(made) == 1 and bundled.is_intact(folder)
    bundled.is_intact.cache_clear()
    damage(folder / "model.safetensors")
    assert not bundled.is_intact(folder) and not folder.exists()
    assert (
        "model.safetensors: it is not what was written; the model is converted again"
        in capsys.readouterr().err
    )
    bundled._write_converted(tmp_path / "m.gguf", folder, "m", save)
    bundled.is_intact.cache_clear()
    assert len(made) == 2 and bundled.is_intact(folder)
    damage(folder / bundled.CHECKSUMS)
    bundled.is_intact.cache_clear()
    assert not bundled.is_intact(folder)
    bundled.is_intact.cache_clear()


@pytest.mark.parametrize("damage", [*TEXT, write_no_keys])
def test_the_index_of_a_model(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert CheckpointFiles(tmp_path).tensor_files == {"a": "model-1.safetensors"}
    damage(path)
    if damage is replace_by_folder:
        path.rmdir()
        path.write_text('{"weight_map": {"a": "../x"}}')
    with pytest.raises(UserError, match=r"index\.json: [^\n]*copy (the file|it) again"):
        CheckpointFiles(tmp_path)


def test_an_index_that_contradicts_its_files(tmp_path: Path) -> None:
    """A tensor in two files, or in another one than the index says, has no certain value."""
    from safetensors.numpy import save_file

    for name, tensors in (("1", ("a", "b")), ("2", ("b", "c"))):
        save_file(dict.fromkeys(tensors, np.zeros(2)), tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": dict(zip("abc", [f"{n}.safetensors" for n in "112"]))})
    )
    with pytest.raises(UserError, match=r"2\.safetensors: 1\.safetensors holds b too"):
        check_index(tmp_path)
    save_file({"c": np.zeros(2)}, tmp_path / "2.safetensors")
    check_index(tmp_path)
    index.write_text(index.read_text().replace('"a": "1', '"a": "2'))
    with pytest.raises(UserError, match=r"it says that 2\.safetensors holds a, and it does not"):
        check_index(tmp_path)


def test_only_the_files_of_a_model_are_its_weights(tmp_path: Path) -> None:
    """Beside model.safetensors, which loading takes, other files are not read."""
    from safetensors.numpy import save_file

    for name in ("adapter", "model", "other"):
        save_file({"a": np.zeros(2)}, tmp_path / f"{name}.safetensors")
    assert list_weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    assert CheckpointFiles(tmp_path).tensor_files == {"a": "model.safetensors"}
    (tmp_path / "model.safetensors").unlink()
    assert [path.stem for path in list_weight_files(tmp_path)] == ["adapter", "other"]


@pytest.mark.parametrize("damage", [empty, truncate, replace_by_pipe, replace_by_folder])
def test_the_weights_of_a_model(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(10)}, path)
    damage(path)
    with pytest.raises(UserError, match=r"model\.safetensors: [^\n]*; copy the file again"):
        CheckpointFiles(tmp_path)


@pytest.mark.parametrize("damage", TEXT)
def test_the_manifest_of_a_regenerated_set(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"settings": {}, "conversations": 1, "shard_size": 1, "shards": {}}))
    assert len(ShardSet(tmp_path).shard_names) == 1
    if damage is enlarge:
        return
    damage(path)
    with pytest.raises(
        UserError, match=r"manifest\.json: it cannot be read [^\n]*; put back a copy"
    ):
        ShardSet(tmp_path).shard_names  # noqa: B018


@pytest.mark.parametrize("damage", TEXT)
def test_the_state_of_a_tracker(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "tracker.json"
    path.write_text('{"train": "abc"}')
    tracker = Wandb.__new__(Wandb)
    assert tracker._identify_run(tmp_path, "train") == ("abc", True)
    damage(path)
    with pytest.raises(UserError, match=r"tracker\.json: [^\n]*again"):
        tracker._identify_run(tmp_path, "train")
