"""The prefixes of a batch after which a training puts masks. Shapes: T tokens."""

from __future__ import annotations

import torch

from spectrain.drafters.layers.mask_blocks import find_prefix_ends
from spectrain.features.batch import Batch
from spectrain.randomness import MASKED_PREFIXES, sequence_generator


def tile_prefixes(batch: Batch, size: int) -> list[list[tuple[int, int]]]:
    """Return the prefixes of every document that end where a tile of `size` tokens begins, with
    as many masks.
    """
    ends = [find_prefix_ends(mask, size).tolist() for _, mask in batch.split_documents()]
    return [[(end, size) for end in row if (end + 1) % size == 0] for row in ends]


def sample_prefixes(
    batch: Batch, num_masks: int, mask_ratio: float, seed: int, step: int
) -> list[list[tuple[int, int]]]:
    """Sample prefixes of every document, with `mask_ratio` masks per token. Its tokens and the
    step key the draw.
    """
    rows = []
    for tokens, mask in batch.split_documents():
        ends = find_prefix_ends(mask, num_masks)
        length = int(tokens.nonzero()[-1]) + 1 if tokens.any() else 0  # without padding
        source = sequence_generator(MASKED_PREFIXES, seed, tokens, step)
        count = max(1, int(mask_ratio * length / num_masks))
        sampled = (
            ends[torch.randperm(len(ends), generator=source, device="cpu")[:count]].sort().values
        )
        rows.append([(end, num_masks) for end in sampled.tolist()])
    return rows
