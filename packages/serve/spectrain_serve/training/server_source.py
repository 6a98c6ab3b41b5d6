"""A source whose features a server computes while the drafter trains. Shapes: B batch, T tokens,
L layers, D target width.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor

from spectrain.config.values import Count, Positive
from spectrain.data.chat import Example
from spectrain.errors import UserError
from spectrain.features.base import (
    BatchRequest,
    FeatureServer,
    FeatureSource,
    FeaturesRead,
    SourceError,
)
from spectrain.features.batch import Batch, pad_or_pack
from spectrain.features.store import FeatureStore
from spectrain.features.store_contents import format_layers
from spectrain.features.stored_source import StoredSource
from spectrain.models.features import Layer
from spectrain.models.target import Target

from ..servers.base import Server
from ..servers.errors import ServerError
from .server_states import ATTEMPTS, CapturedStates, OtherModelError, StateRequester, StatesError

BOTTLENECK_SHARE = 0.1
"""Share of a training spent waiting from which the server is reported to hold the trainer up."""


class BackgroundLoop:
    """An event loop in a thread, in which requests to a server are made."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(
            target=self.loop.run_forever, name="spectrain-server", daemon=True
        )
        self.thread.start()
        self.slots = asyncio.Semaphore(server.concurrency)
        self.submit(server.__aenter__()).result()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancel what is under way, close the connections and end the thread."""
        self.submit(self._finish()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.server.__aexit__()


@dataclass
class StatesRequest:
    """A request for a sequence, and how many coming batches need it."""

    result: Future[CapturedStates]
    num_uses: int = 0


class ServerSource(FeatureSource):
    """Requests the features of the coming batches from a server that captures hidden states, ahead
    of the trainer.

    A sequence whose states fail a check is requested again. A server that goes away stops the
    training at a checkpoint.
    """

    needs_server = True

    def __init__(
        self,
        # Number of batches that are requested before the trainer needs them.
        ahead: Count = 8,
        # Whether the features are stored in source.path, so that later epochs and runs request
        # nothing again.
        keep: bool = False,
        # Folder of the feature store; null stores nothing.
        path: str | None = None,
        # Type of the stored features; auto takes the target's type or that of an existing store,
        # and fp8 and int8 store one scale per token and layer.
        dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = "auto",
        # Largest size of the store, in gigabytes.
        max_gb: Positive = 100.0,
        # Size of one shard of the store, in megabytes.
        shard_mb: Positive = 512.0,
    ) -> None:
        if keep != (path is not None):
            raise UserError(
                "source.keep: features are stored with source.keep=true source.path=DIR; give "
                "both or neither"
            )
        self.num_ahead = ahead
        self.kept = None if path is None else StoredSource(path, dtype, None, max_gb, shard_mb)
        self.store: FeatureStore | None = None
        self.server: Server | None = None
        self.background: BackgroundLoop | None = None
        self.requests: dict[str, StatesRequest] = {}
        self.waited_seconds = self.reported_seconds = 0.0
        self.start_time: float | None = None

    def provenance_facts(self) -> dict[str, Any]:
        return {} if self.kept is None else self.kept.provenance_facts()

    def use_server(self, server: FeatureServer) -> None:
        # The choices of `server=` are those of this package.
        self.server = cast(Server, server)

    def prepare(self, target: Target, reads: FeaturesRead, examples: list[Example] | None) -> str:
        """Check the server against the target and the data, and open the store, before the run
        writes anything.
        """
        assert self.server is not None, "use_server comes first"
        self.requester = StateRequester(self.server, target, reads.layers)
        engine = self.requester.connect(examples or [])
        message = (
            f"states of layers {format_layers(reads.layers)} from {engine}, "
            f"{self.server.concurrency} requests at a time"
        )
        if self.kept is None:
            return message
        self.kept.engine = engine
        stored = self.kept.prepare(target, reads, examples)
        self.store = self.kept.own_store
        if self.store is None:
            raise UserError(
                f"source.path={self.kept.path}: this cache is another project's; choose another "
                "folder"
            )
        return f"{message}; {stored}"

    def request_ahead(self, examples: list[Example]) -> None:
        for example in examples:
            if self.store is None or example not in self.store:
                self._request(example).num_uses += 1

    def _request(self, example: Example) -> StatesRequest:
        """Return the request for a sequence, which is made unless it is under way."""
        key = example.content_hash
        if key not in self.requests:
            self.requests[key] = StatesRequest(self._submit(example.tokens))
        return self.requests[key]

    def _submit(self, tokens: list[int]) -> Future[CapturedStates]:
        if self.background is None:
            self.background = BackgroundLoop(self.requester.server)
        background = self.background

        async def request() -> CapturedStates:
            async with background.slots:
                return await self.requester.request_states(tokens)

        return background.submit(request())

    def get_states(self, batch: Batch, request: BatchRequest) -> Tensor:
        self.start_time = self.start_time or time.monotonic()
        try:
            rows = [self._take_states(example, request.layers) for example in request.examples]
        except (ServerError, StatesError, UserError) as error:
            raise SourceError(f"server.url: {error}") from error
        return pad_or_pack([row.to(request.target.device) for row in rows], request.packed)

    def _take_states(self, example: Example, layers: tuple[Layer, ...]) -> Tensor:
        """Return the states [T, L, D] of a sequence from the store or from the server."""
        target = self.requester.target
        requester = self.requester
        key = example.content_hash
        stored = None if self.store is None else self.store.read_states(example, layers, target)
        if stored is not None:
            self.requests.pop(key, None)
            return stored
        entry = self._request(example)
        states = self._read_checked(entry.result, example.tokens)
        entry.num_uses -= 1
        if entry.num_uses <= 0:
            del self.requests[key]
        if self.store is not None:
            return self.store.put_states(example, states, layers)
        if layers == requester.layers:
            return states
        return states[:, [requester.layers.index(layer) for layer in layers]]

    def _read_checked(self, result: Future[CapturedStates], tokens: list[int]) -> Tensor:
        """Wait for the states and check them against the target, which only this thread runs."""
        for attempt in range(1, ATTEMPTS + 1):
            began = time.monotonic()
            captured = result.result()
            self.waited_seconds += time.monotonic() - began
            try:
                return self.requester.read_layers(captured)
            except OtherModelError:
                if attempt == ATTEMPTS:
                    raise
                result = self._submit(tokens)
        raise AssertionError("the last attempt returns or raises")

    def take_waited_seconds(self) -> float:
        waited = self.waited_seconds - self.reported_seconds
        self.reported_seconds = self.waited_seconds
        return waited

    def writable_store(self) -> FeatureStore | None:
        return self.store

    def flush(self) -> None:
        if self.store is not None:
            self.store.flush()

    def close(self) -> str | None:
        self.flush()
        if self.background is not None:
            self.background.close()
            self.background = None
        self.requests = {}
        if self.start_time is None:
            return None
        seconds = time.monotonic() - self.start_time
        return describe_waiting(self.waited_seconds, seconds, self.requester.num_repeated)


def describe_waiting(waited: float, seconds: float, num_repeated: int) -> str:
    """Say how long the trainer waited for the server, and which of them is the bottleneck."""
    share = waited / max(1e-9, seconds)
    if share >= BOTTLENECK_SHARE:
        verdict = (
            "the server is the bottleneck: add servers, raise server.concurrency, or set "
            "source.keep=true"
        )
    else:
        verdict = "the trainer is the bottleneck"
    repeated = f"; {num_repeated} sequences were requested again" if num_repeated else ""
    return (
        f"the trainer waited {waited:.1f} of {seconds:.1f} s for states ({share:.0%}); "
        f"{verdict}{repeated}"
    )
