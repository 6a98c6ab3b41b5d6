"""Images in conversations, in the hub's form: a turn's content is a list of parts, texts and images.

{"type": "text", "text": ..} and {"type": "image", "path": ..}, or {"type": "image"} with the paths in the row's `images`.
Images are files: a path is one from the folder of the data's file, or a whole one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError
from spectrain.models.images import ImageProcessor, TextWithImages

MessageContent = str | list[dict[str, str]]
"""What a turn says: a text, or parts of {"type": "text", "text"} and {"type": "image", "path"}."""


class RowImages:
    """The images of a row, found as its turns name them."""

    def __init__(self, row: Any, where: str, folder: Path | None) -> None:
        listed = row.get("images") if isinstance(row, dict) else None
        self.listed_paths: Iterator[Any] = iter(listed if isinstance(listed, list) else [])
        self.location, self.folder = where, folder

    def parse_content(self, said: Any) -> MessageContent | None:
        """A turn's content in our form; None where it is neither a text nor a list of texts and images."""
        if not isinstance(said, list):
            return said if isinstance(said, str) else None
        parts = [self._parse_part(part) for part in said]
        found = [part for part in parts if part is not None]
        if not found or len(found) < len(parts):
            return None
        return found if any(part["type"] == "image" for part in found) else "".join(part["text"] for part in found)

    def _parse_part(self, part: Any) -> dict[str, str] | None:
        if not isinstance(part, dict):
            return None
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if part.get("type") in ("image", "image_url"):
            named = (part[key] for key in ("path", "image", "url", "image_url") if key in part)
            return {"type": "image", "path": self._resolve_path(next(named, None) or next(self.listed_paths, None))}
        return None

    def _resolve_path(self, named: Any) -> str:
        if isinstance(named, dict):
            named = named.get("path", named.get("url"))
        if not isinstance(named, str) or "://" in named or named.startswith("data:"):
            raise UserError(
                f'{self.location}: an image has no file; write {{"type": "image", "path": "PICTURE.png"}}, the '
                f"path as seen from "
                "the data's folder"
            )
        place = Path(named).expanduser()
        place = place if self.folder is None else self.folder / place
        if not place.is_file():
            raise UserError(f"{self.location}: there is no image {place}; give paths as seen from the data's folder")
        return str(place)


def content_text(content: MessageContent) -> str:
    """What is said in words."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def image_paths(messages: list[dict[str, Any]]) -> list[str]:
    """The images of a conversation, in their order."""
    parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
    return [part["path"] for part in parts if part["type"] == "image"]


def to_template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates want them, which ask for no path."""

    def shown(content: MessageContent) -> Any:
        if isinstance(content, str):
            return content
        return [{key: value for key, value in part.items() if key != "path"} for part in content]

    return [{**message, "content": shown(message["content"])} for message in messages]


def tokenize_with_images(
    tokenizer: PreTrainedTokenizerBase, vision: ImageProcessor, text: str, mask: list[bool], paths: list[str]
) -> tuple[TextWithImages, list[bool]]:
    """The tokens of a text, every placeholder replaced by those of its image, and the `mask` of its own tokens spread over
    them: no token of an image carries loss."""
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    shown = plain.count(vision.placeholder_id)
    if not 0 < shown <= len(paths):
        raise UserError(
            f"data: a conversation has {len(paths)} images, of which the chat template tells {shown}; mend the template, "
            "or leave such conversations out"
        )
    found = vision.tokenize_text(text, paths[:shown])
    return found, expand_mask(plain, mask, list(found), vision.placeholder_id)


def expand_mask(plain: list[int], mask: list[bool], whole: list[int], placeholder: int) -> list[bool]:
    """A mask of `plain` tokens over the `whole` of them, in which more than one token stands for each placeholder."""
    result: list[bool] = []
    start = 0
    while start < len(plain):
        end = start
        while end < len(plain) and plain[end] == placeholder:
            end += 1
        behind = next((at for at in range(end, len(plain)) if plain[at] == placeholder), len(plain))
        words = plain[end:behind]
        place, least = len(result), len(result) + end - start
        while whole[least : least + len(words)] != words and least < len(whole):
            least += 1
        if end == start and least > place:
            break  # the text itself is told otherwise
        result += [False] * (least - place) + mask[end:behind]
        start = behind
    if len(result) > len(whole) or start < len(plain):
        raise UserError(
            "data: the target's processor changes the text around images, so it is not known which tokens are answers"
        )
    return result + [False] * (len(whole) - len(result))
