"""What a self-drafting target reads of its own cache: all of it, selected tokens, or all of it in few bits.

Rotary positions are part of the keys, so copied keys keep the positions of the text; drafted nodes get positions of their own.
Shapes: B batch, T tokens, N nodes, H key-value heads, D head size, S selected slots, Q queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.kernels.tree_attention import Visibility
from spectrain.models.kv_cache import TreeCache
from spectrain.models.traffic import slot_bytes

from .key_selectors import KeySelector, SelectionInput, most_recent
from .quantized_kv import Bits, QuantizedGroups, quantize_groups

if TYPE_CHECKING:
    from spectrain.models.target import Target


class RecentQueries:
    """The queries of the newest tokens in each layer: recorded by a forward, retained when its nodes are committed."""

    def __init__(self, count: int) -> None:
        self.num_queries = count
        self.new_queries: dict[int, Tensor] = {}  # [B, heads, N, D] of the last forward
        self.queries: dict[int, Tensor] = {}  # [B, heads, Q, D], the newest last

    def __call__(self, layer: int, queries: Tensor, scale: float) -> None:
        self.new_queries[layer] = queries * scale

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Retain the queries of the committed nodes: `counts[b]` of `path[b]` [B, P] are the newest tokens now."""
        for layer, told in self.new_queries.items():
            new = told.gather(2, path[:, None, :, None].expand(-1, told.shape[1], -1, told.shape[3]))
            before = self.queries.get(layer, new[:, :, :0])
            size = min(self.num_queries, before.shape[2] + int(counts.min()))
            last = before.shape[2] + counts[:, None] - size + torch.arange(size, device=counts.device)
            both = torch.cat([before, new], dim=2)
            self.queries[layer] = both.gather(2, last[:, None, :, None].expand(-1, both.shape[1], -1, both.shape[3]))
        self.new_queries = {}

    def group_by_key_head(self, layer: int, num_key_heads: int) -> Tensor | None:
        """Return [B, H, G, Q, D]."""
        return self.queries[layer].unflatten(1, (num_key_heads, -1)) if layer in self.queries else None


class SelectedCache(TreeCache):
    """Copies of the tokens that a selector takes from a target's cache, and slots for later committed and drafted tokens.

    A sliding-window layer holds as many tokens as the others, the newest ones: its window lacks none of them, and its positions
    count from the oldest.
    """

    def __init__(self, target: Target, whole: TreeCache, chooser: KeySelector, room: int) -> None:
        size = min(chooser.budget + chooser.max_extra, whole.max_length) + room
        super().__init__(len(whole.layers), len(whole.lengths), size, whole.lengths.device, None, whole.shapes)
        assert whole.storage is not None
        self.source, self.selector, self.position_offsets = whole, chooser, whole.position_offsets
        reaches = {layer: kept.range.window for layer, kept in target.architecture.attention_layers.items()}
        self.windows = {layer: window for layer, window in reaches.items() if window is not None}
        self.slot_bytes = slot_bytes(target)
        shape = list(whole.storage.shape)
        shape[3] = size
        self.storage = whole.storage.new_zeros(shape)
        self.synced_lengths = torch.zeros_like(whole.lengths)  # [B] tokens of the text at the last selection or copy
        self.window_starts = torch.zeros_like(whole.lengths)  # [B] index in the text of slot 0 of a window layer
        self.is_empty = False

    def visibility(
        self, tree: Tensor, query_positions: Tensor | None = None, key_positions: Tensor | None = None
    ) -> Visibility:
        assert query_positions is not None and key_positions is not None
        first = self.window_starts[:, None]  # of positions only window layers ask
        return super().visibility(tree, query_positions - first, key_positions - first)

    def select_tokens(self, queries: RecentQueries) -> int:
        """Copy the selected tokens; return the bytes that were read."""
        whole, read = self.source, 0
        counts = self.selector.count_selected(whole.lengths)
        for layer in whole.attention_layers:
            keys = whole.keys_values(layer)[0][:, : whole.longest]
            seen = SelectionInput(keys, whole.lengths, queries.group_by_key_head(layer, keys.shape[2]))
            if layer in self.windows:
                places = most_recent(seen, counts)
            else:
                read += self.selector.selection_bytes(layer, seen)
                places = self.selector.select_keys(layer, seen, counts)
            order = places.transpose(1, 2)[..., None]  # [B, S, H, 1]
            for mine, theirs in zip(self.keys_values(layer), whole.keys_values(layer)):
                mine[:, : order.shape[1]] = theirs.gather(1, order.expand(-1, -1, -1, theirs.shape[3]))
        self.lengths.copy_(counts)
        self.longest = int(counts.max())
        self.synced_lengths, self.window_starts = whole.lengths.clone(), whole.lengths - counts
        return read + int(counts.sum()) * sum(self.slot_bytes.values())

    def copy_committed(self) -> int:
        """Copy the tokens committed since the last copy; return the bytes that were read."""
        whole, new = self.source, self.source.lengths - self.synced_lengths
        steps = torch.arange(int(new.max()), device=new.device)
        rows = torch.arange(len(new), device=new.device)[:, None]
        source = (self.synced_lengths[:, None] + steps).clamp(max=whole.max_length - 1)
        for layer in whole.attention_layers:
            for mine, theirs in zip(self.keys_values(layer), whole.keys_values(layer)):
                mine[rows, self.lengths[:, None] + steps] = theirs[rows, source]
        self.lengths += new
        self.longest = int(self.lengths.max())
        self.synced_lengths = whole.lengths.clone()
        return int(new.sum()) * sum(self.slot_bytes.values())

    def has_room(self, num_nodes: int) -> bool:
        """Return whether the tokens committed since, and so many nodes, fit."""
        return self.longest + int((self.source.lengths - self.synced_lengths).max()) + num_nodes <= self.max_length

    def bytes_read(self, nodes: int) -> int:
        """Return the bytes of keys and values that the forward which appended the last `nodes` read."""
        held = [length + self.uncommitted for length in self.lengths.tolist()]
        return sum(slot * count_read_tokens(held, nodes, self.windows.get(layer)) for layer, slot in self.slot_bytes.items())


def count_read_tokens(held: list[int], nodes: int, window: int | None) -> int:
    """Return the tokens that a layer reads of texts of these lengths, which end in a chain of `nodes`."""
    return sum(length if window is None else min(length, window + nodes - 1) for length in held)


class QuantizedKV:
    """All keys and values of a target's cache in few bits: keys by channel over groups of tokens, values by token. The newest
    tokens, whose group is not full, and drafted nodes stay unquantized (KIVI, Liu et al., 2024)."""

    def __init__(self, target: Target, whole: TreeCache, bits: Bits, group: int) -> None:
        self.source, self.bits, self.group_size = whole, bits, group
        self.slot_bytes = slot_bytes(target)
        reaches = {layer: kept.range.window for layer, kept in target.architecture.attention_layers.items()}
        self.windows = {layer: window for layer, window in reaches.items() if window is not None}
        self.keys: dict[int, QuantizedGroups] = {}  # [B, groups, H, D, G]
        self.values: dict[int, QuantizedGroups] = {}  # [B, groups * G, H, D]
        self.quantized_lengths = torch.zeros_like(whole.lengths)  # [B] quantized tokens

    def quantize_committed(self) -> int:
        """Quantize the groups that have become full; return the bytes that were read."""
        whole, size = self.source, self.group_size
        done, full = int(self.quantized_lengths.min()), whole.lengths // size * size
        new, before = int(full.max()), int((full - self.quantized_lengths).sum())
        self.quantized_lengths = full
        if new > done:
            for layer in whole.attention_layers:
                keys, values = (held[:, done:new] for held in whole.keys_values(layer))
                groups = keys.unflatten(1, (-1, size)).permute(0, 1, 3, 4, 2)
                self.keys[layer] = append_groups(self.keys.get(layer), done // size, quantize_groups(groups, self.bits))
                self.values[layer] = append_groups(self.values.get(layer), done, quantize_groups(values, self.bits))
        return before * sum(self.slot_bytes.values())

    def __call__(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is read instead of keys and values [B, H, T, D]."""
        if layer not in self.keys:
            return keys, values
        coded = self.keys[layer].dequantize(keys.dtype).permute(0, 2, 1, 4, 3).flatten(2, 3)
        return self._append_unquantized(coded, keys), self._append_unquantized(
            self.values[layer].dequantize(values.dtype).transpose(1, 2), values
        )

    def _append_unquantized(self, coded: Tensor, plain: Tensor) -> Tensor:
        size = coded.shape[2]
        if len(plain) > 1:  # texts of other lengths
            is_coded = torch.arange(size, device=plain.device) < self.quantized_lengths[:, None]
            coded = torch.where(is_coded[:, None, :, None], coded, plain[:, :, :size])
        return torch.cat([coded, plain[:, :, size:]], dim=2)

    def bytes_read(self, nodes: int) -> int:
        """Return the bytes of keys and values that the forward which appended the last `nodes` read."""
        total = 0
        for length, full in zip(self.source.lengths.tolist(), self.quantized_lengths.tolist()):
            held = length + self.source.uncommitted
            for layer, slot in self.slot_bytes.items():
                every = count_read_tokens([held], nodes, self.windows.get(layer))
                plain = min(every, held - full)
                total += plain * slot + self._quantized_bytes(layer, every - plain)
        return total

    def _quantized_bytes(self, layer: int, tokens: int) -> int:
        """Return the bytes of so many quantized tokens of one text, in full groups."""
        if not tokens:
            return 0
        groups, keys, values = -(-tokens // self.group_size), self.keys[layer][:3], self.values[layer][:3]
        parts = [(part, groups) for part in keys] + [(part, groups * self.group_size) for part in values]
        return sum(count * part[0, 0].numel() * part.element_size() for part, count in parts)


def append_groups(before: QuantizedGroups | None, kept: int, new: QuantizedGroups) -> QuantizedGroups:
    """Concatenate the first `kept` groups and new ones, along dim 1."""
    if before is None:
        return new
    packed, low, step = (torch.cat([old[:, :kept], part], dim=1) for old, part in zip(before[:3], new[:3]))
    return QuantizedGroups(packed, low, step, new.group_size)
