"""Answers from a server, with many requests at once."""

import asyncio
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from spectrain.data.messages import Conversation
from spectrain.data.shards import FailedRow, PendingRow, Row, Shard
from spectrain.output.text import mask_settings
from spectrain.regeneration.chat_progress import AnswerError, ChatProgress, GeneratedAnswer
from spectrain.regeneration.sampling import Sampling
from spectrain.regeneration.writers import AnswerWriter, OutcomeCallback

from ..servers.base import Completion, CompletionRequest, Server
from ..servers.errors import ServerError
from ..servers.workers import run_workers


class ServerWriter(AnswerWriter):
    """Answers of a model on a server, which renders the messages with its own chat template."""

    def __init__(self, sampling: Sampling, server: Server) -> None:
        self.sampling, self.server = sampling, server

    def recorded_settings(self) -> dict[str, Any]:
        if self.server.model is None:
            self.check_ready()
        extra = mask_settings(self.server.settings.extra or {})
        return {"writer": "server", "server.model": self.server.model, "server.extra": extra}

    def check_ready(self) -> None:
        """Raise a UserError if the address, the key or the model is wrong."""
        self.server.check_ready()

    def write_answers(self, shards: Iterable[Shard], on_outcome: OutcomeCallback) -> None:
        asyncio.run(self._write_concurrently(shards, on_outcome))

    async def _write_concurrently(
        self, shards: Iterable[Shard], on_outcome: OutcomeCallback
    ) -> None:
        async with self.server:
            # Conversations of any shard are answered at the same time.
            pending = ((shard, row) for shard in shards for row in shard.unanswered_rows)

            async def answer(entry: tuple[Shard, PendingRow]) -> None:
                shard, row = entry
                on_outcome(shard, await self._answer_conversation(row))

            await run_workers(answer, pending, self.server.concurrency)

    async def _answer_conversation(self, pending: PendingRow) -> Row | FailedRow:
        """Answer one conversation, turn by turn."""
        chat = ChatProgress(pending, self.sampling)
        try:
            while (conversation := chat.next_prompt()) is not None:
                chat.add_answer(await self.request_answer(chat, conversation))
            await self.finish_conversation(chat)
        except ServerError as error:
            return AnswerError(
                "too_long" if error.kind == "too_long" else "failed", str(error)
            ).to_failed_row(pending)
        except AnswerError as error:
            return error.to_failed_row(pending)
        return chat.finished_row

    async def request_answer(
        self, chat: ChatProgress, conversation: Conversation
    ) -> GeneratedAnswer:
        """Return the next answer of a conversation; raise a ServerError or an AnswerError if
        there is none.
        """
        return to_answer(await self.server.complete(self.make_request(chat, conversation)))

    async def finish_conversation(self, chat: ChatProgress) -> None:
        """Take a conversation whose answers are all given."""

    def make_request(
        self, chat: ChatProgress, prompt: Conversation | list[int]
    ) -> CompletionRequest:
        """Return the request for the next answer; its seed depends on the conversation and the
        turn.
        """
        sampling = self.sampling
        keys = f"{sampling.seed}/{chat.pending.key}/{len(chat.answer_lengths)}".encode()
        seed = int.from_bytes(blake2b(keys, digest_size=4).digest(), "big") >> 1
        return CompletionRequest(
            prompt,
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            seed,
        )


def to_answer(completion: Completion) -> GeneratedAnswer:
    """Return the answer of a completion; raise an AnswerError for one without text, reasoning and
    tool calls.

    An empty text whose token ids are known is an answer: the model ended its turn at once.
    """
    message = completion.message
    text = message.get("content")
    has_text = isinstance(text, str) and bool(text.strip() or completion.token_ids)
    if not has_text and not (message.get("reasoning_content") or message.get("tool_calls")):
        raise AnswerError(
            "failed", f"the server gave no text (finish_reason {completion.finish_reason})"
        )
    return GeneratedAnswer(
        message, completion.finish_reason, completion.num_tokens, completion.token_ids
    )
