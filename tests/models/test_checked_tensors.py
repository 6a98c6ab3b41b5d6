"""Tensors come back as they were saved, or the file is refused by name."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spectrain.models.checked_tensors import DamagedFile, read_tensors, save_tensors

TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 2),
}


def test_saved_tensors_are_read_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors(TENSORS, path)
    read = read_tensors(path, "copy it")
    assert read.keys() == TENSORS.keys()
    assert all(
        torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        for name, tensor in TENSORS.items()
    )


def test_every_flipped_bit_of_the_data_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors(TENSORS, path)
    content = path.read_bytes()
    data_start = 8 + int.from_bytes(content[:8], "little")
    for place in range(data_start, len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DamagedFile, match=r"model\.safetensors: it is damaged.*copy it"):
            read_tensors(path, "copy it")


def test_files_of_other_tools_have_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, path)
    assert torch.equal(read_tensors(path, "copy it")["a"], torch.ones(2))


@pytest.mark.parametrize("kind", ["absent", "cut", "empty", "pipe", "folder"])
def test_what_is_no_file_of_tensors_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "cut":
        save_tensors(TENSORS, path)
        path.write_bytes(path.read_bytes()[:-3])
    elif kind == "empty":
        path.touch()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(DamagedFile, match=r"model\.safetensors: .*; copy it"):
        read_tensors(path, "copy it")


def entry(shape: list[int], dtype: str = "F32", begin: int = 0, end: int = 24) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})


def escaped(text: str) -> str:
    return text.replace("data_offsets", r"data\u005foffsets")


REPEATED = {
    "shape": f'{{"w": {entry([2, 3])}, "w": {entry([3, 2])}}}',
    "type": f'{{"w": {entry([6], "I32")}, "w": {entry([6])}}}',
    "equal": f'{{"w": {entry([6])}, "w": {entry([6])}}}',
    "escaped name": rf'{{"w": {entry([6])}, "\u0077": {entry([6])}}}',
    "escaped key": f'{{"w": {escaped(entry([2, 3]))}, "w": {entry([3, 2])}}}',
}
DISTINCT = {
    "plain": f'{{"w": {entry([2, 3])}}}',
    "named as the key": f'{{"data_offsets": {entry([2, 3])}}}',
    "escaped": f'{{"\\u0077": {escaped(entry([2, 3]))}}}',
    "metadata": f'{{"__metadata__": {{"w": "1"}}, "w": {entry([2, 3])}}}',
}


def write_header(path: Path, header: str) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(24))
    return path


@pytest.mark.parametrize("header", REPEATED.values(), ids=REPEATED.keys())
def test_a_name_that_stands_twice_in_a_header_is_refused(header: str, tmp_path: Path) -> None:
    """safetensors takes the last entry of the same bytes; another reader may take the first."""
    path = write_header(tmp_path / "model.safetensors", header)
    with pytest.raises(DamagedFile, match=r"model\.safetensors: its header holds w twice; copy it"):
        read_tensors(path, "copy it")


@pytest.mark.parametrize("header", DISTINCT.values(), ids=DISTINCT.keys())
def test_headers_with_different_names_are_read(header: str, tmp_path: Path) -> None:
    path = write_header(tmp_path / "model.safetensors", header)
    assert [tensor.shape for tensor in read_tensors(path, "copy it").values()] == [(2, 3)]
