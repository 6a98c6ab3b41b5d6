"""Consecutive decoder layers on the quantised blocks of a GGUF file, compiled by Numba: one call
computes what `compiled_layers.LayerKernels` computes layer by layer, with the same bits.

A step of one row spends a twentieth of its time between the calls of Python otherwise. Numbers are
bfloat16, and tensors are passed by address.
Shapes: N nodes, D width, H query heads, K key-value heads, d head size, I inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from numba import carray
from torch import Tensor

from spectrain.models.compiled_layers import mark_layer_done

from .attention import append_part_half, attend_part_half, attend_texts
from .block_formats import BLOCK
from .block_products import BlockProduct, multiply_segments, record_memory, working_sums
from .compiled_layers import LayerKernels, LayerSlots, NodeBuffers
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


class BlockLayers:
    """The layers of a decoder, all of whose products are with weights in blocks."""

    def __init__(self, layers: Sequence[LayerKernels]) -> None:
        self.layers = layers
        # The plan has the addresses of their segments.
        self.products = [find_products(layer) for layer in layers]
        numbers = []
        for layer, blocks in zip(layers, self.products):
            row = []
            for packed, product in zip(layer.products, blocks):
                biases = 0 if packed.bias is None else packed.bias.data_ptr()
                row += [product.segments_address, product.num_segments, product.record_bytes]
                row.append(biases)
            weights = [*layer.norm_weights, *(norm.weight for norm in layer.head_norms)]
            norms = [weight.data_ptr() for weight in weights]
            numbers.append([*row, *norms, *[0] * (4 - len(norms))])
        self.plan = torch.tensor(numbers, dtype=torch.int64)
        # Of a row, for every product.
        self.record_bytes = max(
            product.width // BLOCK * product.record_bytes
            for blocks in self.products
            for product in blocks
        )
        first = layers[0]
        assert first.table is not None and first.lanes is not None
        self.shape = LayerShape(
            first.norm_weights[0].numel(),
            first.inner_width,
            first.num_heads,
            first.num_key_heads,
            first.head_size,
            float(first.scale),
            float(first.eps),
            float(first.head_norms[0].variance_epsilon if first.head_norms else 0.0),
            first.lanes,
            first.table.data_ptr(),
            append_part_half().address,
            attend_part_half().address,
        )
        self.heads_width = (first.num_heads + 2 * first.num_key_heads) * first.head_size

    @staticmethod
    def supports(layers: Sequence[LayerKernels]) -> bool:
        """Return whether all layers have weights in blocks and the same sizes."""
        kinds = {
            (
                layer.num_heads,
                layer.num_key_heads,
                layer.head_size,
                layer.inner_width,
                layer.scale,
                layer.eps,
                *(norm.variance_epsilon for norm in layer.head_norms),
            )
            for layer in layers
        }
        are_halves = all(
            layer.norm_weights[0].dtype == torch.bfloat16 and not layer.has_paired_rows
            for layer in layers
        )
        return are_halves and len(kinds) == 1 and all(map(find_products, layers))

    def run(
        self, first: int, end: int, hidden: Tensor, added: Tensor | None, buffers: NodeBuffers
    ) -> tuple[Tensor, Tensor]:
        """Run the layers from `first` to before `end` on hidden + added [1, N, D]. Return two
        terms of their output, of which the first is one of the buffers.
        """
        for layer in self.layers[first:end]:
            mark_layer_done(layer.index)
        rows = hidden.shape[1]
        heads = hidden.new_empty(rows, self.heads_width)
        projected = torch.empty_like(hidden)
        inner = hidden.new_empty(rows, 2 * self.shape.inner_width)
        out = torch.empty_like(hidden)
        memory = LayerMemory(
            hidden.data_ptr(),
            0 if added is None else added.data_ptr(),
            buffers.normed.data_ptr(),
            buffers.first_sum.data_ptr(),
            buffers.second_sum.data_ptr(),
            heads.data_ptr(),
            buffers.attended.data_ptr(),
            projected.data_ptr(),
            inner.data_ptr(),
            buffers.inner.data_ptr(),
            out.data_ptr(),
            record_memory(rows * self.record_bytes).data_ptr(),
            working_sums().data_ptr(),
            *buffers.scratch,
            *buffers.team,
        )
        run_layers(
            self.plan.data_ptr(), first, end, rows, self.shape, memory, buffers.describe_slots()
        )
        return buffers.second_sum, out


def find_products(layer: LayerKernels) -> list[BlockProduct]:
    """Return the four products of a layer with weights in blocks; none where one is another."""
    panels = [product.source.find_panels() for product in layer.products]
    products = [product for product in panels if isinstance(product, BlockProduct)]
    return products if len(products) == len(panels) else []


@cache
def prepare_block_layers() -> None:
    """Load the kernel, or compile it where this machine has not, so that no step that is timed
    does.
    """
    shape = LayerShape(0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0)
    memory = LayerMemory(*[0] * len(LayerMemory._fields))
    slots = LayerSlots(*[0] * len(LayerSlots._fields))
    run_layers(0, 0, 0, 0, shape, memory, slots)
