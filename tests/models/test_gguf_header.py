"""Headers of GGUF files: what the library writes passes, and nothing else keeps a process busy."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from spectrain.errors import UserError
from spectrain.models.gguf_header import read_gguf_header

HUGE = 2**62


def write_file(path: Path) -> None:
    """Write a small file with keys of every kind and a quantised tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("count", 3)
    writer.add_float32("rate", 0.5)
    writer.add_bool("flag", True)
    writer.add_array("texts", ["a", "bb", ""])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("float", np.ones((2, 32), dtype=np.float32))
    stored = gguf.quants.quantize(
        np.ones((2, 32), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("quantised", stored, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def header(num_tensors: int, num_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def key(kind: int, value: bytes, name: bytes = b"k") -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def tensor(dimensions: list[int], kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in dimensions)
    return (
        struct.pack("<Q", len(name))
        + name
        + struct.pack("<I", len(dimensions))
        + sizes
        + struct.pack("<IQ", kind, offset)
    )


def nested_arrays(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)


def array(kind: int, *items: bytes) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


TWO = struct.pack("<I", 2)
LAYERS = key(4, TWO, name=b"llama.block_count")
HEADS = b"llama.attention.head_count"

MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "another file": b"PK\x03\x04" + bytes(60),
    "magic alone": b"GGUF",
    "cut in the counts": header(1, 1)[:-3],
    "version 0": header(0, 0, version=0),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "more keys than bytes": header(0, HUGE, bytes(25)),
    "more tensors than bytes": header(HUGE, 0, bytes(25)),
    "a name longer than the file": header(0, 1, struct.pack("<Q", HUGE) + bytes(20)),
    "a text longer than the file": header(0, 1, key(8, struct.pack("<Q", HUGE))),
    "an array of numbers longer than the file": header(0, 1, key(9, struct.pack("<IQ", 4, HUGE))),
    "an array of texts longer than the file": header(0, 1, key(9, struct.pack("<IQ", 8, HUGE))),
    "an array of arrays longer than the file": header(0, 1, key(9, struct.pack("<IQ", 9, HUGE))),
    "arrays nested too deeply": header(0, 1, key(9, nested_arrays(1000))),
    "an unknown type of value": header(0, 1, key(99, bytes(8))),
    "an unknown type of tensor": header(1, 0, tensor([4], kind=9999) + bytes(64)),
    "too many dimensions": header(1, 0, tensor([1] * 9) + bytes(64)),
    "a tensor larger than the file": header(1, 0, tensor([HUGE]) + bytes(64)),
    "a tensor without a name": header(1, 0, tensor([8], name=b"") + bytes(96)),
    "a tensor without dimensions": header(1, 0, tensor([]) + bytes(96)),
    "a tensor without values": header(1, 0, tensor([0]) + bytes(96)),
    "rows that are no blocks": header(1, 0, tensor([33], kind=2) + bytes(96)),
    "two tensors of one name": header(2, 0, tensor([8]) + tensor([8], offset=32) + bytes(128)),
    "two tensors in one place": header(2, 0, tensor([8]) + tensor([8], name=b"u") + bytes(128)),
    "tensors that overlap": header(
        2, 0, tensor([16]) + tensor([8], offset=32, name=b"u") + bytes(128)
    ),
    "a gap between tensors": header(
        2, 0, tensor([8]) + tensor([8], offset=64, name=b"u") + bytes(192)
    ),
    "data that is not aligned": header(1, 0, tensor([8], offset=4) + bytes(96)),
    "a key given twice": header(0, 2, 2 * key(4, bytes(4))),
    "a width as a list": header(0, 1, key(9, array(4, TWO), name=b"llama.embedding_length")),
    "a width as true": header(0, 1, key(7, b"\x01", name=b"llama.embedding_length")),
    "a width with a fraction": header(0, 1, key(6, TWO, name=b"llama.embedding_length")),
    "an id as a list": header(0, 1, key(9, array(4, TWO), name=b"tokenizer.ggml.eos_token_id")),
    "a base as a list": header(0, 1, key(9, array(6, TWO), name=b"llama.rope.freq_base")),
    "a base as a whole number": header(0, 1, key(4, TWO, name=b"llama.rope.freq_base")),
    "an architecture as a list": header(
        0, 1, key(9, array(8, struct.pack("<Q", 1) + b"x"), name=b"general.architecture")
    ),
    "heads of one layer of two": header(0, 2, LAYERS + key(9, array(4, TWO), name=HEADS)),
    "heads of no layers": header(0, 1, key(9, array(4, TWO), name=HEADS)),
    "heads as texts": header(0, 2, LAYERS + key(8, struct.pack("<Q", 1) + b"2", name=HEADS)),
    "heads in lists of lists": header(
        0, 2, LAYERS + key(9, array(9, array(4, TWO), array(4, TWO)), name=HEADS)
    ),
    "a tensor beyond the file": header(1, 0, tensor([1], offset=HUGE) + bytes(64)),
}


def test_files_that_the_library_writes_pass(tmp_path: Path) -> None:
    write_file(tmp_path / "model.gguf")
    read_gguf_header(tmp_path / "model.gguf")


def test_heads_may_differ_between_layers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(0, 2, LAYERS + key(9, array(4, TWO, TWO), name=HEADS)))
    assert read_gguf_header(path).fields[HEADS.decode()].value == [2, 2]


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_headers_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(MALFORMED[name])
    with pytest.raises(
        UserError, match=r"model\.gguf: it cannot be read as a GGUF file .*; copy the file again"
    ):
        read_gguf_header(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: None])
def test_what_is_no_file_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "model.gguf")
    with pytest.raises(UserError, match="there is no such file"):
        read_gguf_header(tmp_path / "model.gguf")


def test_every_cut_of_a_file_ends_in_a_sentence(tmp_path: Path) -> None:
    write_file(tmp_path / "model.gguf")
    content = (tmp_path / "model.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(0, len(content) - 64, 3):
        cut.write_bytes(content[:size])
        with pytest.raises(UserError):
            read_gguf_header(cut)
