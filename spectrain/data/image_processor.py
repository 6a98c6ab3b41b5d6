"""Texts with images: the tokens that stand for images, and the processor that turns images into
model inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError, first_line

ModelInputs = dict[str, Any]


@dataclass(frozen=True)
class Images:
    """The images of a text, as files that are read again for every use, because their pixels take
    more memory than their tokens."""

    text: str  # with one placeholder for each
    paths: tuple[str, ...]
    digest: bytes  # of their contents
    end: int  # index after the last image token
    process_inputs: Callable[[str, Sequence[str]], ModelInputs] = field(repr=False, compare=False)

    def model_inputs(self, length: int, like: nn.Module) -> ModelInputs:
        """Return the model inputs besides the tokens, for a text that may continue after the
        processed part.
        """
        processed = self.process_inputs(self.text, self.paths)
        weight = next(like.parameters())
        inputs = {}
        for name, value in processed.items():
            if name in ("input_ids", "attention_mask"):
                continue
            if isinstance(value, Tensor):
                is_per_token = (
                    value.shape == processed["input_ids"].shape and not value.is_floating_point()
                )
                value = F.pad(value, (0, length - value.shape[1])) if is_per_token else value
                value = value.to(weight.device, weight.dtype if value.is_floating_point() else None)
            inputs[name] = value
        return inputs


class TextWithImages(list[int]):
    """Token ids that carry the images which some of them stand for, also after appending tokens
    or cutting the end.
    """

    def __init__(self, tokens: Iterable[int], images: Images) -> None:
        super().__init__(tokens)
        self.images = images

    def __add__(self, other: Any) -> Any:
        return TextWithImages([*self, *other], self.images)

    def __getitem__(self, index: Any) -> Any:
        tokens = super().__getitem__(index)
        if (
            not isinstance(index, slice)
            or index.start not in (None, 0)
            or index.step not in (None, 1)
        ):
            return tokens
        return TextWithImages(tokens, self.images)

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
        raise UserError(
            f"{who}: it reads text alone, and there are images; leave out conversations that have "
            "any"
        )


class ImageProcessor:
    """Reads images for a target, through the processor that its model ships."""

    def __init__(self, model: str, has_vision: bool, trust_remote_code: bool = False) -> None:
        self.model, self.has_vision, self.trust_remote_code = model, has_vision, trust_remote_code

    @cached_property
    def processor(self) -> Any:
        if not self.has_vision:
            raise UserError(
                f"target {self.model}: it reads text alone, and the data holds images; use a "
                "target that sees them"
            )
        # It imports every kind of processor, which takes a command without images some time.
        from transformers import AutoProcessor

        try:
            return AutoProcessor.from_pretrained(
                self.model, trust_remote_code=self.trust_remote_code
            )
        # Where a package is missing, errors are of any kind.
        except Exception as error:
            raise UserError(
                f"target {self.model}: its processor of images could not be loaded "
                f"({first_line(error)}); see that its files are there, and run pip install pillow "
                "torchvision"
            ) from error

    @property
    def placeholder_id(self) -> int:
        """Return the token that stands for an image, or for a part of one."""
        return int(self.processor.image_token_id)

    def tokenize_text(self, text: str, paths: Sequence[str]) -> TextWithImages:
        """Return the tokens of a text, with every placeholder replaced by the tokens of its
        image.
        """
        tokens = self.process_inputs(text, paths)["input_ids"][0].tolist()
        digest = blake2b(digest_size=16)
        for path in paths:
            digest.update(blake2b(Path(path).read_bytes()).digest())
        last = max(index for index, token in enumerate(tokens) if token == self.placeholder_id)
        return TextWithImages(
            tokens, Images(text, tuple(paths), digest.digest(), last + 1, self.process_inputs)
        )

    def process_inputs(self, text: str, paths: Sequence[str]) -> ModelInputs:
        """Run the processor on a text and its images."""
        pictures = [open_image(path) for path in paths]
        try:
            return dict(
                self.processor(
                    text=[text], images=pictures, add_special_tokens=False, return_tensors="pt"
                )
            )
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
            raise UserError(
                f"target {self.model}: its processor refuses {', '.join(paths)} "
                f"({first_line(error)}); mend or drop them"
            ) from error


def open_image(path: str) -> Any:
    """Return the picture in a file, in RGB."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    # Damaged and oversized files raise errors of many kinds.
    except Exception as error:
        raise UserError(
            f"{path}: it is no picture that can be read ({first_line(error)}); mend or drop it"
        ) from error
