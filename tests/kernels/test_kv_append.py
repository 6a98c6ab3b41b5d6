"""Appending keys and values: the kernel, its reference and a loop agree, and the kernel compiles
for sm_90.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import spectrain.kernels.kv_append as module
from spectrain.kernels.kv_append import kv_append, kv_append_reference
from tests.kernels import aot

interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU machine compiles kernels"
)


def append_by_loop(
    store: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, pending: int
) -> None:
    for half, new in enumerate((keys, values)):
        for b in range(len(lengths)):
            for head in range(new.shape[1]):
                for node in range(new.shape[2]):
                    store[half, b, int(lengths[b]) + pending + node, head] = new[b, head, node]


def make_arguments(
    batch: int, heads: int, nodes: int, width: int, dtype: torch.dtype, strided: bool
) -> tuple[Any, ...]:
    """A store full of NaN, new keys and values, ragged lengths."""
    store = torch.full((3, 2, batch, 40, heads, width), float("nan"), dtype=dtype)[1]
    shape = (batch, nodes, heads, width) if strided else (batch, heads, nodes, width)
    keys, values = (torch.randn(shape).to(dtype) for _ in range(2))
    if strided:
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)
    return store, keys, values, torch.randint(0, 20, (batch,)), 3


@interpreter
@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "nodes", "width"),
    [(1, 1, 1, 64), (3, 2, 5, 96), (2, 9, 3, 128), (1, 8, 16, 256)],
)
def test_kernel_equals_reference_and_loop(
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    heads: int,
    nodes: int,
    width: int,
    dtype: torch.dtype,
    strided: bool,
) -> None:
    """Bit for bit, other slots untouched, whatever the strides."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    store, *new = make_arguments(batch, heads, nodes, width, dtype, strided)
    result = []
    for append in (kv_append, kv_append_reference, append_by_loop):
        copy = store.clone()
        append(copy, *new)
        result.append(copy)
    assert result[0].isnan().sum() == store.numel() - 2 * batch * heads * nodes * width
    for other in result[1:]:
        torch.testing.assert_close(result[0], other, rtol=0, atol=0, equal_nan=True)


@interpreter
def test_rows_may_be_more_than_32_bits_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """New keys of a large batch of long prompts are more than 2^31 elements; of this memory only
    what is used is touched.
    """
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    apart = 1 << 30
    # half of it is where 32 bits would lead to
    memory = torch.empty(4 * apart + 16, dtype=torch.int8)
    keys = memory.as_strided((3, 1, 1, 16), (apart, 16, 16, 1), 2 * apart)
    keys.copy_(torch.arange(48).view(3, 1, 1, 16))
    store = torch.zeros(2, 3, 2, 1, 16, dtype=torch.int8)
    kv_append(store, keys, keys, torch.tensor([0, 1, 0]), 0)
    expected = torch.zeros_like(store)
    kv_append_reference(expected, keys, keys, torch.tensor([0, 1, 0]), 0)
    assert torch.equal(store, expected) and store.sum() == 2 * sum(range(48))


@interpreter
def test_operator_passes_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's schema says what it changes, and its fake stands in for it."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    store, *new = make_arguments(2, 2, 3, 16, torch.float32, False)
    torch.library.opcheck(module._launch_append, (store.nan_to_num(), *new))


def test_only_the_requested_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is the reference unless SPECTRAIN_KERNELS=triton asks for the kernel."""
    ran: list[str] = []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(module, "_launch_append", lambda *arguments: ran.append("kernel"))
    monkeypatch.setattr(module, "kv_append_reference", lambda *arguments: ran.append("reference"))
    for setting in (None, "reference", "triton"):
        monkeypatch.setenv("SPECTRAIN_KERNELS", setting) if setting else monkeypatch.delenv(
            "SPECTRAIN_KERNELS", raising=False
        )
        kv_append(*make_arguments(1, 1, 1, 16, torch.float32, False))
    assert ran == ["reference", "reference", "kernel"]


@pytest.mark.sweep(1, free=("dtype", "heads", "head_size"))
@pytest.mark.parametrize("heads, head_size", [(8, 128), (3, 64), (32, 96)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernel_compiles_for_sm_90(dtype: str, heads: int, head_size: int) -> None:
    """No stack, no shared memory, and loads of 16 bytes where a node has as much for every
    thread.
    """
    types = {name: f"*{dtype}" for name in ("store_ptr", "keys_ptr", "values_ptr")} | {
        "lengths_ptr": "*i64"
    }
    blocks = {
        "BLOCK_H": 1 << (heads - 1).bit_length(),
        "BLOCK_D": 1 << (head_size - 1).bit_length(),
    }
    constants = {"HEADS": heads, "HEAD_SIZE": head_size, **blocks}
    usage = aot.compile_for(
        aot.Request("spectrain.kernels.kv_append", "_append_kernel", types, constants, 4, 3)
    )
    assert usage.stack == 0 and usage.shared == 0, usage
    assert usage.wide > 0 or heads == 3, usage
