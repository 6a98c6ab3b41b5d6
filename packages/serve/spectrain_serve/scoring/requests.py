"""Requests to running servers, many at once, with the times of their answers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spectrain.data.chat_template import Kind
from spectrain.data.image_processor import have_images
from spectrain.data.messages import Conversation
from spectrain.eval.kinds import opening_kind
from spectrain.eval.prompts import Prompt, TurnAnswer
from spectrain.models.target import Target
from spectrain.output.console import make_console

from ..servers.base import Completion, CompletionRequest, DraftCounters, Server
from ..servers.errors import ServerError
from ..servers.workers import run_workers

# Tokens of an answer that only warms the server up.
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class ServedRequest:
    """One turn of a prompt, as token ids or as messages that the server renders."""

    id: str
    turn: int
    category: str
    prompt: list[int] | Conversation
    # The kind of the answer's first token.
    first_kind: Kind = "content"

    @property
    def name(self) -> str:
        return f"{self.id}, turn {self.turn}" if self.turn else self.id


@dataclass(frozen=True)
class ServedAnswer:
    """A server's answer, and what the server counted for it alone where that was read."""

    request: ServedRequest
    completion: Completion
    counters: DraftCounters | None = None


@dataclass
class LevelResult:
    """The answers of one server to all requests, with so many at the same time."""

    concurrency: int
    # In the order of the requests; None for one that failed.
    answers: list[ServedAnswer | None] = field(default_factory=list)
    seconds: float = 0.0
    # What the server counted from the first request to the last.
    counters: DraftCounters | None = None
    # Name of a failed request -> the reason.
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def successes(self) -> list[ServedAnswer]:
        return [answer for answer in self.answers if answer is not None]

    def extend(self, part: LevelResult) -> None:
        """Add the answers to further requests."""
        self.answers += part.answers
        self.seconds += part.seconds
        self.failures |= part.failures


Levels = list[LevelResult]
"""The results of one server, a level of concurrency each."""


class RequestWriter:
    """Writes the turns of prompts as requests: as the target's token ids or, without a target,
    as messages.
    """

    def __init__(self, target: Target | None, max_new_tokens: int) -> None:
        self.target, self.max_new_tokens = target, max_new_tokens
        self.left_out = Counter[str]()

    def write_request(self, prompt: Prompt, answers: Sequence[TurnAnswer]) -> ServedRequest | None:
        """Return the turn that follows these answers; None for one that this server cannot be
        given, which is counted.
        """
        if self.target is None:
            if prompt.context.text is not None:
                self.left_out["plain text, which needs a target to be tokenized"] += 1
                return None
            return ServedRequest(
                prompt.id, len(answers), prompt.category, prompt.continue_with(answers)
            )
        tokens = prompt.tokenize_for(self.target, answers)
        if have_images([tokens]) or len(tokens) + self.max_new_tokens > self.target.max_length:
            self.left_out["with images" if have_images([tokens]) else "too long"] += 1
            return None
        kind = opening_kind(self.target.template, prompt.conversation_for(self.target, answers))
        return ServedRequest(prompt.id, len(answers), prompt.category, tokens, kind)

    def read_answer(self, completion: Completion) -> TurnAnswer:
        """Return an answer as the next turn repeats it."""
        if self.target is None or completion.token_ids is None:
            return TurnAnswer(str(completion.message.get("content") or ""), [])
        return TurnAnswer.from_tokens(self.target, completion.token_ids)


async def write_requests(
    server: Server, prompts: Sequence[Prompt], writer: RequestWriter, concurrency: int
) -> list[ServedRequest]:
    """Return the requests of all turns: a later turn follows the server's own answers, which are
    requested here.
    """
    gate = asyncio.Semaphore(concurrency)

    async def write_turns(prompt: Prompt) -> list[ServedRequest]:
        requests: list[ServedRequest] = []
        answers: list[TurnAnswer] = []
        while (request := writer.write_request(prompt, answers)) is not None:
            requests.append(request)
            if len(requests) == prompt.num_answers:
                break
            async with gate:
                completion = await server.complete(
                    CompletionRequest(request.prompt, writer.max_new_tokens)
                )
            answers.append(writer.read_answer(completion))
        return requests

    return [
        request for turns in await asyncio.gather(*map(write_turns, prompts)) for request in turns
    ]


class LoadGenerator:
    """Requests answers from servers, level by level, at every level from all servers in turn."""

    def __init__(
        self, servers: Mapping[str, Server], requests: Sequence[ServedRequest], max_new_tokens: int
    ) -> None:
        self.servers = servers
        self.requests = list(requests)
        self.max_new_tokens = max_new_tokens
        self.console = make_console(stderr=True)

    async def run(self, levels: Sequence[int]) -> dict[str, Levels]:
        """Return the results of each server by its name."""
        results: dict[str, Levels] = {name: [] for name in self.servers}
        for number, concurrency in enumerate(levels):
            for name, result in (await self._run_level(concurrency, number)).items():
                results[name].append(result)
        return results

    async def _run_level(self, concurrency: int, number: int) -> dict[str, LevelResult]:
        """Run one level: prompt by prompt from one server after the other, or, with many
        requests at once, all of them.
        """
        key = uuid.uuid4().hex
        reads_each = {
            name: await self._warm_up(server, concurrency) for name, server in self.servers.items()
        }
        before = {name: await server.read_counters() for name, server in self.servers.items()}
        results = {name: LevelResult(concurrency) for name in self.servers}
        is_alternating = concurrency == 1 and len(self.servers) > 1
        blocks = [[request] for request in self.requests] if is_alternating else [self.requests]
        names = [*self.servers]
        for turn, block in enumerate(blocks, number):
            for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                counts = concurrency == 1 and reads_each[name]
                results[name].extend(
                    await self._run_block(self.servers[name], block, concurrency, key, counts)
                )
        for name, server in self.servers.items():
            after = await server.read_counters()
            earlier = before[name]
            results[name].counters = (
                None if after is None or earlier is None else after.subtract(earlier)
            )
            answers = len(results[name].successes)
            seconds = results[name].seconds
            self.console.print(
                f"{name}: {answers} answers in {seconds:.1f} s, {concurrency} at once",
                highlight=False,
            )
        return results

    async def _warm_up(self, server: Server, concurrency: int) -> bool:
        """Request a few short answers; return whether the server counts drafts, but not in its
        answers.
        """
        requests = self.requests[:concurrency]
        answers = [
            server.complete(CompletionRequest(request.prompt, WARM_UP_TOKENS))
            for request in requests
        ]
        completions = await asyncio.gather(*answers, return_exceptions=True)
        if all(isinstance(completion, BaseException) for completion in completions):
            raise next(error for error in completions if isinstance(error, BaseException))
        counted = any(
            isinstance(completion, Completion) and completion.rounds for completion in completions
        )
        return server.capabilities.counts_drafts and not counted

    async def _run_block(
        self,
        server: Server,
        requests: Sequence[ServedRequest],
        concurrency: int,
        key: str,
        reads_counters: bool,
    ) -> LevelResult:
        """Request answers with so many workers; with `reads_counters`, read the server's
        counters around every answer.
        """
        result = LevelResult(concurrency, [None] * len(requests))

        async def request_answer(entry: tuple[int, ServedRequest]) -> None:
            index, request = entry
            began = time.perf_counter()
            try:
                completion = await server.complete(
                    CompletionRequest(
                        request.prompt, self.max_new_tokens, streams=True, cache_key=key
                    )
                )
            except ServerError as error:
                result.failures[request.name] = str(error)
                return
            finally:
                spent = time.perf_counter() - began
                result.seconds += spent if reads_counters else 0.0
            counters = await server.read_counters() if reads_counters else None
            result.answers[index] = ServedAnswer(request, completion, counters)

        earlier = await server.read_counters() if reads_counters else None
        began = time.perf_counter()
        await run_workers(request_answer, enumerate(requests), concurrency)
        result.seconds = result.seconds if reads_counters else time.perf_counter() - began
        return result if earlier is None else subtract_earlier(result, earlier)


def subtract_earlier(result: LevelResult, earlier: DraftCounters) -> LevelResult:
    """Replace the counters after each answer by those of the answer alone."""
    for index, answer in enumerate(result.answers):
        if answer is not None and answer.counters is not None:
            counted = answer.counters.subtract(earlier)
            result.answers[index], earlier = (
                ServedAnswer(answer.request, answer.completion, counted),
                answer.counters,
            )
    return result
