"""A conversation while its answers are regenerated, turn by turn; recorded tool results answer
the regenerated calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from spectrain.data.chat_template import Message
from spectrain.data.messages import Conversation
from spectrain.data.shards import FailedRow, FailureKind, PendingRow, Row

from .sampling import Sampling


class AnswerError(Exception):
    """A conversation that could not be answered, with the reason."""

    def __init__(self, kind: FailureKind, error: str) -> None:
        super().__init__(error)
        self.kind = kind

    def to_failed_row(self, pending: PendingRow) -> FailedRow:
        origin = pending.conversation.origin
        reason = str(self)
        located = reason if not origin or reason.startswith(origin) else f"{origin}: {reason}"
        return FailedRow(pending.id, pending.messages, self.kind, located)


@dataclass(frozen=True)
class GeneratedAnswer:
    """An answer: its message, why it ended ("stop" or "length"), its number of tokens, and its
    token ids if they are known.
    """

    message: Message
    finish_reason: str
    num_tokens: int
    token_ids: list[int] | None = None


class ChatProgress:
    """A conversation in progress; each answer depends on the answers before it.

    Where the model calls tools, the recorded results of the same user turn answer the calls by the
    tools' names. The conversation ends where it calls a tool that has no result left.
    """

    def __init__(self, pending: PendingRow, sampling: Sampling) -> None:
        self.pending, self.sampling = pending, sampling
        self.messages: list[Message] = []
        self.answer_ids: dict[int, list[int]] = {}
        self.finish_reasons: list[str] = []
        self.answer_lengths: list[int] = []
        # Why the conversation ends before its source.
        self.ended: str | None = None
        self.source_index = 0
        self.results: list[Message] = []
        self.awaits_answer = False

    @property
    def conversation(self) -> Conversation:
        """The conversation so far."""
        source = self.pending.conversation
        return replace(source, messages=self.messages, answer_ids=self.answer_ids)

    def next_prompt(self) -> Conversation | None:
        """Return the conversation before the next answer; None if all answers are given."""
        if self.ended is not None:
            return None
        if self.awaits_answer:
            return self.conversation
        source = self.pending.messages
        for message in source[self.source_index :]:
            if message["role"] == "assistant":
                return self.conversation
            if message["role"] == "user":
                self.results = collect_results(source, self.source_index)
            if message["role"] != "tool":
                self.messages.append(message)
            self.source_index += 1
        return None

    def add_answer(self, answer: GeneratedAnswer) -> None:
        """Add the next answer; raise an AnswerError if it was cut and cut answers are not kept."""
        if answer.finish_reason == "length" and not self.sampling.keep_cut:
            raise AnswerError(
                "cut",
                f"answer {len(self.answer_lengths) + 1} was cut at {self.sampling.max_new_tokens} "
                "tokens",
            )
        if answer.token_ids:
            self.answer_ids[len(self.messages)] = answer.token_ids
        self.messages.append(answer.message)
        self.finish_reasons.append(answer.finish_reason)
        self.answer_lengths.append(answer.num_tokens)
        source = self.pending.messages
        called_in_source = self.source_index < len(source) and bool(
            source[self.source_index].get("tool_calls")
        )
        if not self.awaits_answer:
            self.source_index += 1
        self.awaits_answer = False
        if answer.message.get("tool_calls"):
            self._answer_calls(answer.message["tool_calls"])
        elif called_in_source:
            self._skip_to_next_question()

    def _answer_calls(self, calls: list[dict[str, Any]]) -> None:
        """Append the recorded result of each call, or end the conversation at the first that has
        none.
        """
        answered = []
        for call in calls:
            name = call["function"]["name"]
            result = next((result for result in self.results if result["name"] == name), None)
            if result is None:
                self.ended = f"it calls {name}, for which no result is recorded"
                return
            self.results.remove(result)
            if "id" not in call and "tool_call_id" in result:
                call["id"] = result["tool_call_id"]
            answered.append({**result, **({"tool_call_id": call["id"]} if "id" in call else {})})
        self.messages += answered
        source = self.pending.messages
        while self.source_index < len(source) and source[self.source_index]["role"] == "tool":
            self.source_index += 1
        # The model answers the results, also where the source had no such turn.
        at_answer = (
            self.source_index < len(source) and source[self.source_index]["role"] == "assistant"
        )
        self.awaits_answer = not at_answer

    def _skip_to_next_question(self) -> None:
        """Leave out the recorded calls and results that the model did not ask for."""
        source = self.pending.messages
        while self.source_index < len(source) and source[self.source_index]["role"] != "user":
            self.source_index += 1

    @property
    def finished_row(self) -> Row:
        conversation = self.conversation
        row = conversation.to_row()
        return Row(
            self.pending.id,
            self.messages,
            self.finish_reasons,
            self.answer_lengths,
            row.get("answer_ids"),
            conversation.tools,
            conversation.documents,
            conversation.template_arguments or None,
            self.ended,
        )


def collect_results(source: list[Message], start: int) -> list[Message]:
    """Return the tool results between the user's message at `start` and the next, each with the
    name of its tool.
    """
    names: dict[str | None, list[str]] = {}
    results = []
    for message in source[start + 1 :]:
        if message["role"] == "user":
            break
        for call in message.get("tool_calls", ()):
            names.setdefault(call.get("id"), []).append(call["function"]["name"])
        if message["role"] == "tool":
            called = names.get(message.get("tool_call_id"))
            results.append(
                {**message, "name": called.pop(0) if called else str(message.get("name"))}
            )
    return results
