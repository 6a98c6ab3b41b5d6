"""Causal attention of bfloat16 texts on a CPU with AVX512-BF16, compiled by Numba: probabilities,
and gradients of scores.

Shapes: H query heads, K key-value heads, T tokens, S = T up to a multiple of 32, d head size.
Scores exist for the rows of a tile. oneDNN multiplies the probabilities and the gradients of the
scores, [H, T, S] in bfloat16, with values, keys and queries. Torch's own kernel takes three times
as long: it multiplies small blocks in float32.

Keys and values are in panels [K, S / 32, d / 2, 2, 16, 2], as the weights of `linear` are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor

from .available import has_panel_kernels
from .linear import COLUMNS, MAX_TILE_ROWS, multiply_rows
from .losses import exp_negative
from .vectors import advance, compile_cached, compile_inline, narrow, to_floats, to_halves

TILE = COLUMNS * MAX_TILE_ROWS  # float32 numbers of a block of scores
ZERO = np.float32(0)
HIDDEN = np.float32(-1e30)  # score of a key that a token does not see
MAX_LENGTH = 768
"""Tokens up to which texts are attended to so: probabilities [T, S] of all heads exist at one
time.
"""
MAX_THREADS = 2
"""Threads up to which the kernels, which run on one, are faster than torch on all."""


@compile_inline
def _multiply_tile(
    rows: int, count: int, head_size: int, panels: int, blocks: int, sums: int
) -> None:
    """Store the products of `count` rows [.., d] with blocks of 32 keys, [blocks, count, 32]."""
    for block in range(blocks):
        panel = panels + 2 * block * COLUMNS * head_size
        multiply_rows(
            to_halves(rows),
            count,
            rows,
            2 * head_size,
            panel,
            head_size // 2,
            sums + 4 * block * TILE,
            False,
            panel,
            0,
        )


@compile_inline
def _hide_later(scores: Any, row: int) -> None:
    """Hide the keys after a row in the block of its own key."""
    block = carray(scores, (COLUMNS,))
    for i in range(row % COLUMNS + 1, COLUMNS):
        block[i] = HIDDEN


@compile_inline
def _normalise(scores: Any, blocks: int, scale: Any) -> Any:
    """Replace the scores of a row, in blocks, by e^(scale (score - largest)); return the largest
    and the sum.
    """
    tops = np.full(COLUMNS, HIDDEN)
    totals = np.zeros(COLUMNS, np.float32)
    for block in range(blocks):
        part = carray(advance(scores, block * TILE), (COLUMNS,))
        for i in range(COLUMNS):
            tops[i] = part[i] if part[i] > tops[i] else tops[i]
    largest = tops.max()
    for block in range(blocks):
        part = carray(advance(scores, block * TILE), (COLUMNS,))
        for i in range(COLUMNS):
            part[i] = exp_negative((part[i] - largest) * scale)
            totals[i] += part[i]
    return largest, totals.sum()


@compile_cached
def causal_probabilities(
    queries: int,
    key_panels: int,
    probabilities: int,
    lse: int,
    heads: int,
    groups: int,
    length: int,
    head_size: int,
    scale: float,
    scratch: int,
) -> None:
    """Store the probabilities [H, T, S] and the log-sum-exps [H, T] of queries [H, T, d]; `scratch`
    holds the blocks of a tile."""
    factor = np.float32(scale)
    width = (length + COLUMNS - 1) // COLUMNS * COLUMNS
    for head in range(heads):
        panels = key_panels + head // groups * 2 * width * head_size
        for first in range(0, length, MAX_TILE_ROWS):
            count = min(MAX_TILE_ROWS, length - first)
            blocks = (first + count + COLUMNS - 1) // COLUMNS
            start = head * length + first
            _multiply_tile(
                queries + 2 * start * head_size, count, head_size, panels, blocks, scratch
            )
            for row in range(first, first + count):
                scores = advance(to_floats(scratch), (row - first) * COLUMNS)
                visible = row // COLUMNS + 1
                _hide_later(advance(scores, (visible - 1) * TILE), row)
                largest, total = _normalise(scores, visible, factor)
                carray(to_floats(lse), (heads * length,))[head * length + row] = (
                    np.log(total) + largest * factor
                )
                share = np.float32(1) / total
                out = carray(to_halves(probabilities + 2 * (head * length + row) * width), (width,))
                for block in range(visible):
                    part = carray(advance(scores, block * TILE), (COLUMNS,))
                    for i in range(COLUMNS):
                        out[block * COLUMNS + i] = narrow(part[i] * share, out[0])
                out[visible * COLUMNS :] = 0


@compile_cached
def causal_score_gradients(
    queries: int,
    key_panels: int,
    gradients: int,
    value_panels: int,
    dots: int,
    lse: int,
    probabilities: int,
    score_gradients: int,
    heads: int,
    groups: int,
    length: int,
    head_size: int,
    scale: float,
    scratch: int,
) -> None:
    """Store the probabilities and the gradients of the scores [H, T, S] from those of the outputs
    [H, T, d], their products with the outputs, `dots` [H, T], and the log-sum-exps; `scratch` holds
    the blocks of two tiles."""
    factor = np.float32(scale)
    width = (length + COLUMNS - 1) // COLUMNS * COLUMNS
    other = scratch + 4 * width // COLUMNS * TILE
    all_lse = carray(to_floats(lse), (heads * length,))
    all_dots = carray(to_floats(dots), (heads * length,))
    for head in range(heads):
        offset = head // groups * 2 * width * head_size
        for first in range(0, length, MAX_TILE_ROWS):
            count = min(MAX_TILE_ROWS, length - first)
            blocks = (first + count + COLUMNS - 1) // COLUMNS
            start = 2 * (head * length + first) * head_size
            _multiply_tile(queries + start, count, head_size, key_panels + offset, blocks, scratch)
            _multiply_tile(
                gradients + start, count, head_size, value_panels + offset, blocks, other
            )
            for row in range(first, first + count):
                index = head * length + row
                shift = all_lse[index]
                dot = all_dots[index]
                p = carray(to_halves(probabilities + 2 * index * width), (width,))
                g = carray(to_halves(score_gradients + 2 * index * width), (width,))
                visible = row // COLUMNS + 1
                _hide_later(
                    advance(to_floats(scratch), (row - first) * COLUMNS + (visible - 1) * TILE), row
                )
                for block in range(visible):
                    begin = block * TILE + (row - first) * COLUMNS
                    scores = carray(advance(to_floats(scratch), begin), (COLUMNS,))
                    grads = carray(advance(to_floats(other), begin), (COLUMNS,))
                    for i in range(COLUMNS):
                        score = scores[i] * factor - shift
                        probability = exp_negative(score if score < ZERO else ZERO)
                        p[block * COLUMNS + i] = narrow(probability, p[0])
                        g[block * COLUMNS + i] = narrow(
                            probability * (grads[i] - dot) * factor, g[0]
                        )
                p[visible * COLUMNS :] = 0
                g[visible * COLUMNS :] = 0


def has_text_kernels(q: Tensor, k: Tensor, v: Tensor, longest: int) -> bool:
    """Return whether the kernels take queries [B, H, T, d], keys and values [B, K, T, d] of
    texts of up to so many tokens.
    """
    if q.device.type != "cpu" or not q.dtype == k.dtype == v.dtype == torch.bfloat16:
        return False
    fits = (
        longest <= MAX_LENGTH
        and q.shape[2] == k.shape[2]
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % COLUMNS == 0
    )
    return (
        fits
        and q.numel() > 0
        and torch.get_num_threads() <= MAX_THREADS
        and has_panel_kernels(torch.bfloat16)
    )


def attend_text(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return causal attention [B, H, T, d], and its log-sum-exps [B, H, T]."""
    batch, num_heads, length, size = q.shape
    q = q.contiguous()
    k = _pad_tokens(k)
    v = _pad_tokens(v)
    probabilities = q.new_empty(batch, num_heads, length, k.shape[2])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    panels = _make_panels(k)
    scratch = _make_scratch(length)
    causal_probabilities(
        q.data_ptr(),
        panels.data_ptr(),
        probabilities.data_ptr(),
        lse.data_ptr(),
        batch * num_heads,
        num_heads // k.shape[1],
        length,
        size,
        scale,
        scratch.data_ptr(),
    )
    return torch.bmm(_by_group(probabilities, k), v.flatten(0, 1)).view(q.shape), lse


def text_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from that of the output [B, H, T, d].

    The output and the log-sum-exps may be those of attention to further keys.
    """
    batch, num_heads, length, size = q.shape
    grad = grad.to(q.dtype).contiguous()
    q = q.contiguous()
    k = _pad_tokens(k)
    v = _pad_tokens(v)
    dots = (grad.float() * out).sum(-1)
    lse = lse.contiguous()
    probabilities, score_gradients = q.new_empty(2, batch, num_heads, length, k.shape[2])
    key_panels = _make_panels(k)
    value_panels = _make_panels(v)
    scratch = _make_scratch(length)
    causal_score_gradients(
        q.data_ptr(),
        key_panels.data_ptr(),
        grad.data_ptr(),
        value_panels.data_ptr(),
        dots.data_ptr(),
        lse.data_ptr(),
        probabilities.data_ptr(),
        score_gradients.data_ptr(),
        batch * num_heads,
        num_heads // k.shape[1],
        length,
        size,
        scale,
        scratch.data_ptr(),
    )
    probabilities, score_gradients, rows, grads = (
        _by_group(part, k) for part in (probabilities, score_gradients, q, grad)
    )
    grad_q = torch.bmm(score_gradients, k.flatten(0, 1)).view(q.shape)
    grad_k = torch.bmm(score_gradients.transpose(1, 2), rows).view(k.shape)
    grad_v = torch.bmm(probabilities.transpose(1, 2), grads).view(v.shape)
    return grad_q, grad_k[:, :, :length], grad_v[:, :, :length]


def _pad_tokens(heads: Tensor) -> Tensor:
    """Return keys or values [B, K, S, d], with zeros after the last token."""
    return F.pad(heads, (0, 0, 0, -heads.shape[2] % COLUMNS))


def _by_group(heads: Tensor, k: Tensor) -> Tensor:
    """Return values of query heads [B, H, T, ..], with the heads that share a key head side by
    side: [B K, G T, ..].
    """
    return heads.reshape(k.shape[0] * k.shape[1], -1, heads.shape[-1])


def _make_panels(heads: Tensor) -> Tensor:
    """Return keys or values [B, K, S, d] in panels [B K, S / 32, d / 2, 2, 16, 2]."""
    blocks = heads.reshape(
        heads.shape[0] * heads.shape[1], -1, 2, COLUMNS // 2, heads.shape[-1] // 2, 2
    )
    return blocks.permute(0, 1, 4, 2, 3, 5).contiguous()


def _make_scratch(length: int) -> Tensor:
    """Return the working memory of the scores of two tiles of rows, [2, S / 32, rows, 32]."""
    return torch.empty(2 * (length // COLUMNS + 1) * TILE)


class _TextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, lse = attend_text(q, k, v, scale)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*text_gradients(grad, q, k, v, out, lse, ctx.scale), None)


def text_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Return causal attention [B, H, T, d], with gradients."""
    attended: Tensor = _TextAttention.apply(
        q, k, v, q.shape[-1] ** -0.5 if scale is None else scale
    )
    return attended


class TextKernels(NamedTuple):
    """Causal attention with gradients, and its two parts."""

    attend: Callable[..., Tensor]
    attend_with_lse: Callable[..., tuple[Tensor, Tensor]]
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor]]


TEXT_KERNELS = TextKernels(text_attention, attend_text, text_gradients)


def find_text_kernels(q: Tensor, k: Tensor, v: Tensor, longest: int) -> TextKernels | None:
    """Return the functions where `has_text_kernels` is true."""
    return TEXT_KERNELS if has_text_kernels(q, k, v, longest) else None
