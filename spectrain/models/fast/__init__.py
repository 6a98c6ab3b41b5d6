"""Faster ways to compute what the modules compute; the only door to this room.

`speed_up_linears` serves a target, `pack_linears` a drafter. Layers and attention take the faster
way where it is possible.
"""

from torch import nn

from spectrain.models.accelerator import accelerator

from .batch_invariance import enforce_batch_invariance, has_batch_invariance, paired_forwards
from .merged_linears import merge_linears
from .packed_linears import (
    FeatureLinear,
    cut_output,
    is_large_weight,
    is_packed,
    lowest_precision,
    pack_linears,
    packed_product,
    packed_weights,
    shared_input,
    unpack_linears,
)

__all__ = [
    "FeatureLinear",
    "cut_output",
    "enforce_batch_invariance",
    "has_batch_invariance",
    "is_large_weight",
    "is_packed",
    "lowest_precision",
    "merge_linears",
    "pack_linears",
    "packed_product",
    "packed_weights",
    "paired_forwards",
    "shared_input",
    "speed_up_linears",
    "unpack_linears",
]


def speed_up_linears(model: nn.Module) -> None:
    """Switch a model to reordered weights on a CPU, and on a GPU to one product for the linears
    that read the same input.
    """
    pack_linears(model)
    first = next(model.parameters())
    accelerator().prepare(first.dtype, first.device)
    if first.device.type == "cuda":
        merge_linears(model)
