"""Which nodes of a tree see which: ancestors and depths from parents, and masks packed into words,
in one launch each.

Shapes: B batch, N nodes, M appended nodes, W 64-bit words of M bits. The references in torch come
first; they are also the path on a CPU. In the kernels a program owns one row of a mask: it walks
from a node to the root, or packs 64 entries into each word.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import jit, runs_on, tl, triton

MAX_NODES = 1024
"""Nodes of a tree whose row of the mask fits a program."""


def count_words(num_entries: int) -> int:
    """Return the words that hold so many entries of a mask."""
    return -(-num_entries // 64)


def find_ancestors_reference(parents: Tensor, longest_path: int) -> tuple[Tensor, Tensor]:
    """Return of trees with `parents` [B, N], -1 at the root, and paths of at most `longest_path`
    nodes: the mask [B, N, N], True where node j is node i or one of its ancestors, and the depths
    [B, N], 0 at the root.
    """
    batch, num_nodes = parents.shape
    eye = torch.eye(num_nodes, device=parents.device)
    if num_nodes == 1:
        return eye.bool().expand(batch, 1, 1), torch.zeros_like(parents)
    step = torch.zeros(batch, num_nodes, num_nodes, device=parents.device)
    step.scatter_(2, parents.clamp(min=0)[..., None], (parents >= 0).float()[..., None])
    reach = step + eye
    # each squaring doubles the depth that is covered
    for _ in range((longest_path - 1).bit_length()):
        reach = (reach @ reach).clamp(max=1)
    ancestors = reach.bool()
    return ancestors, ancestors.sum(-1) - 1


def pack_words_reference(mask: Tensor) -> Tensor:
    """Pack [..., M] bool into [..., W] int64: entry 64 w + j is bit j of word w."""
    padded = F.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % 64))
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    # the low byte of a word is first
    packed = (padded.unflatten(-1, (-1, 8)) << shifts).sum(-1, dtype=torch.uint8)
    return packed.view(torch.int64)


@jit
def _ancestors_kernel(  # type: ignore[no-untyped-def]
    parents_ptr,
    mask_ptr,
    depths_ptr,
    num_nodes,
    BLOCK: tl.constexpr,
):
    """Walk from one node to the root; grid [N, B]."""
    node = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    parents_ptr += batch * num_nodes
    row = batch * num_nodes + node
    index = tl.arange(0, BLOCK)
    visible = index == node
    depth = 0
    above = tl.load(parents_ptr + node)
    while above >= 0:
        visible = visible | (index == above)
        depth += 1
        above = tl.load(parents_ptr + above)
    tl.store(mask_ptr + row * num_nodes + index, visible, mask=index < num_nodes)
    tl.store(depths_ptr + row, depth)


@jit
def _pack_kernel(  # type: ignore[no-untyped-def]
    mask_ptr,
    words_ptr,
    mask_stride_b,
    mask_stride_n,
    num_entries,
):
    """Pack the entries of one word; grid [W, N, B]."""
    word = tl.program_id(0)
    node = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    bit = tl.arange(0, 64)
    entry = word * 64 + bit
    mask_ptr += batch * mask_stride_b + node * mask_stride_n
    is_set = tl.load(mask_ptr + entry, mask=entry < num_entries, other=0) != 0
    # Bits do not overlap, so their sum is their union.
    packed = tl.sum(is_set.to(tl.int64) << bit.to(tl.int64), 0)
    row = batch * tl.num_programs(1) + node
    tl.store(words_ptr + row * tl.num_programs(0) + word, packed)


@torch.library.custom_op("spectrain::find_ancestors", mutates_args=())
def _launch_ancestors(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the kernel."""
    batch, num_nodes = parents.shape
    mask, depths = _empty_ancestors(parents)
    block = triton.next_power_of_2(num_nodes)
    with torch.cuda.device_of(parents):
        _ancestors_kernel[(num_nodes, batch)](
            parents, mask, depths, num_nodes, BLOCK=block, num_warps=1
        )
    return mask, depths


@_launch_ancestors.register_fake
def _empty_ancestors(parents: Tensor) -> tuple[Tensor, Tensor]:
    batch, num_nodes = parents.shape
    mask = parents.new_empty(batch, num_nodes, num_nodes, dtype=torch.bool)
    return mask, torch.empty_like(parents)


@torch.library.custom_op("spectrain::pack_words", mutates_args=())
def _launch_pack(mask: Tensor) -> Tensor:
    """Launch the kernel."""
    batch, num_nodes, num_entries = mask.shape
    words = _empty_words(mask)
    with torch.cuda.device_of(mask):
        _pack_kernel[(words.shape[2], num_nodes, batch)](
            mask, words, mask.stride(0), mask.stride(1), num_entries, num_warps=1
        )
    return words


@_launch_pack.register_fake
def _empty_words(mask: Tensor) -> Tensor:
    return mask.new_empty(*mask.shape[:2], count_words(mask.shape[2]), dtype=torch.int64)


def can_find_ancestors(parents: Tensor) -> bool:
    """Tell whether the kernel runs for trees with these parents [B, N]."""
    return runs_on(parents.device) and parents.shape[1] <= MAX_NODES


def find_ancestors(parents: Tensor, longest_path: int) -> tuple[Tensor, Tensor]:
    """Do what `find_ancestors_reference` does, in one launch where the kernel runs."""
    if not can_find_ancestors(parents):
        return find_ancestors_reference(parents, longest_path)
    masks: tuple[Tensor, Tensor] = _launch_ancestors(parents.contiguous())
    return masks


def pack_words(mask: Tensor) -> Tensor:
    """Do what `pack_words_reference` does for masks [B, N, M], in one launch where the kernel
    runs."""
    if mask.dim() != 3 or not runs_on(mask.device):
        return pack_words_reference(mask)
    words: Tensor = _launch_pack(mask if mask.stride(-1) == 1 else mask.contiguous())
    return words
