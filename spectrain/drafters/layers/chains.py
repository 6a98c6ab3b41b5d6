"""Chains of masks behind the places of a batch, as many as conditional drop leaves, all of them in one forward.

Shapes: N places of a batch, its rows one after another (B T of them), C masks, H query heads, G key-value heads, D head size.

A place t has the features of token t and the token behind it, and predicts token t + 2. The d-th mask of its chain stands d
positions further on and predicts token t + 2 + d. It sees the places of its document up to its anchor, and of its own chain
the masks up to itself; no place sees a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.features.batch import Batch
from spectrain.randomness import CHAINS, sequence_generator

from .chunked_attention import attend_chunks

CHUNK_MASKS = 256  # masks whose attention is computed at one time; a chain is never cut


@dataclass(frozen=True)
class ConditionalDrop:
    """How many masks are trained: at depth d a share max(keep^d, least) of a document's answers."""

    num_drafts: int  # the first of them is the place's own, without a mask
    keep_rate: float
    min_rate: float
    seed: int


@dataclass(frozen=True)
class Chains:
    """The masks of a batch: by document, in it by anchor, behind that by depth."""

    anchors: Tensor  # [C] the place of each mask's anchor
    depths: Tensor  # [C] from 1
    chunks: tuple[tuple[slice, slice], ...]  # of masks whose attention is computed together, with the places they may see
    document_sizes: tuple[tuple[int, int], ...]  # of every document: predictions that are judged, and tokens that carry loss

    @property
    def label_positions(self) -> Tensor:
        """[C] the place whose target says what a mask should: that of the token before the one it predicts."""
        return self.anchors + self.depths + 1

    def document_weights(self, documents: Tensor) -> Tensor:
        """[R] what a prediction of each of these documents counts: together as many terms as its tokens that carry loss."""
        shares = torch.tensor([tokens / max(judged, 1) for judged, tokens in self.document_sizes], device=documents.device)
        return shares[documents]


def sample_chains(batch: Batch, drop: ConditionalDrop, step: int) -> Chains:
    """Conditional drop (P-EAGLE, section 3): depth 1 keeps some of the places that are judged, and each depth after it some
    of those one further on, so that behind every mask the chain before it is there.

    A document's own tokens key the draw, so it is the same whatever the document is batched with.
    """
    anchors, depths, chunks, sizes, first, masks = [], [], [], [], 0, 0
    for tokens, mask in batch.split_documents():
        anchor, depth = _sample_document(mask, drop, sequence_generator(CHAINS, drop.seed, tokens, step))
        for begin, end in _chunk_ranges(depth):
            last = first + int(anchor[end - 1])
            chunks.append((slice(masks + begin, masks + end), slice(first, last + 1)))
        anchors.append(first + anchor)
        depths.append(depth)
        sizes.append((int(mask[2:].sum()) + len(anchor), int(mask[1:].sum())))
        first, masks = first + len(tokens), masks + len(anchor)
    device = batch.tokens.device
    return Chains(torch.cat(anchors).to(device), torch.cat(depths).to(device), tuple(chunks), tuple(sizes))


def _sample_document(mask: Tensor, drop: ConditionalDrop, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Anchors and depths of one document's masks, by its loss mask [T]."""
    judged = F.pad(mask[2:], (0, min(len(mask), 2)))  # [T] whether the token that a place predicts carries loss
    seeds = judged.nonzero()[:, 0]
    pool, anchors, depths = seeds[seeds > 0], [seeds[:0]], [seeds[:0]]
    for depth in range(1, drop.num_drafts):
        count = int((len(seeds) - depth) * max(drop.keep_rate**depth, drop.min_rate))
        kept = pool[torch.randperm(len(pool), generator=source)[: max(count, 0)]]
        anchors.append(kept - depth)
        depths.append(torch.full_like(kept, depth))
        pool = (kept + 1)[judged[kept + 1]]
    anchor, depth_of = torch.cat(anchors), torch.cat(depths)
    order = (anchor * drop.num_drafts + depth_of).argsort()
    return anchor[order], depth_of[order]


def _chunk_ranges(depths: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of at most ROWS masks, or of one chain, that cut none."""
    ends = [*(depths == 1).nonzero()[1:, 0].tolist(), len(depths)]
    begin = reached = 0
    for end in ends:
        if end - begin > CHUNK_MASKS and reached > begin:
            yield begin, reached
            begin = reached
        reached = end
    if reached > begin:
        yield begin, reached


def chain_attention(
    q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor], chains: Chains, window: int | None = None
) -> Tensor:
    """[1, H, C, D] of masks q [1, H, C, D] that see places, keys and values [1, G, N, D], and their chain's k and v
    [1, G, C, D].

    Some chains at a time, of one document, and only over what stands before the last of them.
    """
    return attend_chunks((q, k, v), context, chains.chunks, (chains.anchors, chains.depths), window=window)
