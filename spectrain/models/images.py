"""Texts with images: which tokens stand for them, and the decoder inputs that the target's own model computes from both.

The multimodal model runs unmodified up to its decoder, and the arguments of the decoder call are recorded (embeddings,
positions in three planes where rotary embeddings have these, states that later layers add). The decoder then runs with these as
with any text. After an image, positions differ from slot indices; the cache stores the difference. Shapes: B batch, T tokens, D
width, P planes of positions, n image tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoProcessor
from transformers.modeling_outputs import BaseModelOutputWithPast

from spectrain.errors import UserError, first_line

from .forward_override import override_forwards
from .masks import RequestedMask, record_masks

if TYPE_CHECKING:
    from .target import Target

STANDARD_ARGUMENTS = {"input_ids", "inputs_embeds", "position_ids", "attention_mask", "past_key_values", "use_cache",
    "return_dict",
               "cache_position", "output_attentions", "output_hidden_states"}  # fmt: skip
"""Arguments of a decoder that are not about images, or that a forward of the target sets itself."""

VISIBILITY_KEY = "what tokens see"  # key of the masks by kind of layer

ModelInputs = dict[str, Any]


@dataclass(frozen=True)
class Images:
    """The images of a text, as files that are read again for every use, because their pixels take more memory than their
    tokens."""

    text: str  # with one placeholder for each
    paths: tuple[str, ...]
    digest: bytes  # of their contents
    end: int  # index after the last image token
    process_inputs: Callable[[str, Sequence[str]], ModelInputs] = field(repr=False, compare=False)

    def model_inputs(self, length: int, like: nn.Module) -> ModelInputs:
        """Return the model inputs besides the tokens, for a text that may continue after the processed part."""
        found = self.process_inputs(self.text, self.paths)
        weight, given = next(like.parameters()), {}
        for name, value in found.items():
            if name in ("input_ids", "attention_mask"):
                continue
            if isinstance(value, Tensor):
                is_wide = value.dim() == 2 and value.shape == found["input_ids"].shape and not value.is_floating_point()
                value = F.pad(value, (0, length - value.shape[1])) if is_wide else value
                value = value.to(weight.device, weight.dtype if value.is_floating_point() else None)
            given[name] = value
        return given


class TextWithImages(list[int]):
    """Token ids that carry the images which some of them stand for, also after appending tokens or cutting the end."""

    def __init__(self, tokens: Iterable[int], images: Images) -> None:
        super().__init__(tokens)
        self.images = images

    def __add__(self, other: Any) -> Any:
        return TextWithImages([*self, *other], self.images)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if not isinstance(index, slice) or index.start not in (None, 0) or index.step not in (None, 1):
            return found
        return TextWithImages(found, self.images)

    def __repr__(self) -> str:
        return f"{super().__repr__()} {self.images.digest.hex()}"


def get_images(tokens: Sequence[int]) -> Images | None:
    """Return the images of a text; None where it has none."""
    return getattr(tokens, "images", None)


def has_complete_images(tokens: Sequence[int]) -> bool:
    """Return whether no image of a text lost tokens where the end was cut."""
    images = get_images(tokens)
    return images is None or len(tokens) >= images.end


def have_images(texts: Iterable[Sequence[int]]) -> bool:
    """Return whether any of the texts has images."""
    return any(get_images(text) is not None for text in texts)


def refuse_images(texts: Iterable[Sequence[int]], who: str) -> None:
    """Raise UserError where any of the texts has images and `who` reads text only."""
    if have_images(texts):
        raise UserError(f"{who}: it reads text alone, and there are images; leave out conversations that have any")


class ImageProcessor:
    """Reads images for a target, through the processor that its model ships."""

    def __init__(self, model: str, has_vision: bool, trust_remote_code: bool = False) -> None:
        self.model, self.has_vision, self.trust_remote_code = model, has_vision, trust_remote_code

    @cached_property
    def processor(self) -> Any:
        if not self.has_vision:
            raise UserError(f"target {self.model}: it reads text alone, and the data holds images; use a target that sees them")
        try:
            return AutoProcessor.from_pretrained(self.model, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # of any kind, where a package is missing
            raise UserError(
                f"target {self.model}: its processor of images could not be loaded ({first_line(error)}); see that its files "
                "are there, and run pip install pillow torchvision"
            ) from error

    @property
    def placeholder_id(self) -> int:
        """Return the token that stands for an image, or for a part of one."""
        return int(self.processor.image_token_id)

    def tokenize_text(self, text: str, paths: Sequence[str]) -> TextWithImages:
        """Return the tokens of a text, with every placeholder replaced by the tokens of its image."""
        tokens = self.process_inputs(text, paths)["input_ids"][0].tolist()
        digest = blake2b(digest_size=16)
        for path in paths:
            digest.update(blake2b(Path(path).read_bytes()).digest())
        last = max(place for place, token in enumerate(tokens) if token == self.placeholder_id)
        return TextWithImages(tokens, Images(text, tuple(paths), digest.digest(), last + 1, self.process_inputs))

    def process_inputs(self, text: str, paths: Sequence[str]) -> ModelInputs:
        """Run the processor on a text and its images."""
        pictures = [open_image(path) for path in paths]
        try:
            return dict(self.processor(text=[text], images=pictures, add_special_tokens=False, return_tensors="pt"))
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
            raise UserError(
                f"target {self.model}: its processor refuses {', '.join(paths)} ({first_line(error)}); mend or drop them"
            ) from error


def open_image(path: str) -> Any:
    """Return the picture in a file, in RGB."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except OSError as error:
        raise UserError(f"{path}: it is no picture that can be read ({first_line(error)}); mend or drop it") from error


# The inputs of the decoder


@dataclass(frozen=True)
class DecoderInputs:
    """The arguments of the decoder for texts, some of which have images."""

    arguments: ModelInputs
    offsets: Tensor | None  # [B] positions after the text minus its length; None where these are equal
    visible_masks: list[
        dict[str, Tensor]
    ]  # by text and kind of layer [T, T] what a token sees, where tokens of images see ahead


def make_decoder_inputs(
    target: Target, tokens: Tensor, texts: Sequence[Sequence[int]], positions: Tensor, lengths: tuple[int, ...] | None
) -> DecoderInputs:
    """Return the decoder inputs for rows [B, T], padded on the right, or for packed documents of these lengths. Texts without
    images have the given `positions`."""
    rows = list(tokens.split(1)) if lengths is None else list(tokens.split(lengths, dim=1))
    places = list(positions.split(1)) if lengths is None else list(positions.split(lengths, dim=1))
    found = [_capture_call(target, row, text, place) for row, text, place in zip(rows, texts, places)]
    dim = 0 if lengths is None else 1
    inputs = {"inputs_embeds": torch.cat([call["inputs_embeds"] for call in found], dim=dim)}
    planes = max(len(call["position_ids"]) for call in found)
    inputs["position_ids"] = torch.cat([call["position_ids"].expand(planes, -1, -1) for call in found], dim=1 + dim)
    for name in sorted({name for call in found for name in call} - STANDARD_ARGUMENTS - {VISIBILITY_KEY}):
        inputs[name] = _merge_argument([call.get(name) for call in found], rows, dim, name, target)
    ends = torch.stack([call["position_ids"].max() + 1 - row.shape[1] for call, row in zip(found, rows)])
    seen = [call.pop(VISIBILITY_KEY, {}) for call in found]
    if planes == 1:
        return DecoderInputs({**inputs, "position_ids": inputs["position_ids"][0]}, None, seen)
    return DecoderInputs(inputs, ends if lengths is None else None, seen)


def layer_kinds(target: Target) -> list[str]:
    """Return the kind of each layer, by which models distinguish their masks."""
    kinds = getattr(target.config, "layer_types", None) or ()
    return [kinds[layer] if layer < len(kinds) else "" for layer in range(target.num_layers)]


def masks_for_kind(parts: Sequence[dict[str, Tensor]], sizes: Sequence[int], kind: str) -> list[Tensor]:
    """Return for each text the mask [T, T] of a kind of layer: the recorded one, or the causal one."""
    device = next(mask.device for part in parts for mask in part.values())
    causal = (torch.ones(size, size, dtype=torch.bool, device=device).tril() for size in sizes)
    return [part.get(kind, part.get("", before)) for part, before in zip(parts, causal)]


class EmptyOutput(BaseModelOutputWithPast):
    """The output of a decoder that did not run: every attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _capture_call(target: Target, row: Tensor, text: Sequence[int], positions: Tensor) -> ModelInputs:
    """Return the arguments with which the model calls its decoder for one text [1, T]. A text without images keeps its own
    embeddings."""
    images, noted = get_images(text), ModelInputs()

    def note(*args: Any, **kwargs: Any) -> EmptyOutput:
        noted.update(kwargs)
        return EmptyOutput(last_hidden_state=kwargs["inputs_embeds"])

    pixels = {} if images is None else images.model_inputs(row.shape[1], target.model)
    with torch.no_grad(), override_forwards([(target.decoder, note)]), record_masks() as asked:
        _vision_model(target.model)(input_ids=row, use_cache=False, **pixels)
    told = noted.get("position_ids")
    if images is None:
        noted |= {"inputs_embeds": target.head.embed(row), "position_ids": positions[None]}
    else:
        noted["position_ids"] = positions[None] if told is None else told.view(-1, 1, row.shape[1])
        noted[VISIBILITY_KEY] = _bidirectional_masks(noted.get("attention_mask"), asked, positions[0])
    return {name: value for name, value in noted.items() if value is not None}


def _vision_model(model: Any) -> Any:
    """Return the part of a model that reads pixels, without the output layer where possible."""
    return model.base_model if "pixel_values" in inspect.signature(model.base_model.forward).parameters else model


def _bidirectional_masks(given: Any, asked: Sequence[tuple[Tensor, RequestedMask]], places: Tensor) -> dict[str, Tensor]:
    """Return by kind of layer what each token [T, T] sees, where image tokens see later ones. The range of layers is not
    included."""
    found = {}
    for kind, mask in given.items() if isinstance(given, dict) else [("", given)]:
        said = next((function for tensor, function in asked if tensor is mask), None)
        if said is None:
            continue
        slots = torch.arange(len(places), device=places.device)
        ahead = said.visible_keys(slots, slots).triu(1)
        if bool(ahead.any()):
            found[kind] = ahead | torch.ones_like(ahead).tril()
    return found


def _merge_argument(parts: list[Any], rows: list[Tensor], dim: int, name: str, target: Target) -> Any:
    """Merge a decoder argument of all texts, which has a row per token, or rows for image tokens alone."""
    first = next(place for place, part in enumerate(parts) if part is not None)
    some = parts[first]
    if isinstance(some, Tensor) and some.shape[:2] == rows[first].shape:
        blank = [part if part is not None else some.new_zeros(*row.shape, *some.shape[2:]) for part, row in zip(parts, rows)]
        return torch.cat(blank, dim=dim)
    if isinstance(some, (list, tuple)) and all(isinstance(one, Tensor) for one in some):
        return [torch.cat(layer) for layer in zip(*(part for part in parts if part is not None))]
    if isinstance(some, (bool, int, str)):
        return some
    raise UserError(f"target {target.name}: its model tells its decoder of images by {name}, which is not known here; use text")
