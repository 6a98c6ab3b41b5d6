"""Consecutive decoder layers on the quantised blocks of a GGUF file, compiled by Numba: one call
computes what `compiled_layers.LayerKernels` computes layer by layer, with the same bits.
`joined_layers` lists the addresses.

A step of one row spends a twentieth of its time between the calls of Python otherwise. Numbers are
bfloat16, and tensors are passed by address.
Shapes: N nodes, D width, H query heads, K key-value heads, d head size, I inner width.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import carray

from .attention import attend_texts
from .block_products import multiply_segments
from .rows import add_norm_half, gate_half, norm_heads_half
from .vectors import compile_cached, compile_inline, to_longs

# Numbers of a product: its segments, their number, the bytes of a record, and the biases or 0.
PRODUCT_SIZE = 4
# Numbers of a layer: the products with queries, keys and values, of the output, with gate and up,
# and down; then the norms before attention and MLP, and those of queries and keys or 0.
QKV = 0
OUTPUT = PRODUCT_SIZE
GATE_UP = 2 * PRODUCT_SIZE
DOWN = 3 * PRODUCT_SIZE
NORMS = 4 * PRODUCT_SIZE
LAYER_SIZE = NORMS + 4


class LayerShape(NamedTuple):
    """The sizes of every layer, and the constants of its kernels."""

    width: int
    inner_width: int
    num_heads: int
    num_key_heads: int
    head_size: int
    scale: float
    eps: float
    head_eps: float
    lanes: int
    activations: int  # of all bfloat16
    append: int  # the functions of a part of attention
    attend: int


class LayerMemory(NamedTuple):
    """What layers compute for N nodes, and the working memory of their kernels."""

    hidden: int  # [N, D]
    added: int  # [N, D] to be added to it, or 0
    normed: int  # [N, D]
    first_sum: int  # [N, D]
    second_sum: int  # [N, D]
    heads: int  # [N, H + 2 K, d]
    attended: int  # [N, H d]
    projected: int  # [N, D]
    inner: int  # [N, 2 I]
    gated: int  # [N, I]
    out: int  # [N, D]
    records: int
    sums: int
    scratch: int
    scratch_bytes: int
    team: int
    members: int


class LayerSlots(NamedTuple):
    """The slots of the first layer's cache, and what nodes see of them."""

    keys: int
    values: int
    layer_bytes: int
    slot_stride: int
    starts: int
    lengths: int
    num_texts: int
    num_appended: int
    mask: int
    num_nodes: int
    cos: int
    sin: int


@compile_inline
def _multiply(
    numbers: Any,
    x: int,
    width: int,
    out: int,
    num_outputs: int,
    rows: int,
    memory: LayerMemory,
) -> None:
    multiply_segments(
        numbers[0],
        numbers[1],
        x,
        numbers[2],
        memory.records,
        numbers[3],
        out,
        True,
        rows,
        width,
        num_outputs,
        memory.sums,
        memory.team,
        memory.members,
    )


@compile_inline
def _attend(
    layer: Any, index: int, shape: LayerShape, memory: LayerMemory, slots: LayerSlots, rows: int
) -> None:
    """Rotate the heads, append keys and values to the slots of a layer, and attend."""
    size = shape.head_size
    if layer[NORMS + 2] != 0:
        norm_heads_half(
            memory.heads,
            layer[NORMS + 2],
            layer[NORMS + 3],
            rows,
            shape.num_heads,
            shape.num_key_heads,
            size,
            shape.head_eps,
            shape.lanes,
            memory.scratch,
        )
    shift = index * slots.layer_bytes
    attend_texts(
        shape.append,
        shape.attend,
        memory.heads,
        (shape.num_heads + 2 * shape.num_key_heads) * size,
        size,
        slots.cos,
        slots.sin,
        slots.keys + shift,
        slots.values + shift,
        slots.slot_stride,
        slots.starts,
        slots.lengths,
        slots.num_texts,
        slots.num_appended,
        slots.mask,
        slots.num_nodes,
        shape.num_heads,
        shape.num_key_heads,
        size,
        memory.attended,
        shape.scale,
        memory.scratch,
        memory.scratch_bytes,
        0,
        memory.team,
        memory.members,
    )


@compile_inline
def _add_norm(
    hidden: int,
    added: int,
    weight: int,
    summed: int,
    shape: LayerShape,
    memory: LayerMemory,
    rows: int,
) -> None:
    add_norm_half(
        hidden,
        added,
        weight,
        summed,
        memory.normed,
        rows,
        shape.width,
        shape.eps,
        shape.lanes,
        memory.scratch,
    )


@compile_cached
def run_layers(
    plan: int,
    first: int,
    end: int,
    rows: int,
    shape: LayerShape,
    memory: LayerMemory,
    slots: LayerSlots,
) -> None:
    """Run the layers from `first` to before `end` on hidden + added [N, D]. The result is the sum
    of `second_sum` and `out`.
    """
    attended_width = shape.num_heads * shape.head_size
    heads_width = (shape.num_heads + 2 * shape.num_key_heads) * shape.head_size
    inner = shape.inner_width
    hidden = memory.hidden
    added = memory.added
    for index in range(first, end):
        layer = carray(to_longs(plan + 8 * LAYER_SIZE * index), (LAYER_SIZE,))
        _add_norm(hidden, added, layer[NORMS], memory.first_sum, shape, memory, rows)
        if added != 0:
            hidden = memory.first_sum
        _multiply(
            layer[QKV:OUTPUT], memory.normed, shape.width, memory.heads, heads_width, rows, memory
        )
        _attend(layer, index, shape, memory, slots, rows)
        _multiply(
            layer[OUTPUT:GATE_UP],
            memory.attended,
            attended_width,
            memory.projected,
            shape.width,
            rows,
            memory,
        )
        _add_norm(
            hidden, memory.projected, layer[NORMS + 1], memory.second_sum, shape, memory, rows
        )
        _multiply(
            layer[GATE_UP:DOWN], memory.normed, shape.width, memory.inner, 2 * inner, rows, memory
        )
        gate_half(memory.inner, shape.activations, memory.gated, rows, inner, 1)
        _multiply(layer[DOWN:NORMS], memory.gated, inner, memory.out, shape.width, rows, memory)
        hidden = memory.second_sum
        added = memory.out


@cache
def prepare_block_layers() -> None:
    """Load the kernel, or compile it where this machine has not, so that no step that is timed
    does.
    """
    shape = LayerShape(0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0)
    memory = LayerMemory(*[0] * len(LayerMemory._fields))
    slots = LayerSlots(*[0] * len(LayerSlots._fields))
    run_layers(0, 0, 0, 0, shape, memory, slots)
