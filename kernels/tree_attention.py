"""Attention of tree nodes over a committed prefix and their own ancestors.

Shapes: B batch, N query nodes, M appended nodes (the N new ones last), W 64-bit words of M bits, T
key slots, H query heads, K key-value heads, D head size. First the reference in torch, which a CPU
runs where no kernel of an installed package does; then the Triton kernels:
- a program takes BLOCK_M rows, each a (node, query head) pair of one key-value head, over one split
  of the key blocks: full blocks of the prefix, which all nodes see, in a loop without a mask; then
  the masked blocks: the edge of a window, the end of the prefix, and the appended nodes, whose
  visibility is in the packed words;
- where the keys are split, each split stores its normalised output and the base-2 logarithm of its
  sum of weights, and a second kernel averages them. Scores are in base 2 throughout.
Lengths stay on the device. `tree_attention` chooses the path; SPECTRAIN_KERNELS=reference or
=triton overrides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .dispatch import jit, runs_on, tl, triton
from .fused_attention import fused_attention
from .tree_masks import pack_words


@dataclass
class Visibility:
    """What each of N new nodes sees: the committed prefix, and the appended nodes that `tree`
    marks.
    """

    lengths: Tensor  # [B] committed tokens per row
    longest: int  # the largest of them
    tree: Tensor  # [B, N, M] bool over the M appended nodes, the N new ones last
    query_positions: Tensor  # [B, N] position ids of the new nodes
    # [B, M] position ids of the appended nodes; needed by sliding windows only
    key_positions: Tensor | None
    is_exact: bool = True  # `longest` is the largest length, not an upper bound
    chunk_size: int | None = None  # positions per chunk; a node sees its own chunk only
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    _biases: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)
    _words: Tensor | None = None
    _chunked: dict[int, Visibility] = field(default_factory=dict)
    # What kernels of an installed package have made of it, by window.
    kernel_limits: dict[int | None, Any] = field(default_factory=dict)

    def attention_mask(self, window: int | None) -> Tensor | None:
        """Return [B, 1, N, T] bool, or None where every new node sees every slot; built once for
        all layers.
        """
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        return self._masks[window]

    def attention_bias(self, mask: Tensor, window: int | None, group: int) -> Tensor:
        """Return a single row's mask for `group` query heads as a float64 bias [1, group * N,
        T]; built once for all layers.
        """
        if (window, group) not in self._biases:
            bias = torch.zeros(
                mask.shape[1:], dtype=torch.float64, device=mask.device
            ).masked_fill_(~mask[0], float("-inf"))
            self._biases[window, group] = bias.repeat(1, group, 1)
        return self._biases[window, group]

    def packed_words(self) -> Tensor:
        """Return [B, N, W] int64: bit j of word w is set where a new node sees appended node 64
        w + j; built once.
        """
        if self._words is None:
            self._words = pack_words(self.tree)
        return self._words

    def in_chunks(self, size: int) -> Visibility:
        """Return the visibility of layers that attend within chunks of `size` positions; built
        once.
        """
        if size not in self._chunked:
            self._chunked[size] = replace(
                self, chunk_size=size, _masks={}, _biases={}, _chunked={}, kernel_limits={}
            )
        return self._chunked[size]

    def _build_mask(self, window: int | None) -> Tensor | None:
        batch, num_new, num_appended = self.tree.shape
        num_slots = self.longest + num_appended
        if batch == 1 and self.is_exact:
            prefix = self.tree.new_ones(1, num_new, self.longest)
            mask = torch.cat([prefix, self.tree], dim=2)
        else:
            slots = torch.arange(num_slots, device=self.tree.device)
            # [B, T] node held by each slot
            offset = (slots - self.lengths[:, None]).clamp(0, num_appended - 1)
            mask = self.tree.gather(2, offset[:, None].expand(-1, num_new, -1))
            mask &= (slots < self.lengths[:, None] + num_appended)[:, None]
            mask |= (slots < self.lengths[:, None])[:, None]
        if (window is not None and num_slots > window) or self.chunk_size is not None:
            assert self.key_positions is not None
            slots = torch.arange(num_slots, device=self.tree.device)
            offset = (slots - self.lengths[:, None]).clamp(0, num_appended - 1)
            positions = torch.where(
                slots < self.lengths[:, None], slots, self.key_positions.gather(1, offset)
            )
            here = self.query_positions[:, :, None]
            there = positions[:, None]
            if window is not None:
                mask = mask & (here - there < window)
            if self.chunk_size is not None:
                mask = mask & (here // self.chunk_size == there // self.chunk_size)
        return None if self.is_exact and num_new == 1 and bool(mask.all()) else mask[:, None]


MAX_BATCHED_SCORES = 1 << 21  # float64 scores of a row: 16 MB


def tree_attention_reference(
    q_BHND: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    visibility: Visibility,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale) v over the slots that each node sees, [B, H, N, D]."""
    mask = visibility.attention_mask(window)
    if softcap is None and sinks is None:
        batch, num_heads, num_nodes, _ = q_BHND.shape
        num_scores = num_heads * num_nodes * k_BKTD.shape[2]
        if (
            batch == 1
            and mask is not None
            and q_BHND.dtype == torch.float64
            and num_scores <= MAX_BATCHED_SCORES
        ):
            bias = visibility.attention_bias(mask, window, num_heads // k_BKTD.shape[1])
            return _attend_batched(q_BHND, k_BKTD, v_BKTD, bias, scale)
        return fused_attention(q_BHND, k_BKTD, v_BKTD, mask, scale=scale)
    return eager_attention(q_BHND, k_BKTD, v_BKTD, mask, scale, softcap, sinks)


def _attend_batched(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Compute the same for a single row, with the query heads of a key-value head as rows of one
    product.

    In float64, in which a CPU attends for targets in half precision, SDPA multiplies head by head.
    With 8 nodes, 9 query heads on 3 key-value heads and 150 keys it took 149 microseconds and this
    takes 120; with 600 keys 536 and 406 (EPYC, one thread).
    """
    _, num_heads, num_nodes, size = q.shape
    rows = q.reshape(k.shape[1], -1, size)
    scores = torch.baddbmm(bias, rows, k[0].transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v[0]).view(1, num_heads, num_nodes, v.shape[-1])


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with capped scores or sinks, storing all scores.

    Scores pass through softcap * tanh(score / softcap), as in Gemma 2. A head's sink [H] is the
    score of one more key, whose value is 0, as in gpt-oss.
    """
    group = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(group, 1).to(wide)
    v = v.repeat_interleave(group, 1).to(wide)
    scores = q.to(wide) @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return (scores.softmax(-1) @ v).to(q.dtype)
    away = sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, away], dim=-1).softmax(-1)[..., :-1]
    return (weights @ v).to(q.dtype)


@dataclass(frozen=True)
class AttentionTiles:
    """Tile sizes of a kernel: rows and keys per block, warps per program, blocks of keys in
    flight.
    """

    block_m: int
    # keys of a block that is masked; divides 64, so that a block of appended nodes lies in one word
    block_n: int
    num_warps: int
    num_stages: int
    block_p: int  # keys of an unmasked block; a multiple of block_n


# The largest blocks that compile for sm_90 without spilling a register, windows and softcaps
# included, and fit the 99 KB of consumer GPUs (sm_89, sm_120); tests/kernels/test_compiled.py holds
# them to it. Not yet timed. Head size at most -> for 16 rows, for 64 rows, for more.
TILE_CONFIGS = {
    64: (
        AttentionTiles(16, 32, 4, 3, 64),
        AttentionTiles(64, 64, 4, 2, 128),
        AttentionTiles(128, 64, 8, 2, 128),
    ),
    128: (
        AttentionTiles(16, 32, 4, 3, 64),
        AttentionTiles(64, 32, 4, 2, 64),
        AttentionTiles(128, 64, 8, 3, 64),
    ),
    256: (
        AttentionTiles(16, 32, 4, 2, 64),
        AttentionTiles(64, 32, 8, 2, 32),
        AttentionTiles(64, 32, 8, 2, 32),
    ),
    512: (
        AttentionTiles(16, 16, 4, 2, 32),
        AttentionTiles(32, 32, 8, 2, 32),
        AttentionTiles(32, 32, 8, 2, 32),
    ),
}
# The same where a program may have 227 KB: on an H100 or H200.
HOPPER_TILE_CONFIGS = TILE_CONFIGS | {
    64: (*TILE_CONFIGS[64][:2], AttentionTiles(128, 64, 8, 3, 128)),
    128: (
        TILE_CONFIGS[128][0],
        AttentionTiles(64, 32, 4, 3, 64),
        AttentionTiles(128, 64, 8, 2, 128),
    ),
    256: (TILE_CONFIGS[256][0], AttentionTiles(64, 32, 8, 2, 64), AttentionTiles(64, 32, 8, 2, 64)),
}
# Exact float32 products have no tensor cores, and keep whole rows of both operands in registers;
# larger blocks spill a lot.
FLOAT32_TILE_CONFIGS = (AttentionTiles(16, 16, 4, 2, 16), AttentionTiles(32, 16, 8, 2, 16))

DEFAULT_MULTIPROCESSORS = 132  # of an H100 or H200; used to choose splits without a GPU
MAX_SPLITS = 64
MIN_SPLIT_KEYS = 64  # keys per split, where rows are few
# A program averages one row, and of 64 splits at most 128 dimensions: 64 numbers a thread. Rows are
# few where splits are many, so more programs are not too many.
COMBINED_ROWS = 1
COMBINED_DIMS = 128


@cache
def is_hopper(device: torch.device) -> bool:
    """Tell whether a device is an H100 or H200; devices other than CUDA count as one."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


@cache
def num_multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else DEFAULT_MULTIPROCESSORS
    )


def choose_tiles(
    num_rows: int, head_size: int, dtype: torch.dtype, on_hopper: bool = True
) -> AttentionTiles:
    """Return the tiles of the first block that holds all rows, or of the largest."""
    if dtype == torch.float32:
        return FLOAT32_TILE_CONFIGS[num_rows > 16 and head_size <= 256]
    table = HOPPER_TILE_CONFIGS if on_hopper else TILE_CONFIGS
    configs = table[min(size for size in table if size >= head_size)]
    return configs[(num_rows > 16) + (num_rows > 64)]


@lru_cache(1024)
def choose_splits(
    config: AttentionTiles,
    num_rows: int,
    num_groups: int,
    num_keys: int,
    processors: int = DEFAULT_MULTIPROCESSORS,
) -> int:
    """Return the number of splits with which the last wave of programs ends first; of equal ones
    the fewest.

    `num_groups` are rows of the batch times key-value heads, each with `num_rows` rows. A program
    takes as long as its keys, in whole blocks, and a key more for every row of its own, which it
    reads, writes and leaves to be averaged (by bytes, ten a dimension of a row, four of a key with
    its value), or a block where these are few. Two of 16 rows share a multiprocessor: one computes
    while the other waits for memory. No split is left fewer keys than the rows whose outputs it
    writes, up to
    256. All of it follows from shapes, so the order of additions, and with it the output, is the
         same from run to run.
    """
    num_programs = -(-num_rows // config.block_m) * num_groups
    own = max(min(num_rows, config.block_m), config.block_p)
    slots = processors * (2 if config.block_m <= 16 else 1)
    blocks = max(num_keys // config.block_p, 1)

    def duration(splits: int) -> int:
        return -(-num_programs * splits // slots) * (-(-blocks // splits) * config.block_p + own)

    most = num_keys // min(max(num_rows, MIN_SPLIT_KEYS), 256)
    return min(range(1, max(1, min(most, MAX_SPLITS)) + 1), key=duration)


@jit
def _attend_block(  # type: ignore[no-untyped-def]
    q,
    best,
    total,
    summed,
    k_ptr,
    v_ptr,
    slot,
    present,
    visible,
    dims,
    value_dims,
    k_stride,
    v_stride,
    scale,
    softcap,
    BLOCK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
):
    """Fold the BLOCK keys and values at `slot` into a running softmax: its maximum, sum and
    weighted sum of values.

    Without `present` no slot is empty, and without `visible` every row sees all of them.
    """
    # 1. Scores of the block, in base 2.
    steps = tl.arange(0, BLOCK)[:, None]
    slot = tl.cast(slot, tl.int64)  # a long row may have more than 2^31 elements
    k_ptrs = k_ptr + slot * k_stride + (steps * k_stride + dims[None, :])
    v_ptrs = v_ptr + slot * v_stride + (steps * v_stride + value_dims[None, :])
    k = _load_block(k_ptrs, present, dims, HEAD_SIZE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if softcap is not None:
        # softcap * tanh(x): scores are 2 x in base 2
        scores = softcap * (1 - 2 / (1 + tl.exp2(scores * scale)))
        scale = 1.0
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    # 2. Rescale the running sums to the new maximum and add the block.
    new_best = tl.maximum(best, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_best[:, None])  # one multiply-add an entry
    fade = tl.exp2(best - new_best)
    v = _load_block(v_ptrs, present, value_dims, VALUE_SIZE)
    summed = tl.dot(weights.to(v.dtype), v, summed * fade[:, None], input_precision="ieee")
    return new_best, total * fade + tl.sum(weights, 1), summed


@jit
def _load_block(ptrs, present, dims, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load [BLOCK, D] of keys or values, 0 where a slot is empty: empty slots may hold NaN."""
    if present is not None:
        mask = present[:, None]
        if dims.shape[0] != SIZE:
            mask = mask & (dims < SIZE)[None, :]
        block = tl.load(ptrs, mask=mask, other=0.0)
    elif dims.shape[0] != SIZE:
        block = tl.load(ptrs, mask=(dims < SIZE)[None, :], other=0.0)
    else:
        block = tl.load(ptrs)
    return block


@jit
def _split_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    logs_ptr,
    words_ptr,
    lengths_ptr,
    query_positions_ptr,
    key_positions_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    v_stride_b,
    v_stride_h,
    v_stride_t,
    num_kv_heads,
    num_nodes,
    num_appended,
    num_splits,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Attend with one tile of rows over one split of the keys; grid [tiles, B * K, splits].
    Writes [splits, B, N, H, D].
    """
    # 1. Load the queries of this tile; locate the keys, the values and the visibility words.
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    split = tl.program_id(2)
    batch = pair // num_kv_heads
    kv_head = pair % num_kv_heads
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    # rows past the end repeat the last node, unstored
    node = tl.minimum(row // GROUP, num_nodes - 1)
    head = kv_head * GROUP + row % GROUP
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    q_ptr += tl.cast(batch, tl.int64) * q_stride_b
    q_ptrs = q_ptr + (node[:, None] * q_stride_n + head[:, None] * q_stride_h + dims[None, :])
    q = (
        tl.load(q_ptrs)
        if BLOCK_D == HEAD_SIZE
        else tl.load(q_ptrs, mask=(dims < HEAD_SIZE)[None, :], other=0.0)
    )
    k_ptr += tl.cast(batch, tl.int64) * k_stride_b + kv_head * k_stride_h
    v_ptr += tl.cast(batch, tl.int64) * v_stride_b + kv_head * v_stride_h
    words_ptrs = words_ptr + (batch * num_nodes + node) * tl.cdiv(num_appended, 64)

    # 2. Divide the keys into blocks. Full blocks of the prefix, visible to all rows, need no mask.
    #    Smaller, masked blocks hold
    # the edge of a window, the rest of the prefix, and the appended nodes. Splits share out both
    # kinds, by their keys.
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    num_lead = 0
    first = 0
    rest = length // BLOCK_P * BLOCK_P
    lead = 0
    if window is not None:
        here = tl.load(query_positions_ptr + batch * num_nodes + node).to(tl.int32)
        lead = tl.maximum(tl.min(here, 0) - window + 1, 0) // BLOCK_N * BLOCK_N
        first = tl.minimum(
            tl.cdiv(tl.maximum(tl.max(here, 0) - window + 1, 0), BLOCK_P), rest // BLOCK_P
        )
        num_lead = tl.maximum(first * BLOCK_P - lead, 0) // BLOCK_N
        rest = tl.maximum(rest, tl.minimum(lead, length))
    num_full = tl.maximum(length // BLOCK_P - first, 0)
    num_before = num_lead + tl.cdiv(length - rest, BLOCK_N)
    num_masked = num_before + tl.cdiv(num_appended, BLOCK_N)
    num_units = num_full * (BLOCK_P // BLOCK_N) + num_masked
    begin = num_units * split // num_splits
    end = num_units * (split + 1) // num_splits
    full_begin = tl.minimum(begin // (BLOCK_P // BLOCK_N), num_full)
    full_end = tl.minimum(end // (BLOCK_P // BLOCK_N), num_full)

    # 3. Fold in the full blocks of this split.
    # finite: a row without any visible key yet must not give inf - inf
    best = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for block in range(first + full_begin, first + full_end):
        best, total, summed = _attend_block(
            q,
            best,
            total,
            summed,
            k_ptr,
            v_ptr,
            block * BLOCK_P,
            None,
            None,
            dims,
            value_dims,
            k_stride_t,
            v_stride_t,
            scale,
            softcap,
            BLOCK_P,
            HEAD_SIZE,
            VALUE_SIZE,
        )
    # 4. Fold in the masked blocks of this split.
    num_units = num_full * (BLOCK_P // BLOCK_N)
    for block in range(tl.maximum(begin - num_units, 0), tl.maximum(end - num_units, 0)):
        is_node = block >= num_before
        column = tl.maximum(block - num_before, 0) * BLOCK_N
        slot = tl.where(
            block < num_lead, lead + block * BLOCK_N, rest + (block - num_lead) * BLOCK_N
        )
        slot = tl.where(is_node, length + column, slot)
        slots = slot + tl.arange(0, BLOCK_N)
        present = slots < tl.where(is_node, length + num_appended, length)
        columns = column + tl.arange(0, BLOCK_N)
        # all slots of the prefix are visible
        word = tl.where(is_node, tl.load(words_ptrs + column // 64), -1)
        visible = (((word[:, None] >> (columns % 64)[None, :]) & 1) != 0) & present[None, :]
        if window is not None:
            there_ptrs = key_positions_ptr + batch * num_appended + columns
            there = tl.load(there_ptrs, mask=columns < num_appended, other=0).to(tl.int32)
            visible = visible & (here[:, None] - tl.where(is_node, there, slots)[None, :] < window)
        best, total, summed = _attend_block(
            q,
            best,
            total,
            summed,
            k_ptr,
            v_ptr,
            slot,
            present,
            visible,
            dims,
            value_dims,
            k_stride_t,
            v_stride_t,
            scale,
            softcap,
            BLOCK_N,
            HEAD_SIZE,
            VALUE_SIZE,
        )

    # 5. Normalise and store. Where GROUP is no power of two, the divisions are repeated after the
    #    loops, through a 0 that the
    # compiler cannot infer: otherwise their results would stay in registers from the start and
    # spill.
    if GROUP & (GROUP - 1) != 0:
        row += tl.minimum(num_splits, 0)
        node = tl.minimum(row // GROUP, num_nodes - 1)
        head = kv_head * GROUP + row % GROUP
    stored = row < num_nodes * GROUP
    num_rows = tl.num_programs(1) * num_nodes * GROUP
    out_row = (
        tl.cast(split, tl.int64) * num_rows
        + (batch * num_nodes + node) * num_kv_heads * GROUP
        + head
    )
    # a row without any visible key has output 0 and almost no weight
    total = tl.where(total > 0, total, 1)
    if logs_ptr is not None:
        tl.store(logs_ptr + out_row, best + tl.log2(total), mask=stored)
    out = summed / total[:, None]
    stored = stored[:, None]
    if BLOCK_V != VALUE_SIZE:
        stored = stored & (value_dims < VALUE_SIZE)[None, :]
    tl.store(out_ptr + out_row[:, None] * VALUE_SIZE + value_dims[None, :], out, mask=stored)


@jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    logs_ptr,
    out_ptr,
    num_rows,
    num_splits,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Average the splits [splits, rows, D] of each row (batch, node, head) by their sums of
    weights, all splits at once; grid [blocks of rows, blocks of dimensions].
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.arange(0, BLOCK_S)
    is_row = row < num_rows
    is_dim = dims < HEAD_SIZE
    is_part = is_row[:, None] & (split < num_splits)[None, :]  # [M, S]
    split_row = tl.cast(split, tl.int64)[None, :] * num_rows + row[:, None]
    logs = tl.load(logs_ptr + split_row, mask=is_part, other=-1e30)
    parts = tl.load(
        parts_ptr + split_row[:, :, None] * HEAD_SIZE + dims[None, None, :],
        mask=is_part[:, :, None] & is_dim[None, None, :],
        other=0.0,
    )
    weights = tl.where(is_part, tl.exp2(logs - tl.max(logs, 1)[:, None]), 0.0)
    # 1 where there is no row, which nothing stores
    total = tl.where(is_row, tl.sum(weights, 1), 1.0)
    average = tl.sum(parts * weights[:, :, None], 1) / total[:, None]
    out_ptrs = out_ptr + tl.cast(row, tl.int64)[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(out_ptrs, average, mask=is_row[:, None] & is_dim[None, :])


@torch.library.custom_op("spectrain::tree_attention", mutates_args=())
def _launch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Tensor,
    lengths: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    num_appended: int,
    num_keys: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Launch the kernels; [B, H, N, D]. No row has more than `num_keys` to read: they decide the
    number of splits.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (batch, num_heads, num_nodes, head_size), num_kv_heads, value_size = (
        q.shape,
        k.shape[1],
        v.shape[-1],
    )
    group = num_heads // num_kv_heads
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (head_size, value_size))
    config = choose_tiles(
        num_nodes * group, max(head_size, value_size), q.dtype, is_hopper(q.device)
    )
    splits = choose_splits(
        config, num_nodes * group, batch * num_kv_heads, num_keys, num_multiprocessors(q.device)
    )
    out = _empty_output(q, k, v).transpose(1, 2)
    parts = out
    logs = None
    if splits > 1:
        parts = out.new_empty(splits, *out.shape, dtype=torch.float32)
    if splits > 1 or sinks is not None:
        logs = out.new_empty(splits, *out.shape[:3], dtype=torch.float32)
    if window is None:
        query_positions = key_positions = None
    else:
        assert query_positions is not None and key_positions is not None
        query_positions = query_positions.contiguous()
        key_positions = key_positions.contiguous()
    scale *= math.log2(math.e)
    if softcap is not None:
        scale = 2 * scale / softcap
        softcap = softcap * math.log2(math.e)
    strides = [x.stride(dim) for x in (q, k, v) for dim in range(3)]
    grid = (triton.cdiv(num_nodes * group, config.block_m), batch * num_kv_heads, splits)
    with torch.cuda.device_of(q):
        _split_kernel[grid](
            q,
            k,
            v,
            parts,
            logs,
            words,
            lengths,
            query_positions,
            key_positions,
            *strides,
            num_kv_heads,
            num_nodes,
            num_appended,
            splits,
            scale,
            softcap,
            window,
            GROUP=group,
            HEAD_SIZE=head_size,
            VALUE_SIZE=value_size,
            BLOCK_D=block_d,
            BLOCK_V=block_v,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_P=config.block_p,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if splits > 1:
            num_rows = batch * num_nodes * num_heads
            dims = min(block_v, COMBINED_DIMS)
            blocks = (triton.cdiv(num_rows, COMBINED_ROWS), triton.cdiv(block_v, dims))
            _combine_kernel[blocks](
                parts,
                logs,
                out,
                num_rows,
                splits,
                HEAD_SIZE=value_size,
                BLOCK_D=dims,
                BLOCK_S=triton.next_power_of_2(splits),
                BLOCK_M=COMBINED_ROWS,
            )
    # what falls to a sink is taken from all keys alike: 1 - sigmoid(sink - log of the sum of
    # weights)
    if sinks is not None:
        assert logs is not None
        total = torch.logsumexp(logs * math.log(2), dim=0)  # [B, N, H]
        out.mul_(torch.sigmoid(total - sinks.float())[..., None])
    return out.transpose(1, 2)


@_launch_attention.register_fake
def _empty_output(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Allocate the output, laid out as [B, N, H, D], so that the output projection reads it
    without a copy.
    """
    batch, num_heads, num_nodes, _ = q.shape
    return q.new_empty(batch, num_nodes, num_heads, v.shape[-1]).transpose(1, 2)


def _can_run_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tell whether the kernels are enabled and can run here; they have no backward pass."""
    if max(q.shape[-1], v.shape[-1]) > max(TILE_CONFIGS) or (
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    ):
        return False
    # the interpreter is silently wrong (Triton 3.9)
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return False
    return runs_on(q.device) and q.dtype in (torch.float32, torch.float16, torch.bfloat16)


def tree_attention(
    q_BHND: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    visibility: Visibility,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `tree_attention_reference` by the kernels where they run: on a GPU, or interpreted
    for tests.

    The kernels support neither chunks nor a scale of 0 or less. Where keys have a wider dtype than
    queries, both are computed in that dtype.
    """
    if q_BHND.dtype != k_BKTD.dtype:
        wide = tree_attention(
            q_BHND.to(k_BKTD.dtype), k_BKTD, v_BKTD, visibility, scale, window, softcap, sinks
        )
        return wide.to(q_BHND.dtype)
    if (
        visibility.chunk_size is not None
        or scale <= 0
        or not _can_run_kernel(q_BHND, k_BKTD, v_BKTD)
    ):
        return tree_attention_reference(
            q_BHND, k_BKTD, v_BKTD, visibility, scale, window, softcap, sinks
        )
    longest = visibility.longest
    num_appended = visibility.tree.shape[2]
    if window is not None and longest + num_appended <= window:
        window = None
    num_keys = num_appended + (longest if window is None else min(longest, window))
    positions = visibility.query_positions, visibility.key_positions
    rules = num_appended, num_keys, scale, window, softcap, sinks
    return _launch_attention(
        q_BHND, k_BKTD, v_BKTD, visibility.packed_words(), visibility.lengths, *positions, *rules
    )


def attend_by_words(
    q_BHND: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    words_BNW: Tensor,
    lengths: Tensor,
    num_appended: int,
    longest: int,
    scale: float,
) -> Tensor:
    """Compute `tree_attention_reference` by the kernels, for nodes whose visibility of the
    `num_appended` appended nodes is packed already: [B, H, N, D]. No row of the batch has more than
    `longest` committed tokens.
    """
    num_keys = longest + num_appended
    output: Tensor = _launch_attention(
        q_BHND, k_BKTD, v_BKTD, words_BNW, lengths, None, None, num_appended, num_keys, scale,
        None, None, None,
    )  # fmt: skip
    return output
