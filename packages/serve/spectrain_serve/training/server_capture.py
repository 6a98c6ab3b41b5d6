"""Filling a feature store from servers, with many requests at once."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from spectrain.data.chat import Example
from spectrain.errors import RunError
from spectrain.features.base import FeatureCache, StateCapture
from spectrain.files import write_text
from spectrain.output.count_progress import CountProgress

from ..servers.errors import ServerError
from ..servers.workers import run_workers
from .server_states import StateRequester, StatesError

FAILURE_FILE = "failed.jsonl"
STOP_AFTER = 20
"""Number of consecutive failures that stops the capture at once."""


@dataclass
class StoreFiller:
    """Captures sequences from servers into a store, and collects those that fail with their
    reason.
    """

    requester: StateRequester
    store: FeatureCache
    shows_progress: bool = False
    # Reasons by the sequence's key.
    failed: dict[str, str] = field(default_factory=dict)
    num_done: int = 0
    num_tokens: int = 0
    num_failed_in_a_row: int = 0
    start_time: float = field(default_factory=time.monotonic)

    def fill_store(self, examples: list[Example]) -> None:
        """Capture these sequences; raise a RunError if the servers are gone or nothing succeeds
        any more.
        """
        total = sum(len(example.tokens) for example in examples)
        progress = CountProgress("capturing", total, unit="tokens", enabled=self.shows_progress)
        try:
            with progress:
                asyncio.run(self._capture_all(examples, progress))
        finally:
            self.store.flush()

    async def _capture_all(self, examples: list[Example], progress: CountProgress) -> None:
        async def capture(example: Example) -> None:
            await self._capture_example(example)
            self.num_done += 1
            progress.advance(len(example.tokens))

        async with self.requester.server as server:
            await run_workers(capture, examples, server.concurrency)

    async def _capture_example(self, example: Example) -> None:
        try:
            states = await self.requester.capture_states(example.tokens)
        except ServerError as error:
            if error.kind == "unreachable":
                raise RunError(f"server.url: {error}; {self._how_to_go_on()}") from error
            self._add_failure(example, error)
        except StatesError as error:
            self._add_failure(example, error)
        else:
            self.store.put_states(example, states, self.requester.layers)
            self.num_failed_in_a_row = 0
            self.num_tokens += len(example.tokens)

    def _add_failure(self, example: Example, error: Exception) -> None:
        self.failed[self.store.sequence_key(example)] = str(error)
        self.num_failed_in_a_row += 1
        if self.num_failed_in_a_row >= STOP_AFTER:
            raise RunError(
                f"server.url: {STOP_AFTER} sequences failed one after another, the last: {error}; "
                f"{self._how_to_go_on()}"
            ) from error

    @property
    def summary_line(self) -> str:
        """Return a line with what was captured, repeated and not captured, and how fast."""
        seconds = time.monotonic() - self.start_time
        return (
            f"{self.num_done - len(self.failed)} sequences captured, {self.num_tokens} tokens in "
            f"{seconds:.0f} s ({self.num_tokens / max(1e-9, seconds):.0f} a second); "
            f"{self.requester.num_repeated} requested again, {len(self.failed)} failed"
        )

    def _how_to_go_on(self) -> str:
        return (
            f"what was captured is stored in {self.store.path}; start the server again, and "
            "run the same command"
        )


def record_failures(failed: dict[str, str], examples: list[Example], store: FeatureCache) -> None:
    """Write which sequences of the data failed and why, a line each; without failures the file
    is deleted.
    """
    file = store.path / FAILURE_FILE
    if not failed:
        file.unlink(missing_ok=True)
        return
    lines = [
        json.dumps(failure_entry(number, example, failed[key])) + "\n"
        for number, example in enumerate(examples)
        if (key := store.sequence_key(example)) in failed
    ]
    write_text(file, "".join(lines))


def failure_entry(number: int, example: Example, reason: str) -> dict[str, Any]:
    """Return a line of the file of failures."""
    return {
        "sequence": number,
        "tokens": len(example.tokens),
        "first_ids": example.tokens[:16],
        "error": reason,
    }


class ServerCapture(StateCapture):
    """Captures the sequences of a training from a server that `requester` has checked."""

    failure_file = FAILURE_FILE

    def __init__(self, requester: StateRequester, engine: str) -> None:
        self.requester, self.engine = requester, engine

    def fill_store(
        self, store: FeatureCache, accelerator: Accelerator, examples: list[Example]
    ) -> None:
        """Capture this process's share of the missing sequences, and record those that fail."""
        _, missing = store.list_distinct(examples)
        accelerator.wait_for_everyone()
        filler = StoreFiller(self.requester, store, shows_progress=accelerator.is_main_process)
        try:
            filler.fill_store(missing[accelerator.process_index :: accelerator.num_processes])
        finally:
            print(filler.summary_line, flush=True)
        gathered: list[dict[str, str]] = gather_object([filler.failed])
        if accelerator.is_main_process:
            failed = {key: reason for failed in gathered for key, reason in failed.items()}
            record_failures(failed, examples, store)
