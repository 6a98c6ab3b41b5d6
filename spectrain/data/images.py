"""Images in conversations, in the form of the Hugging Face hub: the content of a turn is a list of
texts and images.

The parts are {"type": "text", "text": ..} and {"type": "image", "path": ..}, or {"type": "image"}
with the paths in the row's `images`. Images are files; a path is relative to the folder of the data
file, or absolute.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError
from spectrain.files import shorten_path

from .image_processor import ImageProcessor, TextWithImages

MessageContent = str | list[dict[str, str]]
"""What a turn says: a text, or parts of {"type": "text", "text"} and {"type": "image", "path"}."""


class RowImages:
    """The images of a row, resolved in the order in which its turns name them."""

    def __init__(self, row: Any, where: str, folder: Path | None) -> None:
        listed = row.get("images") if isinstance(row, dict) else None
        self.listed_paths: Iterator[Any] = iter(listed if isinstance(listed, list) else [])
        self.location = where
        self.folder = folder

    def parse_content(self, content: Any) -> MessageContent | None:
        """Return a turn's content in our form; None if it is neither a text nor a list of texts
        and images.
        """
        if not isinstance(content, list):
            return content if isinstance(content, str) else None
        parts = [self._parse_part(part) for part in content]
        valid = [part for part in parts if part is not None]
        if not valid or len(valid) < len(parts):
            return None
        return (
            valid
            if any(part["type"] == "image" for part in valid)
            else "".join(part["text"] for part in valid)
        )

    def _parse_part(self, part: Any) -> dict[str, str] | None:
        if not isinstance(part, dict):
            return None
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if part.get("type") in ("image", "image_url"):
            named = (part[key] for key in ("path", "image", "url", "image_url") if key in part)
            return {
                "type": "image",
                "path": self._resolve_path(next(named, None) or next(self.listed_paths, None)),
            }
        return None

    def _resolve_path(self, named: Any) -> str:
        if isinstance(named, dict):
            named = named.get("path", named.get("url"))
        if not isinstance(named, str) or "://" in named or named.startswith("data:"):
            raise UserError(
                f'{self.location}: an image has no file; write {{"type": "image", "path": '
                f'"PICTURE.png"}}, the '
                f"path as seen from "
                "the data's folder"
            )
        path = Path(named) if self.folder is None else self.folder / named
        try:
            path = path if not named.startswith("~") else Path(named).expanduser()
            is_there = path.is_file()
        # A name may be too long for a file, and ~ the home of nobody.
        except (OSError, RuntimeError):
            is_there = False
        if not is_there:
            raise UserError(
                f"{self.location}: there is no image {shorten_path(path)}; give paths as seen from "
                "the data's folder"
            )
        return str(path)


def content_text(content: MessageContent | None) -> str:
    """Return the text of a turn's content, images left out; empty where there is none."""
    return (
        content
        if isinstance(content, str)
        else "".join(part.get("text", "") for part in content or ())
    )


def image_paths(messages: list[dict[str, Any]]) -> list[str]:
    """Return the image paths of a conversation, in order."""
    parts = [
        part
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    ]
    return [part["path"] for part in parts if part["type"] == "image"]


def tokenize_with_images(
    tokenizer: PreTrainedTokenizerBase,
    vision: ImageProcessor,
    text: str,
    codes: list[int],
    paths: list[str],
) -> tuple[TextWithImages, list[int]]:
    """Return the tokens of a text with every placeholder expanded to the tokens of its image, and
    the expanded codes.

    The code of an image's tokens is 0: no token of an image carries loss.
    """
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    shown = plain.count(vision.placeholder_id)
    if not 0 < shown <= len(paths):
        raise UserError(
            f"data: a conversation has {len(paths)} images, of which the chat template renders "
            f"{shown}; correct the template, or leave such conversations out"
        )
    expanded = vision.tokenize_text(text, paths[:shown])
    return expanded, expand_codes(plain, codes, list(expanded), vision.placeholder_id)


def expand_codes(
    plain: list[int], codes: list[int], expanded: list[int], placeholder: int
) -> list[int]:
    """Expand the codes of the text's tokens to the processor's tokens, in which several tokens
    replace each placeholder.
    """
    result: list[int] = []
    start = 0
    while start < len(plain):
        end = start
        while end < len(plain) and plain[end] == placeholder:
            end += 1
        next_placeholder = next(
            (at for at in range(end, len(plain)) if plain[at] == placeholder), len(plain)
        )
        words = plain[end:next_placeholder]
        position = len(result)
        least = len(result) + end - start
        while expanded[least : least + len(words)] != words and least < len(expanded):
            least += 1
        if end == start and least > position:
            # The processor changed the text itself.
            break
        result += [0] * (least - position) + codes[end:next_placeholder]
        start = next_placeholder
    if len(result) > len(expanded) or start < len(plain):
        raise UserError(
            "data: the target's processor changes the text around images, so it is not known "
            "which tokens are answers"
        )
    return result + [0] * (len(expanded) - len(result))
