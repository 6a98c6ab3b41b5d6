"""A cache for texts that join and leave while others are decoded. Shapes: B texts, P slots of the
pool, the others as in the core's kv_cache.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.models.kv_cache import TreeCache


class PooledCache(TreeCache):
    """Keys and values of texts that each have a segment of one pool of slots, as long as the text
    can become.

    The storage is [layers, 2, 1, P, H, D]. Only kernels that take the first slot of each text run
    on it (`row_starts`).
    """

    def __init__(self, num_layers: int, num_slots: int, device: torch.device) -> None:
        super().__init__(num_layers, 1, num_slots, device)
        self.lengths = self.lengths[:0]
        self.segments: list[range] = []
        self.starts = self.lengths

    def find_segment(self, size: int) -> range | None:
        """Return the first free slots of this number, or None where there are none."""
        start = 0
        for segment in sorted(self.segments, key=lambda segment: segment.start):
            if segment.start - start >= size:
                break
            start = segment.stop
        return range(start, start + size) if start + size <= self.max_length else None

    def add_text(self, segment: range, source: TreeCache) -> None:
        """Add a text with the committed tokens of a cache of one row."""
        assert source.storage is not None
        if self.storage is None:
            layers, both, _, _, *slot = source.storage.shape
            self.storage = torch.zeros(
                layers, both, 1, self.max_length, *slot, dtype=source.storage.dtype
            )
        length = source.longest
        self.storage[:, :, 0, segment.start : segment.start + length] = source.storage[
            :, :, 0, :length
        ]
        self.segments.append(segment)
        self._set_texts(torch.cat([self.lengths, source.lengths]))

    def copy_text(self, number: int) -> Tensor:
        """Return a copy of the keys and values of a text's committed tokens, [layers, 2, T, H,
        D].
        """
        assert self.storage is not None
        start = self.segments[number].start
        length = int(self.lengths[number])
        return self.storage[:, :, 0, start : start + length].clone()

    def keep_texts(self, kept: list[int]) -> None:
        """Remove all texts but those with these numbers, which are then numbered anew."""
        self.segments = [self.segments[text] for text in kept]
        self._set_texts(self.lengths[kept])

    def row_starts(self) -> Tensor:
        return self.starts

    def _set_texts(self, lengths: Tensor) -> None:
        self.lengths = lengths
        self.longest = int(lengths.max()) if len(lengths) else 0
        self.starts = torch.tensor([segment.start for segment in self.segments], dtype=torch.int64)
        self.is_empty = False


def fill_slots(cache: TreeCache, keys_values: Tensor) -> None:
    """Commit the keys and values [layers, 2, T, H, D] of T tokens in an empty cache of one row."""
    _, _, length, num_heads, size = keys_values.shape
    slots = cache.lend_storage(length, num_heads, size, keys_values.dtype)
    slots[:, :, 0, :length] = keys_values
    cache.add_uncommitted(length)
    cache.commit(None, torch.full_like(cache.lengths, length))
