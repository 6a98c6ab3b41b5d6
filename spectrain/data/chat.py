"""Chat templates and loss masks: which tokens of a rendered conversation the assistant wrote.

Few templates mark the assistant's part, so it is found by rendering growing prefixes of the conversation.
"""

import os
from array import array
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError
from spectrain.models.images import Sight, images_of

from .images import paths_of, template_form, with_images

Message = dict[str, Any]  # "role", and "content": a text, or parts of which some are images


@dataclass(frozen=True)
class Example:
    """One training sequence: token ids, and for each whether it carries loss."""

    tokens: list[int]
    mask: list[bool]

    @cached_property
    def key(self) -> str:
        """A hash of the tokens: what is kept of a sequence is found by it, in whatever order or company it comes."""
        images = images_of(self.tokens)
        seen = b"" if images is None else images.digest
        return blake2b(array("q", self.tokens).tobytes() + seen, digest_size=16).hexdigest()

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first that carries loss."""
        return self.tokens[: self.mask.index(True)]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], prompt: bool = False) -> str:
    """The conversation as text; with `prompt`, up to where the assistant would go on."""
    try:
        return str(tokenizer.apply_chat_template(template_form(messages), tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # templates raise whatever their author chose
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"data: the chat template refuses a conversation of {roles} ({error}); mend or drop it") from error


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, messages: list[Message], sight: Sight | None = None) -> list[int]:
    """The token ids after which the assistant goes on; images are read by a target's `sight`."""
    text, paths = render(tokenizer, messages, prompt=True), paths_of(messages)
    if paths:
        return _sighted(sight).read(text, paths)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _sighted(sight: Sight | None) -> Sight:
    if sight is None:
        raise UserError("data: a conversation has images, and text alone is read here; leave such conversations out")
    return sight


def assistant_spans(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Texts to train on, each with the character spans that the assistant wrote, end-of-turn token included.

    One text for the whole conversation where every turn stays as it was rendered when it was the last one; else, as with
    reasoning models that drop earlier thoughts, one text for each assistant turn.
    """
    whole = render(tokenizer, messages)
    shared: list[tuple[int, int]] = []
    apart: list[tuple[str, list[tuple[int, int]]]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text = render(tokenizer, messages[: index + 1])
        opening = render(tokenizer, messages[:index], prompt=True)
        start = len(os.path.commonprefix([opening, text]))  # noqa: RUF071 - characters are meant
        if not text.startswith(opening):  # the answer may share its first characters with what the generation prompt adds
            other = render(tokenizer, [*messages[:index], {**message, "content": "\u2400"}])
            start = min(start, len(os.path.commonprefix([other, text])))  # noqa: RUF071
        span = (start, max(start, len(text.rstrip())))  # the line break after the end of turn is the template's
        apart.append((text, [span]))
        if whole.startswith(text[: span[1]]):
            shared.append(span)
    return [(whole, shared)] if len(shared) == len(apart) else apart


def tokenize(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message] | Example, sight: Sight | None = None
) -> list[Example]:
    """Token ids and loss masks of a conversation; stops where a mask comes out all zero or all one.

    One that another project has tokenised stays as it is. Images are read by a target's `sight`.
    """
    if isinstance(messages, Example):
        return [messages]
    if not tokenizer.chat_template:
        raise UserError(
            "target: its tokenizer has no chat template; use an instruction-tuned model or add one to the tokenizer"
        )
    if not tokenizer.is_fast:
        raise UserError("target: its tokenizer cannot tell where tokens lie in the text; save it as a fast tokenizer")
    examples, paths = [], paths_of(messages)
    for text, spans in assistant_spans(tokenizer, messages):
        encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [any(low <= start < high for low, high in spans) for start, _ in encoded["offset_mapping"]]
        if not any(mask) or all(mask):
            what = "no token is the assistant's" if not any(mask) else "every token is the assistant's"
            raise UserError(f"data: in this conversation {what}, so its chat template or its roles are wrong: {text!r}")
        tokens = list(encoded["input_ids"])
        if paths:
            tokens, mask = with_images(tokenizer, _sighted(sight), text, mask, paths)
        examples.append(Example(tokens, mask))
    return examples
