"""Tensors come back as they were saved, or the file is refused by name."""

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
