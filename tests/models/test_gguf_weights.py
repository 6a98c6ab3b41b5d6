"""GGUF files are read into the type that a model computes in, with the values of the library."""

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from spectrain.drafters.layers.small_models import load_model_files
from spectrain.errors import UserError
from spectrain.models import bundled, gguf_header, gguf_weights, loading
from spectrain.models.bundled import convert_gguf, load_gguf_network
from spectrain.models.loading import load_hf
from tests.models.checkpoints import save_gguf_file


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf_file(tmp_path_factory.mktemp("gguf"))[0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_written_in_the_type_that_is_computed_in(
    gguf_file: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their values are those that transformers reads from the file, rounded once."""
    directory = convert_gguf(gguf_file, dtype)
    weights = load_file(directory / "model.safetensors")
    expected = bundled.load_by_transformers(
        gguf_header.read_gguf_header(gguf_file),
        torch.float32,
        "target.model",
    )
    named = dict(expected.named_parameters())
    assert set(weights) == set(named)
    assert all(torch.equal(weights[name], named[name].to(dtype)) for name in named)
    size = sum(weight.numel() for weight in named.values()) * dtype.itemsize / 1e9
    line = f"written once in {str(dtype)[6:]}, {size:.2f} GB, to {directory}"
    assert line in capsys.readouterr().err
    convert_gguf(gguf_file, dtype)
    assert not capsys.readouterr().err


def test_pieces_make_the_same_tensor(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a piece; a Llama's heads are moved within a tensor, so it has one."""
    tensors = [tensor for tensor in gguf_header.read_gguf_header(gguf_file).tensors]
    largest = max(tensors, key=lambda tensor: tensor.num_bytes)
    monkeypatch.setattr(gguf_weights, "PIECE_VALUES", 256)
    parts = gguf_weights.list_parts(largest, in_pieces=True)
    (whole,) = gguf_weights.list_parts(largest, in_pieces=False)
    processor = gguf_weights.TensorProcessor()
    with gguf_file.open("rb") as file:
        pieces = [part.read_values(file.fileno(), processor) for part in parts]
        values = whole.read_values(file.fileno(), processor)
    assert len(parts) > 2 and torch.equal(torch.cat(pieces), values)
    starts = [part.first_value for part in parts]
    assert starts == [256 * index for index in range(len(parts))]


def test_what_is_not_read_here_is_read_by_transformers(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a file of experts, whose tensors transformers merges."""
    directory = convert_gguf(gguf_file, torch.bfloat16)
    expected = load_file(directory / "model.safetensors")
    shutil.rmtree(directory)
    monkeypatch.setattr(gguf_weights, "is_read_here", lambda header, network: False)
    weights = load_file(convert_gguf(gguf_file, torch.bfloat16) / "model.safetensors")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_drafter_is_read_in_float32_without_a_copy_on_disk(gguf_file: Path, cache: Path) -> None:
    network, tokenizer = load_model_files(str(gguf_file))
    target = load_hf(str(gguf_file), device="cpu", dtype="float32")
    written = dict(target.model.named_parameters())
    assert all(
        weight.dtype == torch.float32 and torch.equal(weight, written[name])
        for name, weight in network.named_parameters()
    )
    assert tokenizer.get_vocab() == target.tokenizer.get_vocab()
    for path in cache.rglob("*.safetensors"):
        path.unlink()
    load_gguf_network(gguf_file, "drafter.model", torch.float32)
    assert not [*cache.rglob("*.safetensors")]


def test_a_drafter_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^drafter.model=.*none.gguf: there is no such file"):
        load_model_files(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize("key", ["target", "drafter"])
def test_a_model_that_is_not_downloaded_names_the_command(key: str) -> None:
    with pytest.raises(UserError, match=rf"^{key}.model=qwen2.5-coder-0.5b: .*; run make models"):
        if key == "target":
            load_hf("qwen2.5-coder-0.5b")
        else:
            load_model_files("qwen2.5-coder-0.5b")


def test_too_little_memory_is_said_before_anything_is_written(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"of memory and 0\.0 GB are free; close other programs"):
        load_hf(str(gguf_file), device="cpu")
    assert not [*cache.rglob("*.safetensors")]


def test_too_little_disk_leaves_nothing_behind(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    with pytest.raises(UserError, match="are needed on its disk and 0.0 GB are free"):
        convert_gguf(gguf_file, torch.float32)
    assert not [path for path in cache.iterdir() if not path.name.endswith(".config")]


def test_keys_are_those_of_the_library(gguf_file: Path) -> None:
    header = gguf_header.read_gguf_header(gguf_file)
    reader = gguf.GGUFReader(gguf_file)
    for key, entry in header.fields.items():
        theirs = reader.fields[key]
        assert entry.types == theirs.types
        assert [bytes(part) if isinstance(part, bytes) else part[0] for part in entry.parts] == [
            part.tobytes() if entry.types[-1] == gguf.GGUFValueType.STRING else part[0]
            for part in (theirs.parts[index] for index in theirs.data)
        ]
    for own, tensor in zip(header.tensors, reader.tensors):
        assert own.name == tensor.name and own.start == tensor.data_offset
        assert own.num_bytes == tensor.n_bytes and own.shape == tuple(tensor.shape)[::-1]


def test_the_header_is_read_once(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load reads it once, transformers included; a file that has changed is read again."""
    file = tmp_path / "model.gguf"
    shutil.copyfile(gguf_file, file)
    reads: list[Path] = []
    read = gguf_header.HeaderReader.read_header

    def count_reads(self: gguf_header.HeaderReader) -> None:
        reads.append(file)
        read(self)

    def refuse(path: Path, *args: Any) -> None:
        raise AssertionError(f"{path} is read by transformers")

    monkeypatch.setattr(gguf_header.HeaderReader, "read_header", count_reads)
    monkeypatch.setattr(gguf, "GGUFReader", refuse)
    monkeypatch.setattr("transformers.integrations.gguf.reader._mapped", refuse, raising=False)
    load_hf(str(file), device="cpu")
    assert len(reads) == 1
    os.utime(file, ns=(1, 1))
    gguf_header.read_gguf_header(file)
    assert len(reads) == 2


def test_a_file_of_an_impossible_size_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    """A million layers, which nobody would wait for."""
    key = b"llama.block_count"
    content = bytearray(gguf_file.read_bytes())
    # Behind the name stands the type of the value, in 4 bytes.
    struct.pack_into("<I", content, content.index(key) + len(key) + 4, 10**6)
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match="num_hidden_layers=1000000: use 4096 or less"):
        load_hf(str(path), device="cpu")
