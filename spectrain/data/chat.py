"""Chat templates and loss masks: which tokens of a rendered conversation belong to the assistant.

Few templates mark the assistant's turns, so this module finds them by rendering growing prefixes of the conversation.
"""

import os
from array import array
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError
from spectrain.models.images import ImageProcessor, get_images

from .images import image_paths, to_template_messages, tokenize_with_images

Message = dict[str, Any]  # "role", and "content": a text, or parts of which some are images


@dataclass(frozen=True)
class Example:
    """A training sequence: its token ids and, for each token, whether the loss counts it."""

    tokens: list[int]
    mask: list[bool]

    @cached_property
    def content_hash(self) -> str:
        """A hash of the tokens and images; it identifies the sequence in a feature store, in any order and batch."""
        images = get_images(self.tokens)
        image_digest = b"" if images is None else images.digest
        return blake2b(array("q", self.tokens).tobytes() + image_digest, digest_size=16).hexdigest()

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first supervised token."""
        return self.tokens[: self.mask.index(True)]


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[Message], for_generation: bool = False) -> str:
    """Render a conversation as text; `for_generation` ends the text where the assistant's next turn begins."""
    try:
        return str(
            tokenizer.apply_chat_template(to_template_messages(messages), tokenize=False, add_generation_prompt=for_generation)
        )
    except Exception as error:  # templates raise whatever their author chose
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"data: the chat template refuses a conversation of {roles} ({error}); mend or drop it") from error


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], vision: ImageProcessor | None = None
) -> list[int]:
    """Return the token ids after which the assistant's turn begins; `vision` processes the images of the conversation."""
    text, paths = render_chat(tokenizer, messages, for_generation=True), image_paths(messages)
    if paths:
        return _require_vision(vision).tokenize_text(text, paths)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _require_vision(vision: ImageProcessor | None) -> ImageProcessor:
    if vision is None:
        raise UserError("data: a conversation has images, and text alone is read here; leave such conversations out")
    return vision


def find_assistant_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message]
) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return the texts to train on, each with the character spans of the assistant's turns, end-of-turn token included.

    The whole conversation is one text if no turn renders differently once later turns follow it. Otherwise, as with
    reasoning models whose templates drop earlier thoughts, each assistant turn has a text of its own.
    """
    conversation_text = render_chat(tokenizer, messages)
    shared: list[tuple[int, int]] = []
    apart: list[tuple[str, list[tuple[int, int]]]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text = render_chat(tokenizer, messages[: index + 1])
        opening = render_chat(tokenizer, messages[:index], for_generation=True)
        start = len(os.path.commonprefix([opening, text]))  # noqa: RUF071 - characters are meant
        if not text.startswith(opening):  # the answer may share its first characters with what the generation prompt adds
            other = render_chat(tokenizer, [*messages[:index], {**message, "content": "\u2400"}])
            start = min(start, len(os.path.commonprefix([other, text])))  # noqa: RUF071
        span = (start, max(start, len(text.rstrip())))  # the line break after the end of turn is the template's
        apart.append((text, [span]))
        if conversation_text.startswith(text[: span[1]]):
            shared.append(span)
    return [(conversation_text, shared)] if len(shared) == len(apart) else apart


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message] | Example, vision: ImageProcessor | None = None
) -> list[Example]:
    """Return the examples (token ids and loss masks) of a conversation.

    An `Example`, which another project has tokenized, is returned unchanged. `vision` processes the images. A UserError is
    raised if a mask supervises no token or every token.
    """
    if isinstance(messages, Example):
        return [messages]
    if not tokenizer.chat_template:
        raise UserError(
            "target: its tokenizer has no chat template; use an instruction-tuned model or add one to the tokenizer"
        )
    if not tokenizer.is_fast:
        raise UserError("target: its tokenizer cannot tell where tokens lie in the text; save it as a fast tokenizer")
    examples, paths = [], image_paths(messages)
    for text, spans in find_assistant_spans(tokenizer, messages):
        encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [any(low <= start < high for low, high in spans) for start, _ in encoded["offset_mapping"]]
        if not any(mask) or all(mask):
            what = "no token is the assistant's" if not any(mask) else "every token is the assistant's"
            raise UserError(f"data: in this conversation {what}, so its chat template or its roles are wrong: {text!r}")
        tokens = list(encoded["input_ids"])
        if paths:
            tokens, mask = tokenize_with_images(tokenizer, _require_vision(vision), text, mask, paths)
        examples.append(Example(tokens, mask))
    return examples
