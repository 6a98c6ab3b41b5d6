"""Chains of mask tokens after the positions of a batch, as many as conditional drop retains, all in
one forward.

Position t has the features of token t and the embedding of token t + 1, and predicts token t + 2.
The d-th mask of its chain stands d positions after it and predicts token t + 2 + d. A mask sees the
positions of its document up to its anchor, and the masks of its chain up to itself. No position
sees a mask.

Shapes: N = B T positions of a batch, its rows concatenated, C masks, R predictions, H query heads,
G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.features.batch import Batch
from spectrain.models.host_copies import copy_to_device, on_host
from spectrain.randomness import CHAINS, sequence_generator

# Largest number of masks whose attention is computed together, unless one chain is longer.
CHUNK_MASKS = 256


@dataclass(frozen=True)
class ConditionalDrop:
    """Rates of masks in training: depth d retains a share max(keep_rate^d, min_rate) of a
    document's predictions.
    """

    num_drafts: int  # the first draft is predicted without a mask
    keep_rate: float
    min_rate: float
    seed: int

    @property
    def masks_per_token(self) -> float:
        """The number of masks that training adds for each prediction."""
        return sum(max(self.keep_rate**depth, self.min_rate) for depth in range(1, self.num_drafts))


@dataclass(frozen=True)
class Chains:
    """The masks of a batch, ordered by document, anchor and depth."""

    anchors: Tensor  # [C] the position of each mask's anchor
    depths: Tensor  # [C] from 1
    # ranges of masks that are run together, and the positions that they may see
    chunks: tuple[tuple[slice, slice], ...]
    # per document: supervised predictions, and tokens that carry loss
    document_sizes: tuple[tuple[int, int], ...]

    @property
    def label_positions(self) -> Tensor:
        """The positions [C] where the target predicts the same tokens as the masks: one before
        the predicted token.
        """
        positions = on_host(self.anchors) + on_host(self.depths) + 1
        return copy_to_device(positions, self.anchors.device)

    def select_own(self, batch: Batch) -> Chains:
        """Return the chains whose anchors stand at the columns that this process runs."""
        if batch.piece.is_whole:
            return self
        anchors, depths = (on_host(part) for part in (self.anchors, self.depths))
        own = batch.piece.find_own(anchors % batch.tokens.shape[1])
        chunks = []
        begin = 0
        is_own = torch.zeros(len(depths), dtype=torch.bool, device="cpu").index_fill(0, own, True)
        for masks, tokens in self.chunks:
            count = int(is_own[masks].sum())
            chunks += [(slice(begin, begin + count), tokens)] if count else []
            begin += count
        own_anchors, own_depths = (
            copy_to_device(part[own], batch.tokens.device) for part in (anchors, depths)
        )
        return replace(self, anchors=own_anchors, depths=own_depths, chunks=tuple(chunks))

    def document_weights(self, documents: Tensor) -> Tensor:
        """Return the loss weights [R] of predictions of these documents; those of a document sum
        to its supervised tokens.
        """
        shares = torch.tensor(
            [tokens / max(judged, 1) for judged, tokens in self.document_sizes], device="cpu"
        )
        return copy_to_device(shares, documents.device)[documents]


def sample_chains(batch: Batch, drop: ConditionalDrop, step: int) -> Chains:
    """Sample masks by conditional drop (P-EAGLE, section 3).

    Depth 1 retains some of the supervised positions, and each later depth some of the next
    positions, so that every mask has the chain before it. A document's tokens key the draw, so it
    does not depend on the other documents of the batch.
    """
    anchors = []
    depths = []
    chunks = []
    sizes = []
    first_token = 0
    num_masks = 0
    for tokens, mask in batch.split_documents():
        anchor, depth = _sample_document(
            mask, drop, sequence_generator(CHAINS, drop.seed, tokens, step)
        )
        for begin, end in _chunk_ranges(depth):
            last = first_token + int(anchor[end - 1])
            chunks.append((slice(num_masks + begin, num_masks + end), slice(first_token, last + 1)))
        anchors.append(first_token + anchor)
        depths.append(depth)
        sizes.append((int(mask[2:].sum()) + len(anchor), int(mask[1:].sum())))
        first_token = first_token + len(tokens)
        num_masks = num_masks + len(anchor)
    all_anchors, all_depths = (
        copy_to_device(torch.cat(parts), batch.tokens.device) for parts in (anchors, depths)
    )
    return Chains(all_anchors, all_depths, tuple(chunks), tuple(sizes))


def _sample_document(
    mask: Tensor, drop: ConditionalDrop, source: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sample the anchors and depths of one document's masks from its loss mask [T]."""
    # [T] of the token that each position predicts
    is_supervised = F.pad(mask[2:], (0, min(len(mask), 2)))
    seeds = is_supervised.nonzero()[:, 0]
    pool = seeds[seeds > 0]
    anchors = [seeds[:0]]
    depths = [seeds[:0]]
    for depth in range(1, drop.num_drafts):
        count = int((len(seeds) - depth) * max(drop.keep_rate**depth, drop.min_rate))
        retained = pool[torch.randperm(len(pool), generator=source, device="cpu")[: max(count, 0)]]
        anchors.append(retained - depth)
        depths.append(torch.full_like(retained, depth))
        pool = (retained + 1)[is_supervised[retained + 1]]
    mask_anchors = torch.cat(anchors)
    mask_depths = torch.cat(depths)
    order = (mask_anchors * drop.num_drafts + mask_depths).argsort()
    return mask_anchors[order], mask_depths[order]


def _chunk_ranges(depths: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of complete chains with at most `CHUNK_MASKS` masks, or of one longer chain."""
    ends = [*(depths == 1).nonzero()[1:, 0].tolist(), len(depths)]
    begin = reached = 0
    for end in ends:
        if end - begin > CHUNK_MASKS and reached > begin:
            yield begin, reached
            begin = reached
        reached = end
    if reached > begin:
        yield begin, reached
