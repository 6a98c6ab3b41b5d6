"""The chat template of a target: how it renders a conversation, which fields it reads, and the
kinds of text in an answer.

Templates differ in what they accept: a missing content, arguments of tool calls as an object or as
JSON text, the role `developer`. A probe conversation shows which of these forms a template renders,
so that no list of models is needed. Another probe finds the strings that begin reasoning, content
and tool calls, such as <think>, </think> and <tool_call>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from itertools import product
from os.path import commonprefix
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError, first_line

from .template_arguments import check_template_arguments
from .template_limits import TemplateLimitError

Message = dict[str, Any]
"""A message in the form of `apply_chat_template`: role, content (text, null or parts),
tool_calls, reasoning_content ..
"""

Kind = Literal["content", "reasoning", "tool_calls"]
KINDS: tuple[Kind, ...] = ("content", "reasoning", "tool_calls")
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")

# A tag such as <think>, <|channel|> or [TOOL_CALLS].
TAG = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,30}\]")
QUESTION = "Probe question"
THOUGHT = "Probe thought"
ANSWER = "Probe answer"
TOOL = "probe_tool"
# Nine letters and digits: Mistral's templates accept no other id.
PROBE_CALL = {
    "id": "probe0001",
    "type": "function",
    "function": {"name": TOOL, "arguments": {"probe_key": "probe value"}},
}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A key."}},
        },
    },
}


# What transformers calls the function by which a template asks for the date or the time.
CLOCK_NAME = "strftime_now"
CLOCK_CALL = re.compile(
    rf"""\b{CLOCK_NAME}\s*\(\s*(?P<quote>["'])(?P<format>[^"'\\]*)(?P=quote)\s*\)"""
)
CLOCK_USE = re.compile(rf"\b{CLOCK_NAME}\b(?!\s+is\s+(?:not\s+)?defined)")
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
# The date that Llama 3's template prints where nothing tells it the date.
FIXED_DATE = datetime(2024, 7, 26)


@dataclass(frozen=True)
class Markers:
    """The strings that begin each kind of text in an answer; None for a kind that the template
    does not have.
    """

    reasoning: str | None = None
    # Ends the reasoning, or begins the final content.
    content: str | None = None
    tool_calls: str | None = None

    def split_kinds(
        self, text: str, begin: int, end: int, kind: Kind = "content"
    ) -> Iterator[tuple[int, int, Kind]]:
        """Yield the (begin, end, kind) of the parts of text[begin:end], which begins with `kind`,
        in order and without gaps.

        A marker of reasoning or of tool calls belongs to the part that it begins, and a marker of
        content to the part that it ends. A marker of tool calls that is mere JSON, such as {"name":
        ", counts only where an answer begins.
        """
        start = at = begin
        while at < end:
            position, marker, following = self._next_marker(text, at, end, begin)
            if marker is None:
                break
            edge = position if following != "content" else position + len(marker)
            if following != kind:
                if edge > start:
                    yield start, edge, kind
                start = edge
                kind = following
            at = position + len(marker)
        if end > start:
            yield start, end, kind

    def _next_marker(
        self, text: str, at: int, end: int, begin: int
    ) -> tuple[int, str | None, Kind]:
        best: tuple[int, str | None, Kind] = (end, None, "content")
        for kind, marker in (
            ("reasoning", self.reasoning),
            ("content", self.content),
            ("tool_calls", self.tool_calls),
        ):
            if marker is None:
                continue
            position = text.find(marker, at, end)
            if kind == "tool_calls" and "{" in marker and text[begin:position].strip():
                continue
            if 0 <= position < best[0]:
                best = (position, marker, kind)  # type: ignore[assignment]
        return best

    def last_kind(self, text: str) -> Kind:
        """Return the kind of what follows the text, such as the generation prompt of a template
        that opens <think> itself.
        """
        kinds = list(self.split_kinds(text + "\n\0", 0, len(text) + 2))
        return kinds[-1][2]


class ChatTemplate:
    """The chat template of a tokenizer with the arguments that it is always rendered with, such as
    enable_thinking.

    `num_embeddings` is the number of rows of the target's embedding, where a target is loaded:
    token ids must be below it. A template that prints today's date prints `FIXED_DATE` instead, so
    that data, stores and resumed trainings have the same tokens on every day. With `reads_clock` it
    prints today's, for answers to somebody who asks now.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any] | None = None,
        num_embeddings: int | None = None,
        reads_clock: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.arguments = check_template_arguments(arguments, "template_kwargs")
        self.num_embeddings = num_embeddings
        self.reads_clock = reads_clock

    @property
    def exists(self) -> bool:
        """Whether the tokenizer has a chat template; base models and code models have none."""
        return bool(self.tokenizer.chat_template)

    @property
    def source(self) -> str:
        """The text of the template, of all of them where there are several by name."""
        template: Any = self.tokenizer.chat_template or ""
        return (
            template
            if isinstance(template, str)
            else "\n".join(template[name] for name in sorted(template))
        )

    def facts(self) -> dict[str, Any]:
        """Return what identifies the rendering: a hash of the template, and its arguments."""
        digest = sha256(self.source.encode()).hexdigest()[:16] if self.exists else None
        date = (
            {"date": FIXED_DATE.date().isoformat()}
            if self.prints_date and not self.reads_clock
            else {}
        )
        return {"sha256": digest, "arguments": self.arguments, **date}

    @property
    def prints_date(self) -> bool:
        """Whether the template asks for the date or the time."""
        return CLOCK_NAME in self.source

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with these arguments added."""
        if not arguments:
            return self
        return ChatTemplate(
            self.tokenizer, {**self.arguments, **arguments}, self.num_embeddings, self.reads_clock
        )

    def with_clock(self) -> ChatTemplate:
        """Return the template as it prints the real date."""
        return ChatTemplate(self.tokenizer, self.arguments, self.num_embeddings, reads_clock=True)

    @property
    def vocab_size(self) -> int:
        """The number that token ids must be below: the rows of the embedding, or without a
        target the tokenizer's tokens.
        """
        return len(self.tokenizer) if self.num_embeddings is None else self.num_embeddings

    def check_embedded(self, tokens: Sequence[int]) -> None:
        """Raise a UserError for a text with a token that has no row in the target's embedding."""
        largest = max(tokens, default=0)
        if self.num_embeddings is not None and largest >= self.num_embeddings:
            raise UserError(
                f"data: a text holds {self.tokenizer.convert_ids_to_tokens(largest)!r}, the token "
                f"{largest} of the target's tokenizer, and the target's embedding has "
                f"{self.num_embeddings} rows; leave such texts out, or resize the embedding and "
                "train it"
            )

    def reads(self, name: str) -> bool:
        """Tell whether the template names this field, role or variable."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template marks what the model generates, by {% generation %}."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        for_generation: bool = False,
    ) -> str:
        """Render messages as text; with `for_generation` the text ends where the assistant's next
        turn begins.

        A template that refuses the conversation, or that needs more than its limits, raises a
        UserError.
        """
        own = check_template_arguments(arguments, "data")
        try:
            return self._render(self.adapt(messages), tools, documents, own, for_generation)
        except TemplateLimitError:
            raise
        except Exception as error:  # templates raise whatever their author chose
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"data: the chat template refuses a conversation of {roles} "
                f"({first_line(error)}); mend or drop it"
            ) from error

    def _render(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        documents: Any = None,
        arguments: Any = None,
        opens: bool = False,
    ) -> str:
        options = {**self.arguments, **(arguments or {})}
        if self.prints_date and not self.reads_clock:
            options = {"chat_template": self._select_source(tools), **options}
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                documents=documents,
                tokenize=False,
                add_generation_prompt=opens,
                **options,
            )
        )

    def generation_spans(
        self, messages: Sequence[Message], tools: Any, documents: Any, arguments: Any
    ) -> list[tuple[int, int]]:
        """Return the character spans that a template with {% generation %} marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        present = [
            {key: value for key, value in message.items() if value is not None}
            for message in self.adapt(messages)
        ]
        options = {
            **self.tokenizer.special_tokens_map,
            **self.arguments,
            **check_template_arguments(arguments, "data"),
        }
        _, spans = render_jinja_template(
            [present],
            tools,
            documents,
            self._select_source(tools),
            return_assistant_tokens_mask=True,
            **options,
        )
        return [(begin, end) for begin, end in spans[0]]

    def _select_source(self, tools: Any) -> str:
        """Return the text of the template that renders a conversation, with the fixed date
        unless it reads the clock.
        """
        source: str = self.tokenizer.get_chat_template(None, tools)
        return source if self.reads_clock else fix_date(source)

    # The forms that a template accepts

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in the form that the template renders; what they say stays the
        same.
        """
        return [self._adapt_message(message) for message in messages]

    def _adapt_message(self, message: Message) -> Message:
        adapted = dict(message)
        if isinstance(content := adapted.get("content"), list):
            adapted["content"] = [
                {key: value for key, value in part.items() if key != "path"} for part in content
            ]
        if adapted.get("role") == "developer" and not self.reads("developer"):
            adapted["role"] = "system"
        reasoning = next(
            (adapted[name] for name in REASONING_NAMES if adapted.get(name) is not None), None
        )
        if reasoning is not None:
            adapted.update({name: reasoning for name in REASONING_NAMES if self.reads(name)})
        if adapted.get("content") is None:
            adapted["content"] = "" if self._fills_content else None
        if self._takes_json_text and adapted.get("tool_calls"):
            adapted["tool_calls"] = [_with_json_arguments(call) for call in adapted["tool_calls"]]
        return adapted

    @cached_property
    def _tool_forms(self) -> tuple[bool, bool] | None:
        """How tool calls are passed: whether a missing content is "", and whether arguments are
        JSON text; None where the template renders no tool call in any form."""
        for fills_content, as_text in product((False, True), repeat=2):
            call = _with_json_arguments(PROBE_CALL) if as_text else PROBE_CALL
            answer = {
                "role": "assistant",
                "content": "" if fills_content else None,
                "tool_calls": [call],
            }
            text = self._probe([{"role": "user", "content": QUESTION}, answer], [PROBE_TOOL])
            turn = text[text.find(QUESTION) :]
            # Python's form of a dictionary shows that the template concatenates text.
            if TOOL in turn and "probe value" in turn and "{'probe_key'" not in turn:
                return fills_content, as_text
        return None

    @property
    def renders_tool_calls(self) -> bool:
        return self._tool_forms is not None

    @property
    def _fills_content(self) -> bool:
        return self._tool_forms is None or self._tool_forms[0]

    @property
    def _takes_json_text(self) -> bool:
        return self._tool_forms is not None and self._tool_forms[1]

    def _probe(self, messages: list[Message], tools: Any = None) -> str:
        """Render a probe without adapting it; empty text where the template refuses it."""
        try:
            return self._render(messages, tools)
        except TemplateLimitError:
            raise
        except Exception:  # templates raise whatever their author chose
            return ""

    # Kinds of text in an answer

    @cached_property
    def markers(self) -> Markers:
        """The strings that begin reasoning, content and tool calls, found by rendering probes."""
        if not self.exists:
            return Markers()
        question = {"role": "user", "content": QUESTION}

        def render_answer(*following: Message, **fields: Any) -> str:
            answer = self._adapt_message({"role": "assistant", "content": ANSWER, **fields})
            return self._probe(
                [question, answer, *following], [PROBE_TOOL] if "tool_calls" in fields else None
            )

        # Before a later question, templates render an answer without an empty block of reasoning.
        plain = _text_between(
            render_answer({"role": "user", "content": "Another question"}), QUESTION, ANSWER
        )
        plain = plain or _text_between(render_answer(), QUESTION, ANSWER)
        thoughtful = render_answer(reasoning_content=THOUGHT)
        to_thought = _text_between(thoughtful, QUESTION, THOUGHT)
        to_answer = _text_between(thoughtful, THOUGHT, ANSWER)
        calling = render_answer(tool_calls=[PROBE_CALL])
        to_call = _text_between(calling, ANSWER, TOOL)
        calling_at_once = render_answer(
            tool_calls=[PROBE_CALL], reasoning_content=THOUGHT, content=None
        )
        thought_to_call = _text_between(calling_at_once, THOUGHT, TOOL)

        reasoning = _new_tag(to_thought, plain, last=True) or _remainder(to_thought, plain)
        content = _new_tag(to_answer, to_thought, last=True) or _remainder(
            to_answer, thought_to_call
        )
        # the template cuts reasoning out of the content
        if reasoning is None and "</think>" in self.source:
            reasoning = "<think>"
            content = "</think>"
        earlier = plain + to_thought + to_answer
        if to_call:
            tool_calls = _new_tag(to_call, earlier) or _remainder(to_call, to_answer)
        elif thought_to_call:
            tool_calls = _new_tag(thought_to_call, earlier)
            tool_calls = tool_calls or _remainder(thought_to_call, to_answer)
        else:
            calling_alone = render_answer(tool_calls=[PROBE_CALL], content=None)
            bare = _text_between(calling_alone, QUESTION, TOOL)
            tool_calls = _new_tag(bare, plain) or _remainder(bare, plain)
        return Markers(reasoning, content, tool_calls)

    @cached_property
    def turn_end(self) -> str:
        """What ends an assistant turn, such as <|im_end|>."""
        text = self._probe(
            [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        )
        return text.rpartition(ANSWER)[2].rstrip()


def fix_date(source: str) -> str:
    """Return a template in which `FIXED_DATE` stands in place of today's date; a UserError if that
    cannot be done.

    Templates call strftime_now("%d %b %Y"), which transformers and engines provide.
    """
    fixed = CLOCK_CALL.sub(lambda call: json.dumps(FIXED_DATE.strftime(call["format"])), source)
    if CLOCK_USE.search(COMMENT.sub("", fixed)):
        raise UserError(
            f"target: its chat template calls {CLOCK_NAME} with a format that it computes, so its "
            "text differs from day to day; give a template without that by "
            "target.chat_template=FILE"
        )
    return fixed


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        **call,
        "function": {
            **function,
            "arguments": json.dumps(function["arguments"], ensure_ascii=False),
        },
    }


def _text_between(text: str, first: str, second: str) -> str:
    """Return what stands between two strings; empty where they do not follow each other."""
    before, _, rest = text.rpartition(first)
    inner, has_second, _ = rest.partition(second)
    return inner if has_second and (before or text.startswith(first)) else ""


def _new_tag(text: str, other: str, last: bool = False) -> str | None:
    """Return the first (or last) tag of a text that another text does not have."""
    tags = [tag for tag in TAG.findall(text) if tag not in other]
    return tags[-1 if last else 0] if tags else None


def _remainder(text: str, other: str) -> str | None:
    """Return what follows the common prefix of two texts, in the first."""
    return text[common_length(text, other) :].strip("\n").rstrip() or None


def common_length(text: str, other: str) -> int:
    """Return the number of characters that two texts begin with alike."""
    return len(commonprefix([text, other]))  # noqa: RUF071 - characters are meant
