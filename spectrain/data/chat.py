"""Token ids and loss masks of conversations: which tokens the assistant generates, and of which
kind they are.

What a model generates carries loss: content, reasoning and tool calls; what users and tools say
never does. A template that marks generation by {% generation %} says where that is. For others,
rendered prefixes of the conversation show it: an answer is what follows the generation prompt.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

from tokenizers.decoders import DecodeStream

from spectrain.errors import UserError

from .chat_template import (
    KINDS,
    REASONING_NAMES,
    ChatTemplate,
    Kind,
    Markers,
    Message,
    common_length,
)
from .image_processor import ImageProcessor, get_images
from .images import content_text, image_paths, tokenize_with_images
from .messages import Conversation, name_row
from .plain_text import tokenize_text, tokenize_text_prompt

KIND_CODES: dict[Kind, int] = {kind: code for code, kind in enumerate(KINDS, 1)}
"""The code of each kind in `Example.kinds`; 0 stands for context."""

SHOWN_CHARACTERS = 400
"""Characters of a conversation that an error shows."""

INLINE_REASONING = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A training sequence: its token ids and, for each token, whether the loss counts it."""

    tokens: list[int]
    mask: list[bool]
    # The code of each token's kind; empty where the source does not tell kinds apart.
    kinds: bytes = b""
    # File and line of the row that holds the tokens, for errors; empty where a conversation was
    # tokenized.
    origin: str = field(default="", compare=False)

    @cached_property
    def content_hash(self) -> str:
        """A hash of the tokens and images; it identifies the sequence in a feature store, in any
        order and batch.
        """
        images = get_images(self.tokens)
        image_digest = b"" if images is None else images.digest
        return blake2b(array("q", self.tokens).tobytes() + image_digest, digest_size=16).hexdigest()

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first supervised token."""
        return self.tokens[: self.mask.index(True)]

    @property
    def kind_names(self) -> list[str]:
        """The kind of each token: content, reasoning, tool_calls or context.

        Where the source does not tell kinds apart, what carries loss is content.
        """
        if not self.kinds:
            return ["content" if supervised else "context" for supervised in self.mask]
        names = ["context", *KIND_CODES]
        return [names[code] for code in self.kinds]

    def cut(self, length: int) -> Example:
        """Return the first `length` tokens."""
        return Example(self.tokens[:length], self.mask[:length], self.kinds[:length])

    def split(self, length: int) -> list[Example]:
        """Return consecutive examples of at most `length` tokens; a single token at the end is
        left out.
        """
        starts = range(0, max(1, len(self.tokens) - 1), length)
        return [
            Example(self.tokens[at : at + length], self.mask[at : at + length]) for at in starts
        ]


@dataclass(frozen=True)
class AnswerSpan:
    """The characters of a rendered text that one assistant turn generates, end-of-turn token
    included.
    """

    begin: int
    end: int
    # The index of the message.
    message: int
    # The kind of the first character.
    kind: Kind = "content"


@dataclass(frozen=True)
class RenderedText:
    """A text to train on, with its answers in order."""

    text: str
    answers: list[AnswerSpan]


def render_chat(
    template: ChatTemplate, messages: Conversation | Sequence[Message], for_generation: bool = False
) -> str:
    """Render a conversation as text; with `for_generation` the text ends where the assistant's
    next turn begins.
    """
    conversation = Conversation.wrap(messages)
    if (
        any(message.get("tool_calls") for message in conversation.messages)
        and not template.renders_tool_calls
    ):
        raise UserError(
            "data: a conversation has tool calls, and the chat template renders none; leave such "
            "rows out"
        )
    return template.render(
        conversation.messages,
        conversation.tools,
        conversation.documents,
        conversation.template_arguments,
        for_generation,
    )


def tokenize_prompt(
    template: ChatTemplate,
    messages: Conversation | Sequence[Message],
    vision: ImageProcessor | None = None,
) -> list[int]:
    """Return the token ids after which the assistant's turn begins; `vision` processes the images
    of the conversation.

    Answers with generated token ids keep these ids, so that nothing is tokenized twice. A UserError
    is raised for a token that the target cannot read.
    """
    conversation = Conversation.wrap(messages)
    with name_row(conversation.origin):
        tokens = _tokenize_prompt(template, conversation, vision)
        template.check_embedded(tokens)
    return tokens


def _tokenize_prompt(
    template: ChatTemplate, conversation: Conversation, vision: ImageProcessor | None
) -> list[int]:
    if conversation.text is not None:
        return tokenize_text_prompt(template.tokenizer, conversation.text)
    require_template(template)
    text = render_chat(template, conversation, for_generation=True)
    paths = image_paths(conversation.messages)
    if paths:
        return _require_vision(vision).tokenize_text(text, paths)
    spans = [] if not conversation.answer_ids else _shared_spans(template, conversation, text)
    return encode(template, text, spans, conversation.answer_ids)[0]


def tokenize_question(template: ChatTemplate, conversation: Conversation) -> list[int]:
    """Return the prompt of a conversation's first message; plain text where the target has no
    chat template.
    """
    if template.exists:
        return tokenize_prompt(template, conversation.up_to(1))
    return tokenize_prompt(
        template, Conversation([], text=content_text(conversation.messages[0]["content"]))
    )


def require_template(template: ChatTemplate) -> None:
    """Raise a UserError if the target has no chat template."""
    if not template.exists:
        raise UserError(
            "target: its tokenizer has no chat template; give one with target.chat_template=FILE, "
            "use an instruction-tuned model, or train and score on plain text (data=text)"
        )


def _require_vision(vision: ImageProcessor | None) -> ImageProcessor:
    if vision is None:
        raise UserError(
            "data: a conversation has images, and text alone is read here; leave such "
            "conversations out"
        )
    return vision


def render_answers(
    template: ChatTemplate, messages: Conversation | Sequence[Message]
) -> list[RenderedText]:
    """Return the texts to train on, each with its answers.

    The whole conversation is one text if no turn renders differently once later turns follow it.
    Otherwise, as with reasoning models whose templates drop earlier thoughts, each assistant turn
    has a text of its own.
    """
    conversation = Conversation.wrap(messages)
    conversation_text = render_chat(template, conversation)
    turns = [
        _render_turn(template, conversation, index)
        for index, message in enumerate(conversation.messages)
        if message["role"] == "assistant"
    ]
    shared = [
        turn.answers[-1]
        for turn in turns
        if conversation_text.startswith(turn.text[: turn.answers[-1].end])
    ]
    texts = [RenderedText(conversation_text, shared)] if len(shared) == len(turns) else turns
    return (
        [_apply_generation_marks(template, conversation, text) for text in texts]
        if template.marks_generation
        else texts
    )


def _render_turn(template: ChatTemplate, conversation: Conversation, index: int) -> RenderedText:
    """Return the text up to an assistant turn, with the span of this turn."""
    earlier = conversation.up_to(index)
    message = conversation.messages[index]
    text = render_chat(template, conversation.up_to(index + 1))
    opening = render_chat(template, earlier, for_generation=True)
    begin = common_length(opening, text)
    header = (
        opening[common_length(opening, render_chat(template, earlier)) :]
        if template.markers.reasoning
        else ""
    )
    kind = template.markers.last_kind(header)
    reasoning, content = split_reasoning(message)
    if kind == "reasoning" and reasoning and reasoning not in text[begin:]:
        # The template drops the reasoning even of the last turn; the model writes it behind the
        # generation prompt.
        close = "\n</think>\n\n" if opening.endswith("\n") else "</think>"
        text = f"{opening}{reasoning}{close}{content}{template.turn_end}"
        begin = len(opening)
    elif not text.startswith(opening):
        # The answer may share its first characters with what the generation prompt adds.
        blank = Conversation(
            [*earlier.messages, {"role": "assistant", "content": "\u2400"}],
            conversation.tools,
            conversation.documents,
            conversation.template_arguments,
        )
        begin = min(begin, common_length(render_chat(template, blank), text))
        kind = template.markers.last_kind(
            text[common_length(text, render_chat(template, earlier)) : begin]
        )
    # The line break after the end of turn is the template's.
    return RenderedText(text, [AnswerSpan(begin, max(begin, len(text.rstrip())), index, kind)])


def split_reasoning(message: Message) -> tuple[str, str]:
    """Return the reasoning and the content of a message; reasoning may stand in the content,
    before </think>.
    """
    content = content_text(message.get("content") or "")
    field_value = next((message[name] for name in REASONING_NAMES if message.get(name)), "")
    if not field_value and (match := INLINE_REASONING.fullmatch(content)):
        return match[1].strip(), match[2]
    return field_value.strip(), content


def _apply_generation_marks(
    template: ChatTemplate, conversation: Conversation, text: RenderedText
) -> RenderedText:
    """Return the text with the spans that {% generation %} marks in place of those of its
    prefixes.
    """
    count = text.answers[-1].message + 1
    part = (
        conversation
        if text.text == render_chat(template, conversation)
        else conversation.up_to(count)
    )
    marked = template.generation_spans(
        part.messages, part.tools, part.documents, part.template_arguments
    )
    answers = []
    for answer in text.answers:
        spans = [(begin, end) for begin, end in marked if begin < answer.end and end > answer.begin]
        answers += [AnswerSpan(begin, end, answer.message, answer.kind) for begin, end in spans]
    return RenderedText(text.text, answers)


def tokenize_conversation(
    template: ChatTemplate,
    messages: Conversation | Sequence[Message] | Example,
    vision: ImageProcessor | None = None,
    train_on: Sequence[Kind] = KINDS,
    unread: Counter[str] | None = None,
) -> list[Example]:
    """Return the examples (token ids, loss masks, kinds) of a conversation.

    An `Example`, which another project has tokenized, is returned unchanged. `vision` processes the
    images. Only the kinds in `train_on` carry loss. `unread` counts what the chat template does not
    render. A UserError is raised if an answer has no token, if every token is an answer, or for a
    token that the target cannot read.
    """
    if isinstance(messages, Example):
        return [messages]
    conversation = Conversation.wrap(messages)
    with name_row(conversation.origin):
        examples = _tokenize_conversation(template, conversation, vision, train_on, unread)
        for example in examples:
            template.check_embedded(example.tokens)
    return examples


def _tokenize_conversation(
    template: ChatTemplate,
    conversation: Conversation,
    vision: ImageProcessor | None,
    train_on: Sequence[Kind],
    unread: Counter[str] | None,
) -> list[Example]:
    if not template.tokenizer.is_fast:
        raise UserError(
            "target: its tokenizer cannot tell where tokens lie in the text; save it as a fast "
            "tokenizer"
        )
    if conversation.text is not None:
        written = tokenize_text(
            template.tokenizer, conversation.text, conversation.completion, conversation.infill_seed
        )
        return [Example(written.tokens, written.mask)]
    require_template(template)
    texts = render_answers(template, conversation)
    paths = image_paths(conversation.messages)
    if unread is not None:
        unread.update(list_unrendered(template, conversation, [text.text for text in texts]))
    codes = {KIND_CODES[kind] for kind in train_on}
    examples = []
    for text in texts:
        tokens, kinds = encode(template, text.text, text.answers, conversation.answer_ids)
        if not any(kinds) or all(kinds):
            start = (
                text.text
                if len(text.text) <= SHOWN_CHARACTERS
                else f"{text.text[:SHOWN_CHARACTERS]} .."
            )
            problem = (
                "no token is the assistant's"
                if not any(kinds)
                else "every token is the assistant's"
            )
            raise UserError(
                f"data: in this conversation {problem}, so its chat template or its roles are "
                f"wrong: {start!r}"
            )
        if paths:
            tokens, kinds = tokenize_with_images(
                template.tokenizer, _require_vision(vision), text.text, kinds, paths
            )
        examples.append(Example(tokens, [kind in codes for kind in kinds], bytes(kinds)))
    return examples


def encode(
    template: ChatTemplate, text: str, answers: list[AnswerSpan], answer_ids: dict[int, list[int]]
) -> tuple[list[int], list[int]]:
    """Return the token ids of a rendered text and the kind code of each. Answers with generated
    ids keep these ids.
    """
    encoded: Any = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    parts = [
        (begin, end, KIND_CODES[kind])
        for answer in answers
        for begin, end, kind in template.markers.split_kinds(
            text, answer.begin, answer.end, answer.kind
        )
    ]
    tokens: list[int] = list(encoded["input_ids"])
    kinds = _mark_kinds([begin for begin, _ in encoded["offset_mapping"]], parts)
    # A template may mark an answer in several parts, and the generated ids stand for all of them.
    spans: dict[int, AnswerSpan] = {}
    for answer in answers:
        spans[answer.message] = replace(spans.get(answer.message, answer), end=answer.end)
    for number in reversed([number for number in spans if number in answer_ids]):
        _splice(
            template,
            text,
            spans[number],
            answer_ids[number],
            encoded["offset_mapping"],
            tokens,
            kinds,
        )
    return tokens, kinds


def _mark_kinds(starts: list[int], parts: list[tuple[int, int, int]]) -> list[int]:
    """Return the code of the part in which each token begins, 0 outside of all parts; starts and
    parts ascend.
    """
    kinds = []
    number = 0
    for start in starts:
        while number < len(parts) and start >= parts[number][1]:
            number += 1
        kinds.append(parts[number][2] if number < len(parts) and start >= parts[number][0] else 0)
    return kinds


def _splice(
    template: ChatTemplate,
    text: str,
    answer: AnswerSpan,
    ids: list[int],
    offsets: list[tuple[int, int]],
    tokens: list[int],
    kinds: list[int],
) -> None:
    """Put the generated ids of an answer in place of its tokens.

    An end of turn that the model did not write follows as context.
    """
    first = next(
        (at for at, (begin, _) in enumerate(offsets) if begin >= answer.begin), len(offsets)
    )
    last = next((at for at, (begin, _) in enumerate(offsets) if begin >= answer.end), len(offsets))
    tokenizer: Any = template.tokenizer
    head: list[int] = []
    if first and offsets[first - 1][1] > answer.begin:
        # A token reaches across the beginning of the answer; in the prompt it ended there.
        first -= 1
        head = list(
            tokenizer(text[offsets[first][0] : answer.begin], add_special_tokens=False)["input_ids"]
        )
    written = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    end = template.turn_end
    tail = (
        []
        if not end or written.rstrip().endswith(end)
        else list(tokenizer(end, add_special_tokens=False)["input_ids"])
    )
    generated = [KIND_CODES[kind] for kind in token_kinds(template, ids, answer.kind)]
    tokens[first:last] = head + ids + tail
    kinds[first:last] = [0] * len(head) + generated + [0] * len(tail)


def token_kinds(template: ChatTemplate, tokens: Sequence[int], first: Kind) -> list[Kind]:
    """Return the kind of each token of an answer that begins with the kind `first`."""
    if template.markers == Markers():
        return ["content"] * len(tokens)
    text, starts = decode_with_starts(template.tokenizer, tokens)
    parts = list(template.markers.split_kinds(text, 0, len(text), first))
    kinds = list[Kind]()
    number = 0
    for start in starts:
        while number + 1 < len(parts) and start >= parts[number][1]:
            number += 1
        kinds.append(parts[number][2] if parts else first)
    return kinds


def decode_with_starts(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[int]]:
    """Return the text of tokens, special ones included, and the position of the first character
    of each.
    """
    stream = DecodeStream(skip_special_tokens=False)
    text = ""
    starts = []
    for token in tokens:
        starts.append(len(text))
        # A character that takes several tokens comes with its last one.
        text += (
            stream.step(tokenizer.backend_tokenizer, token)
            if tokenizer.is_fast
            else tokenizer.decode([token])
        ) or ""
    return text, starts


def _shared_spans(
    template: ChatTemplate, conversation: Conversation, text: str
) -> list[AnswerSpan]:
    """Return the spans of answers with generated ids that stand in the text as they were
    generated.
    """
    turns = [
        _render_turn(template, conversation, index) for index in sorted(conversation.answer_ids)
    ]
    return [
        turn.answers[-1] for turn in turns if text.startswith(turn.text[: turn.answers[-1].end])
    ]


def list_unrendered(
    template: ChatTemplate, conversation: Conversation, texts: Iterable[str]
) -> list[str]:
    """List what a conversation says and the chat template renders in none of the texts."""
    rendered = "\n".join(texts)
    missing = []
    if conversation.tools and not template.reads("tools"):
        missing.append("tools of a row, which the chat template does not render")
    if conversation.documents and not any(
        str(value) in rendered for value in conversation.documents[0].values()
    ):
        missing.append("documents of a row, which the chat template does not render")
    missing += [
        f"template argument {name!r} of a row, which the chat template does not read"
        for name in conversation.template_arguments
        if not template.reads(name)
    ]
    for message in conversation.messages:
        reasoning, content = split_reasoning(message)
        if message["role"] == "developer" and not template.reads("developer"):
            missing.append("message of the role developer, rendered as system")
        if not _stands_in(content.strip(), rendered):
            missing.append(
                f"content of a message of the role {message['role']}, which the chat template "
                "does not render"
            )
        if reasoning and not _stands_in(reasoning, rendered):
            missing.append("reasoning of a message, which the chat template does not render")
    return missing


def _stands_in(content: str, rendered: str) -> bool:
    """Tell whether a text stands in the rendered one, as it is or in JSON."""
    return (
        content in rendered
        or content.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") in rendered
    )
