"""Answers from a server that speaks OpenAI's chat interface, such as vLLM's and SGLang's: many at once, tried again where one
fails.

Spoken to through httpx, not the `openai` package: two addresses of an interface, and what failed is told row by row.
"""

import asyncio
import email.utils
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from random import uniform
from typing import Any

import httpx

from spectrain.data.shards import Lost, Row, Shard, Wanted
from spectrain.errors import UserError, nearest

from .writers import Add, Chat, Sampling, Unanswered, Writer

PASSING = (408, 409, 425, 429)  # what a server refuses for the moment, beside all of its own errors, 500 and above
LONGEST_WAIT = 60.0  # seconds between attempts, unless the server names another time


@dataclass(frozen=True)
class Passing:
    """A failure that may pass, and how many seconds the server asks to wait."""

    problem: str
    pause: float | None = None


class ServerWriter(Writer):
    """A model on a server. `concurrency` conversations are under way at once; `extra` joins the body of every request, as in
    writer.extra={repetition_penalty:1.0}.

    A request that fails in passing (429, 500 and above, no connection, `timeout` seconds without an answer, an answer that is
    none) is tried again up to `retries` times, after 1, 2, 4 .. seconds, less up to half of it by chance, or when the server
    says. The key is read from the environment variable `api_key_variable`; messages go as they are, for the server has the
    model's chat template. What sampling does not name, such as top_k=0, is left to the server's own defaults.
    """

    needs_target = False

    def __init__(
        self,
        sampling: Sampling,
        base_url: str,
        model: str,
        api_key_variable: str | None = None,
        concurrency: int = 32,
        timeout: float = 300.0,
        retries: int = 6,
        extra: dict[str, Any] | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise UserError(f"writer.base_url={base_url}: give an address, as in http://localhost:8000/v1")
        for key, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if value < least:
                raise UserError(f"writer.{key}={value}: use {least} or more")
        if not timeout > 0:
            raise UserError(f"writer.timeout={timeout}: use more than 0 seconds")
        self.sampling, self.base_url, self.model = sampling, base_url.rstrip("/"), model
        self.concurrency, self.timeout, self.retries, self.extra = concurrency, timeout, retries, extra or {}
        self.headers = {}
        if api_key_variable is not None:
            if not os.environ.get(api_key_variable):
                raise UserError(f"writer.api_key_variable={api_key_variable}: this environment variable is not set; export it")
            self.headers = {"Authorization": f"Bearer {os.environ[api_key_variable]}"}

    def settings(self) -> dict[str, Any]:
        return {"writer": "openai", "writer.model": self.model, "writer.extra": self.extra}

    def check(self) -> None:
        """Stop where address, key or model are wrong."""
        where = f"writer.base_url={self.base_url}"
        try:
            reply = httpx.get(f"{self.base_url}/models", headers=self.headers, timeout=min(10.0, self.timeout))
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise UserError(f"{where}: no server answers there ({told(error)}); start it, or mend the address") from error
        self._refuse(reply)
        if reply.status_code in PASSING or reply.status_code >= 500:
            return  # busy, and each request will be tried again
        try:
            served = [str(model["id"]) for model in reply.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{where}: what answers there has no list of models (status {reply.status_code}); give an OpenAI-compatible "
                "address, which mostly ends in /v1"
            ) from error
        if self.model not in served:
            raise UserError(f"writer.model={self.model}: the server has no such model; {nearest(self.model, served)}")

    def write(self, shards: Iterable[Shard], add: Add) -> None:
        asyncio.run(self._write(shards, add))

    async def _write(self, shards: Iterable[Shard], add: Add) -> None:
        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        timeout = httpx.Timeout(self.timeout, connect=min(10.0, self.timeout))
        async with httpx.AsyncClient(headers=self.headers, timeout=timeout, limits=limits) as client:
            waiting = ((shard, wanted) for shard in shards for wanted in shard.left)

            async def work() -> None:
                for shard, wanted in waiting:  # shared: a worker takes the next conversation, of whichever shard
                    add(shard, await self._converse(client, wanted))

            workers = [asyncio.create_task(work()) for _ in range(self.concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    def _refuse(self, reply: httpx.Response) -> None:
        """Stop where every request would be refused."""
        if reply.status_code in (401, 403):
            raise UserError(
                f"writer.api_key_variable: {self.base_url} refuses the key or wants one ({detail(reply)}); name the "
                "environment variable that holds a valid one"
            )
        if reply.status_code == 404:
            raise UserError(
                f"writer.base_url={self.base_url}, writer.model={self.model}: the server does not know this address or this "
                f"model ({detail(reply)}); the address mostly ends in /v1"
            )

    async def _converse(self, client: httpx.AsyncClient, wanted: Wanted) -> Row | Lost:
        """One conversation, turn by turn."""
        chat = Chat(wanted, self.sampling)
        try:
            while (messages := chat.ask()) is not None:
                chat.answer(*await self._request(client, {**self._body(chat), "messages": messages}))
        except Unanswered as given_up:
            return given_up.of(wanted)
        return chat.row

    def _body(self, chat: Chat) -> dict[str, Any]:
        """A request without its messages; the seed is that of the conversation and turn."""
        sampling = self.sampling
        keys = f"{sampling.seed}/{chat.wanted.key}/{len(chat.sizes)}".encode()
        seed = int.from_bytes(blake2b(keys, digest_size=4).digest(), "big") >> 1
        body = {"model": self.model, "temperature": sampling.temperature, "top_p": sampling.top_p,
                "max_tokens": sampling.max_new_tokens, "seed": seed}  # fmt: skip
        if sampling.top_k:  # not OpenAI's, so that a server which does not know it is only asked where it is wanted
            body["top_k"] = sampling.top_k
        return {**body, **self.extra}

    async def _request(self, client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str, int]:
        """The text of one answer, why it ended, and its tokens; an Unanswered where it cannot be had."""
        problem = ""
        for attempt in range(self.retries + 1):
            found = await self._attempt(client, body)
            if isinstance(found, tuple):
                return found
            problem = found.problem
            if attempt < self.retries:
                chosen = min(LONGEST_WAIT, 2.0**attempt) * uniform(0.5, 1.0)
                await asyncio.sleep(chosen if found.pause is None else found.pause)
        raise Unanswered("failed", f"{self.retries + 1} attempts, the last: {problem}")

    async def _attempt(self, client: httpx.AsyncClient, body: dict[str, Any]) -> "tuple[str, str, int] | Passing":
        """An answer, or what another attempt may mend; an Unanswered where none can."""
        try:
            reply = await client.post(f"{self.base_url}/chat/completions", json=body)
        except httpx.RequestError as error:
            return Passing(told(error))
        self._refuse(reply)
        if reply.status_code in PASSING or reply.status_code >= 500:
            return Passing(detail(reply), retry_after(reply))
        if reply.status_code >= 400:
            problem = detail(reply)
            long = "context" in problem.lower() and "length" in problem.lower()
            raise Unanswered("too_long" if long else "failed", problem)
        try:
            return self._read(reply)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            return Passing(f"the answer is no chat completion ({told(error)})")

    def _read(self, reply: httpx.Response) -> tuple[str, str, int]:
        found = reply.json()
        choice = found["choices"][0]
        text = choice["message"]["content"]
        if not isinstance(text, str):
            raise Unanswered("failed", f"the server gave no text (finish_reason {choice.get('finish_reason')})")
        usage = found.get("usage") or {}
        return text, str(choice.get("finish_reason")), int(usage.get("completion_tokens") or 0)


def retry_after(reply: httpx.Response) -> float | None:
    """The seconds that the server asks to wait, given as a number or a date; ten minutes at most."""
    said = reply.headers.get("retry-after", "")
    try:
        seconds = float(said)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(said).timestamp() - time.time()
        except ValueError:
            return None
    return min(600.0, max(0.0, seconds))


def detail(reply: httpx.Response) -> str:
    """Status and reason in a line."""
    return f"status {reply.status_code}: {' '.join(reply.text.split())[:300]}"


def told(error: Exception) -> str:
    """An error in a line; those of the network are often without words."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
