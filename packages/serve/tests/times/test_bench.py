"""Times of an engine, by an engine in this process whose forwards take programmed seconds."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from spectrain.config.spec import RunSpec
from spectrain.errors import RunError, UserError
from spectrain.export.targets import TargetFiles
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain_serve.engines.starter import EngineStarter
from spectrain_serve.servers.base import (
    Completion,
    CompletionRequest,
    RequestTimes,
    ServedModel,
    Server,
    ServerCapabilities,
    TimedStep,
)
from spectrain_serve.servers.client import HttpClient
from spectrain_serve.servers.settings import EngineSettings
from spectrain_serve.servers.vllm import VllmServer, VllmSettings
from spectrain_serve.times import bench
from spectrain_serve.times.bench import EngineBench, list_groups, make_times, measure_engine
from spectrain_serve.times.table import print_times

# Milliseconds of a forward by rows, of a fake engine, and of the drafting of one token.
FORWARD = {1: 10.0, 2: 12.0, 3: 15.0, 4: 20.0, 8: 30.0}
DRAFTING = 2.0
LAUNCH = EngineLaunch("TARGET", dtype="float32")


class QuickStarter(EngineStarter):
    """Starts the fake engine, whose version cannot be read."""

    starts_quickly = True


class ChoosingStarter(QuickStarter):
    chooses_draft_length = True


class TimedServer(Server):
    """Answers with the text that it gets. Every fifth round drafts nothing and takes long, and
    must not count.
    """

    name = "llamacpp"
    capabilities: ClassVar[ServerCapabilities] = ServerCapabilities(has_lookup=True)
    settings: EngineSettings
    # Launch of the running engine, and the number of starts.
    launch: ClassVar[EngineLaunch] = LAUNCH
    starts: ClassVar[list[int]] = []

    def check_ready(self) -> ServedModel:
        return ServedModel("tiny", 512)

    async def request_completion(
        self, client: HttpClient, request: CompletionRequest
    ) -> Completion:
        drafter = type(self).launch.drafter
        count = (
            0
            if drafter is None
            else int((self.settings.extra or {}).get("num_assistant_tokens", drafter.num_tokens))
        )
        drafting = 0.0 if drafter is None or drafter.path is None else DRAFTING * count
        full = TimedStep(count, count, (FORWARD[count + 1] + drafting) / 1000)
        steps = [
            full if number % 5 or not count else TimedStep(0, 0, 1.0)
            for number in range(1, self.num_rounds(request, count))
        ]
        ids = [
            request.prompt[index % len(request.prompt)] for index in range(request.max_new_tokens)
        ]
        answer: Any = {"role": "assistant", "content": ""}
        return Completion(
            answer, "length", len(ids), RequestTimes(1.0), token_ids=ids, timed_steps=tuple(steps)
        )

    def num_rounds(self, request: CompletionRequest, count: int) -> int:
        return request.max_new_tokens // (count + 1)


class ChoosingServer(TimedServer):
    name = "openvino"


@pytest.fixture(autouse=True)
def fake_start(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def start(server: Server, launch: EngineLaunch) -> Iterator[Any]:
        TimedServer.launch = launch
        TimedServer.starts.append(0 if launch.drafter is None else launch.drafter.num_tokens)
        yield SimpleNamespace(server=server)

    TimedServer.starts.clear()
    # It asks git.
    monkeypatch.setattr(bench, "collect_provenance", dict)
    monkeypatch.setattr(bench, "start_engine", start)
    starters = {TimedServer: QuickStarter, ChoosingServer: ChoosingStarter}
    monkeypatch.setattr(
        bench, "find_starter", lambda server: starters.get(type(server), EngineStarter)(server)
    )


@pytest.mark.parametrize("kind", [TimedServer, ChoosingServer])
def test_programmed_times_are_the_measured_ones(
    kind: type[TimedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = kind(EngineSettings(extra={"top_k": 1}))
    options = EngineBench(rows=[1, 2, 4, 8], lengths=[64, 4000]).complete(server)
    real = EngineLaunch("TARGET", dtype="float32", drafter=DrafterLaunch("eagle3", "DIR", 3))
    samples, rounds = measure_engine(server, LAUNCH, real, options, range(9))
    # A length beyond the context is the longest that leaves room for the answers.
    assert {length for length, _ in samples} == {64, 512 - 2 * 10 * 8 - 2}
    times = make_times(server, TargetFiles("tiny"), LAUNCH, samples)
    assert {(each.rows, each.seconds.median) for each in times.forwards} == {
        (rows, FORWARD[rows] / 1000) for rows in (1, 2, 4, 8)
    }
    assert {(count, value) for (_, count), values in rounds.items() for value in values} == {
        (1, 0.014),
        (3, 0.026),
    }
    assert times.ratios(64) == pytest.approx({1: 1.2, 3: 2.0, 7: 3.0}) and times.settings == {
        "extra": {"top_k": 1}
    }
    order = [0, 7, 3] if kind is ChoosingServer else [0, 1, 3, 7, 1, 3]
    assert TimedServer.starts == [*order, *reversed(order)]
    print_times(times)
    printed = " ".join(capsys.readouterr().out.split())
    # Three drafted tokens need 2 per forward, each accepted with a + a^2 + a^3 = 1.
    assert "2.00 (54%)" in printed and "1.56 (56%)" in printed and "unreachable" not in printed


def test_an_engine_without_times_is_an_error() -> None:
    server = TimedServer(EngineSettings())
    server.num_rounds = lambda request, count: 0  # type: ignore[method-assign]
    for samples in ({}, {(64, 0): [0.01] * 3}, {(64, 1): [0.01] * 3}):
        with pytest.raises(RunError, match="bench.rounds"):
            make_times(server, TargetFiles("tiny"), LAUNCH, samples)


def test_slow_engines_start_few_times() -> None:
    slow = VllmServer(VllmSettings())
    options = EngineBench().complete(slow)
    assert (options.rows, options.passes) == ([1, 2, 4], 1)
    groups = list_groups(slow, LAUNCH, options.draft_lengths)
    assert [group.draft_lengths for group in groups] == [(0,), (1,), (3,)]
    assert all(group.launch.drafter and group.launch.drafter.path is None for group in groups[1:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": [2, 4]}, "bench.rows"),
        ({"rows": [1]}, "bench.rows"),
        ({"lengths": [8]}, "bench.lengths"),
        ({"answers": 0}, "answers"),
        ({"acceptance_rates": [0.2, 0.4]}, "acceptance_rates"),
    ],
)
def test_settings_that_measure_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineBench(**settings)


def test_only_engines_with_a_lookup_are_measured() -> None:
    for node, message in (
        ({}, "server: say"),
        ({"_target_": "spectrain_serve.servers.openai.OpenAIServer"}, "server=openai"),
    ):
        with pytest.raises(UserError, match=message):
            bench.make_server(RunSpec.from_nodes({"server": node}))
    timer = bench.EngineTimer(
        TimedServer(EngineSettings()), EngineBench(rows=[1, 8], rounds=40), {}, range(9)
    )
    with pytest.raises(UserError, match="fewer rounds"):
        asyncio.run(timer.make_prompts())
