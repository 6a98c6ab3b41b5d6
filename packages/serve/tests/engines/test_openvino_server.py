"""server=openvino: the script that serves OpenVINO GenAI, behind a stand-in for the library, and
the client of it.
"""

import asyncio
import importlib.util
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from spectrain.errors import UserError
from spectrain.servers.commands import LOOKUP, DrafterLaunch, EngineLaunch
from spectrain_serve.engines.environments import EngineEnvironment
from spectrain_serve.engines.openvino import SCRIPT, OpenVinoStarter, start_openvino
from spectrain_serve.engines.openvino_command import OpenVinoSettings, serve_openvino
from spectrain_serve.engines.openvino_ir import IR_NAME
from spectrain_serve.engines.openvino_server import OpenVinoServer
from spectrain_serve.servers.base import Completion, CompletionRequest, DraftCounters
from spectrain_serve.servers.errors import ServerError
from tests.servers.test_commands import options_of

# Tokens that the stand-in emits in each step; a request ends with them or at its limit.
STEPS = [[11], [12, 13, 14], [15], [16, 17]]


class FakeHandle:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.steps = list(STEPS)
        self.ready = list[list[int]]()
        self.num_tokens = 0

    def advance(self) -> None:
        if not self.is_done():
            step = self.steps.pop(0)[: self.limit - self.num_tokens]
            self.num_tokens += len(step)
            self.ready.append(step)

    def is_done(self) -> bool:
        return not self.steps or self.num_tokens >= self.limit

    def can_read(self) -> bool:
        return bool(self.ready)

    def read(self) -> dict[int, Any]:
        reason = "LENGTH" if self.num_tokens >= self.limit else "STOP" if self.is_done() else "NONE"
        return {
            0: SimpleNamespace(
                generated_ids=self.ready.pop(0), finish_reason=SimpleNamespace(name=reason)
            )
        }

    def get_status(self) -> str:
        return "finished" if self.is_done() and not self.ready else "running"


class FakePipeline:
    """Emits STEPS for every request, and notes the settings of the requests."""

    def __init__(
        self, target: str, scheduler: Any, device: str, properties: dict[str, Any]
    ) -> None:
        self.properties = properties
        self.configs = list[Any]()
        self.open = list[FakeHandle]()
        self.most_open = 0

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(
            decode=lambda ids, skip_special_tokens: "".join(chr(97 + id - 11) for id in ids),
            encode=lambda text, add_special_tokens: SimpleNamespace(
                input_ids=SimpleNamespace(data=[[5, 6, len(text)]])
            ),
            apply_chat_template=lambda messages, generates, tools, extra_context: messages[-1][
                "content"
            ],
        )

    def add_request(self, number: int, prompt: Any, config: Any) -> FakeHandle:
        if prompt == [[404]]:
            raise RuntimeError("no such token")
        self.configs.append(config)
        self.open.append(FakeHandle(config.max_new_tokens))
        return self.open[-1]

    def step(self) -> None:
        self.most_open = max(self.most_open, sum(not handle.is_done() for handle in self.open))
        for handle in self.open:
            handle.advance()


def fake_modules() -> dict[str, ModuleType]:
    genai = ModuleType("openvino_genai")
    openvino = ModuleType("openvino")
    numpy = ModuleType("numpy")
    genai.__dict__.update(
        SchedulerConfig=SimpleNamespace,
        ContinuousBatchingPipeline=FakePipeline,
        GenerationConfig=lambda: SimpleNamespace(validate=lambda: None),
        GenerationStatus=SimpleNamespace(RUNNING="running"),
        draft_model=lambda path, device, **properties: path,
    )
    openvino.__dict__.update(Tensor=lambda array: array)
    numpy.__dict__.update(array=lambda rows, dtype: rows, int64=None)
    return {"openvino_genai": genai, "openvino": openvino, "numpy": numpy}


@contextmanager
def serve(folder: Path, *words: str) -> Iterator[tuple[OpenVinoServer, FakePipeline]]:
    """Run the script in a thread, with the stand-in, and yield a client of it and the pipeline."""
    (folder / "config.json").write_text(
        '{"max_position_embeddings": 64, "vocab_size": 900, "eos_token_id": [2, 3]}'
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, module in fake_modules().items():
            patch.setitem(sys.modules, name, module)
        spec = importlib.util.spec_from_file_location("spectrain_openvino", SCRIPT)
        assert spec is not None and spec.loader is not None
        script: Any = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, script)
        spec.loader.exec_module(script)
        options = script.parse_options(
            ["--target", str(folder), "--model-name", "tiny", "--port", "0", *words]
        )
        thread = script.PipelineThread(options)
        with script.make_http_server(thread, options.host, options.port) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            settings = OpenVinoSettings(
                url=f"http://127.0.0.1:{server.server_address[1]}/v1", retries=0
            )
            try:
                yield OpenVinoServer(settings), thread.pipeline
            finally:
                server.shutdown()


def complete(
    server: OpenVinoServer, *requests: CompletionRequest
) -> tuple[list[Completion], DraftCounters | None]:
    async def ask() -> tuple[list[Completion], DraftCounters | None]:
        async with server:
            return await asyncio.gather(
                *map(server.complete, requests)
            ), await server.read_counters()

    return asyncio.run(ask())


DRAFTING = ("--drafter", "DIR", "--num-assistant-tokens", "3")


@pytest.mark.parametrize("streams", [False, True])
def test_a_step_is_a_round(tmp_path: Path, streams: bool) -> None:
    """The first step is the prefill's; of every later one all tokens but one are accepted
    drafts. Requests share the steps.
    """
    with serve(tmp_path, *DRAFTING) as (server, _):
        request = CompletionRequest([4, 5], 20, streams=streams)
        answers, counters = complete(server, request, request)
        for answer in answers:
            assert answer.token_ids == [11, 12, 13, 14, 15, 16, 17] and answer.prompt_ids == [4, 5]
            assert (
                answer.message["content"] == "abcdefg"
                and answer.finish_reason == "stop"
                and answer.num_tokens == 7
            )
            assert answer.rounds is not None
            assert answer.rounds.accepted == (2, 0, 1) and answer.rounds.drafted == (3, 3, 3)
            assert [(step.drafted, step.accepted) for step in answer.timed_steps] == [
                (3, 2),
                (3, 0),
                (3, 1),
            ]
            assert all(step.seconds > 0 for step in answer.timed_steps)
            assert [count for _, count in answer.times.arrivals] == (
                [1, 3, 1, 2] if streams else []
            )
        assert counters == DraftCounters(6, 18, (4, 2))
        described = server.check_ready()
        assert (described.name, described.max_length, described.weights) == (
            "tiny",
            64,
            str(tmp_path),
        )


@pytest.mark.parametrize(
    "words", [("--max-requests", "1"), ("--tree-depth", "2", "--branching-factor", "2")]
)
def test_requests_wait_where_only_a_single_request_is_decoded(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """As with DFlash, or with trees: no two requests are open at the same time, and all are
    answered.
    """
    with serve(tmp_path, *DRAFTING, *words) as (server, pipeline):
        answers, counters = complete(server, *[CompletionRequest([4, 5], 20)] * 3)
        assert [answer.num_tokens for answer in answers] == [7, 7, 7] and counters == DraftCounters(
            9, 27, (6, 3)
        )
        assert pipeline.most_open == 1


def test_a_limit_cuts_and_no_drafter_counts_nothing(tmp_path: Path) -> None:
    with serve(tmp_path) as (server, pipeline):
        (answer,), counters = complete(server, CompletionRequest([4], 3))
        assert answer.token_ids == [11, 12, 13] and answer.finish_reason == "length"
        assert (
            answer.rounds is None
            and counters is None
            and [step.drafted for step in answer.timed_steps] == [0]
        )
        assert pipeline.configs[0].stop_token_ids == {2, 3} and not pipeline.configs[0].do_sample


def test_a_lookup_counts_what_was_accepted(tmp_path: Path) -> None:
    """OpenVINO does not tell how many tokens a lookup drafted. Each request may choose how many
    it drafts at most.
    """
    with serve(tmp_path, "--lookup-match", "4", "--num-assistant-tokens", "7") as (
        server,
        pipeline,
    ):
        server.settings.extra = {"num_assistant_tokens": 2}
        (answer,), counters = complete(server, CompletionRequest([4], 20))
        assert pipeline.properties["prompt_lookup"] and "draft_model" not in pipeline.properties
        assert (pipeline.configs[0].num_assistant_tokens, pipeline.configs[0].max_ngram_size) == (
            2,
            4,
        )
        assert [step.drafted for step in answer.timed_steps] == [
            2,
            0,
            1,
        ] and counters == DraftCounters(3, 3, (2, 1))


def test_requests_choose_their_tree(tmp_path: Path) -> None:
    """The script's options are the default of each request's settings, which `server.extra`
    changes.
    """
    with serve(tmp_path, *DRAFTING) as (server, pipeline):
        server.settings.extra = {"num_assistant_tokens": 4, "branching_factor": 2, "tree_depth": 2}
        complete(server, CompletionRequest([4], 5))
        config = pipeline.configs[0]
        assert (config.num_assistant_tokens, config.branching_factor, config.tree_depth) == (
            4,
            2,
            2,
        )


@pytest.mark.parametrize(
    ("prompt", "limit", "kind", "reason"),
    [([4], 64, "too_long", "context length"), ([404], 5, "failed", "no such token")],
)
def test_failures_are_reported(
    tmp_path: Path, prompt: list[int], limit: int, kind: str, reason: str
) -> None:
    with serve(tmp_path) as (server, _):
        with pytest.raises(ServerError, match=reason) as error:
            complete(server, CompletionRequest(prompt, limit))
        assert error.value.kind == kind
        # The next request is answered.
        assert complete(server, CompletionRequest([4], 5))[0][0].num_tokens == 5


def exchange(server: OpenVinoServer, raw: bytes) -> bytes:
    """Send bytes over a connection, and return all that comes back until it is closed."""
    address = urlsplit(str(server.settings.url))
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def post(server: OpenVinoServer, body: str, headers: str = "") -> bytes:
    content = body.encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{headers}"
    return exchange(server, f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)


REFUSED_BODIES = {
    "[1]": "no JSON object",
    '{"prompt": [4], "max_tokens": 0}': "max_tokens: use a whole number from 1",
    '{"prompt": [4], "max_tokens": true}': "max_tokens: use a whole number",
    '{"prompt": [4], "max_tokens": 1.5}': "max_tokens: use a whole number",
    '{"prompt": [4], "temperature": NaN}': "NaN is no number",
    '{"prompt": [4], "temperature": -1}': "temperature: use a number from 0",
    '{"prompt": [4], "temperature": 1e999}': "temperature: use a number",
    '{"prompt": [4], "top_p": 0}': "top_p: use a number",
    '{"prompt": [4], "n": 2}': "n: this server does not support it",
    '{"prompt": [4], "n": true}': "n: this server does not support it",
    '{"prompt": [4], "stop": ["a"]}': "stop: this server does not support it",
    '{"prompt": [4], "stream": 1}': "stream: use true or false",
    '{"prompt": [4], "guided_json": {}}': "guided_json: this server has no such setting",
    '{"prompt": [true, false]}': "token ids of the vocabulary",
    '{"prompt": [-1]}': "token ids of the vocabulary",
    '{"prompt": [900]}': "token ids of the vocabulary",
    '{"prompt": [1180591620717411303424]}': "token ids of the vocabulary",
    "[" * 100_000: "recursion",
}


def test_settings_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    with serve(tmp_path) as (server, pipeline):
        for body, reason in REFUSED_BODIES.items():
            answer = post(server, body)
            assert answer.startswith(b"HTTP/1.1 400 ") and reason.encode() in answer, body[:80]
        assert not pipeline.configs
        same = '{"prompt": [4], "n": 1, "stop": [], "user": "x", "seed": 0, "temperature": 1}'
        assert post(server, same).startswith(b"HTTP/1.1 200 ")
        assert pipeline.configs[0].rng_seed == 0 and pipeline.configs[0].do_sample


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (411, ""),
        (411, "Content-Length: -1\r\n"),
        (411, "Content-Length: x\r\n"),
        (411, "Content-Length: 5\r\nContent-Length: 6\r\n"),
        (411, "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n"),
        (413, f"Content-Length: {10**30}\r\n"),
    ],
)
def test_a_body_without_a_length_is_refused_and_is_no_next_request(
    tmp_path: Path, status: int, headers: str
) -> None:
    with serve(tmp_path) as (server, _):
        raw = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{headers}\r\n"
        answer = exchange(server, raw.encode() + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert answer.count(b"HTTP/1.1") == 1 and b"Connection: close" in answer


def test_a_request_that_fails_ends_no_other_one(tmp_path: Path) -> None:
    with serve(tmp_path, *DRAFTING) as (server, _):

        async def ask() -> list[Any]:
            async with server:
                requests = [CompletionRequest([number], 20) for number in (4, 404, 4)]
                return await asyncio.gather(*map(server.complete, requests), return_exceptions=True)

        first, failed, last = asyncio.run(ask())
        assert isinstance(failed, ServerError) and first.num_tokens == last.num_tokens == 7


def test_the_command_starts_the_script_with_the_tree(tmp_path: Path) -> None:
    environment = EngineEnvironment("ENV/bin/python", tmp_path, {})
    launch = EngineLaunch("IR", "tiny", "bfloat16", DrafterLaunch("eagle3", "DIR", 4))
    settings = OpenVinoSettings(branching_factor=2, tree_depth=2, threads=1)
    words = [*start_openvino(launch, settings, environment).arguments]
    assert words[:3] == ["ENV/bin/python", "-I", str(SCRIPT)]
    expected = {
        "--target": "IR",
        "--drafter": "DIR",
        "--precision": "bf16",
        "--num-assistant-tokens": "4",
        "--tree-depth": "2",
        "--branching-factor": "2",
        "--threads": "1",
        "--device": "CPU",
        "--port": "8000",
    }
    assert expected.items() <= options_of(words).items()
    lookup = options_of(
        [
            *start_openvino(
                EngineLaunch("IR", drafter=DrafterLaunch(LOOKUP, None, 4)), settings, environment
            ).arguments
        ]
    )
    assert (
        lookup["--lookup-match"]
        and lookup["--num-assistant-tokens"] == "4"
        and "--drafter" not in lookup
    )
    plain = options_of(
        [*start_openvino(EngineLaunch("IR", "tiny"), settings, environment).arguments]
    )
    assert not plain.keys() & {"--drafter", "--tree-depth", "--precision"}
    assert serve_openvino(launch).format_shell() == "spectrain serve run=DIR server=openvino"


def test_a_target_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target is converted into the cache, by the weight type; a folder that holds an IR is
    used as it is.
    """
    monkeypatch.setattr(
        "spectrain_serve.engines.openvino.cache_directory", lambda: tmp_path / "cache"
    )
    sources: list[str] = []

    def write_ir(self: Any, source: str, out: Path, options: tuple[str, ...] = ()) -> None:
        sources.append(source)
        (out / f"{IR_NAME}.xml").write_text("<net />")

    monkeypatch.setattr("spectrain_serve.engines.openvino.IrConverter.convert", write_ir)
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({}))
    starter = OpenVinoStarter(OpenVinoServer(OpenVinoSettings()))
    for _ in range(2):
        starter.prepare_start(EngineLaunch(str(target)))
    packed = OpenVinoStarter(OpenVinoServer(OpenVinoSettings(weights="int8")))
    packed.prepare_start(EngineLaunch(str(target)))
    assert (
        sources == [str(target)] * 2 and len(list((tmp_path / "cache" / "openvino").iterdir())) == 2
    )
    (target / f"{IR_NAME}.xml").write_text("<net />")
    starter.prepare_start(EngineLaunch(str(target)))
    assert len(sources) == 2


def test_wrong_settings_of_openvino_are_refused() -> None:
    for settings, words in (
        ({"weights": "q8_0"}, "server.weights=q8_0"),
        ({"dtype": "float64"}, "server.dtype=float64: OpenVINO computes in"),
        ({"tree_depth": 2}, "a tree needs both"),
        ({"tree_depth": 0, "branching_factor": 1}, "server.tree_depth=0"),
    ):
        with pytest.raises(UserError, match=words):
            OpenVinoSettings(**settings)  # type: ignore[arg-type]
    launch = EngineLaunch("IR", capture_layers=(2,))
    with pytest.raises(UserError, match="OpenVINO gives no hidden states"):
        OpenVinoStarter(OpenVinoServer(OpenVinoSettings())).make_command(launch)
    absent = OpenVinoStarter(OpenVinoServer(OpenVinoSettings(python="/nowhere/python")))
    with pytest.raises(UserError, match=r"server.python=/nowhere/python: .* run make openvino"):
        absent.check_installed()
