"""Masked attention: models whose layers compute attention themselves, without transformers' attention interface.

Their code asks transformers for a mask and a cache. It gets a mask [B, 1, N, S] over the committed tokens and the nodes after
them, and all keys in the tree cache. In a tree the slot of a node is not its position, so two things that such code computes
from slots are corrected: biases that grow with the slot of a key (ALiBi), and masks that a layer stores (GPT-Neo), whose
windows count positions. Shapes: B batch, N new tokens, S key slots, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from spectrain.errors import UserError
from spectrain.kernels.fused_attention import fused_attention
from spectrain.kernels.tree_attention import Visibility

from .attention import AttentionRange
from .kv_cache import KeyValueShape, TreeCache
from .masks import make_mask

MASKED = "spectrain_masks"  # name in transformers
BIAS_ARGUMENTS = ("alibi", "position_bias")  # arguments that are biases [.., S] of key slots


@dataclass(frozen=True)
class MaskedAttention:
    """What layers with attention of their own need besides a mask."""

    bias_arguments: tuple[str, ...] = ()  # arguments that are biases by slot
    takes_positions: bool = True  # whether the decoder takes position ids
    stored_masks: Mapping[nn.Module, AttentionRange] = field(default_factory=dict)  # modules that store a mask as `bias`


@dataclass
class MaskVisibility:
    """What the tokens of one forward see, as masks."""

    build_mask: Callable[[int | None], Tensor]  # within a window, [B or 1, 1, N, S] bool
    key_positions: Tensor | None  # [B, S] positions of slots; None: the slot indices
    num_heads: int

    def __post_init__(self) -> None:
        self._masks: dict[int | None, Tensor] = {}

    def get_mask(self, window: int | None = None) -> Tensor:
        if window not in self._masks:
            self._masks[window] = self.build_mask(window)
        return self._masks[window]

    def gather_bias(self, bias: Tensor) -> Tensor | PerRowBias:
        """Return biases of slots, [B * H, 1, S] or [H, 1, S or more, the last S used], as biases of the positions in these
        slots."""
        if self.key_positions is None:
            return bias
        batch, size = self.key_positions.shape
        before, own = bias[..., :-size], bias[..., -size:].reshape(-1, self.num_heads, 1, size)
        index = self.key_positions[:, None, None].expand(-1, self.num_heads, -1, -1)
        moved = own.expand(batch, -1, -1, -1).gather(-1, index)
        if len(bias) == batch * self.num_heads:
            return torch.cat([before, moved.flatten(0, 1)], dim=-1)
        return PerRowBias(torch.cat([before.expand(batch, -1, -1, -1), moved], dim=-1))


class PerRowBias:
    """Biases [B, H, 1, S] that replace biases [H, 1, S] shared by all texts, which are sliced before they are added."""

    def __init__(self, bias: Tensor) -> None:
        self.bias, self.shape = bias, bias.shape[1:]

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, cut: tuple[slice, ...]) -> Tensor:
        return self.bias[(slice(None), *cut)]


_active_masks: list[MaskVisibility] = []


def mask_function(
    *args: Any, dtype: torch.dtype = torch.float32, q_length: int = 0, kv_length: int = 0, **kwargs: Any
) -> Tensor:
    """Return the mask that transformers asks for, to be added to scores [B, 1, N, S]."""
    make_mask(*args, q_length=q_length, kv_length=kv_length, **kwargs)  # recorded while a target is inspected
    if _active_masks:
        seen = _active_masks[-1].get_mask()
    else:
        seen = torch.ones(q_length, kv_length, dtype=torch.bool, device=kwargs.get("device")).tril(kv_length - q_length)[
            None, None
        ]
    batch = kwargs.get("batch_size", len(seen))
    added = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
    return added.expand(batch, -1, -1, -1)


def _masked_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention for layers that use the interface but pass nothing except a mask."""
    if any(others.get(name) is not None for name in ("sliding_window", "softcap", "s_aux")):
        raise UserError(
            "target: its attention has windows, caps or sinks, of which its layers tell nothing; use another target"
        )
    attended = fused_attention(query, key, value, attention_mask, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(MASKED, _masked_attention)
AttentionMaskInterface.register(MASKED, mask_function)


def make_mask_visibility(
    positions: Tensor,
    visibility: Visibility | Sequence[Visibility] | None,
    lengths: tuple[int, ...] | None,
    cache: TreeCache | None,
    heads: int,
) -> MaskVisibility:
    """Return what tokens at `positions` [B, N] see: earlier tokens, in documents of these lengths, or a tree's `visibility`."""
    num_new, device = positions.shape[1], positions.device
    if visibility is None:

        def texts(window: int | None) -> Tensor:
            parts = [torch.ones(length, length, dtype=torch.bool, device=device).tril() for length in lengths or (num_new,)]
            return torch.block_diag(*(part if window is None else part.triu(1 - window) for part in parts)).bool()[None, None]

        return MaskVisibility(texts, None if cache is not None else positions.expand(len(positions), -1), heads)
    if not isinstance(visibility, Visibility):
        trees = visibility

        def packed(window: int | None) -> Tensor:
            return torch.block_diag(*(_full_mask(tree, window)[0, 0] for tree in trees)).bool()[None, None]

        return MaskVisibility(packed, positions, heads)
    tree = visibility
    slots = torch.arange(tree.longest + tree.tree.shape[2], device=device)
    offset = (slots - tree.lengths[:, None]).clamp(0, tree.tree.shape[2] - 1)
    appended = positions if tree.key_positions is None else tree.key_positions
    places = torch.where(slots < tree.lengths[:, None], slots, appended.gather(1, offset))
    return MaskVisibility(lambda window: _full_mask(tree, window), places, heads)


def _full_mask(tree: Visibility, window: int | None) -> Tensor:
    mask = tree.attention_mask(window)
    batch, num_new, num_appended = tree.tree.shape
    return tree.tree.new_ones(batch, 1, num_new, tree.longest + num_appended) if mask is None else mask


@contextmanager
def apply_masks(layers: nn.ModuleList, own: MaskedAttention, told: MaskVisibility, cache: TreeCache | None) -> Iterator[None]:
    """Let the layers see this while the context is open."""

    def placed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {name: told.gather_bias(value) if name in own.bias_arguments else value for name, value in kwargs.items()}

    handles = [layer.register_forward_pre_hook(placed, with_kwargs=True) for layer in layers if own.bias_arguments]
    before = {module: module.bias for module in own.stored_masks}
    _active_masks.append(told)
    if cache is not None:
        cache.returns_all_keys = True
    try:
        for module, reach in own.stored_masks.items():
            seen = told.get_mask(reach.window)
            module.bias = F.pad(seen, (0, 0, seen.shape[-1] - seen.shape[-2], 0))
        yield
    finally:
        _active_masks.pop()
        for module, bias in before.items():
            module.bias = bias
        for handle in handles:
            handle.remove()


# Which models they are


class KVRecorder(DynamicCache):
    """A cache that records the shape of the keys and values of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, KeyValueShape] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.shapes[layer_idx] = KeyValueShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def inspect_masked_attention(layers: nn.ModuleList, told: Mapping[str, Any], asks_positions: bool) -> MaskedAttention:
    """Return what layers that were called with the arguments `told` need besides a mask."""
    kept, biases = {}, tuple(name for name in BIAS_ARGUMENTS if told.get(name) is not None)
    if any(told[name].dim() != 3 for name in biases):
        raise UserError("target: its biases by place (ALiBi) are mixed with its masks, which trees replace; use another target")
    for module in layers.modules():
        mask = dict(module.named_buffers(recurse=False)).get("bias")
        if mask is not None and mask.dim() == 4 and mask.dtype == torch.bool and mask.shape[-1] == mask.shape[-2] > 1:
            kept[module] = AttentionRange(_mask_window(mask[0, 0]))
    return MaskedAttention(biases, asks_positions, kept)


def _mask_window(mask: Tensor) -> int | None:
    """Return the window of a causal mask [P, P]: the number of positions that its last token sees."""
    size = len(mask)
    width = int(mask[-1].sum())
    causal = torch.ones_like(mask).tril()
    if not torch.equal(mask, causal.triu(1 - width)):
        raise UserError("target: its layers keep masks that are no window of the text before a token; use another target")
    return None if width == size else width
