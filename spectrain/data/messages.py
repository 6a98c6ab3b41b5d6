"""Conversations as chat templates take them, read from the layouts that data sets have.

A row is OpenAI's {"messages": [..]} or ShareGPT's {"conversations": [..]}, with `tools`,
`documents` and `chat_template_kwargs` beside the messages. Everything that a row says reaches the
chat template. What nothing reads is counted, and what cannot be used raises a UserError with one
sentence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spectrain.errors import UserError, describe_error

from .chat_template import REASONING_NAMES, Message
from .images import RowImages, content_text, image_paths
from .template_arguments import check_template_arguments

# Larger ones block a tokenizer for minutes.
MAX_TURNS = 1_000
MAX_TURN_CHARACTERS = 2_000_000
# Tokenizers take 32 bits; what the vocabulary lacks below that is refused by its name.
MAX_TOKEN_ID = 1 << 31
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant",
         "assistant": "assistant", "model": "assistant", "function_call": "assistant",
         "system": "system",
         "developer": "developer", "tool": "tool", "function": "tool", "observation": "tool",
         "ipython": "tool"}  # fmt: skip
"""The role of each name that data sets use."""

ROW_KEYS = {"messages", "conversations", "prompt", "turns", "tools", "functions", "documents",
    "chat_template_kwargs", "images",
            "answer_ids", "id", "finish_reason", "num_tokens", "ended"}  # fmt: skip
ROW_SYNONYMS = (("messages", "conversations", "turns", "prompt"), ("tools", "functions"))
"""Keys of a row that mean the same; the first that a row has is read."""
MESSAGE_SYNONYMS = (("role", "from"), ("content", "value"))
SINGLE_TURN_COLUMNS = (
    ("instruction", "output"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
)
"""The columns of a question and its answer, as data sets of one turn name them."""
SINGLE_TURN_FORMS = "instruction and output, prompt and completion, or question and answer"
MESSAGE_KEYS = {
    "role",
    "from",
    "content",
    "value",
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    *REASONING_NAMES,
}


@dataclass(frozen=True)
class Conversation:
    """Messages, and what a chat template reads beside them."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    # Arguments of the chat template for this conversation, such as enable_thinking.
    template_arguments: dict[str, Any] = field(default_factory=dict)
    # The token ids that a model generated for a message, by the message's index.
    answer_ids: dict[int, list[int]] = field(default_factory=dict)
    # Plain text in place of messages: a document, or a prompt before a completion.
    text: str | None = None
    completion: str | None = None
    # Seed of the cuts of fill-in-the-middle; None for text in its order.
    infill_seed: int | None = None
    # File and line of the row, for errors; empty for a conversation that no file holds.
    origin: str = field(default="", compare=False)

    @property
    def is_document(self) -> bool:
        """Whether this is plain text of which every token carries loss."""
        return self.text is not None and self.completion is None and self.infill_seed is None

    @classmethod
    def wrap(cls, messages: Conversation | Sequence[Message]) -> Conversation:
        """Return a conversation of plain messages; a conversation stays as it is."""
        return messages if isinstance(messages, Conversation) else cls(list(messages))

    def up_to(self, count: int) -> Conversation:
        """Return the conversation of the first `count` messages."""
        ids = {index: tokens for index, tokens in self.answer_ids.items() if index < count}
        return replace(self, messages=self.messages[:count], answer_ids=ids)

    def to_row(self) -> dict[str, Any]:
        """Return the conversation as a row that `parse_conversation` reads."""
        row: dict[str, Any] = {"messages": self.messages}
        for key, value in (("tools", self.tools), ("documents", self.documents)):
            if value:
                row[key] = value
        if self.template_arguments:
            row["chat_template_kwargs"] = self.template_arguments
        if self.answer_ids:
            answers = [
                index
                for index, message in enumerate(self.messages)
                if message["role"] == "assistant"
            ]
            row["answer_ids"] = [self.answer_ids.get(index) for index in answers]
        return row


@contextmanager
def name_row(origin: str) -> Iterator[None]:
    """Name file and line in errors about a conversation, which begin with "data: "; without an
    origin they stay.
    """
    try:
        yield
    except UserError as error:
        text = str(error)
        if not origin or not text.startswith("data: "):
            raise
        raise UserError(f"{origin}: {text.removeprefix('data: ')}") from error


def describe_row_key(key: str) -> str:
    """Name a key of a row, as it is counted where nothing reads it."""
    return f"key {key!r} of a row"


def parse_conversation(
    row: Any,
    location: str,
    allows_unanswered: bool = False,
    folder: Path | None = None,
    unread: Counter[str] | None = None,
) -> Conversation:
    """Return the conversation of a row; assistant turns before the first question are left out and
    counted in `unread`.

    With `allows_unanswered`, {"prompt": ..} and {"turns": [..]} are conversations too, and a
    missing answer is empty. Image paths are relative to `folder`. `unread` counts keys that nothing
    reads.
    """
    unread = Counter() if unread is None else unread
    row = drop_nulls(row)
    if (
        allows_unanswered
        and isinstance(row, dict)
        and not {"messages", "conversations"} & row.keys()
    ):
        questions = row.get("turns", [row.get("prompt")])
        if (
            isinstance(questions, list)
            and questions
            and all(isinstance(text, str) and text.strip() for text in questions)
        ):
            row = {**row, "messages": [{"role": "user", "content": text} for text in questions]}
    if isinstance(row, dict):
        row = write_single_turn_as_messages(row)
    turns = row.get("messages", row.get("conversations")) if isinstance(row, dict) else None
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        # Tables of text, such as CSV, hold lists as JSON.
        turns = _parse_json(turns, "messages", location)
    if not isinstance(turns, list):
        problem = (
            "it is a list; write one conversation a line,"
            if isinstance(row, list)
            else "it holds no conversation; write"
        )
        raise UserError(
            f'{location}: {problem} {{"messages": [{{"role": .., "content": ..}}, ..]}}, or one '
            f"question and its answer as {SINGLE_TURN_FORMS}"
        )
    if len(turns) > MAX_TURNS:
        raise UserError(
            f"{location}: a conversation of {len(turns)} turns; cut it into several of "
            f"{MAX_TURNS} or fewer"
        )
    pictures = RowImages(row, location, folder)
    messages = [
        parse_message(turn, f"{location}: message {number}", pictures)
        for number, turn in enumerate(turns, 1)
    ]
    for turn in map(drop_nulls, turns):
        keys = list_unread_keys(turn, MESSAGE_KEYS, MESSAGE_SYNONYMS)
        unread.update(f"key {key!r} of a message" for key in keys)
    unread.update(map(describe_row_key, list_unread_keys(row, ROW_KEYS, ROW_SYNONYMS)))
    check_tool_calls(messages, location)
    tools = parse_tools(row.get("tools", row.get("functions")), location)
    documents = parse_documents(row.get("documents"), location)
    arguments = check_template_arguments(row.get("chat_template_kwargs") or {}, location)
    answer_ids = parse_answer_ids(row.get("answer_ids"), messages, location)
    check_texts([messages, tools, documents, arguments], location)
    conversation = Conversation(messages, tools, documents, arguments, answer_ids, origin=location)
    return complete_turns(conversation, location, allows_unanswered, unread)


def list_unread_keys(
    row: dict[str, Any], read: set[str], synonyms: Sequence[tuple[str, ...]]
) -> list[str]:
    """List the keys of a row or a message that nothing reads: those that are not in `read`, and
    those that mean the same as one before them in `synonyms`.
    """
    doubled = {key for names in synonyms for key in [name for name in names if name in row][1:]}
    return [key for key in row if key not in read or key in doubled]


def write_single_turn_as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its question and its answer as messages, where it has them in columns of
    their own and no messages. Alpaca's `input` follows the instruction.
    """
    if {"messages", "conversations"} & row.keys():
        return row
    for question_name, answer_name in SINGLE_TURN_COLUMNS:
        question = row.get(question_name)
        answer = row.get(answer_name)
        if not isinstance(question, str) or not isinstance(answer, str):
            continue
        used = {question_name, answer_name, "system"}
        if question_name == "instruction":
            used.add("input")
            parts = [question, row.get("input")]
            question = "\n\n".join(part for part in parts if isinstance(part, str) and part)
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        if isinstance(row.get("system"), str):
            messages.insert(0, {"role": "system", "content": row["system"]})
        rest = {name: value for name, value in row.items() if name not in used}
        return {**rest, "messages": messages}
    return row


def drop_nulls(row: Any) -> Any:
    """Return a row or a message without its null values, with which tables fill gaps; what is no
    object stays as it is.
    """
    return (
        {key: value for key, value in row.items() if value is not None}
        if isinstance(row, dict)
        else row
    )


def parse_message(turn: Any, location: str, pictures: RowImages) -> Message:
    """Return a turn of any layout as a message; keys without a value are left out, others stay."""
    if not isinstance(turn, dict):
        raise UserError(f'{location}: it is no object; write {{"role": "user", "content": ".."}}')
    turn = drop_nulls(turn)
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(
            f"{location}: it has an unknown role ({role!r}); use system, developer, user, "
            "assistant or tool"
        )
    message: Message = {
        key: value for key, value in turn.items() if key not in ("role", "from", "content", "value")
    }
    content = turn.get("content", turn.get("value"))
    message = {"role": ROLES[role], "content": None, **message}
    if role == "function_call" or isinstance(turn.get("function_call"), dict):
        message["tool_calls"] = [message.pop("function_call", content)]
        content = None if role == "function_call" else content
    if content is not None:
        message["content"] = pictures.parse_content(content)
        if message["content"] is None:
            raise UserError(
                f"{location}: its content is neither a text nor a list of texts and images; write "
                "a text"
            )
        check_text(content_text(message["content"]), location)
    for name in REASONING_NAMES:
        if name in message:
            if not isinstance(message[name], str):
                raise UserError(f"{location}: its {name} is no text; write a text or leave it out")
            check_text(message[name], location)
    if "tool_calls" in message:
        message["tool_calls"] = parse_tool_calls(message["tool_calls"], location)
        if not message["tool_calls"]:
            del message["tool_calls"]
        elif message["role"] != "assistant":
            raise UserError(
                f"{location}: the role {message['role']} makes tool calls; only the assistant does"
            )
    if message["content"] is None and message["role"] != "assistant":
        raise UserError(f"{location}: it has no content; write a text")
    return message


def parse_tool_calls(calls: Any, location: str) -> list[dict[str, Any]]:
    """Return tool calls as {"type": "function", "function": {"name", "arguments"}}, with their
    ids; arguments are objects.
    """
    result = []
    for call in _parse_list(calls, "tool_calls", location) or []:
        function = call.get("function", call)
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise UserError(
                f'{location}: a tool call names no function; write {{"function": {{"name": .., '
                f'"arguments": ..}}}}'
            )
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _parse_json(
                arguments, f"the arguments of the tool call {function['name']}", location
            )
        if not isinstance(arguments, dict):
            raise UserError(
                f"{location}: the arguments of the tool call {function['name']} are no object; "
                "write an object"
            )
        identifier = call.get("id")
        if identifier is not None and (not isinstance(identifier, str) or not identifier):
            raise UserError(
                f"{location}: the id of the tool call {function['name']} is no text; write a text "
                "or leave it out"
            )
        named = {} if identifier is None else {"id": identifier}
        result.append(
            {
                **named,
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return result


def parse_tools(tools: Any, location: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row as {"type": "function", "function": ..}; a row may hold them as
    JSON text.
    """
    if isinstance(tools, str) and tools.strip():
        tools = _parse_json(tools, "tools", location)
    result = []
    for tool in _parse_list(tools or None, "tools", location) or []:
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f'{location}: a tool has no name; write {{"type": "function", "function": '
                f'{{"name": .., "parameters": ..}}}}'
            )
        result.append({"type": "function", "function": function} if function is tool else tool)
    return result or None


def parse_documents(documents: Any, location: str) -> list[dict[str, Any]] | None:
    """Return the documents of a row; a row may hold them as JSON text."""
    return _parse_list(documents, "documents", location)


def parse_answer_ids(listed: Any, messages: list[Message], location: str) -> dict[int, list[int]]:
    """Return the generated token ids by message index, from one list (or null) for each
    assistant turn.
    """
    if listed is None:
        return {}
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not isinstance(listed, list) or len(listed) != len(answers):
        raise UserError(
            f"{location}: answer_ids needs one list for each of the {len(answers)} assistant turns"
        )
    for ids in listed:
        if ids is not None and (
            not isinstance(ids, list)
            or not ids
            or not all(type(token) is int and 0 <= token < MAX_TOKEN_ID for token in ids)
        ):
            raise UserError(
                f"{location}: answer_ids holds something that is no list of token ids; write "
                "integers"
            )
    return {index: ids for index, ids in zip(answers, listed) if ids is not None}


def check_tool_calls(messages: list[Message], location: str) -> None:
    """Raise a UserError where a tool's result answers no call before it, answers one twice, or does
    not say which.

    Calls and results without ids belong together in their order.
    """
    pending: list[str | None] = []
    identifiers: set[str] = set()
    for number, message in enumerate(messages, 1):
        for call in message.get("tool_calls", ()):
            identifier = call.get("id")
            if identifier in identifiers:
                raise UserError(
                    f"{location}: message {number}: two tool calls have the id {identifier}; give "
                    "each its own"
                )
            identifiers |= {identifier} if identifier is not None else set()
            pending.append(identifier)
        if message["role"] != "tool":
            continue
        answered = message.get("tool_call_id")
        if answered is not None and not isinstance(answered, str):
            raise UserError(
                f"{location}: message {number}: its tool_call_id is no text; write the id of a "
                "call before it"
            )
        if not pending:
            raise UserError(
                f"{location}: message {number}: a tool's result answers no call before it; add "
                "the call or drop it"
            )
        if answered is None and any(identifier is not None for identifier in pending):
            raise UserError(
                f"{location}: message {number}: a tool's result has no tool_call_id; name the "
                "call that it answers"
            )
        if answered not in pending:
            problem = "was answered already" if answered in identifiers else "no call before it has"
            raise UserError(
                f"{location}: message {number}: its tool_call_id {answered} {problem}; name a "
                "call without a result"
            )
        pending.remove(answered)


def complete_turns(
    conversation: Conversation, location: str, allows_unanswered: bool, unread: Counter[str]
) -> Conversation:
    """Leave out assistant turns before the first question, add missing answers where they are
    allowed, and check the rest.
    """
    messages: list[Message] = []
    ids: dict[int, list[int]] = {}
    for index, message in enumerate(conversation.messages):
        if (
            allows_unanswered
            and message["role"] == "user"
            and messages
            and messages[-1]["role"] == "user"
        ):
            messages.append({"role": "assistant", "content": ""})
        if message["role"] == "assistant" and all(
            earlier["role"] in ("system", "developer") for earlier in messages
        ):
            unread["assistant turn before the first question"] += 1
            continue
        if index in conversation.answer_ids:
            ids[len(messages)] = conversation.answer_ids[index]
        messages.append(message)
    if allows_unanswered and messages and messages[-1]["role"] in ("user", "tool"):
        messages.append({"role": "assistant", "content": ""})
    answers = [message for message in messages if message["role"] == "assistant"]
    if allows_unanswered and not answers:
        raise UserError(
            f"{location}: it has no question to answer; end it with a message of the user, or "
            "drop the line"
        )
    if allows_unanswered and image_paths(messages):
        raise UserError(
            f"{location}: it has images, and answers are written to text alone; leave it out"
        )
    # An answer with generated ids may be empty: the model ended its turn at once.
    if not allows_unanswered and not ids and not any(has_answer(message) for message in answers):
        empty = (
            "its answers are empty"
            if answers
            else "the conversation has no assistant turn to learn from"
        )
        raise UserError(f"{location}: {empty}; add one or drop the line")
    return replace(conversation, messages=messages, answer_ids=ids)


def has_answer(message: Message) -> bool:
    """Tell whether an assistant's message says anything."""
    texts = [
        content_text(message["content"] or ""),
        *(message.get(name, "") for name in REASONING_NAMES),
    ]
    return bool(message.get("tool_calls")) or any(text.strip() for text in texts)


def check_texts(value: Any, location: str) -> None:
    """Raise a UserError for a text anywhere in a value of JSON that no tokenizer accepts."""
    waiting = [value]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, str):
            check_text(entry, location)
        elif isinstance(entry, dict):
            waiting += [*entry.keys(), *entry.values()]
        elif isinstance(entry, list):
            waiting += entry


def check_text(text: str, location: str) -> None:
    """Raise a UserError for a text that no tokenizer accepts or that is too long for a turn."""
    if len(text) > MAX_TURN_CHARACTERS:
        raise UserError(
            f"{location}: a text of {len(text):,} characters; no turn has more than "
            f"{MAX_TURN_CHARACTERS:,}, so cut it"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):x}"
        raise UserError(
            f"{location}: its text holds {half}, which is half of a character; write it as UTF-8 "
            "text"
        ) from error


def _parse_list(value: Any, name: str, location: str) -> list[dict[str, Any]] | None:
    """Return a list of objects, or None; JSON text is read."""
    if isinstance(value, str):
        value = _parse_json(value, name, location)
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        value = [
            _parse_json(entry, name, location) if isinstance(entry, str) else entry
            for entry in value
        ]
    if value is not None and not (
        isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    ):
        raise UserError(f"{location}: {name} is no list of objects; write [{{..}}, ..]")
    return value


def _parse_json(text: str, name: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{location}: {name} hold no valid JSON ({describe_error(error)}); write a JSON object"
        ) from error
