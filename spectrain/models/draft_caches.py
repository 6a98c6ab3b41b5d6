"""What a target reads of its own cache when it drafts for itself: all of it, some tokens of it, or all of it in few bits.

Rotary positions are in the keys already, so copies keep those of the text; what is drafted behind them is told its own.
Shapes: B batch, T tokens, N nodes, H key-value heads, D head size, S chosen slots, Q queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.kernels.tree_attention import Visibility

from .choosers import Chooser, Seen, newest
from .codes import Bits, Codes, encode
from .kv_cache import TreeCache
from .traffic import slot_bytes

if TYPE_CHECKING:
    from .target import Target


class NewestQueries:
    """What the newest tokens ask, layer by layer: told by a forward, kept where its nodes are committed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.told: dict[int, Tensor] = {}  # [B, heads, N, D] of the last forward
        self.held: dict[int, Tensor] = {}  # [B, heads, Q, D], the newest last

    def __call__(self, layer: int, queries: Tensor, scale: float) -> None:
        self.told[layer] = queries * scale

    def keep(self, path: Tensor, counts: Tensor) -> None:
        """Of the nodes that the last forward ran, `counts[b]` of `path[b]` [B, P] are the newest tokens now."""
        for layer, told in self.told.items():
            new = told.gather(2, path[:, None, :, None].expand(-1, told.shape[1], -1, told.shape[3]))
            before = self.held.get(layer, new[:, :, :0])
            size = min(self.count, before.shape[2] + int(counts.min()))
            last = before.shape[2] + counts[:, None] - size + torch.arange(size, device=counts.device)
            both = torch.cat([before, new], dim=2)
            self.held[layer] = both.gather(2, last[:, None, :, None].expand(-1, both.shape[1], -1, both.shape[3]))
        self.told = {}

    def by_key(self, layer: int, num_key_heads: int) -> Tensor | None:
        """[B, H, G, Q, D]"""
        return self.held[layer].unflatten(1, (num_key_heads, -1)) if layer in self.held else None


class ChosenCache(TreeCache):
    """Copies of what a chooser takes from a target's cache, and room for what is committed and drafted behind them.

    A sliding-window layer holds the newest tokens, as many as others hold, whatever these are: within its window nothing of
    them is missing, and its positions count from the oldest.
    """

    def __init__(self, target: Target, whole: TreeCache, chooser: Chooser, room: int) -> None:
        size = min(chooser.budget + chooser.spare, whole.max_length) + room
        super().__init__(len(whole.layers), len(whole.lengths), size, whole.lengths.device, None, whole.shapes)
        assert whole.storage is not None
        self.whole, self.chooser, self.offsets = whole, chooser, whole.offsets
        reaches = {layer: kept.reach.window for layer, kept in target.attending.kept.items()}
        self.windows = {layer: window for layer, window in reaches.items() if window is not None}
        self.slots_of = slot_bytes(target)
        shape = list(whole.storage.shape)
        shape[3] = size
        self.storage = whole.storage.new_zeros(shape)
        self.known = torch.zeros_like(whole.lengths)  # [B] tokens of the text that it was chosen from or has followed
        self.first = torch.zeros_like(whole.lengths)  # [B] the place in the text of slot 0 of a window layer
        self.is_empty = False

    def sees(self, tree: Tensor, query_positions: Tensor | None = None, key_positions: Tensor | None = None) -> Visibility:
        assert query_positions is not None and key_positions is not None
        first = self.first[:, None]  # of positions only window layers ask
        return super().sees(tree, query_positions - first, key_positions - first)

    def choose(self, queries: NewestQueries) -> int:
        """Hold what is worth most now; the bytes that were read for it."""
        whole, read = self.whole, 0
        counts = self.chooser.counts(whole.lengths)
        for layer in whole.attending:
            keys = whole.held(layer)[0][:, : whole.longest]
            seen = Seen(keys, whole.lengths, queries.by_key(layer, keys.shape[2]))
            if layer in self.windows:
                places = newest(seen, counts)
            else:
                read += self.chooser.read(layer, seen)
                places = self.chooser.places(layer, seen, counts)
            order = places.transpose(1, 2)[..., None]  # [B, S, H, 1]
            for mine, theirs in zip(self.held(layer), whole.held(layer)):
                mine[:, : order.shape[1]] = theirs.gather(1, order.expand(-1, -1, -1, theirs.shape[3]))
        self.lengths.copy_(counts)
        self.longest = int(counts.max())
        self.known, self.first = whole.lengths.clone(), whole.lengths - counts
        return read + int(counts.sum()) * sum(self.slots_of.values())

    def follow(self) -> int:
        """Copy what was committed since; the bytes that were read."""
        whole, new = self.whole, self.whole.lengths - self.known
        steps = torch.arange(int(new.max()), device=new.device)
        rows = torch.arange(len(new), device=new.device)[:, None]
        source = (self.known[:, None] + steps).clamp(max=whole.max_length - 1)
        for layer in whole.attending:
            for mine, theirs in zip(self.held(layer), whole.held(layer)):
                mine[rows, self.lengths[:, None] + steps] = theirs[rows, source]
        self.lengths += new
        self.longest = int(self.lengths.max())
        self.known = whole.lengths.clone()
        return int(new.sum()) * sum(self.slots_of.values())

    def has_room(self, num_nodes: int) -> bool:
        """For what was committed since, and so many nodes."""
        return self.longest + int((self.whole.lengths - self.known).max()) + num_nodes <= self.max_length

    def read_by(self, nodes: int) -> int:
        """Bytes of keys and values that the forward which appended the last `nodes` read."""
        held = [length + self.pending for length in self.lengths.tolist()]
        return sum(slot * reached(held, nodes, self.windows.get(layer)) for layer, slot in self.slots_of.items())


def reached(held: list[int], nodes: int, window: int | None) -> int:
    """Tokens that a layer reads of texts so long, a chain of `nodes` being their end."""
    return sum(length if window is None else min(length, window + nodes - 1) for length in held)


class CodedKeys:
    """All keys and values of a target's cache in few bits: keys by channel over groups of tokens, values by token, and the
    newest tokens, whose group is not full yet, as they are (KIVI, Liu et al., 2024). What is drafted stays as it is too."""

    def __init__(self, target: Target, whole: TreeCache, bits: Bits, group: int) -> None:
        self.whole, self.bits, self.group = whole, bits, group
        self.slots_of = slot_bytes(target)
        reaches = {layer: kept.reach.window for layer, kept in target.attending.kept.items()}
        self.windows = {layer: window for layer, window in reaches.items() if window is not None}
        self.keys: dict[int, Codes] = {}  # [B, groups, H, D, G]
        self.values: dict[int, Codes] = {}  # [B, groups * G, H, D]
        self.full = torch.zeros_like(whole.lengths)  # [B] tokens that are coded

    def follow(self) -> int:
        """Code the groups that have become full; the bytes that were read."""
        whole, size = self.whole, self.group
        done, full = int(self.full.min()), whole.lengths // size * size
        new, before = int(full.max()), int((full - self.full).sum())
        self.full = full
        if new > done:
            for layer in whole.attending:
                keys, values = (held[:, done:new] for held in whole.held(layer))
                groups = keys.unflatten(1, (-1, size)).permute(0, 1, 3, 4, 2)
                self.keys[layer] = joined(self.keys.get(layer), done // size, encode(groups, self.bits))
                self.values[layer] = joined(self.values.get(layer), done, encode(values, self.bits))
        return before * sum(self.slots_of.values())

    def __call__(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What is read in the place of keys and values [B, H, T, D]."""
        if layer not in self.keys:
            return keys, values
        coded = self.keys[layer].numbers(keys.dtype).permute(0, 2, 1, 4, 3).flatten(2, 3)
        return self._behind(coded, keys), self._behind(self.values[layer].numbers(values.dtype).transpose(1, 2), values)

    def _behind(self, coded: Tensor, plain: Tensor) -> Tensor:
        size = coded.shape[2]
        if len(plain) > 1:  # texts of other lengths
            is_coded = torch.arange(size, device=plain.device) < self.full[:, None]
            coded = torch.where(is_coded[:, None, :, None], coded, plain[:, :, :size])
        return torch.cat([coded, plain[:, :, size:]], dim=2)

    def read_by(self, nodes: int) -> int:
        """Bytes of keys and values that the forward which appended the last `nodes` read."""
        total = 0
        for length, full in zip(self.whole.lengths.tolist(), self.full.tolist()):
            held = length + self.whole.pending
            for layer, slot in self.slots_of.items():
                every = reached([held], nodes, self.windows.get(layer))
                plain = min(every, held - full)
                total += plain * slot + self._coded_bytes(layer, every - plain)
        return total

    def _coded_bytes(self, layer: int, tokens: int) -> int:
        """Of the codes of so many tokens of one text, in whole groups."""
        if not tokens:
            return 0
        groups, keys, values = -(-tokens // self.group), self.keys[layer][:3], self.values[layer][:3]
        parts = [(part, groups) for part in keys] + [(part, groups * self.group) for part in values]
        return sum(count * part[0, 0].numel() * part.element_size() for part, count in parts)


def joined(before: Codes | None, kept: int, new: Codes) -> Codes:
    """The first `kept` groups and new ones behind them, along dim 1."""
    if before is None:
        return new
    packed, low, step = (torch.cat([old[:, :kept], part], dim=1) for old, part in zip(before[:3], new[:3]))
    return Codes(packed, low, step, new.size)
