"""Masked attention: models whose layers compute attention themselves, without transformers'
attention interface.

Their code requests a mask and a cache from transformers. It receives a mask [B, 1, N, S] over the
committed tokens and the nodes after them, and all keys in the tree cache. In a tree the slot of a
node is not its position, so two things that such code computes from slots are corrected: biases
that grow with the slot of a key (ALiBi), and masks that a layer stores (GPT-Neo), whose windows
count positions. Shapes: B batch, N new tokens, S key slots, H heads, P positions of a stored mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from spectrain.errors import UserError
from spectrain.kernels.fused_attention import fused_attention
from spectrain.kernels.tree_attention import Visibility
from spectrain.models.attention import AttentionRange
from spectrain.models.cache_arguments import accepts_argument
from spectrain.models.cache_types import KeyValueShape
from spectrain.models.masks import make_mask, record_masks
from spectrain.models.model_parts import ModelParts

from .base import ForwardCall, LayerAttention
from .probe import Probe, are_causal, explain_incompatibility
from .standard import Standard, are_alike

MASKED = "spectrain_masks"  # name in transformers
BIAS_ARGUMENTS = ("alibi", "position_bias")  # arguments that are biases [.., S] of key slots


@dataclass(frozen=True)
class Masked(Standard):
    """Layers that compute attention themselves, by masks that they are passed and over all keys
    of the cache.
    """

    attention_name: ClassVar[str] = MASKED
    attends_by_masks: ClassVar[bool] = True

    bias_arguments: tuple[str, ...] = ()  # arguments that are biases by slot
    takes_positions: bool = True  # whether the decoder takes position ids
    # modules that store a mask as `bias`
    stored_masks: Mapping[nn.Module, AttentionRange] = field(default_factory=dict)

    @classmethod
    def matches(cls, probe: Probe) -> bool:
        return not probe.calls and not probe.recurrent_modules

    @classmethod
    def from_probe(cls, probe: Probe) -> Masked:
        parts = probe.parts
        recorder = KVRecorder()
        arguments = _record_layer_call(probe, recorder)
        shapes = recorder.shapes
        is_causal = are_causal(probe.masks, parts.device)
        if sorted(shapes) != [*range(parts.num_layers)] or not is_causal:
            what = (
                "keep no keys in a cache of transformers"
                if is_causal or not shapes
                else "make masks of their own"
            )
            raise probe.refuse(f"its layers go past transformers' attention interface and {what}")
        stored = find_stored_masks(parts.layers)
        windows = [
            next((stored[module].window for module in layer.modules() if module in stored), None)
            for layer in parts.layers
        ]
        return cls(
            output_tuple_size=probe.output_tuple_size,
            cache_argument=probe.cache_argument,
            kv_shapes=None if are_alike(shapes, parts.num_layers) else shapes,
            attention_layers={
                layer: LayerAttention(shape, AttentionRange(windows[layer]))
                for layer, shape in shapes.items()
            },
            bias_arguments=find_bias_arguments(arguments),
            takes_positions=accepts_argument(parts.decoder, "position_ids"),
            stored_masks=stored,
        )

    def text_inputs(self, call: ForwardCall) -> dict[str, Any]:
        return super().text_inputs(call) if self.takes_positions else {"input_ids": call.tokens}

    def attention_arguments(self, call: ForwardCall) -> dict[str, Any]:
        return {}

    def forward_contexts(self, call: ForwardCall) -> Iterator[AbstractContextManager[Any]]:
        yield from super().forward_contexts(call)
        yield self._apply_masks(call)

    @contextmanager
    def _apply_masks(self, call: ForwardCall) -> Iterator[None]:
        """Pass the layers the masks of the call while the context is open."""
        visibility = make_mask_visibility(call)
        layers = call.parts.layers
        cache = call.plan.cache

        def move_biases(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            biases = {
                name: visibility.gather_bias(kwargs[name])
                for name in self.bias_arguments
                if name in kwargs
            }
            return args, kwargs | biases

        before = {module: module.bias for module in self.stored_masks}
        if cache is not None:
            cache.returns_all_keys = True
        with ExitStack() as hooks:
            for layer in layers if self.bias_arguments else ():
                hooks.enter_context(layer.register_forward_pre_hook(move_biases, with_kwargs=True))
            _active_masks.append(visibility)
            try:
                for module, reach in self.stored_masks.items():
                    mask = visibility.get_mask(reach.window)
                    module.bias = F.pad(mask, (0, 0, mask.shape[-1] - mask.shape[-2], 0))
                yield
            finally:
                _active_masks.pop()
                for module, bias in before.items():
                    module.bias = bias

    def capture_blocker(self, parts: ModelParts) -> str | None:
        reason = (
            f"target {parts.name} has layers with their own attention, whose masks are built "
            "in every round"
        )
        return super().capture_blocker(parts) or reason

    def set_attention(self, model: Any, implementation: str) -> None:
        # transformers refuses to set it, because the model's code does not use the interface.
        model.config._attn_implementation = implementation


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
        """Return biases of slots, [B * H, 1, S] or [H, 1, S or more, the last S used], as biases of
        the positions in these slots."""
        if self.key_positions is None:
            return bias
        batch, size = self.key_positions.shape
        before = bias[..., :-size]
        used = bias[..., -size:].reshape(-1, self.num_heads, 1, size)
        index = self.key_positions[:, None, None].expand(-1, self.num_heads, -1, -1)
        moved = used.expand(batch, -1, -1, -1).gather(-1, index)
        if len(bias) == batch * self.num_heads:
            return torch.cat([before, moved.flatten(0, 1)], dim=-1)
        return PerRowBias(torch.cat([before.expand(batch, -1, -1, -1), moved], dim=-1))


class PerRowBias:
    """Biases [B, H, 1, S] that replace biases [H, 1, S] shared by all texts, which are sliced
    before they are added.
    """

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias
        self.shape = bias.shape[1:]

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, cut: tuple[slice, ...]) -> Tensor:
        return self.bias[(slice(None), *cut)]


_active_masks: list[MaskVisibility] = []


def mask_function(
    *args: Any,
    dtype: torch.dtype = torch.float32,
    q_length: int = 0,
    kv_length: int = 0,
    **kwargs: Any,
) -> Tensor:
    """Return the mask that transformers requests, to be added to scores [B, 1, N, S]."""
    # The request is recorded while a target is probed.
    make_mask(*args, q_length=q_length, kv_length=kv_length, **kwargs)
    if _active_masks:
        visible = _active_masks[-1].get_mask()
    else:
        ones = torch.ones(q_length, kv_length, dtype=torch.bool, device=kwargs.get("device"))
        visible = ones.tril(kv_length - q_length)[None, None]
    batch = kwargs.get("batch_size", len(visible))
    added = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )
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
            "target: its attention has windows, caps or sinks, which tree attention does not "
            "support here; use another target"
        )
    attended = fused_attention(query, key, value, attention_mask, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(MASKED, _masked_attention)
AttentionMaskInterface.register(MASKED, mask_function)


def make_mask_visibility(call: ForwardCall) -> MaskVisibility:
    """Return what the tokens [B, N] of a call see: earlier tokens, in packed documents, or a
    tree.
    """
    positions = call.positions
    lengths = call.plan.lengths
    tree = call.attention_visibility
    num_new = positions.shape[1]
    device = positions.device
    heads = getattr(call.parts.config, "num_attention_heads", 1)
    if tree is None:

        def causal_mask(window: int | None) -> Tensor:
            parts = [
                torch.ones(length, length, dtype=torch.bool, device=device).tril()
                for length in lengths or (num_new,)
            ]
            return torch.block_diag(
                *(part if window is None else part.triu(1 - window) for part in parts)
            ).bool()[None, None]

        return MaskVisibility(
            causal_mask, None if call.plan.cache is not None else positions, heads
        )
    if isinstance(tree, list):
        trees = tree

        def packed_mask(window: int | None) -> Tensor:
            return torch.block_diag(
                *(_full_mask(document, window)[0, 0] for document in trees)
            ).bool()[None, None]

        return MaskVisibility(packed_mask, positions, heads)
    slots = torch.arange(tree.longest + tree.tree.shape[2], device=device)
    offset = (slots - tree.lengths[:, None]).clamp(0, tree.tree.shape[2] - 1)
    appended = positions if tree.key_positions is None else tree.key_positions
    key_positions = torch.where(slots < tree.lengths[:, None], slots, appended.gather(1, offset))
    return MaskVisibility(partial(_full_mask, tree), key_positions, heads)


def _full_mask(tree: Visibility, window: int | None) -> Tensor:
    mask = tree.attention_mask(window)
    batch, num_new, num_appended = tree.tree.shape
    return (
        tree.tree.new_ones(batch, 1, num_new, tree.longest + num_appended) if mask is None else mask
    )


# Detection


class KVRecorder(DynamicCache):
    """A cache that records the shape of the keys and values of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, KeyValueShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.shapes[layer_idx] = KeyValueShape(
            key_states.shape[1], key_states.shape[3], value_states.shape[3]
        )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _record_layer_call(probe: Probe, cache: KVRecorder) -> dict[str, Any]:
    """Run two tokens through the target with a cache, and return the arguments of its first
    layer.
    """
    parts = probe.parts
    arguments = dict[str, Any]()
    parts.config._attn_implementation = MASKED
    record_arguments = parts.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: arguments.update(kwargs), with_kwargs=True
    )
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=parts.device)
    with (
        record_arguments,
        probe.record_output(),
        torch.no_grad(),
        explain_incompatibility(parts.name),
        record_masks() as probe.masks,
    ):
        parts.decoder(input_ids=tokens, **probe.cache_arguments(cache))
    return arguments


def find_bias_arguments(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments of a layer that are biases by key slot."""
    biases = tuple(name for name in BIAS_ARGUMENTS if arguments.get(name) is not None)
    if any(arguments[name].dim() != 3 for name in biases):
        raise UserError(
            "target: its biases by place (ALiBi) are mixed with its masks, which trees replace; "
            "use another target"
        )
    return biases


def find_stored_masks(layers: nn.ModuleList) -> dict[nn.Module, AttentionRange]:
    """Return the modules that store a causal mask [1, 1, P, P] as `bias`, with its window."""
    stored = {}
    for module in layers.modules():
        mask = dict(module.named_buffers(recurse=False)).get("bias")
        if (
            mask is not None
            and mask.dim() == 4
            and mask.dtype == torch.bool
            and mask.shape[-1] == mask.shape[-2] > 1
        ):
            stored[module] = AttentionRange(_mask_window(mask[0, 0]))
    return stored


def _mask_window(mask: Tensor) -> int | None:
    """Return the window of a causal mask [P, P]: the number of positions that its last token
    sees.
    """
    size = len(mask)
    width = int(mask[-1].sum())
    if not torch.equal(mask, torch.ones_like(mask).tril().triu(1 - width)):
        raise UserError(
            "target: its layers keep masks that are no window of the text before a token; use "
            "another target"
        )
    return None if width == size else width
