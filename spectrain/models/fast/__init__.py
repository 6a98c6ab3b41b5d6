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
from .text_kernels import LATE_ROTATION, can_rotate_late, fuse_text_layers, use_text_kernels
from .training_products import (
    find_merged,
    join_norms,
    merge_for_training,
    multiply_output,
    multiply_parts,
    needs_gradients,
    norm_stream,
    use_merged,
)

__all__ = [
    "LATE_ROTATION",
    "FeatureLinear",
    "can_rotate_late",
    "cut_output",
    "enforce_batch_invariance",
    "find_merged",
    "fuse_text_layers",
    "has_batch_invariance",
    "is_large_weight",
    "is_packed",
    "join_norms",
    "lowest_precision",
    "merge_for_training",
    "merge_linears",
    "multiply_output",
    "multiply_parts",
    "needs_gradients",
    "norm_stream",
    "pack_linears",
    "packed_product",
    "packed_weights",
    "paired_forwards",
    "shared_input",
    "speed_up_linears",
    "unpack_linears",
    "use_merged",
    "use_text_kernels",
]


def speed_up_linears(model: nn.Module) -> None:
    """Switch a model to reordered weights on a CPU, and on a GPU to one product for the linears
    that read the same input and to one launch for each norm and gated unit of texts.
    """
    pack_linears(model)
    first = next(model.parameters())
    accelerator().prepare(first.dtype, first.device)
    if first.device.type == "cuda":
        merge_linears(model)
        fuse_text_layers(model)
