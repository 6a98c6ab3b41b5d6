"""The static key-value cache, for the target and for drafters. Shapes: B batch, T slots, H
key-value heads, D head size.

Storage is one allocation [layers, 2, B, T, H, D]. Where layers, or keys and values, differ in heads
or sizes, it is [layers, 2, B, T, 1, W]: W is the widest layer's numbers per slot, and each layer
uses a part of them. A row holds `lengths[b]` committed tokens. A forward appends N uncommitted
nodes after them (a prompt, a tree, or one more level of a tree); `commit` keeps one path of these
and discards the rest.
"""

from collections.abc import Mapping
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from spectrain.errors import UserError
from spectrain.kernels.dispatch import run_on_cpu
from spectrain.kernels.kv_append import kv_append
from spectrain.kernels.kv_commit import kv_commit
from spectrain.kernels.rotate_append import rotate_append_angles
from spectrain.kernels.tree_attention import Visibility, tree_attention

from .accelerator import accelerator
from .cache_types import (
    DEFAULT_OPTIONS,
    AttentionOptions,
    KeyValueShape,
    KVTransform,
    QueryObserver,
    RecurrentStates,
)

_cache_ids = count()
live_caches: WeakValueDictionary[int, "TreeCache"] = WeakValueDictionary()


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which keys are attended to by torch. On a CPU half precision becomes
    float64: the rounded sums over keys are then the same in whatever order the keys lie, while in
    half precision one different bit changes the logits."""
    return (
        torch.float64
        if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)
        else dtype
    )


def storage_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which keys are stored: their own where kernels widen them, else that of
    attention.
    """
    return dtype if accelerator().reads_keys(dtype, device) else attention_dtype(dtype, device)


class CacheLayer(CacheLayerMixin):
    """One layer of the cache, with the interface of `transformers`."""

    is_sliding = False

    def __init__(self, owner: "TreeCache") -> None:
        super().__init__()
        self.owner = owner
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.owner.update(key_states, value_states, self.owner.last_updated)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.longest + self.owner.uncommitted

    def get_max_length(self) -> int:
        return self.owner.max_length


class TreeCache(Cache):
    """Keys and values of `num_layers` layers for `batch_size` rows of at most `max_length` tokens,
    tree nodes included.

    Without a `bound`, the host has `longest` exactly, and every commit reads it from the device.
    With a `bound` on the length of every active row, the host has only the bound: nothing
    synchronizes, tensors stay in place, and a CUDA graph may replay the operations. `shapes` holds
    the shape of each attention layer where these differ or where not every layer attends. The
    states of recurrent layers are in `recurrences`.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        device: torch.device | str,
        bound: int | None = None,
        shapes: Mapping[int, KeyValueShape] | None = None,
    ) -> None:
        number = next(_cache_ids)
        live_caches[number] = self
        # An input by which compiled code finds the cache, so that it is compiled for all caches.
        self.cache_id = torch.tensor(number, device="cpu")
        self.max_length, self.bound, self.shapes = max_length, bound, shapes
        # Compiled code reads this flag, because it would be compiled again for every bound.
        self.is_bounded = bound is not None
        # where shapes differ
        self.storage_index = {layer: index for index, layer in enumerate(shapes or ())}
        # [B] committed tokens
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        # the largest length, or its bound; the host has it without asking the device
        self.longest = bound or 0
        self.is_empty = True  # no forward has appended anything yet
        self.uncommitted = 0  # appended nodes that are not yet committed or discarded
        # [B, uncommitted] position ids of these nodes, where they are set
        self.positions: Tensor | None = None
        self.recurrences: dict[int, RecurrentStates] = {}  # by layer
        # [B] lengths of the prompts that the next forward runs
        self.prompt_lengths: Tensor | None = None
        # [B] position ids minus indices in the text, after images
        self.position_offsets: Tensor | None = None
        # allocated at the first keys, whose shape and dtype it takes
        self.storage: Tensor | None = None
        self.kv_transform: KVTransform | None = None  # changes what layers attend to
        # receives the queries of every uncompiled layer
        self.query_observer: QueryObserver | None = None
        self.last_updated = -1  # layer index of the last call of `update`
        self.returns_all_keys = False  # whether layers compute attention themselves, over all keys
        super().__init__(layers=[CacheLayer(self) for _ in range(num_layers)])

    def __deepcopy__(self, memo: dict[int, Any]) -> "TreeCache":
        """Return an empty cache: a copied drafter decodes for itself."""
        return TreeCache(
            len(self.layers),
            len(self.lengths),
            self.max_length,
            self.lengths.device,
            self.bound,
            self.shapes,
        )

    def for_drafter(
        self,
        cached: "TreeCache | None",
        num_layers: int,
        extra: int,
        shapes: Mapping[int, KeyValueShape] | None = None,
    ) -> "TreeCache":
        """Return an empty cache of a drafter for the texts of this one, with `extra` more slots.

        Where this cache has fixed addresses and `cached` has the right sizes, `cached` is emptied
        and used again. `shapes` are of layers that differ, or whose values are not as wide as their
        keys.
        """
        batch = len(self.lengths)
        length = self.max_length + extra
        bound = None if self.bound is None else self.bound + 1
        if cached is not None and bound is not None:
            sizes = len(cached.layers), len(cached.lengths), cached.max_length, cached.bound
            if sizes == (num_layers, batch, length, bound):
                cached.reset()
                return cached
        return TreeCache(num_layers, batch, length, self.lengths.device, bound, shapes)

    def reset(self) -> None:
        """Discard every token in place, so that a replayed graph finds the same tensors."""
        self.lengths.zero_()
        self.longest = self.bound or 0
        self.roll_back()
        self.recurrences.clear()
        self.position_offsets = None
        self.is_empty = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Implement the method that layers of `transformers` call. Attention itself appends, so
        keys and values pass unchanged. Layers with attention of their own get all keys and values
        instead."""
        # Compiled code is the same for all layers, so it reads no index.
        if not torch.compiler.is_compiling():
            self.last_updated = layer_idx
        if not self.returns_all_keys:
            return key_states, value_states
        keys, values = self.append(layer_idx, key_states, value_states)
        # Some models view the keys and values, which then must be contiguous.
        return keys.to(key_states.dtype).contiguous(), values.to(value_states.dtype).contiguous()

    def max_prefix_length(self, num_nodes: int) -> int:
        """Return the most committed tokens that a row can hold when `num_nodes` more follow the
        uncommitted ones.
        """
        room = self.max_length - self.uncommitted - num_nodes
        assert room >= (self.longest if not self.is_bounded else 0), (
            f"cache of {self.max_length} slots is {-room} too small"
        )
        return min(self.longest, room)

    def next_slots(self, num_nodes: int) -> Tensor:
        """Return the slots [B, N] that the next `num_nodes` nodes of every row will take."""
        return (self.lengths + self.uncommitted)[:, None] + torch.arange(
            num_nodes, device=self.lengths.device
        )

    def visibility(
        self,
        tree: Tensor,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Visibility:
        """Return what new nodes see: the committed tokens, and the appended nodes in `tree` [B, N,
        M], of which the new ones are the last. Positions [B, N] and [B, M] serve sliding windows.
        """
        positions = self.lengths[:, None] if query_positions is None else query_positions
        return Visibility(
            self.lengths,
            self.max_prefix_length(tree.shape[2] - self.uncommitted),
            tree,
            positions,
            key_positions,
            not self.is_bounded,
        )

    def set_positions(self, positions: Tensor) -> None:
        """Set the position ids [B, N] of the nodes that the next forward appends, for sliding
        windows.
        """
        self.positions = (
            positions if self.positions is None else torch.cat([self.positions, positions], dim=1)
        )

    def attend_new(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
        options: AttentionOptions = DEFAULT_OPTIONS,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Append keys and values [B, H, N, D] of a drafter's layer, and attend. The queries belong
        to the newest N appended nodes and see `visible` [B, N, M]. A window needs the `positions`
        [B, M] of the appended nodes."""
        query_positions = None if positions is None else positions[:, -queries.shape[2] :]
        return self.attend(
            layer,
            queries,
            keys,
            values,
            self.visibility(visible, query_positions, positions),
            options,
        )

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
        """Append keys and values [B, H, N, D] of a layer, and attend with as many queries, [B,
        H, N, D]. Queries and keys are first rotated by cosines and sines [1 or B, N, D], if any.
        """
        scale = queries.shape[-1] ** -0.5 if options.scale is None else options.scale
        window, softcap, sinks = options.window, options.softcap, options.sinks
        if rotation is None:
            self.write(layer, keys, values)
        else:
            queries = self._write_rotated(layer, queries, keys, values, rotation)
        if self.kv_transform is None:
            slots = self.keys_values(layer)
            attended: Tensor | None = run_on_cpu(
                "attend_cached", queries, *slots, visibility, scale, window, softcap, sinks
            )
            if attended is not None:
                return attended
        return tree_attention(
            queries, *self.read(layer, keys.shape[2]), visibility, scale, window, softcap, sinks
        )

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, H, N, D] after those of a layer, and return all its slots up to
        the newest, [B, H, T', D], in the type in which they are attended to."""
        self.write(layer, keys, values)
        return self.read(layer, keys.shape[2])

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [B, H, N, D] after those of a layer."""
        num_nodes = keys.shape[2]
        if self.storage is None:
            self.storage = self._allocate_storage(keys)
        keys = keys.to(self.storage.dtype)
        values = values.to(self.storage.dtype)
        end = self.max_prefix_length(num_nodes) + self.uncommitted + num_nodes
        if self.shapes is not None:
            rows = torch.arange(len(keys), device=keys.device)[:, None]
            for slots, new in zip(self.keys_values(layer), (keys, values)):
                slots[rows, self.next_slots(num_nodes)] = new.transpose(1, 2)
        else:
            store = self.storage[layer]
            if (len(keys), keys.shape[1], keys.shape[3]) != (
                store.shape[1],
                *store.shape[3:],
            ) or values.shape != keys.shape:
                raise UserError(
                    "target: its layers differ in key-value shape, and the cache was made for "
                    "equal shapes"
                )
            if len(keys) == 1 and not self.is_bounded:
                store[0, :, end - num_nodes : end] = keys.transpose(1, 2)
                store[1, :, end - num_nodes : end] = values.transpose(1, 2)
            else:
                kv_append(store, keys, values, self.lengths, self.uncommitted)

    def _write_rotated(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Rotate, write keys and values after those of a layer, and return the queries."""
        storage = self.lend_storage(keys.shape[2], keys.shape[1], keys.shape[3], keys.dtype)
        q, k, v = (x.transpose(1, 2).flatten(2) for x in (queries, keys, values))
        cos, sin = rotation
        return rotate_append_angles(
            storage[layer], q, k, v, cos, sin, self.lengths, self.uncommitted
        )

    def read(self, layer: int, num_new: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer up to the `num_new` newest nodes, [B, H, T', D],
        as they are attended to.
        """
        end = self.max_prefix_length(num_new) + self.uncommitted + num_new
        dtype = attention_dtype(self.dtype, self.lengths.device)
        keys, values = (
            slots[:, :end].transpose(1, 2).to(dtype) for slots in self.keys_values(layer)
        )
        return (
            (keys, values) if self.kv_transform is None else self.kv_transform(layer, keys, values)
        )

    @property
    def can_lend_storage(self) -> bool:
        """Return whether kernels may write and read the slots of layers themselves."""
        return self.lends_storage(torch.bfloat16, torch.float32)

    def lends_storage(self, *dtypes: torch.dtype) -> bool:
        """Return whether kernels may write and read the slots of layers themselves, with numbers
        of one of these types.
        """
        parts = self.kv_transform, self.query_observer, self.shapes, self.position_offsets
        is_stored_so = self.storage is None or self.storage.dtype in dtypes
        return is_stored_so and not self.returns_all_keys and all(part is None for part in parts)

    def lend_storage(self, num_new: int, num_heads: int, size: int, dtype: torch.dtype) -> Tensor:
        """Return the storage, for kernels that append the keys of `num_new` nodes in every
        layer.
        """
        self.max_prefix_length(num_new)
        if self.storage is None:
            self.storage = self._allocate_storage(
                self.lengths.new_empty(len(self.lengths), num_heads, 0, size, dtype=dtype)
            )
        return self.storage

    def row_starts(self) -> Tensor:
        """Return the number of each row's first slot [B] among the slots of a layer's keys."""
        return torch.arange(len(self.lengths)) * self.max_length

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of all slots of a layer, [B, T, H, D] each."""
        assert self.storage is not None
        if self.shapes is None:
            return self.storage[layer, 0], self.storage[layer, 1]
        heads, *sizes = self.shapes[layer]
        both = self.storage[self.storage_index[layer], :, :, :, 0]
        keys, values = (
            half[..., : heads * size].unflatten(-1, (heads, size))
            for half, size in zip(both, sizes)
        )
        return keys, values

    @property
    def dtype(self) -> torch.dtype:
        """Return the type in which keys and values are stored."""
        assert self.storage is not None
        return self.storage.dtype

    @property
    def attention_layers(self) -> list[int]:
        """Return the indices of the layers that attend."""
        return list(range(len(self.layers))) if self.shapes is None else list(self.shapes)

    def _allocate_storage(self, keys: Tensor) -> Tensor:
        """Return empty slots for all attention layers."""
        batch, heads, _, size = keys.shape
        count = len(self.layers)
        slot = (heads, size)
        if self.shapes is not None:
            count = len(self.shapes)
            slot = (1, max(shape.width for shape in self.shapes.values()))
        dtype = storage_dtype(keys.dtype, keys.device)
        return torch.zeros(
            (count, 2, batch, self.max_length, *slot), dtype=dtype, device=keys.device
        )

    def add_uncommitted(self, num_nodes: int) -> None:
        """Count the `num_nodes` nodes that a forward over every layer has appended."""
        self.uncommitted += num_nodes
        self.is_empty = False

    def reorder_nodes(self, order: Tensor, layers: slice = slice(None)) -> None:
        """Reorder the appended nodes: the i-th after the committed tokens becomes node `order[b,
        i]` [B, N].
        """
        for recurrence in self.recurrences.values():
            recurrence.reorder_nodes(order)
        if self.storage is None:
            return
        source = self.lengths[:, None] + order
        target = self.lengths[:, None] + torch.arange(order.shape[1], device=order.device)
        target = target.clamp(max=self.max_length - 1)
        if self.is_bounded or not torch.equal(source, target):
            rows = torch.arange(order.shape[0], device=order.device)[:, None]
            self.storage[layers, :, rows, target] = self.storage[layers, :, rows, source]

    def commit(
        self,
        path: Tensor | None,
        counts: Tensor,
        hidden: Tensor | None = None,
        path_hidden: Tensor | None = None,
        are_counted: bool = False,
    ) -> None:
        """Commit the first `counts[b]` of the appended nodes, or of `path[b]` [B, P], which
        ascends. Discard the others.

        `path_hidden` [B, P, ...] receives the rows of `hidden` [B, N, ...] along the path. Nodes
        that `are_counted` are in the lengths of this cache, which has a bound, already.
        """
        for recurrence in self.recurrences.values():
            recurrence.commit(path, counts)
        if path is not None and self.is_bounded and self.storage is not None:
            moved = path, counts, hidden, path_hidden, are_counted
            kv_commit(self.storage, self.lengths, *moved)
        else:
            if (
                path is not None
                and not self.recurrences
                and self.storage is not None
                and self.storage.device.type == "cpu"
            ):
                self._move_path(self.storage, path, counts)
            elif path is not None:
                self.reorder_nodes(path)
            if not are_counted:
                self.lengths += counts
        if not self.is_bounded:
            self.longest = int(self.lengths.max())
        self.roll_back()

    def _move_path(self, storage: Tensor, path: Tensor, counts: Tensor) -> None:
        """Move the first `counts[b]` nodes of `path[b]` [B, P] to the slots after the committed
        tokens, one by one: few of them are elsewhere. A path ascends, so no node is overwritten
        before it was moved."""
        for row, (start, nodes, num_accepted) in enumerate(
            zip(self.lengths.tolist(), path.tolist(), counts.tolist())
        ):
            for step, node in enumerate(nodes[:num_accepted]):
                if node != step:
                    storage[:, :, row, start + step] = storage[:, :, row, start + node]

    def check_no_states(self) -> None:
        """Raise UserError where layers keep a state."""
        if self.recurrences:
            raise UserError(
                "target: its layers keep a state, which cannot take committed tokens back as this "
                "drafter does; use another drafter, such as eagle3"
            )

    def crop(self, lengths: Tensor) -> None:
        """Cut every row to `lengths` [B] committed tokens, which is at most its length, and
        discard the appended nodes.
        """
        self.check_no_states()
        self.lengths.copy_(lengths)
        if not self.is_bounded:
            self.longest = int(self.lengths.max())
        self.roll_back()

    def roll_back(self, committed: int = 0) -> None:
        """Discard all uncommitted nodes, and the newest `committed` committed tokens of every
        row.
        """
        for recurrence in self.recurrences.values():
            recurrence.roll_back(len(self.lengths))
        if committed:
            self.check_no_states()
            self.lengths -= committed
            self.longest -= 0 if self.is_bounded else committed
        self.uncommitted = 0
        self.positions = None
