"""vLLM: answers, hidden states and counters of a running server. Shapes: T tokens, L captured
layers, D target width.

Layer k is vLLM's k: the residual stream entering layer k, and after the last layer, without the
final norm, the number of layers.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from spectrain.data.messages import Conversation
from spectrain.errors import UserError
from spectrain.servers.commands import is_decreasing

from .base import (
    Completion,
    CompletionRequest,
    DraftCounters,
    DraftedRounds,
    RequestTimes,
    ServerCapabilities,
    TimedStep,
    add_counters,
)
from .counters import read_settled_counters
from .errors import ServerError, refuse_malformed
from .openai import OpenAIServer
from .settings import EngineSettings

if TYPE_CHECKING:
    from .client import HttpClient

# Seconds between two attempts at a lock.
LOCK_POLL_SECONDS = 0.005


@dataclass
class VllmSettings(EngineSettings):
    """Settings of server=vllm."""

    # Folder of captured states as this machine sees it; null takes the path that the server names,
    # and a started engine then writes to spectrain-states-PORT in the folder of temporary files.
    states_folder: str | None = None
    # Seconds that the server may take to write the states of a request.
    write_seconds: float = 60.0
    # Share of rounds that accept all draft tokens up to each position, as in [0.7,0.4,0.2], for
    # which a started engine simulates acceptance; null verifies the drafts.
    acceptance_rates: list[float] | None = None
    # Whether a started engine takes the weights of other drafters while it runs, through the
    # endpoints of vLLM's development mode; whoever reaches its port can then change the drafter.
    takes_drafters: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = self.acceptance_rates
        if rates is None:
            return
        if self.takes_drafters:
            raise UserError(
                "server.takes_drafters: simulated acceptance checks no drafts; leave "
                "server.acceptance_rates out"
            )
        if not is_decreasing(rates):
            raise UserError(
                f"server.acceptance_rates={rates}: use rates from 0 to 1, none above the one "
                "before it"
            )
        if self.draft_tokens not in (None, len(rates)):
            raise UserError(
                f"server.acceptance_rates={rates}: these are {len(rates)} rates for "
                f"server.draft_tokens={self.draft_tokens}; leave server.draft_tokens out"
            )

    @property
    def states_path(self) -> Path:
        """Return the folder that a started engine writes captured states into."""
        if self.states_folder is not None:
            return Path(self.states_folder).expanduser().resolve()
        return Path(tempfile.gettempdir()) / f"spectrain-states-{self.port}"


class VllmServer(OpenAIServer):
    """A vLLM server."""

    name = "vllm"
    capabilities: ClassVar[ServerCapabilities] = ServerCapabilities(
        captures_states=True, counts_drafts=True, has_lookup=True
    )
    settings: VllmSettings

    def __init__(self, config: VllmSettings) -> None:
        super().__init__(config)

    async def request_completion(
        self, client: HttpClient, request: CompletionRequest
    ) -> Completion:
        response, times = await self.request_response(client, request)
        with refuse_malformed("the server's answer"):
            completion = self.parse_response(
                response, isinstance(request.prompt, Conversation), times
            )
        return (
            await self._add_states(completion, response) if request.captures_states else completion
        )

    def find_states_file(self, named: str) -> Path:
        """Return the file of states that a server names; it is deleted once it is read, so that
        it must be a temporary one.
        """
        path = Path(named)
        if self.settings.states_folder is not None:
            return Path(self.settings.states_folder).expanduser() / path.name
        if path.suffix != ".safetensors" or not path.resolve().is_relative_to(
            Path(tempfile.gettempdir()).resolve()
        ):
            raise ServerError(
                "failed",
                f"{named}: the server names a file of states outside of {tempfile.gettempdir()}; "
                "give its folder with server.states_folder=FOLDER",
            )
        return path

    async def _add_states(self, completion: Completion, response: dict[str, Any]) -> Completion:
        """Add the states that the server wrote to a file, and delete the file."""
        with refuse_malformed("kv_transfer_params of the server's answer"):
            named = (response.get("kv_transfer_params") or {}).get("hidden_states_path")
        if named is None:
            raise ServerError(
                "failed",
                "the server captured no states; start it with spectrain serve server=vllm "
                "capture=true recipe=NAME",
            )
        path = self.find_states_file(str(named))
        try:
            await wait_for_writer(path, self.settings.write_seconds)
            states, tokens, layers = await asyncio.to_thread(read_states_file, path)
        finally:
            for leftover in (path, Path(f"{path}.lock"), Path(f"{path}.partial")):
                with suppress(OSError):
                    leftover.unlink()
        return replace(completion, states=states, state_tokens=tokens, state_layers=layers)

    def request_body(self, request: CompletionRequest) -> dict[str, Any]:
        body = super().request_body(request) | {"return_token_ids": True}
        if request.cache_key is not None:
            body["cache_salt"] = request.cache_key
        if request.captures_states:
            body["kv_transfer_params"] = {"include_output_tokens": request.max_new_tokens > 1}
        return body

    def parse_response(
        self, response: dict[str, Any], is_chat: bool, times: RequestTimes
    ) -> Completion:
        completion = super().parse_response(
            response, is_chat, add_engine_clock(times, response.get("metrics") or {})
        )
        return replace(completion, timed_steps=time_steps(times, completion.rounds))

    def parse_rounds(self, response: dict[str, Any]) -> DraftedRounds | None:
        counts = (response.get("metrics") or {}).get("speculative_decoding") or {}
        # Null where the server counts sums alone, and for an answer of one token.
        if counts.get("per_step_accepted") is None:
            return None
        return DraftedRounds(tuple(counts["per_step_accepted"]), tuple(counts["per_step_drafted"]))

    async def read_counters(self) -> DraftCounters | None:
        """Return what all servers have counted, once it stands still; None without a drafter."""
        return add_counters(
            [await read_settled_counters(client, self.name) for client in self.clients]
        )


async def wait_for_writer(path: Path, seconds: float) -> None:
    """Wait until vLLM has written a file of states: its writer holds a lock from the request's
    arrival to the file's end.
    """
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR)
    except FileNotFoundError:
        # The server was started without locks.
        return
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ServerError(
                        "failed",
                        f"{path}: the server did not finish this file in {seconds:g} seconds",
                    ) from None
                await asyncio.sleep(LOCK_POLL_SECONDS)
    finally:
        os.close(lock)


def read_states_file(path: Path) -> tuple[Tensor, list[int], tuple[int, ...] | None]:
    """Return the states [T, L, D] of a file, their tokens [T], and their layers if the file
    names them.
    """
    try:
        with safe_open(path, "pt") as file:
            states = file.get_tensor("hidden_states")
            tokens = file.get_tensor("token_ids")
            metadata = file.metadata() or {}
    except FileNotFoundError as error:
        raise ServerError(
            "failed",
            f"{path}: there is no such file; server.states_folder must name the server's folder "
            "as this machine sees it",
        ) from error
    except (OSError, SafetensorError) as error:
        raise ServerError("failed", f"{path}: it cannot be read ({error})") from error
    with refuse_malformed(f"{path}: what the server wrote"):
        named = metadata.get("layers")
        layers = tuple(map(int, named.split(","))) if named else None
        if states.dim() != 3 or tokens.shape != states.shape[:1]:
            raise ValueError(
                f"states {list(states.shape)} of tokens {list(tokens.shape)} instead of [T, L, D] "
                "and [T]"
            )
        if layers is not None and len(layers) != states.shape[1]:
            raise ValueError(f"{states.shape[1]} layers, and the names of {len(layers)}")
        return states, tokens.tolist(), layers


def time_steps(times: RequestTimes, rounds: DraftedRounds | None) -> tuple[TimedStep, ...]:
    """Return the forwards of a streamed answer, by the client's clock: each part of the stream
    holds the tokens of one forward.

    If some forwards had no drafts, the counts do not tell which, and only accepted tokens count as
    drafted.
    """
    gaps = [
        (after[0] - before[0], after[1] - 1)
        for before, after in zip(times.arrivals, times.arrivals[1:])
    ]
    is_known = rounds is not None and len(rounds.drafted) == len(gaps)
    drafted = (
        rounds.drafted if rounds is not None and is_known else [accepted for _, accepted in gaps]
    )
    return tuple(
        TimedStep(count, accepted, seconds) for count, (seconds, accepted) in zip(drafted, gaps)
    )


def add_engine_clock(times: RequestTimes, metrics: dict[str, Any]) -> RequestTimes:
    """Add the engine's own times, in milliseconds, to those of the client."""
    first = metrics.get("time_to_first_token_ms")
    per_token = metrics.get("mean_itl_ms")
    return replace(
        times,
        engine_first_token=None
        if first is None
        else (first + (metrics.get("queue_time_ms") or 0.0)) / 1000,
        engine_per_token=None if not per_token else per_token / 1000,
    )
