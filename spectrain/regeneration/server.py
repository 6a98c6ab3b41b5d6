"""Answers from a server with OpenAI's chat interface, such as vLLM or SGLang, with many requests at once.

The `openai` client retries a request after a temporary failure. A permanent failure is reported for its row.
"""

import asyncio
import json
import os
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, Omit, OpenAI, Timeout

from spectrain.data.messages import Conversation, parse_tool_calls
from spectrain.data.shards import FailedRow, PendingRow, Row, Shard
from spectrain.errors import UserError, suggest_nearest
from spectrain.models.chat_template import Message

from .chat_progress import AnswerError, ChatProgress, GeneratedAnswer
from .sampling import Sampling
from .writers import AnswerWriter, OutcomeCallback

# Temporary refusals, besides the server's own errors (500 and above).
TRANSIENT_STATUSES = (408, 409, 429)
# Seconds before the retry of a malformed answer; after an error, the client waits by itself.
RETRY_PAUSE = 1.0


class ServerWriter(AnswerWriter):
    """Answers of a model on a server.

    A temporary failure is a status of 408, 409, 429 or 500 and above, no connection, a timeout, or a malformed answer. The
    request is repeated after 0.5, 1, 2 .. 8 seconds, shortened by up to a quarter at random, or when the server says, if
    that is within two minutes. Messages are sent without a chat template, which the server applies. Sampling settings that
    are off, such as top_k=0, are left to the server's defaults.
    """

    needs_target = False

    def __init__(
        self,
        sampling: Sampling,
        # Address of the server's OpenAI-compatible interface, as in http://localhost:8000/v1.
        base_url: str,
        # Name of the model on the server.
        model: str,
        # Environment variable that holds the API key; null sends no key.
        api_key_variable: str | None = None,
        # Number of conversations that are requested at the same time.
        concurrency: int = 32,
        # Seconds to wait for an answer before the request counts as failed.
        timeout: float = 300.0,
        # Number of times that a request is repeated after a temporary failure.
        retries: int = 6,
        # Entries that are added to the body of every request, as in {repetition_penalty:1.0}; null adds none.
        extra: dict[str, Any] | None = None,
        # Ask for the token ids of every answer, so that training uses exactly these; vLLM and SGLang give them.
        token_ids: bool = True,
    ) -> None:
        if not is_http_url(base_url):
            raise UserError(f"writer.base_url={base_url}: give an address, as in http://localhost:8000/v1")
        for key, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if value < least:
                raise UserError(f"writer.{key}={value}: use {least} or more")
        if not timeout > 0:
            raise UserError(f"writer.timeout={timeout}: use more than 0 seconds")
        self.sampling, self.base_url, self.model = sampling, base_url.rstrip("/"), model
        self.concurrency, self.timeout, self.retries, self.extra = concurrency, timeout, retries, extra or {}
        self.token_ids = token_ids
        if api_key_variable is not None and not os.environ.get(api_key_variable):
            raise UserError(f"writer.api_key_variable={api_key_variable}: this environment variable is not set; export it")
        self.key = os.environ[api_key_variable] if api_key_variable is not None else "none"
        # without a key none is sent: by itself the client sends OPENAI_API_KEY, which is not for this server
        self.headers: Any = {"Authorization": Omit()} if api_key_variable is None else {}

    def recorded_settings(self) -> dict[str, Any]:
        return {"writer": "openai", "writer.model": self.model, "writer.extra": self.extra}

    def check_ready(self) -> None:
        """Raise a UserError if the address, the key or the model is wrong."""
        where = f"writer.base_url={self.base_url}"
        client = OpenAI(api_key=self.key, base_url=self.base_url, timeout=min(10.0, self.timeout), max_retries=0)
        try:
            reply = client.models.with_raw_response.list(extra_headers=self.headers).text
        except APIConnectionError as error:
            raise UserError(f"{where}: no server answers there ({error_text(error)}); start it, or mend the address") from error
        except APIStatusError as error:
            self._raise_if_fatal(error)
            if is_transient(error):
                return  # busy, and each request will be tried again
            reply = status_text(error)
        try:
            served = [str(model["id"]) for model in json.loads(reply)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{where}: what answers there has no list of models ({' '.join(reply.split())[:300]}); give an "
                "OpenAI-compatible address, which mostly ends in /v1"
            ) from error
        if self.model not in served:
            raise UserError(f"writer.model={self.model}: the server has no such model; {suggest_nearest(self.model, served)}")

    def write_answers(self, shards: Iterable[Shard], on_outcome: OutcomeCallback) -> None:
        asyncio.run(self._write_concurrently(shards, on_outcome))

    async def _write_concurrently(self, shards: Iterable[Shard], on_outcome: OutcomeCallback) -> None:
        timeout = Timeout(self.timeout, connect=min(10.0, self.timeout))
        async with AsyncOpenAI(api_key=self.key, base_url=self.base_url, timeout=timeout) as client:
            waiting = ((shard, wanted) for shard in shards for wanted in shard.unanswered_rows)

            async def work() -> None:
                # The workers share this iterator, so each takes the next conversation of any shard.
                for shard, wanted in waiting:
                    on_outcome(shard, await self._answer_conversation(client, wanted))

            workers = [asyncio.create_task(work()) for _ in range(self.concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    def _raise_if_fatal(self, error: APIStatusError) -> None:
        """Raise a UserError if the server would refuse every request."""
        if error.status_code in (401, 403):
            raise UserError(
                f"writer.api_key_variable: {self.base_url} refuses the key or wants one ({status_text(error)}); name the "
                "environment variable that holds a valid one"
            )
        if error.status_code == 404:
            raise UserError(
                f"writer.base_url={self.base_url}, writer.model={self.model}: the server does not know this address or this "
                f"model ({status_text(error)}); the address mostly ends in /v1"
            )

    async def _answer_conversation(self, client: AsyncOpenAI, pending: PendingRow) -> Row | FailedRow:
        """Answer one conversation, turn by turn."""
        chat = ChatProgress(pending, self.sampling)
        try:
            while (conversation := chat.next_prompt()) is not None:
                body = {**conversation_body(conversation), **self._request_body(chat, conversation)}
                chat.add_answer(await self._request_answer(client, body))
        except AnswerError as given_up:
            return given_up.to_failed_row(pending)
        return chat.finished_row

    def _request_body(self, chat: ChatProgress, conversation: Conversation) -> dict[str, Any]:
        """Return a request without its messages; its seed depends on the conversation and the turn."""
        sampling = self.sampling
        keys = f"{sampling.seed}/{chat.pending.key}/{len(chat.answer_lengths)}".encode()
        seed = int.from_bytes(blake2b(keys, digest_size=4).digest(), "big") >> 1
        # top_k is not OpenAI's, so a server that does not know it is only asked where it is wanted
        extra: dict[str, Any] = {"top_k": sampling.top_k} if sampling.top_k else {}
        if self.token_ids:
            extra["return_token_ids"] = True
        if conversation.template_arguments:
            extra["chat_template_kwargs"] = conversation.template_arguments
        if conversation.documents:
            extra["documents"] = conversation.documents
        extra.update(self.extra)
        return {"model": self.model, "temperature": sampling.temperature, "top_p": sampling.top_p,
                "max_tokens": sampling.max_new_tokens, "seed": seed, "extra_body": extra}  # fmt: skip

    async def _request_answer(self, client: AsyncOpenAI, body: dict[str, Any]) -> GeneratedAnswer:
        """Return an answer; raise an AnswerError if there is none."""
        left = self.retries
        while True:
            asking = client.with_options(max_retries=left).chat.completions.with_raw_response
            try:
                reply = await asking.create(**body, extra_headers=self.headers)
            except (APIConnectionError, APIStatusError) as error:
                raise self._to_answer_error(error, self.retries - left) from error
            left -= reply.retries_taken + 1
            try:
                return parse_completion(json.loads(reply.text))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                if left < 0:
                    problem = f"the answer is no chat completion ({error_text(error)})"
                    raise AnswerError("failed", f"{self.retries + 1} attempts, the last: {problem}") from error
            await asyncio.sleep(RETRY_PAUSE)

    def _to_answer_error(self, error: APIConnectionError | APIStatusError, prior_attempts: int) -> AnswerError:
        """Return the error to record after `prior_attempts` attempts and those of the client; a UserError stops the
        command."""
        problem = error_text(error)
        if isinstance(error, APIStatusError):
            self._raise_if_fatal(error)
            problem = status_text(error)
            if not is_transient(error):
                long = "context" in problem.lower() and "length" in problem.lower()
                return AnswerError("too_long" if long else "failed", problem)
        attempts = prior_attempts + int(error.request.headers.get("x-stainless-retry-count", 0)) + 1
        return AnswerError("failed", f"{attempts} attempts, the last: {problem}")


def conversation_body(conversation: Conversation) -> dict[str, Any]:
    """Return the messages and tools of a request; arguments of tool calls are JSON text, as OpenAI's interface has them."""
    messages = []
    for message in conversation.messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        messages.append({**message, "tool_calls": calls} if calls else message)
    return {"messages": messages, **({"tools": conversation.tools} if conversation.tools else {})}


def parse_completion(response: Any) -> GeneratedAnswer:
    """Return the answer of a chat completion: text, reasoning and tool calls as the server parsed them, and the token ids."""
    choice = response["choices"][0]
    answer_fields = {key: value for key, value in choice["message"].items() if value is not None}
    reasoning = answer_fields.get("reasoning_content", answer_fields.get("reasoning"))
    calls = parse_tool_calls(answer_fields.get("tool_calls"), "the answer")
    if not isinstance(answer_fields.get("content"), str) and not (reasoning or calls):
        raise AnswerError("failed", f"the server gave no text (finish_reason {choice.get('finish_reason')})")
    message: Message = {"role": "assistant", "content": answer_fields.get("content")}
    if reasoning:
        message["reasoning_content"] = str(reasoning)
    if calls:
        message["tool_calls"] = calls
    usage = response.get("usage") or {}
    ids = choice.get("token_ids")
    return GeneratedAnswer(
        message,
        str(choice.get("finish_reason")),
        int(usage.get("completion_tokens") or 0),
        ids if isinstance(ids, list) else None,
    )


def is_http_url(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:
        return False


def is_transient(error: APIStatusError) -> bool:
    """Tell whether another attempt may succeed."""
    return error.status_code in TRANSIENT_STATUSES or error.status_code >= 500


def status_text(error: APIStatusError) -> str:
    """Return the status and the reason in one line."""
    return f"status {error.status_code}: {' '.join(error.response.text.split())[:300]}"


def error_text(error: Exception) -> str:
    """Return an error in one line: the network error behind the client's own, which may have no message."""
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
