"""Faster ways to compute what the modules compute; the only door to this room.

`speed_up_linears` serves a target, `pack_linears` a drafter. Layers and attention take the faster
way where it is possible.
"""

from torch import nn

from spectrain.kernels.cpu_kernels import has_cpu_kernels, prepare_kernels

from .batch_invariance import enforce_batch_invariance, has_batch_invariance, paired_forwards
from .compiled_cpu_decoder import fuse_cpu_forwards, runs_rows_alone
from .fused_cpu_layers import CachedRotation, shared_product
from .merged_attention import is_mergeable, merged_attention
from .merged_linears import merge_linears
from .packed_linears import (
    FeatureLinear,
    is_large_weight,
    is_packed,
    lowest_precision,
    pack_linears,
    packed_product,
    packed_weights,
    shared_input,
    unpack_linears,
)
from .text_attention import is_compiled_text, text_attention

__all__ = [
    "CachedRotation",
    "FeatureLinear",
    "enforce_batch_invariance",
    "fuse_cpu_forwards",
    "has_batch_invariance",
    "is_compiled_text",
    "is_large_weight",
    "is_mergeable",
    "is_packed",
    "lowest_precision",
    "merged_attention",
    "pack_linears",
    "packed_product",
    "packed_weights",
    "paired_forwards",
    "runs_rows_alone",
    "shared_input",
    "shared_product",
    "speed_up_linears",
    "text_attention",
    "unpack_linears",
]


def speed_up_linears(model: nn.Module) -> None:
    """Switch a model to reordered weights on a CPU, and on a GPU to one product for the linears
    that read the same input.
    """
    pack_linears(model)
    first = next(model.parameters())
    if has_cpu_kernels(first.dtype, first.device):
        prepare_kernels(first.dtype)
    if first.device.type == "cuda":
        merge_linears(model)
