"""The contract of servers: programs that run the target and answer over HTTP. A file per engine
implements it.

Layers are numbered as everywhere in this project (`spectrain.models.features.Layer`); each engine's
file converts them.
Shapes: T tokens, L captured layers, D target width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from spectrain.data.chat_template import Message
from spectrain.data.messages import Conversation
from spectrain.errors import UserError, suggest_nearest

from .errors import ServerError
from .settings import ClientSettings

if TYPE_CHECKING:
    from typing_extensions import Self

    from .client import HttpClient


@dataclass(frozen=True)
class ServerCapabilities:
    """What an engine can do beyond answering messages."""

    # Returns the hidden states of requests, if it was started for that.
    captures_states: bool = False
    # Counts drafted and accepted tokens.
    counts_drafts: bool = False
    # Has a drafter of its own that copies from the text, which `spectrain.servers.commands.LOOKUP`
    # names.
    has_lookup: bool = False


@dataclass(frozen=True)
class ServedModel:
    """What a server says about itself."""

    name: str
    # Longest sequence, in tokens; None if it does not say.
    max_length: int | None = None
    # Path or name of the weights; None if it does not say.
    weights: str | None = None


@dataclass(frozen=True)
class CompletionRequest:
    """A prompt, and how its answer is sampled."""

    # Token ids, or messages that the server renders with its chat template.
    prompt: Sequence[int] | Conversation
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    # 0 uses the whole vocabulary.
    top_k: int = 0
    seed: int | None = None
    # Whether the answer arrives in parts, with the times of their arrival.
    streams: bool = False
    # Whether the hidden states come too: of the prompt and, beyond one new token, of all of the
    # answer but its last token.
    captures_states: bool = False
    # Prompts with different keys share no cached prefix, where the engine knows such keys; None
    # shares them with all.
    cache_key: str | None = None


@dataclass(frozen=True)
class DraftedRounds:
    """The verified rounds of one answer, in order. The last one is untrimmed: a limit may have
    cut its tokens.
    """

    accepted: tuple[int, ...]
    drafted: tuple[int, ...]


@dataclass(frozen=True)
class TimedStep:
    """A forward of the target after the first token of an answer: draft tokens in it, those
    accepted, and its seconds.

    The seconds are those from the end of the forward before it, so they include the drafting.
    """

    drafted: int
    accepted: int
    seconds: float


@dataclass(frozen=True)
class DraftCounters:
    """What a server has counted since its start: rounds, drafted tokens, and accepted tokens by
    position in the draft.
    """

    num_rounds: int
    num_drafted: int
    accepted_by_position: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_by_position)

    def subtract(self, earlier: DraftCounters) -> DraftCounters:
        """Return what was counted after `earlier`."""
        before = {position: count for position, count in enumerate(earlier.accepted_by_position)}
        accepted = tuple(
            count - before.get(position, 0)
            for position, count in enumerate(self.accepted_by_position)
        )
        return DraftCounters(
            self.num_rounds - earlier.num_rounds, self.num_drafted - earlier.num_drafted, accepted
        )


@dataclass(frozen=True)
class RequestTimes:
    """When an answer came, in seconds."""

    total: float
    # (seconds after the request, tokens that came then) of a streamed answer. Chunks of a busy
    # server arrive in bundles.
    arrivals: tuple[tuple[float, int], ...] = ()
    # The engine's own clock, if it gives it: seconds to the first token, waiting included, and per
    # later token.
    engine_first_token: float | None = None
    engine_per_token: float | None = None

    @property
    def first_token(self) -> float:
        """Return the seconds to the first token, by the engine's clock if there is one."""
        if self.engine_first_token is not None:
            return self.engine_first_token
        return self.arrivals[0][0] if self.arrivals else self.total


@dataclass(frozen=True)
class Completion:
    """An answer."""

    message: Message
    # "stop", "length" or the server's own word.
    finish_reason: str
    num_tokens: int
    times: RequestTimes
    # Token ids of the answer, its stop token included, and of the prompt; None if the server gives
    # none.
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    # The rounds of this answer; None if the server does not count per request.
    rounds: DraftedRounds | None = None
    # The forwards of this answer, in order; () if the server does not tell their times.
    timed_steps: tuple[TimedStep, ...] = ()
    # Hidden states [T, L, D] in the server's type and the tokens [T] that they belong to; None if
    # none were requested.
    states: Tensor | None = None
    state_tokens: list[int] | None = None
    # The layers of the states, if the server names them.
    state_layers: tuple[int, ...] | None = None


class Server(ABC):
    """A running server, or several that serve the same model. Requests are made inside `async with
    server`.

    A request that fails raises a ServerError; a mistake in the settings that fails every request
    raises a UserError.
    """

    # Name of the choice in conf/server.
    name: ClassVar[str]
    capabilities: ClassVar[ServerCapabilities]

    def __init__(self, config: ClientSettings) -> None:
        self.settings = config
        # The client takes a second to import, which commands without a server spare.
        from .client import HttpClient

        self.clients = [HttpClient(config, url) for url in config.urls]
        self.model = config.model

    async def __aenter__(self) -> Self:
        for client in self.clients:
            client.open()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        for client in self.clients:
            await client.close()

    @property
    def concurrency(self) -> int:
        """Return how many requests are made at the same time, to all servers together."""
        return self.settings.concurrency * len(self.clients)

    def check_ready(self) -> ServedModel:
        """Return what the servers serve; raise a UserError if an address, the key or the model is
        wrong.

        A server that is busy now counts as ready. `model` is set to the only served one if the
        settings leave it open.
        """
        served = [self._describe(client) for client in self.clients]
        if len({model.name for model in served}) > 1:
            raise UserError(
                f"server.url: the servers serve {', '.join(model.name for model in served)}; give "
                "those of one model"
            )
        self.model = served[0].name
        return min(served, key=lambda model: model.max_length or float("inf"))

    def _describe(self, client: HttpClient) -> ServedModel:
        models = client.list_models()
        if models is None:
            return ServedModel(self.settings.model or "")
        names = [str(model["id"]) for model in models]
        wanted = self.settings.model
        if wanted is None and len(names) != 1:
            raise UserError(
                f"server.model: the server at {client.url} serves {', '.join(names)}; name one of "
                "them"
            )
        if wanted is not None and wanted not in names:
            raise UserError(
                f"server.model={wanted}: the server has no such model; "
                f"{suggest_nearest(wanted, names)}"
            )
        return self.describe_model(models[0 if wanted is None else names.index(wanted)])

    def describe_model(self, model: Mapping[str, Any]) -> ServedModel:
        """Return what an entry of the server's list of models says."""
        return ServedModel(str(model["id"]), model.get("max_model_len"), model.get("root"))

    def select_client(self) -> HttpClient:
        """Return the client of the reachable server with the fewest open requests; raise a
        ServerError if all are gone.
        """
        reachable = [client for client in self.clients if client.is_reachable]
        if not reachable:
            raise ServerError(
                "unreachable",
                f"no server answers at {', '.join(client.url for client in self.clients)}",
            )
        return min(reachable, key=lambda client: client.num_open)

    async def complete(self, request: CompletionRequest) -> Completion:
        """Answer a prompt. A server that has gone away is left out, and the request goes to
        another one.
        """
        while True:
            client = self.select_client()
            try:
                return await self.request_completion(client, request)
            except ServerError as error:
                if error.kind != "unreachable" or not any(
                    other.is_reachable for other in self.clients
                ):
                    raise

    @abstractmethod
    async def request_completion(
        self, client: HttpClient, request: CompletionRequest
    ) -> Completion:
        """Request an answer from one server."""

    async def read_counters(self) -> DraftCounters | None:
        """Return what the servers have counted of their drafts, added up; None if they count
        none.
        """
        return None


def add_counters(parts: Iterable[DraftCounters | None]) -> DraftCounters | None:
    """Add counters, those of several servers for example; None where nothing was counted."""
    counted = [part for part in parts if part is not None]
    if not counted:
        return None
    columns = zip_longest(*(part.accepted_by_position for part in counted), fillvalue=0)
    accepted = tuple(map(sum, columns))
    return DraftCounters(
        sum(part.num_rounds for part in counted),
        sum(part.num_drafted for part in counted),
        accepted,
    )
