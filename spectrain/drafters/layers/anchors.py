"""Blocks of draft slots after anchors, all blocks of a batch in one forward.

An anchor is a token that the target has chosen but not run. Slot s of its block stands s positions
after it, and slot 0 holds the anchor itself. A slot sees the tokens before the anchor in its
document and the slots of its block.

Shapes: N = B T tokens of a batch, its rows concatenated, A anchors, S slots of a block, K drafts of
a block, H query heads, G key-value heads, D head size.
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
from spectrain.features.context_piece import ContextPiece, RowOwners
from spectrain.kernels.dispatch import kernels_enabled
from spectrain.models.host_copies import copy_to_device, on_host
from spectrain.randomness import ANCHORS, sequence_generator

from .chunked_attention import Chunk, attend_chunks

CHUNK_SLOTS = 256  # slots of one attention mask on a CPU
# On a GPU, anchors are padded to a multiple of this, so that attention is compiled for few sizes.
ANCHOR_MULTIPLE = 64


@dataclass(frozen=True)
class Anchors:
    """The anchors of a batch: documents are in order, and a document's anchors ascend."""

    token_indices: Tensor  # [A] among the N tokens
    positions: Tensor  # [A] in their documents
    document_sizes: tuple[tuple[int, int], ...]  # per document: anchors, and tokens that carry loss

    @property
    def document_starts(self) -> Tensor:
        """The index [A] among the N tokens of the first token of each anchor's document."""
        return self.token_indices - self.positions

    @property
    def supervised_tokens(self) -> tuple[Tensor, Tensor]:
        """The document [A] of each anchor, and the number of supervised tokens of every
        document.
        """
        counts, tokens = torch.tensor(self.document_sizes, device="cpu").view(-1, 2).unbind(1)
        document = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
        device = self.token_indices.device
        return copy_to_device(document, device), copy_to_device(tokens.contiguous(), device)

    def select_anchors(self, own: Tensor) -> Anchors:
        """Return these anchors, of ascending indices."""
        own = on_host(own)
        documents = on_host(self.supervised_tokens[0])[own]
        counts = documents.bincount(minlength=len(self.document_sizes)).tolist()
        sizes = tuple((count, tokens) for count, (_, tokens) in zip(counts, self.document_sizes))
        indices, positions = (
            copy_to_device(on_host(part)[own], part.device)
            for part in (self.token_indices, self.positions)
        )
        return Anchors(indices, positions, sizes)


@dataclass(frozen=True)
class SharedAnchors:
    """The anchors of a batch, and those whose blocks this process runs."""

    all: Anchors
    own: Anchors
    own_index: Tensor  # of the own anchors among all
    owners: RowOwners
    piece: ContextPiece

    @classmethod
    def share_anchors(cls, anchors: Anchors, batch: Batch) -> SharedAnchors:
        """Give every process the anchors at its columns."""
        columns = anchors.token_indices % batch.tokens.shape[1]
        piece = batch.piece
        own_index = piece.find_own(columns)
        own = anchors if piece.is_whole else anchors.select_anchors(own_index)
        return cls(anchors, own, own_index, piece.find_owners(columns), piece)

    def attend_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: tuple[Tensor, Tensor],
        causal: bool,
        window: int | None,
    ) -> Tensor:
        """Return `block_attention` of the own blocks [A, H, S, D] to the context of this process
        [B, G, t, D].
        """
        slots = q.shape[2]
        piece = self.piece
        keys, values = (
            part.transpose(0, 1).flatten(1, 2)[None] for part in piece.exchange_keys(*context)
        )
        rows = piece.exchange_slots(
            (_blocks_to_rows(q), _blocks_to_rows(k), _blocks_to_rows(v)), self.owners
        )
        q, k, v = (_rows_to_blocks(part, slots) for part in rows)
        anchors = self.all if piece.attends_all_slots else self.own
        attended = block_attention(q, k, v, (keys, values), anchors, causal, window)
        return _rows_to_blocks(piece.return_slots(_blocks_to_rows(attended), self.owners), slots)


def _blocks_to_rows(blocks: Tensor) -> Tensor:
    """Return blocks [A, H, S, D] as rows [1, H, A, S D] of their anchors."""
    return blocks.transpose(0, 1).flatten(2)[None]


def _rows_to_blocks(rows: Tensor, slots: int) -> Tensor:
    """Undo `_blocks_to_rows`."""
    return rows[0].unflatten(2, (slots, -1)).transpose(0, 1)


def sample_anchors(batch: Batch, count: int, seed: int, step: int) -> Anchors:
    """Sample up to `count` anchors of every document, without replacement, among the tokens whose
    next token carries loss.

    A document's tokens key the draw, so it does not depend on the other documents of the batch. In
    a document with a rejected draft, only the root before the supervised tokens is an anchor: no
    other block drafted these tokens.
    """
    indices = []
    positions = []
    sizes = []
    start = 0
    for (tokens, mask), is_drafted in zip(
        batch.split_documents(), batch.list_drafted_documents(), strict=True
    ):
        # The first token is no anchor, because no features precede it.
        candidates = mask[2:].nonzero()[:, 0] + 1
        if is_drafted:
            candidates = candidates[~mask[candidates]]
        source = sequence_generator(ANCHORS, seed, tokens, step)
        sampled = (
            candidates[torch.randperm(len(candidates), generator=source, device="cpu")[:count]]
            .sort()
            .values
        )
        indices.append(start + sampled)
        positions.append(sampled)
        sizes.append((len(sampled), int(mask[1:].sum())))
        start += len(tokens)
    device = batch.tokens.device
    token_indices, in_documents = (
        copy_to_device(torch.cat(parts), device) for parts in (indices, positions)
    )
    return Anchors(token_indices, in_documents, tuple(sizes))


def sees_context(
    token_indices: Tensor, anchor: Tensor, start: Tensor, slot: Tensor, window: int | None
) -> Tensor:
    """Tell whether a slot sees the tokens at `token_indices`: those of its document before the
    anchor.

    A window limits them to the last positions up to the slot's own, as every engine counts them.
    """
    visible = (token_indices >= start) & (token_indices < anchor)
    return visible if window is None else visible & (token_indices > anchor + slot - window)


def sees_block(other: Tensor, slot: Tensor, causal: bool, window: int | None) -> Tensor:
    """Tell whether a slot sees another slot of its block: any, or if `causal`, those up to
    itself.
    """
    visible = (other <= slot) if causal else torch.ones_like(other == slot)
    return visible if window is None else visible & (other > slot - window)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: tuple[Tensor, Tensor],
    anchors: Anchors,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Attend from slots q [A, H, S, D] to their context, keys and values [1, G, N, D], and their
    block's k and v [A, G, S, D].

    On a GPU this is FlexAttention, which builds no mask. Elsewhere it runs over some anchors of one
    document at a time, and over only the tokens before the last of these. Returns [A, H, S, D].
    """
    # A plan's tensors are of another type: they have no data to compile for.
    if q.device.type == "cuda" and kernels_enabled(q.device) and type(q) is Tensor:
        return _flex_attention(q, k, v, context, anchors, causal, window)
    count, _, slots, _ = q.shape
    q, k, v = (part.transpose(0, 1).flatten(1, 2)[None] for part in (q, k, v))
    last_and_depth = (
        (anchors.token_indices - 1).repeat_interleave(slots),
        torch.arange(1, slots + 1, device=q.device).repeat(count),
    )
    attended = attend_chunks(
        (q, k, v), context, iterate_chunks(anchors, slots), last_and_depth, causal, window
    )
    return attended[0].unflatten(1, (count, slots)).transpose(0, 1)


def iterate_chunks(anchors: Anchors, slots: int) -> Iterator[Chunk]:
    """Yield ranges of slots of one document, few enough for one mask, with the tokens that they
    may see.
    """
    size = max(1, CHUNK_SLOTS // slots)
    first = 0
    indices = on_host(anchors.token_indices).tolist()
    starts = (on_host(anchors.token_indices) - on_host(anchors.positions)).tolist()
    for count, _ in anchors.document_sizes:
        for begin in range(first, first + count, size):
            end = min(begin + size, first + count)
            yield slice(begin * slots, end * slots), slice(starts[begin], indices[end - 1])
        first += count


def mean_chunk_keys(count: float, slots: int, length: float) -> float:
    """Return the mean number of keys of a slot in the chunks of a document of `length` tokens,
    whose `count` anchors are evenly spaced: the tokens before the chunk's last anchor, and the
    chunk's own slots.
    """
    size = max(1, CHUNK_SLOTS // slots)
    total = 0.0
    begin = 0.0
    while begin < count:
        end = min(begin + size, count)
        total += (end - begin) * (length * end / count + (end - begin) * slots)
        begin = end
    return total / count if count else 0.0


def make_flex_mask(
    anchors: Anchors, slots: int, num_tokens: int, causal: bool, window: int | None
) -> Any:
    """Return the mask function of FlexAttention, (batch, head, query, key) -> bool, for A S
    queries and N + A S keys.
    """
    indices = anchors.token_indices
    starts = anchors.document_starts

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // slots
        slot = query % slots
        other = (key - num_tokens) % slots
        key_block = (key - num_tokens) // slots
        in_context = (key < num_tokens) & sees_context(
            key, indices[block], starts[block], slot, window
        )
        return in_context | (
            (key >= num_tokens) & (key_block == block) & sees_block(other, slot, causal, window)
        )

    return mask_mod


def _flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: tuple[Tensor, Tensor],
    anchors: Anchors,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Compute `block_attention` by compiled FlexAttention. Padding blocks see only themselves."""
    from torch.nn.attention.flex_attention import create_block_mask

    count, _, slots, _ = q.shape
    padding = -count % ANCHOR_MULTIPLE
    padded = Anchors(
        F.pad(anchors.token_indices, (0, padding)),
        F.pad(anchors.positions, (0, padding)),
        anchors.document_sizes,
    )
    q, k, v = (
        F.pad(part, (0, 0, 0, 0, 0, 0, 0, padding)).transpose(0, 1).flatten(1, 2)[None]
        for part in (q, k, v)
    )
    num_tokens = context[0].shape[2]
    keys, values = (
        torch.cat([context_part, block_part], dim=2)
        for context_part, block_part in zip(context, (k, v))
    )
    mask = make_flex_mask(padded, slots, num_tokens, causal, window)
    blocks = create_block_mask(mask, None, None, q.shape[2], keys.shape[2], q.device, _compile=True)
    attended = _compiled_flex()(q, keys, values, block_mask=blocks, enable_gqa=True)
    return attended[0].unflatten(1, (-1, slots)).transpose(0, 1)[:count]


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
