"""Caches that a self-drafting target reads: selected tokens of its own cache, or all of it in few
bits.

Rotary positions are part of the keys, so copied keys keep the positions of the text; drafted nodes
get positions of their own.
Shapes: B batch, T tokens, N nodes, H key-value heads, D head size, S selected slots, Q queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.errors import UserError
from spectrain.kernels.tree_attention import Visibility
from spectrain.models.cache_types import AttentionOptions, KVTransform, QueryObserver
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain_research.less_cache.bytes_read import slot_bytes

from .codecs import KVCodec
from .key_selectors import KeySelector, SelectionInput, most_recent
from .quantized_kv import Bits, QuantizedGroups, quantize_groups
from .ragged_selectors import KVCompressSelector, mask_unselected


@contextmanager
def hook_cache(
    cache: TreeCache,
    kv_transform: KVTransform | None = None,
    query_observer: QueryObserver | None = None,
) -> Iterator[None]:
    """Set the hooks of a cache while the context is open: what layers attend to, and what
    receives their queries.
    """
    before = cache.kv_transform, cache.query_observer
    cache.kv_transform, cache.query_observer = kv_transform, query_observer
    try:
        yield
    finally:
        cache.kv_transform, cache.query_observer = before


class RecentQueries:
    """The queries of the newest tokens in each layer: recorded by a forward, retained when its
    nodes are committed.
    """

    def __init__(self, count: int) -> None:
        self.num_queries = count
        self.new_queries: dict[int, Tensor] = {}  # [B, heads, N, D] of the last forward
        self.queries: dict[int, Tensor] = {}  # [B, heads, Q, D], the newest last

    def __call__(self, layer: int, queries: Tensor, scale: float) -> None:
        self.new_queries[layer] = queries * scale

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Retain the queries of the committed nodes: `counts[b]` of `path[b]` [B, P] are the
        newest tokens now.
        """
        for layer, queries in self.new_queries.items():
            new = queries.gather(
                2, path[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
            )
            earlier = self.queries.get(layer, new[:, :, :0])
            size = min(self.num_queries, earlier.shape[2] + int(counts.min()))
            last = (
                earlier.shape[2] + counts[:, None] - size + torch.arange(size, device=counts.device)
            )
            joined = torch.cat([earlier, new], dim=2)
            self.queries[layer] = joined.gather(
                2, last[:, None, :, None].expand(-1, joined.shape[1], -1, joined.shape[3])
            )
        self.new_queries = {}

    def group_by_key_head(self, layer: int, num_key_heads: int) -> Tensor | None:
        """Return [B, H, G, Q, D]."""
        return (
            self.queries[layer].unflatten(1, (num_key_heads, -1)) if layer in self.queries else None
        )


class SelectedCache(TreeCache):
    """Copies of the tokens that a selector takes from a target's cache, and slots for later
    committed and drafted tokens.

    A sliding-window layer holds as many tokens as the others, the newest ones: its window lacks
    none of them, and its positions count from the oldest.
    """

    def __init__(self, target: Target, source: TreeCache, selector: KeySelector, room: int) -> None:
        size = min(selector.budget + selector.max_extra, source.max_length) + room
        super().__init__(
            len(source.layers),
            len(source.lengths),
            size,
            source.lengths.device,
            None,
            source.shapes,
        )
        assert source.storage is not None
        self.source, self.selector, self.position_offsets = (
            source,
            selector,
            source.position_offsets,
        )
        ranges = {
            layer: attention.range.window
            for layer, attention in target.architecture.attention_layers.items()
        }
        self.windows = {layer: window for layer, window in ranges.items() if window is not None}
        self.slot_bytes = slot_bytes(target)
        shape = list(source.storage.shape)
        shape[3] = size
        self.storage = source.storage.new_zeros(shape)
        # [B] tokens of the text at the last selection or copy
        self.synced_lengths = torch.zeros_like(source.lengths)
        # [B] index in the text of slot 0 of a window layer
        self.window_starts = torch.zeros_like(source.lengths)
        # [B, H] slots that heads read, of layers whose heads differ
        self.head_counts: dict[int, Tensor] = {}
        self.num_selected = torch.zeros_like(source.lengths)  # [B] slots of the selection
        self.is_empty = False

    def visibility(
        self,
        tree: Tensor,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Visibility:
        assert query_positions is not None and key_positions is not None
        first = self.window_starts[:, None]  # only window layers read positions
        return super().visibility(tree, query_positions - first, key_positions - first)

    def select_tokens(self, queries: RecentQueries) -> int:
        """Copy the selected tokens; return the bytes that were read."""
        source = self.source
        num_bytes = 0
        selections = {layer: self._make_input(layer, queries) for layer in source.attention_layers}
        if isinstance(self.selector, KVCompressSelector):
            self.selector.plan_budgets(
                {layer: every for layer, every in selections.items() if layer not in self.windows}
            )
            self.head_counts = self.selector.head_counts
        counts = self.selector.count_selected(source.lengths)
        for layer, selection in selections.items():
            if layer in self.windows:
                indices = most_recent(selection, counts)
            else:
                num_bytes += self.selector.selection_bytes(layer, selection)
                indices = self.selector.select_keys(layer, selection, counts)
            self._copy_slots(layer, indices, counts)
        self._set_lengths(counts)
        return num_bytes + sum(self._selected_bytes(layer, counts) for layer in self.slot_bytes)

    def _set_lengths(self, counts: Tensor) -> None:
        """Set the number of selected tokens of each text."""
        self.lengths.copy_(counts)
        self.longest = int(counts.max())
        self.synced_lengths = self.source.lengths.clone()
        self.window_starts = self.source.lengths - counts
        self.num_selected = counts

    def _copy_slots(self, layer: int, indices: Tensor, counts: Tensor) -> None:
        """Copy the tokens of these indices [B, H, S] to the first slots of a layer. Rows with fewer
        tokens keep the slots after them, which may hold drafted nodes."""
        order = indices.transpose(1, 2)[..., None]  # [B, S, H, 1]
        is_selected = (torch.arange(order.shape[1], device=order.device) < counts[:, None])[
            ..., None, None
        ]
        for selected, full in zip(self.keys_values(layer), self.source.keys_values(layer)):
            slots = selected[:, : order.shape[1]]
            slots.copy_(
                full.gather(1, order.expand(-1, -1, -1, full.shape[3])).where(is_selected, slots)
            )

    def _make_input(self, layer: int, queries: RecentQueries) -> SelectionInput:
        keys = self.source.keys_values(layer)[0][:, : self.source.longest]
        return SelectionInput(
            keys, self.source.lengths, queries.group_by_key_head(layer, keys.shape[2])
        )

    def _selected_bytes(self, layer: int, counts: Tensor) -> int:
        """Return the bytes of the selected tokens of a layer, `counts` [B] where its heads
        select equally many.
        """
        counts = self.head_counts[layer].float().mean(1) if layer in self.head_counts else counts
        return int(counts.sum() * self.slot_bytes[layer])

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        visibility: Visibility,
        options: AttentionOptions,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Append and attend as `TreeCache.attend`; heads that selected fewer tokens do not see
        the other slots. A cache of such heads lends no storage, so nothing asks it to rotate.
        """
        assert rotation is None or not self.head_counts
        if layer not in self.head_counts:
            return super().attend(layer, queries, keys, values, visibility, options, rotation)
        if options.softcap is not None or options.sinks is not None:
            raise UserError(
                "drafter.cache: compress and defensive cannot run layers with soft caps or sinks; "
                "use drafter.cache=snap"
            )
        all_keys, all_values = self.append(layer, keys, values)
        # [B, H, 1, T]
        visible = mask_unselected(self.head_counts[layer], self.num_selected, all_keys.shape[2])[
            :, :, None
        ]
        mask = visibility.attention_mask(None)
        visible = visible if mask is None else visible & mask
        group = queries.shape[1] // keys.shape[1]
        visible = visible.repeat_interleave(group, dim=1).expand(-1, -1, queries.shape[2], -1)
        return F.scaled_dot_product_attention(
            queries.to(all_keys.dtype),
            all_keys,
            all_values,
            visible,
            scale=options.scale,
            enable_gqa=True,
        ).to(queries.dtype)

    def lends_storage(self, *dtypes: torch.dtype) -> bool:
        return not self.head_counts and super().lends_storage(*dtypes)

    def copy_committed(self) -> int:
        """Copy the tokens committed since the last copy; return the bytes that were read."""
        source = self.source
        new = self.source.lengths - self.synced_lengths
        steps = torch.arange(int(new.max()), device=new.device)
        rows = torch.arange(len(new), device=new.device)[:, None]
        source_slots = (self.synced_lengths[:, None] + steps).clamp(max=source.max_length - 1)
        for layer in source.attention_layers:
            for selected, full in zip(self.keys_values(layer), source.keys_values(layer)):
                selected[rows, self.lengths[:, None] + steps] = full[rows, source_slots]
        self.lengths += new
        self.longest = int(self.lengths.max())
        self.synced_lengths = source.lengths.clone()
        return int(new.sum()) * sum(self.slot_bytes.values())

    def has_room(self, num_nodes: int) -> bool:
        """Return whether the tokens committed since, and so many nodes, fit."""
        return (
            self.longest + int((self.source.lengths - self.synced_lengths).max()) + num_nodes
            <= self.max_length
        )

    def bytes_read(self, nodes: int) -> int:
        """Return the bytes of keys and values that the forward which appended the last `nodes`
        read.
        """
        lengths = [length + self.uncommitted for length in self.lengths.tolist()]
        unread = {
            layer: int((self.num_selected - counts.float().mean(1)).sum() * self.slot_bytes[layer])
            for layer, counts in self.head_counts.items()
        }
        return sum(
            slot * count_read_tokens(lengths, nodes, self.windows.get(layer)) - unread.get(layer, 0)
            for layer, slot in self.slot_bytes.items()
        )


class StepSelectedCache(SelectedCache):
    """Selects the tokens of every layer again in each draft step, by the step's own queries (Quest,
    Tang et al., 2024, algorithm 1)."""

    step_bytes = 0  # bytes that the selections of the last forward read

    def select_tokens(self, queries: RecentQueries) -> int:
        self._set_lengths(self.selector.count_selected(self.source.lengths))
        for layer in self.windows:
            recent = most_recent(self._make_input(layer, queries), self.num_selected)
            self._copy_slots(layer, recent, self.num_selected)
        return 0

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        visibility: Visibility,
        options: AttentionOptions,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if layer not in self.windows:
            committed = self.source.keys_values(layer)[0][:, : self.source.longest]
            selection = SelectionInput(
                committed, self.source.lengths, queries.unflatten(1, (keys.shape[1], -1))
            )
            self.step_bytes += self.selector.selection_bytes(layer, selection)
            self._copy_slots(
                layer,
                self.selector.select_keys(layer, selection, self.num_selected),
                self.num_selected,
            )
        return super().attend(layer, queries, keys, values, visibility, options, rotation)

    def lends_storage(self, *dtypes: torch.dtype) -> bool:
        return False

    def bytes_read(self, nodes: int) -> int:
        step_bytes = self.step_bytes
        self.step_bytes = 0
        return super().bytes_read(nodes) + step_bytes


def count_read_tokens(lengths: list[int], nodes: int, window: int | None) -> int:
    """Return the tokens that a layer reads of texts of these lengths, which end in a chain of
    `nodes`.
    """
    return sum(length if window is None else min(length, window + nodes - 1) for length in lengths)


class QuantizedKV:
    """All keys and values of a target's cache in few bits (KIVI, Liu et al., 2024).

    Keys are quantized by channel over groups of tokens, values by token. The newest tokens, whose
    group is not full, and drafted nodes stay unquantized.
    """

    def __init__(self, target: Target, source: TreeCache, bits: Bits, group: int) -> None:
        self.source = source
        self.bits = bits
        self.group_size = group
        self.slot_bytes = slot_bytes(target)
        ranges = {
            layer: attention.range.window
            for layer, attention in target.architecture.attention_layers.items()
        }
        self.windows = {layer: window for layer, window in ranges.items() if window is not None}
        self.keys: dict[int, QuantizedGroups] = {}  # [B, groups, H, D, G]
        self.values: dict[int, QuantizedGroups] = {}  # [B, groups * G, H, D]
        self.quantized_lengths = torch.zeros_like(source.lengths)  # [B] quantized tokens

    def quantize_committed(self) -> int:
        """Quantize the groups that have become full; return the bytes that were read."""
        source = self.source
        size = self.group_size
        num_quantized = int(self.quantized_lengths.min())
        full = source.lengths // size * size
        num_full = int(full.max())
        num_new = int((full - self.quantized_lengths).sum())
        self.quantized_lengths = full
        if num_full > num_quantized:
            for layer in source.attention_layers:
                keys, values = (
                    part[:, num_quantized:num_full] for part in source.keys_values(layer)
                )
                self._code_groups(layer, num_quantized, keys, values)
        return num_new * sum(self.slot_bytes.values())

    def _code_groups(self, layer: int, first: int, keys: Tensor, values: Tensor) -> None:
        """Code the keys and values [B, T, H, D] of full groups that follow the `first` tokens."""
        groups = keys.unflatten(1, (-1, self.group_size)).permute(0, 1, 3, 4, 2)
        self.keys[layer] = append_groups(
            self.keys.get(layer), first // self.group_size, quantize_groups(groups, self.bits)
        )
        self.values[layer] = append_groups(
            self.values.get(layer), first, quantize_groups(values, self.bits)
        )

    def _decode(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return the coded keys and values [B, H, T, D] of a layer, or None before its first
        group.
        """
        if layer not in self.keys:
            return None
        keys = self.keys[layer].dequantize(dtype).permute(0, 2, 1, 4, 3).flatten(2, 3)
        return keys, self.values[layer].dequantize(dtype).transpose(1, 2)

    def __call__(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, T, D] that a forward reads."""
        decoded = self._decode(layer, keys.dtype)
        if decoded is None:
            return keys, values
        return self._append_unquantized(decoded[0], keys), self._append_unquantized(
            decoded[1], values
        )

    def _append_unquantized(self, coded: Tensor, full: Tensor) -> Tensor:
        size = coded.shape[2]
        if len(full) > 1:  # texts of other lengths
            is_coded = torch.arange(size, device=full.device) < self.quantized_lengths[:, None]
            coded = torch.where(is_coded[:, None, :, None], coded, full[:, :, :size])
        return torch.cat([coded, full[:, :, size:]], dim=2)

    def bytes_read(self, nodes: int) -> int:
        """Return the bytes of keys and values that the forward which appended the last `nodes`
        read.
        """
        total = 0
        for length, num_quantized in zip(
            self.source.lengths.tolist(), self.quantized_lengths.tolist()
        ):
            num_tokens = length + self.source.uncommitted
            for layer, slot in self.slot_bytes.items():
                num_read = count_read_tokens([num_tokens], nodes, self.windows.get(layer))
                num_plain = min(num_read, num_tokens - num_quantized)
                total += num_plain * slot + self._quantized_bytes(layer, num_read - num_plain)
        return total

    def _quantized_bytes(self, layer: int, tokens: int) -> int:
        """Return the bytes of so many quantized tokens of one text, in full groups."""
        if not tokens:
            return 0
        groups = -(-tokens // self.group_size)
        keys = self.keys[layer][:3]
        values = self.values[layer][:3]
        parts = [(part, groups) for part in keys] + [
            (part, groups * self.group_size) for part in values
        ]
        return sum(count * part[0, 0].numel() * part.element_size() for part, count in parts)


class DecodedKV(QuantizedKV):
    """All keys and values of a target's cache as a codec returns them, stored decoded; bytes are
    those of the codes.
    """

    def __init__(self, target: Target, source: TreeCache, codec: KVCodec, group: int) -> None:
        super().__init__(target, source, 8, group)
        self.codec = codec
        # [B, H, T, D] keys and values, by layer
        self.decoded: dict[int, tuple[Tensor, Tensor]] = {}
        attention = target.architecture.attention_layers
        self.shapes = {layer: every.shape for layer, every in attention.items()}

    def _code_groups(self, layer: int, first: int, keys: Tensor, values: Tensor) -> None:
        new = tuple(
            part.transpose(1, 2) for part in self.codec.approximate(keys, values, self.group_size)
        )
        if layer in self.decoded:
            new = tuple(
                torch.cat([old[:, :, :first], part], dim=2)
                for old, part in zip(self.decoded[layer], new)
            )
        self.decoded[layer] = new[0], new[1]

    def _decode(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        if layer not in self.decoded:
            return None
        keys, values = self.decoded[layer]
        return keys.to(dtype), values.to(dtype)

    def _quantized_bytes(self, layer: int, tokens: int) -> int:
        shape = self.shapes[layer]
        groups = -(-tokens // self.group_size)
        itemsize = self.slot_bytes[layer] // (shape.num_heads * (shape.key_size + shape.value_size))
        size = self.codec.group_bytes(shape.key_size, shape.value_size, self.group_size, itemsize)
        return round(groups * shape.num_heads * size)


def append_groups(
    earlier: QuantizedGroups | None, num_groups: int, new: QuantizedGroups
) -> QuantizedGroups:
    """Concatenate the first `num_groups` groups and new ones, along dim 1."""
    if earlier is None:
        return new
    packed, low, step = (
        torch.cat([old[:, :num_groups], part], dim=1) for old, part in zip(earlier[:3], new[:3])
    )
    return QuantizedGroups(packed, low, step, new.group_size)
