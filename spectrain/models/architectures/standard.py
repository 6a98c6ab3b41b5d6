"""The default architecture: layers that attend through transformers' interface, over a tree or over
texts.

Shapes: B batch, N tokens or nodes, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.kernels.tree_attention import Visibility
from spectrain.models.accelerator import accelerator
from spectrain.models.attention import (
    ATTENTION_NAME,
    AttentionRange,
    attn_implementation_for,
    layer_attention,
)
from spectrain.models.cache_types import KeyValueShape
from spectrain.models.compiled_layers import set_forward_context
from spectrain.models.fast import LATE_ROTATION, can_rotate_late, enforce_batch_invariance
from spectrain.models.forward_override import (
    Forward,
    checkpoint_layer,
    identity,
    override_forwards,
    run_on_subset,
    zeros,
)
from spectrain.models.forward_plan import ALL_LAYERS, ForwardPlan, Sublayer
from spectrain.models.limits import has_dynamic_rope
from spectrain.models.model_parts import ModelParts
from spectrain.models.positions import limit_positions, resolve_visibility
from spectrain.models.residual_stream import feed_stream

from .base import Architecture, ForwardCall, LayerAttention
from .probe import ADVICE, Probe, find_range
from .vision import add_images


@dataclass(frozen=True)
class Standard(Architecture):
    """Layers that call transformers' attention interface once each, with a range that they pass
    or that their mask shows.
    """

    attention_name: ClassVar[str] = ATTENTION_NAME

    @classmethod
    def matches(cls, probe: Probe) -> bool:
        return bool(probe.calls)

    @classmethod
    def from_probe(cls, probe: Probe) -> Standard:
        return cls(**attention_fields(probe))

    def resolve_call(self, parts: ModelParts, tokens: Tensor, plan: ForwardPlan) -> ForwardCall:
        assert parts.config._attn_implementation == self.attention_name, (
            "another attention would see no tree and fill no cache"
        )
        assert plan.lengths is None or len(tokens) == 1, "documents are packed into one row"
        plan = limit_positions(parts, tokens, plan)
        call = ForwardCall(parts, plan, tokens, *resolve_visibility(parts, tokens, plan))
        if plan.texts:
            add_images(call)
        return call

    def decoder_arguments(self, call: ForwardCall) -> dict[str, Any]:
        cache = call.plan.cache
        return {
            **(self.text_inputs(call) if call.image_inputs is None else call.image_inputs),
            self.cache_argument: cache,
            "use_cache": cache is not None and self.accepts_use_cache,
            **self.attention_arguments(call),
        }

    def text_inputs(self, call: ForwardCall) -> dict[str, Any]:
        """Return tokens and position ids, which after an image are not the indices in the text."""
        offsets = None if call.plan.cache is None else call.plan.cache.position_offsets
        positions = call.positions if offsets is None else call.positions + offsets[:, None]
        return {"input_ids": call.tokens, "position_ids": positions}

    def attention_arguments(self, call: ForwardCall) -> dict[str, Any]:
        """Return the arguments that layers pass on to attention."""
        return {
            "visibility": call.attention_visibility,
            "tree_cache": call.plan.cache,
            "lengths": call.plan.lengths,
            "ranges": self.attention_ranges,
            **({"layer_visibility": call.layer_visibility} if call.layer_visibility else {}),
            **({} if call.plan.attends is None else {"attends": call.plan.attends}),
            **({LATE_ROTATION: True} if _rotates_late(call) else {}),
        }

    def forward_contexts(self, call: ForwardCall) -> Iterator[AbstractContextManager[Any]]:
        parts, plan = call.parts, call.plan
        if plan.span.hidden is not None:
            self.check_single_stream(parts.name)
            # The last layer, skipped, passes its input on to the final norm.
            yield feed_stream(
                parts.layers[min(plan.span.first, parts.num_layers - 1)], plan.span.hidden
            )
        if not plan.grad and parts.device.type == "cpu" and not self.output_tuple_size:
            is_whole = plan.span is ALL_LAYERS and call.image_inputs is None
            tokens = call.tokens if is_whole else None
            forwards = accelerator().forwards(
                parts.decoder, parts.layers, layer_attention, tokens, self.attention_arguments(call)
            )
            yield override_forwards(forwards)
        yield override_forwards(self._layer_overrides(call))
        if call.attention_visibility is not None:
            yield enforce_batch_invariance()
        yield set_forward_context(
            plan.cache, call.attention_visibility, self._running_attention(call)
        )

    def _layer_overrides(self, call: ForwardCall) -> Iterator[tuple[nn.Module, Forward]]:
        """Yield the layers that do not run as they are, each with its forward: skipped ones, and
        checkpointed ones.
        """
        parts, plan, dropped = call.parts, call.plan, call.plan.span.dropped
        active = plan.span.active_layers(parts.num_layers)
        for index, layer in enumerate(parts.layers):
            running = None if dropped is None else ~dropped[index].cpu()
            if index not in active or (
                running is not None and not running.any() and not parts.runs_in_lockstep
            ):
                yield layer, identity(self.output_tuple_size)
            elif running is not None and not running.all():
                yield (
                    layer,
                    run_on_subset(
                        layer, running, plan.lengths, self.output_tuple_size > 0, parts.device
                    ),
                )
        for sublayer in (skipped for skipped in plan.span.skipped if isinstance(skipped, Sublayer)):
            layer = parts.layers[sublayer.layer]
            # The layer runs uncompiled, because one compilation serves whole layers.
            yield layer, partial(type(layer).forward, layer)
            yield parts.get_sublayer(*sublayer), zeros(returns_tuple=sublayer.kind == "attention")
        if plan.recompute and plan.grad and plan.cache is None:
            for index in active:
                yield parts.layers[index], checkpoint_layer(parts.layers[index])

    def _running_attention(self, call: ForwardCall) -> list[int]:
        """Return the cache indices of the attention modules that run."""
        layers = call.plan.span.attention_layers(call.parts.num_layers)
        indices = self.attention_indices
        return (
            layers if indices is None else [index for layer in layers for index in indices[layer]]
        )

    def capture_blocker(self, parts: ModelParts) -> str | None:
        if has_dynamic_rope(parts.config):
            return (
                f"target {parts.name} reads text lengths from the device for its rotary "
                "embedding (rope_type=dynamic)"
            )
        if self.attention_ranges is not None:
            return (
                f"target {parts.name} has layers of different attention ranges, which "
                "compiled code cannot tell apart"
            )
        return None

    def set_attention(self, model: Any, implementation: str) -> None:
        model.set_attn_implementation(attn_implementation_for(model.config, implementation))


def attention_fields(probe: Probe) -> dict[str, Any]:
    """Return the fields of `Architecture` for a target whose attention calls were recorded,
    after checking them.
    """
    calls, num_layers = probe.calls, probe.parts.num_layers
    layers = [call.layer for call in calls]
    _check_calls(probe, layers)
    shapes = {call.layer: call.shape for call in calls}
    ranges = {call.layer: reach for call in calls if (reach := find_range(probe, call)) is not None}
    states = probe.output[0] if probe.output_tuple_size else probe.output
    alike = are_alike(shapes, num_layers)
    ends = [*probe.first_call[1:], len(calls)]
    return {
        "output_tuple_size": probe.output_tuple_size,
        "has_single_stream": states.dim() == 3,
        "cache_argument": probe.cache_argument,
        "accepts_use_cache": probe.accepts_use_cache,
        "attention_indices": None
        if alike
        else tuple(tuple(layers[i:end]) for i, end in zip(probe.first_call, ends)),
        "kv_shapes": None if alike else shapes,
        "attention_ranges": ranges or None,
        "attention_layers": {
            call.layer: LayerAttention(
                call.shape, ranges.get(call.layer, AttentionRange(call.window))
            )
            for call in calls
        },
    }


def _rotates_late(call: ForwardCall) -> bool:
    """Tell whether attention may rotate queries and keys where it appends to the cache."""
    visibility = call.attention_visibility
    plan = call.plan
    return (
        isinstance(visibility, Visibility)
        and plan.cache is not None
        and plan.attends is None
        and not plan.grad
        and not call.layer_visibility
        and can_rotate_late(plan.cache, call.parts.dtype)
    )


def are_alike(shapes: dict[int, KeyValueShape], num_layers: int) -> bool:
    """Return whether all layers attend, with keys and values of one shape."""
    equal = len(shapes) == num_layers and len({*shapes.values()}) == 1
    return equal and all(shape.key_size == shape.value_size for shape in shapes.values())


def _check_calls(probe: Probe, layers: list[int]) -> None:
    """Raise UserError for layers that attend more than once, that neither attend nor keep a
    state, or that need more.
    """
    states = probe.recurrent_modules
    num_layers = probe.parts.num_layers
    if len({*layers}) < len(layers):
        raise probe.refuse("its layers attend several times to keys of their own")
    if (
        layers != sorted(layers)
        or not {*layers, *states}
        or (not states and len(layers) < num_layers)
    ):
        silent = ", ".join(str(layer) for layer in range(num_layers) if layer not in layers)
        raise probe.refuse(
            f"layers {silent} neither attend by transformers' interface nor keep a state in a "
            "cache of transformers"
        )
    if unsupported := sorted({name for call in probe.calls for name in call.unsupported}):
        arguments = ", ".join(unsupported)
        raise UserError(
            f"target {probe.parts.name}: its attention depends on {arguments}, which tree "
            f"attention does not know; {ADVICE}"
        )
