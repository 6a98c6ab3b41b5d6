"""Decoder inputs of texts with images, as the target's own model computes them.

The multimodal model runs unmodified up to its decoder, and the arguments of the decoder call are
recorded (embeddings, positions in three planes where rotary embeddings have these, states that
later layers add). The decoder then runs with these as with any text. After an image, positions
differ from slot indices; the cache stores the difference. Shapes: B batch, T tokens, D width, P
planes of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from spectrain.data.image_processor import ModelInputs, get_images
from spectrain.errors import UserError
from spectrain.models.cache_arguments import CACHE_ARGUMENTS, accepts_argument
from spectrain.models.forward_override import override_forwards
from spectrain.models.masks import RequestedMask, record_masks
from spectrain.models.model_parts import ModelParts
from spectrain.models.positions import TokenVisibility, uncached_visibility

from .base import ForwardCall

STANDARD_ARGUMENTS = {
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "attention_mask",
    "use_cache",
    "return_dict",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    *CACHE_ARGUMENTS,
}
"""Arguments of a decoder that are not about images, or that a forward of the target sets itself."""

VISIBILITY_KEY = "what tokens see"  # key of the masks by kind of layer


def add_images(call: ForwardCall) -> None:
    """Set the decoder inputs of a call over texts with images, and what each layer sees where
    image tokens see later ones.
    """
    inputs = make_decoder_inputs(
        call.parts, call.tokens, call.plan.texts, call.positions, call.plan.lengths
    )
    if call.plan.cache is not None:
        call.plan.cache.position_offsets = inputs.offsets
    call.image_inputs = inputs.arguments
    if any(inputs.visible_masks):
        call.layer_visibility = _layer_visibility(call, inputs.visible_masks)


def _layer_visibility(
    call: ForwardCall, visible_masks: list[dict[str, Tensor]]
) -> list[TokenVisibility]:
    """Return for each layer what the tokens of texts with images see."""
    plan, positions = call.plan, call.positions
    if plan.mask is not None:
        raise UserError(
            f"target {call.parts.name}: tokens of images see each other, which trees over texts "
            "do not know; use text"
        )
    by_kind: dict[str, TokenVisibility] = {}
    kinds = layer_kinds(call.parts)
    for kind in {*kinds}:
        masks = masks_for_kind(
            visible_masks, plan.lengths or [positions.shape[1]] * len(visible_masks), kind
        )
        if plan.cache is not None:
            by_kind[kind] = plan.cache.visibility(torch.stack(masks), positions, positions)
        else:
            mask = (
                torch.stack(masks) if plan.lengths is None else tuple(mask[None] for mask in masks)
            )
            by_kind[kind] = uncached_visibility(mask, positions, plan.lengths)
    return [by_kind[kind] for kind in kinds]


@dataclass(frozen=True)
class DecoderInputs:
    """The arguments of the decoder for texts, some of which have images."""

    arguments: ModelInputs
    # [B] positions after the text minus its length; None where these are equal
    offsets: Tensor | None
    # For each text, by kind of layer: [T, T] what a token sees, where image tokens see later ones.
    visible_masks: list[dict[str, Tensor]]


def make_decoder_inputs(
    parts: ModelParts,
    tokens: Tensor,
    texts: Sequence[Sequence[int]],
    positions: Tensor,
    lengths: tuple[int, ...] | None,
) -> DecoderInputs:
    """Return the decoder inputs for rows [B, T], padded on the right, or for packed documents of
    these lengths. Texts without images have the given `positions`."""
    dim, sizes = (0, 1) if lengths is None else (1, lengths)
    rows = tokens.split(sizes, dim=dim)
    calls = [
        _capture_call(parts, *text) for text in zip(rows, texts, positions.split(sizes, dim=dim))
    ]
    inputs = {"inputs_embeds": torch.cat([call["inputs_embeds"] for call in calls], dim=dim)}
    planes = max(len(call["position_ids"]) for call in calls)
    inputs["position_ids"] = torch.cat(
        [call["position_ids"].expand(planes, -1, -1) for call in calls], dim=1 + dim
    )
    for name in sorted(
        {name for call in calls for name in call} - STANDARD_ARGUMENTS - {VISIBILITY_KEY}
    ):
        inputs[name] = _merge_argument(
            [call.get(name) for call in calls], rows, dim, f"target {parts.name}", name
        )
    ends = torch.stack(
        [call["position_ids"].max() + 1 - row.shape[1] for call, row in zip(calls, rows)]
    )
    masks = [call.get(VISIBILITY_KEY, {}) for call in calls]
    if planes == 1:
        return DecoderInputs({**inputs, "position_ids": inputs["position_ids"][0]}, None, masks)
    return DecoderInputs(inputs, ends if lengths is None else None, masks)


def layer_kinds(parts: ModelParts) -> list[str]:
    """Return the kind of each layer, by which models distinguish their masks."""
    kinds = getattr(parts.config, "layer_types", None) or ()
    return [kinds[layer] if layer < len(kinds) else "" for layer in range(parts.num_layers)]


def masks_for_kind(
    masks: Sequence[dict[str, Tensor]], sizes: Sequence[int], kind: str
) -> list[Tensor]:
    """Return for each text the mask [T, T] of a kind of layer: the recorded one, or the causal
    one.
    """
    device = next(mask.device for by_kind in masks for mask in by_kind.values())
    causal = (torch.ones(size, size, dtype=torch.bool, device=device).tril() for size in sizes)
    return [by_kind.get(kind, by_kind.get("", default)) for by_kind, default in zip(masks, causal)]


class EmptyOutput(BaseModelOutputWithPast):
    """The output of a decoder that did not run: every attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _capture_call(
    parts: ModelParts, row: Tensor, text: Sequence[int], positions: Tensor
) -> ModelInputs:
    """Return the arguments with which the model calls its decoder for one text [1, T]. A text
    without images keeps its own embeddings."""
    images = get_images(text)
    call = ModelInputs()

    def record(*args: Any, **kwargs: Any) -> EmptyOutput:
        call.update(kwargs)
        return EmptyOutput(last_hidden_state=kwargs["inputs_embeds"])

    pixels = {} if images is None else images.model_inputs(row.shape[1], parts.model)
    with torch.no_grad(), override_forwards([(parts.decoder, record)]), record_masks() as masks:
        _vision_model(parts.model)(input_ids=row, use_cache=False, **pixels)
    own_positions = call.get("position_ids")
    if images is None:
        call |= {"inputs_embeds": parts.head.embed(row), "position_ids": positions[None]}
    else:
        call["position_ids"] = (
            positions[None] if own_positions is None else own_positions.view(-1, 1, row.shape[1])
        )
        call[VISIBILITY_KEY] = _bidirectional_masks(call.get("attention_mask"), masks, positions[0])
    return {name: value for name, value in call.items() if value is not None}


def _vision_model(model: Any) -> Any:
    """Return the part of a model that reads pixels, without the output layer where possible."""
    return model.base_model if accepts_argument(model.base_model, "pixel_values") else model


def _bidirectional_masks(
    masks: Any, requested: Sequence[tuple[Tensor, RequestedMask]], positions: Tensor
) -> dict[str, Tensor]:
    """Return by kind of layer what each token [T, T] sees, where image tokens see later ones. The
    range of layers is not included."""
    visible = {}
    for kind, mask in masks.items() if isinstance(masks, dict) else [("", masks)]:
        request = next((request for tensor, request in requested if tensor is mask), None)
        if request is None:
            continue
        slots = torch.arange(len(positions), device=positions.device)
        later = request.visible_keys(slots, slots).triu(1)
        if bool(later.any()):
            visible[kind] = later | torch.ones_like(later).tril()
    return visible


def _merge_argument(
    parts: list[Any], rows: Sequence[Tensor], dim: int, where: str, name: str
) -> Any:
    """Merge a decoder argument of all texts, which has a row per token, or rows for image tokens
    alone.
    """
    index, first = next((index, part) for index, part in enumerate(parts) if part is not None)
    if isinstance(first, Tensor) and first.shape[:2] == rows[index].shape:
        filled = [
            part if part is not None else first.new_zeros(*row.shape, *first.shape[2:])
            for part, row in zip(parts, rows)
        ]
        return torch.cat(filled, dim=dim)
    if isinstance(first, (list, tuple)) and all(isinstance(tensor, Tensor) for tensor in first):
        return [torch.cat(layer) for layer in zip(*(part for part in parts if part is not None))]
    if isinstance(first, (bool, int, str)):
        return first
    raise UserError(
        f"{where}: its model passes images to its decoder as {name}, which is not supported here; "
        "use text"
    )
