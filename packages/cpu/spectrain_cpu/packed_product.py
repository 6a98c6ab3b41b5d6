"""Products of rows with packed weights: panels for the linears of the core, and for compiled layers
products whose weights stay as they are. Shapes: N rows, D input, O output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.kernels.onednn import linear_pointwise
from spectrain.models.fast import is_large_weight
from spectrain.models.fast.batch_invariance import CONSISTENT_ROWS, is_batch_invariant
from spectrain.models.fast.packed_linears import PackedWeights
from spectrain_cpu.block_weights import BlockWeight

from .available import has_block_kernels, has_panel_kernels

MAX_PLANNED_OUTPUTS = 4_096
"""Outputs on which a plan tries panels: a trial of 151,936 outputs of width 4,096 takes 3 seconds
of a processor, one of 4,096 takes 0.1.
"""


def pack_panels(*weights: Tensor) -> Any:
    """Return stacked weights [O, D] in panels, by which a few rows are multiplied faster: in
    bfloat16 with the bits of oneDNN, in float32 with bits that do not depend on the other rows.
    None where they do not serve."""
    outputs = sum(map(len, weights))
    chunk = find_panel_chunk(weights[0].dtype, outputs, weights[0].shape[1])
    if chunk is None:
        return None
    from .linear import WeightPanels

    return WeightPanels(weights[0] if len(weights) == 1 else torch.cat(weights), chunk)


def join_blocks(weights: Sequence[Tensor]) -> Any:
    """Return the product with weights in the blocks of a GGUF file, below each other; None where
    one is in no blocks, or there are no kernels for them.
    """
    stores = [weight.store for weight in weights if isinstance(weight, BlockWeight)]
    if len(stores) < len(weights) or not has_block_kernels():
        return None
    from .block_products import BlockPanels, BlockProduct

    panels = [store for store in stores if isinstance(store, BlockPanels)]
    if len(panels) < len(stores):
        return None
    if weights[0].dtype == torch.bfloat16:
        from .block_layers import prepare_block_layers

        prepare_block_layers()
    return BlockProduct(panels)


def allocate_blocks(outputs: int, width: int, tensor_type: Any, in_bytes: bool) -> Any:
    """Return a store of weights [O, K] in the blocks of a GGUF file, without values; None where
    there are no kernels for this type, this width or this machine. With `in_bytes` inputs are
    rounded to 8 bits, where the processor multiplies these.
    """
    if count_block_bytes(outputs, width, tensor_type) is None:
        return None
    from .block_products import BlockPanels

    return BlockPanels.allocate(outputs, width, tensor_type, in_bytes)


def count_block_bytes(outputs: int, width: int, tensor_type: Any) -> int | None:
    """Return the bytes of memory of weights [O, K] that stay in blocks; None where
    `allocate_blocks` returns None.
    """
    if not has_block_kernels():
        return None
    from .block_formats import COLUMNS, FORMATS

    if tensor_type not in FORMATS or outputs % COLUMNS:
        return None
    return outputs // COLUMNS * FORMATS[tensor_type].panel_bytes(width)


def count_panel_bytes(dtype: torch.dtype, outputs: int, width: int) -> int | None:
    """Return the bytes of the panels of weights [O, D] that nobody has yet; None where
    `pack_panels` makes none.
    """
    is_served = find_panel_chunk(dtype, outputs, width, MAX_PLANNED_OUTPUTS) is not None
    return outputs * width * dtype.itemsize if is_served else None


def panels_suffice(dtype: torch.dtype, outputs: int, width: int) -> bool:
    """Return whether weights [O, D] that nobody has yet will have panels and no reordered copy
    beside them.
    """
    from .linear import serve_many_rows

    chunk = find_panel_chunk(dtype, outputs, width, MAX_PLANNED_OUTPUTS)
    return serve_many_rows(dtype) and chunk is not None


def find_panel_chunk(
    dtype: torch.dtype, outputs: int, width: int, max_tried: int | None = None
) -> int | None:
    """Return the chunk of inputs by which panels of weights [O, D] are added, which in float32 is
    all of them; None where panels do not serve, tried on at most `max_tried` outputs.
    """
    if not has_panel_kernels(dtype):
        return None
    from .linear import WeightPanels, find_chunk

    weight = torch.empty(outputs, width, dtype=dtype, device="meta")
    if not WeightPanels.supports(weight):
        return None
    if dtype == torch.float32:
        return width
    if not is_large_weight(weight.numel()):
        return None
    return find_chunk(min(outputs, max_tried or outputs), width)


class PackedProduct:
    """The product of rows with weights that stay as they are: panels, or the call of oneDNN or
    BLAS alone.
    """

    def __init__(self, weights: PackedWeights) -> None:
        weights.refresh()
        assert weights.packed is not None and weights.packed_int8 is None
        self.source = weights
        self.weight = weights.packed
        self.bias = weights.join_biases()

    @staticmethod
    def supports(linear: Any) -> bool:
        """Return whether a packed linear is multiplied in the type of its weights, and so are
        those that read its input.
        """
        packed = [
            linear.forward.weights,
            *([linear.forward.shared.weights] if linear.forward.shared is not None else []),
        ]
        return all(weights.packed_dtype == linear.weight.dtype for weights in packed)

    @staticmethod
    def is_paired(weight: Tensor) -> bool:
        """Return whether a single row has to be multiplied with weights [O, K] with a copy of
        itself (`multiply_paired`).
        """
        is_half = weight.dtype == torch.bfloat16 and not isinstance(weight, BlockWeight)
        return is_half and not is_batch_invariant(weight.shape[1], 1)

    def __call__(self, input: Tensor) -> Tensor:
        """Return the outputs of all linears side by side, [1, N, D] -> [1, N, O]."""
        panels = self.source.find_panels()
        if panels is not None:
            return panels.product(input, self.bias)
        if not self.weight.is_mkldnn:
            return F.linear(input, self.weight, self.bias)
        if input.dtype == torch.float32:
            return linear_pointwise(input, self.weight, self.bias, "none", [], "")
        parts = [
            linear_pointwise(part, self.weight, self.bias, "none", [], "")
            for part in input.split(CONSISTENT_ROWS, dim=1)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
