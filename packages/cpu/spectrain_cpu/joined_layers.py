"""The layers of a decoder on the quantised blocks of a GGUF file, for `block_layers`: where their
weights, inputs and slots lie.

Shapes: N nodes, D width, O output width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.models.compiled_layers import mark_layer_done

from .attention import append_part_half, attend_part_half
from .block_formats import BLOCK
from .block_layers import LayerMemory, LayerShape, LayerSlots, run_layers
from .block_products import BlockProduct, record_memory, working_sums
from .compiled_layers import LayerKernels, NodeBuffers


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
        slots = describe_slots(buffers)
        run_layers(self.plan.data_ptr(), first, end, rows, self.shape, memory, slots)
        return buffers.second_sum, out


def find_products(layer: LayerKernels) -> list[BlockProduct]:
    """Return the four products of a layer with weights in blocks; none where one is another."""
    panels = [product.source.find_panels() for product in layer.products]
    products = [product for product in panels if isinstance(product, BlockProduct)]
    return products if len(products) == len(panels) else []


def describe_slots(buffers: NodeBuffers) -> LayerSlots:
    """Return the slots of the first layer and what nodes see of them."""
    _, _, cos, sin = buffers.before
    slot_stride, starts, lengths, num_texts, num_appended, mask, num_nodes = buffers.after[:7]
    return LayerSlots(
        buffers.keys,
        buffers.values,
        buffers.layer_bytes,
        slot_stride,
        starts,
        lengths,
        num_texts,
        num_appended,
        mask,
        num_nodes,
        cos,
        sin,
    )
