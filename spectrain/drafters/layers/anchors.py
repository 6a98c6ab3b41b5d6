"""Blocks of draft slots behind anchors, all of a batch in one forward.

Shapes: N tokens of a batch, its rows one after another (B T of them), A anchors, S slots of a block, K drafts of it, H query
heads, G key-value heads, D head size.

An anchor is a token that the target has chosen and not yet run. Slot s of its block stands s positions further on, the anchor
itself in slot 0. A slot sees what comes before the anchor in its document, never the anchor as context, and its own block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.features.batch import Batch
from spectrain.kernels.dispatch import kernels_enabled
from spectrain.randomness import ANCHORS, sequence_generator

from .chunked_attention import Chunk, attend_chunks

CHUNK_SLOTS = 256  # slots whose mask exists at one time
ANCHOR_MULTIPLE = 64  # on a GPU the anchors are padded to a multiple of it, so that attention is compiled for few sizes


@dataclass(frozen=True)
class Anchors:
    """Where blocks begin. Documents come in their order, and a document's anchors ascend."""

    token_indices: Tensor  # [A] of the anchor among the N tokens
    positions: Tensor  # [A] of the anchor in its document
    document_sizes: tuple[tuple[int, int], ...]  # of every document: anchors, and tokens that carry loss

    @property
    def document_starts(self) -> Tensor:
        """[A] the place of the first token of each anchor's document."""
        return self.token_indices - self.positions

    @property
    def supervised_tokens(self) -> tuple[Tensor, Tensor]:
        """The document [A] of each anchor, and how many tokens of every document carry loss."""
        counts = torch.tensor([count for count, _ in self.document_sizes], device=self.token_indices.device)
        document = torch.arange(len(self.document_sizes), device=self.token_indices.device).repeat_interleave(counts)
        return document, torch.tensor([tokens for _, tokens in self.document_sizes], device=self.token_indices.device)


def sample_anchors(batch: Batch, count: int, seed: int, step: int) -> Anchors:
    """Of every document up to `count` anchors, drawn without replacement among the tokens whose next one carries loss.

    A document's own tokens key the draw, so it is the same whatever the document is batched with.
    """
    places, positions, sizes, start = [], [], [], 0
    for tokens, mask in batch.split_documents():
        possible = mask[2:].nonzero()[:, 0] + 1  # the first token has no features before it
        source = sequence_generator(ANCHORS, seed, tokens, step)
        chosen = possible[torch.randperm(len(possible), generator=source)[:count]].sort().values
        places.append(start + chosen)
        positions.append(chosen)
        sizes.append((len(chosen), int(mask[1:].sum())))
        start += len(tokens)
    device = batch.tokens.device
    return Anchors(torch.cat(places).to(device), torch.cat(positions).to(device), tuple(sizes))


def sees_context(token_indices: Tensor, anchor: Tensor, start: Tensor, slot: Tensor, window: int | None) -> Tensor:
    """Whether a slot sees the token at `places`: before the anchor, in its document, and with a window among the last so many
    positions up to the slot's own, as every engine counts them."""
    seen = (token_indices >= start) & (token_indices < anchor)
    return seen if window is None else seen & (token_indices > anchor + slot - window)


def sees_block(other: Tensor, slot: Tensor, causal: bool, window: int | None) -> Tensor:
    """Whether a slot sees another one of its block: all of them, or those up to itself."""
    seen = (other <= slot) if causal else torch.ones_like(other == slot)
    return seen if window is None else seen & (other > slot - window)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: tuple[Tensor, Tensor],
    anchors: Anchors,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """[A, H, S, D] of slots q [A, H, S, D] that see their context, keys and values [1, G, N, D], and their block's k and v
    [A, G, S, D].

    On a GPU by FlexAttention, which builds no mask. Elsewhere some anchors at a time, of one document, and only over what
    stands before the last of them.
    """
    if (
        q.device.type == "cuda" and kernels_enabled(q.device) and type(q) is Tensor
    ):  # a plan's tensors have no data to compile for
        return _flex_attention(q, k, v, context, anchors, causal, window)
    count, _, slots, _ = q.shape
    q, k, v = (part.transpose(0, 1).flatten(1, 2)[None] for part in (q, k, v))
    places = (anchors.token_indices - 1).repeat_interleave(slots), torch.arange(1, slots + 1, device=q.device).repeat(count)
    found = attend_chunks((q, k, v), context, _iterate_chunks(anchors, slots), places, causal, window)
    return found[0].unflatten(1, (count, slots)).transpose(0, 1)


def _iterate_chunks(anchors: Anchors, slots: int) -> Iterator[Chunk]:
    """Slots of anchors of one document, few enough for a mask, with the tokens that they may see."""
    size, first = max(1, CHUNK_SLOTS // slots), 0
    places, starts = anchors.token_indices.tolist(), anchors.document_starts.tolist()
    for count, _ in anchors.document_sizes:
        for begin in range(first, first + count, size):
            end = min(begin + size, first + count)
            yield slice(begin * slots, end * slots), slice(starts[begin], places[end - 1])
        first += count


def make_flex_mask(anchors: Anchors, slots: int, num_tokens: int, causal: bool, window: int | None) -> Any:
    """The same mask as FlexAttention asks for it: (batch, head, query, key) -> bool, queries and blocks' keys A S long."""
    places, starts = anchors.token_indices, anchors.document_starts

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // slots, query % slots
        other, own = (key - num_tokens) % slots, (key - num_tokens) // slots
        before = (key < num_tokens) & sees_context(key, places[block], starts[block], slot, window)
        return before | ((key >= num_tokens) & (own == block) & sees_block(other, slot, causal, window))

    return sees


def _flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: tuple[Tensor, Tensor],
    anchors: Anchors,
    causal: bool,
    window: int | None,
) -> Tensor:
    """FlexAttention, compiled; blocks that pad the number of anchors see themselves and nothing else."""
    from torch.nn.attention.flex_attention import create_block_mask

    count, _, slots, _ = q.shape
    missing = -count % ANCHOR_MULTIPLE
    filled = Anchors(F.pad(anchors.token_indices, (0, missing)), F.pad(anchors.positions, (0, missing)), anchors.document_sizes)
    q, k, v = (F.pad(part, (0, 0, 0, 0, 0, 0, 0, missing)).transpose(0, 1).flatten(1, 2)[None] for part in (q, k, v))
    num_tokens = context[0].shape[2]
    keys, values = (torch.cat([far, near], dim=2) for far, near in zip(context, (k, v)))
    mask = make_flex_mask(filled, slots, num_tokens, causal, window)
    blocks = create_block_mask(mask, None, None, q.shape[2], keys.shape[2], q.device, _compile=True)
    attended = _compiled_flex()(q, keys, values, block_mask=blocks, enable_gqa=True)
    return attended[0].unflatten(1, (-1, slots)).transpose(0, 1)[:count]


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
