"""HTTP requests to one server. The `openai` client keeps the connections, reads streams and
repeats failed requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    AsyncOpenAI,
    AsyncStream,
    Omit,
    OpenAI,
    Timeout,
)

from spectrain.errors import UserError

from .errors import MALFORMED, FailureKind, ServerError, error_text
from .settings import ClientSettings

# Temporary refusals, besides the server's own errors (500 and above).
TRANSIENT_STATUSES = (408, 409, 429)
# Seconds before the retry of a malformed answer; after an error, the client waits by itself.
RETRY_PAUSE = 1.0
# Longest time to wait for a connection, in seconds.
CONNECT_SECONDS = 10.0
RAW_RESPONSE_HEADER = "X-Stainless-Raw-Response"
Parsed = TypeVar("Parsed")


class HttpClient:
    """The connections to one server.

    A temporary failure is a status of 408, 409, 429 or 500 and above, no connection, a timeout, or
    a malformed answer. The request is repeated after 0.5, 1, 2 .. 8 seconds, shortened by up to a
    quarter at random, or when the server says, if that is within two minutes.
    """

    def __init__(self, settings: ClientSettings, url: str) -> None:
        self.settings, self.url = settings, url
        # Address of the interfaces beside OpenAI's.
        self.root = url.removesuffix("/v1")
        self.is_reachable = True
        # Requests that are not answered yet.
        self.num_open = 0
        self.key = settings.api_key or "none"
        # By itself the client sends OPENAI_API_KEY, which is not for this server.
        self.headers: Any = {"Authorization": Omit()} if settings.api_key is None else {}
        self._client: AsyncOpenAI | None = None

    def open(self) -> None:
        """Open connections in the running event loop."""
        timeout = Timeout(
            self.settings.timeout, connect=min(CONNECT_SECONDS, self.settings.timeout)
        )
        self._client = AsyncOpenAI(api_key=self.key, base_url=self.url, timeout=timeout)
        self.is_reachable = True
        self.num_open = 0

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    @property
    def client(self) -> AsyncOpenAI:
        assert self._client is not None, "requests are made inside `async with server`"
        return self._client

    async def post(self, path: str, body: dict[str, Any], parse: Callable[[Any], Parsed]) -> Parsed:
        """Post JSON to a path below `url`, or to a full address, and return the parsed answer.

        An answer that `parse` rejects (ValueError, KeyError, TypeError ..) counts as a temporary
        failure.
        """
        # A raw response tells how often the client itself has repeated the request.
        options: Any = {"headers": {**self.headers, RAW_RESPONSE_HEADER: "true"}}
        retries = self.settings.retries
        attempts = 0
        with self._count_open():
            while True:
                client = self.client.with_options(max_retries=retries - attempts)
                try:
                    reply: Any = await client.post(path, cast_to=str, body=body, options=options)
                except (APIConnectionError, APIStatusError) as error:
                    raise self._to_server_error(error, attempts) from error
                attempts += reply.retries_taken + 1
                try:
                    return parse(json.loads(reply.text))
                except MALFORMED as error:
                    problem = f"the answer is malformed ({error_text(error)})"
                if attempts > retries:
                    raise ServerError("failed", f"{attempts} attempts, the last: {problem}")
                await asyncio.sleep(RETRY_PAUSE)

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Post JSON and yield the parts of a streamed answer; a failure after the first part is
        not repeated.
        """
        with self._count_open():
            client = self.client.with_options(max_retries=self.settings.retries)
            options: Any = {"headers": self.headers}
            try:
                parts = await client.post(
                    path,
                    cast_to=object,
                    body={**body, "stream": True},
                    options=options,
                    stream=True,
                    stream_cls=AsyncStream[object],
                )
                async for part in parts:
                    if isinstance(part, dict):
                        yield part
            except (APIConnectionError, APIStatusError) as error:
                raise self._to_server_error(error, 0) from error
            except APIError as error:
                raise ServerError(
                    "failed", f"the server broke off its answer ({error_text(error)})"
                ) from error
            except Exception as error:
                # A broken connection is an error of the network library, httpx or httpx2 by the
                # version of the client.
                if not type(error).__module__.startswith("httpx"):
                    raise
                raise ServerError(
                    "failed", f"the connection broke during the answer ({error_text(error)})"
                ) from error

    async def get(self, path: str) -> str:
        """Return the text at a path below `url` or at a full address; a failure raises a
        ServerError.
        """
        try:
            options: Any = {"headers": self.headers}
            return await self.client.with_options(max_retries=1).get(
                path, cast_to=str, options=options
            )
        except (APIConnectionError, APIStatusError) as error:
            raise self._to_server_error(error, 0) from error

    def list_models(self) -> list[dict[str, Any]] | None:
        """Return the served models as the server describes them; None if it is busy.

        A UserError says what is wrong with the address or the key. This call needs no event loop.
        """
        client = OpenAI(
            api_key=self.key,
            base_url=self.url,
            timeout=min(CONNECT_SECONDS, self.settings.timeout),
            max_retries=0,
        )
        where = f"server.url={self.url}"
        try:
            reply = client.models.with_raw_response.list(extra_headers=self.headers).text
        except APIConnectionError as error:
            raise UserError(
                f"{where}: no server answers there ({error_text(error)}); start it, or mend the "
                "address"
            ) from error
        except APIStatusError as error:
            self._raise_if_fatal(error)
            if is_transient(error):
                # Each request will be repeated.
                return None
            reply = status_text(error)
        try:
            return [{**model, "id": str(model["id"])} for model in json.loads(reply)["data"]]
        except MALFORMED as error:
            raise UserError(
                f"{where}: what answers there has no list of models "
                f"({' '.join(reply.split())[:300]}); give an OpenAI-compatible address, which "
                "mostly ends in /v1"
            ) from error

    @contextmanager
    def _count_open(self) -> Iterator[None]:
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def _to_server_error(
        self, error: APIConnectionError | APIStatusError, prior_attempts: int
    ) -> ServerError:
        """Return the error to report after `prior_attempts` attempts and those of the client; a
        UserError stops the command."""
        problem = error_text(error)
        kind: FailureKind = "failed"
        if isinstance(error, APIStatusError):
            self._raise_if_fatal(error)
            problem = status_text(error)
            if not is_transient(error):
                is_long = "context" in problem.lower() and any(
                    word in problem.lower() for word in ("length", "size")
                )
                return ServerError("too_long" if is_long else "failed", problem)
        elif type(error.__cause__).__name__ == "ConnectError":
            kind = "unreachable"
            self.is_reachable = False
        attempts = prior_attempts + int(error.request.headers.get("x-stainless-retry-count", 0)) + 1
        return ServerError(kind, f"{attempts} attempts, the last: {problem}")

    def _raise_if_fatal(self, error: APIStatusError) -> None:
        """Raise a UserError if the server would refuse every request."""
        if error.status_code in (401, 403):
            raise UserError(
                f"server.api_key_variable: {self.url} refuses the key or wants one "
                f"({status_text(error)}); name the environment variable that holds a valid one"
            )
        if error.status_code == 404:
            raise UserError(
                f"server.url={self.url}, server.model={self.settings.model}: the server does not "
                f"know this address or this model ({status_text(error)}); the address mostly ends "
                "in /v1"
            )


def is_transient(error: APIStatusError) -> bool:
    """Tell whether another attempt may succeed."""
    return error.status_code in TRANSIENT_STATUSES or error.status_code >= 500


def status_text(error: APIStatusError) -> str:
    """Return the status and the reason in one line."""
    return f"status {error.status_code}: {' '.join(error.response.text.split())[:300]}"
