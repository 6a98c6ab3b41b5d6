"""A running vLLM takes the weights of other drafters: it drafts as our chain with them, and no
output changes.

The trained drafter is that of runs/engines-tiny-eagle3, or of the folder that
SPECTRAIN_ENGINES_RUNS names.
"""

import asyncio
import gzip
import json
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import httpx
import torch
from safetensors.torch import load_file, save_file

from spectrain.config.spec import RunSpec
from spectrain.data.chat import tokenize_prompt
from spectrain.data.messages import Conversation
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import RunError
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.runs.drafters import load_for_decoding
from spectrain.servers.ports import find_free_port
from spectrain.trees import Chain
from spectrain_serve.follow.exchange import Exchange
from spectrain_serve.follow.http_server import serve_in_thread
from spectrain_serve.follow.kinds import KindRegistry
from spectrain_serve.follow.proxy import Proxy, Recorder
from spectrain_serve.follow.settings import FollowSettings
from spectrain_serve.follow.state import hash_weights
from spectrain_serve.follow.swap import DrafterSwapper
from spectrain_serve.follow.traffic import RecordedConversation, parse_exchange
from spectrain_serve.follow.upstream import UpstreamSwitch
from spectrain_serve.servers.vllm import VllmServer, VllmSettings

from .test_vllm import RUNS

TRAINED = RUNS / "engines-tiny-eagle3" / "drafter"
NUM_PROMPTS = 12
NUM_TOKENS = 48
DEPTH = 3
Answer = tuple[list[int], list[int]]
"""Token ids, and the accepted tokens of every round."""

pytestmark = pytest.mark.skipif(
    not TRAINED.exists(), reason=f"{TRAINED} is trained by make test-engines"
)


@pytest.fixture(scope="module")
def prompts(tiny: Target) -> list[list[int]]:
    """Return chats similar to the training data of the drafter."""
    path = files("spectrain.data") / "conversations.jsonl.gz"
    rows = (
        json.loads(line)
        for line in gzip.decompress(path.read_bytes()).decode().splitlines()
        if line.strip()
    )
    messages = (row["messages"][0] for row in rows)
    short = (
        message
        for message in messages
        if message["role"] == "user" and len(message["content"]) < 200
    )
    return [
        tokenize_prompt(tiny.template, Conversation([message], None, None, {}))
        for message in islice(short, NUM_PROMPTS)
    ]


def write_changed(folder: Path, noise: float, head: torch.Tensor | None = None) -> Path:
    """Write the trained drafter with noise in its weights, or with another output layer."""
    folder.mkdir(parents=True)
    tensors = load_file(TRAINED / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor + noise * tensor.std() * torch.randn(
                tensor.shape, generator=generator
            )
    if head is not None:
        tensors["lm_head.weight"] = head.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((TRAINED / "config.json").read_text())
    return folder


def make_swapper(**settings: Any) -> DrafterSwapper:
    words = {
        "python": sys.executable,
        "port": find_free_port(),
        "max_length": 512,
        "draft_tokens": DEPTH,
    }
    server = VllmServer(VllmSettings(**words, dtype="float32", arguments=["--max-num-seqs", 8]))
    return DrafterSwapper(
        RunSpec(),
        server,
        FollowSettings(start=True, **settings),
        UpstreamSwitch("http://127.0.0.1:1/v1"),
    )


def start_drafter(swapper: DrafterSwapper, directory: Path) -> None:
    swapper.check_settings()
    swapper.start(directory, hash_weights(directory) or "", is_first=True)
    assert swapper.started is not None
    swapper.started.engine.server.check_ready()


def answer_all(root: str, prompts: list[list[int]]) -> list[Answer]:
    """Send all prompts at once."""

    async def run() -> list[Answer]:
        async with httpx.AsyncClient(base_url=root, timeout=120, trust_env=False) as client:

            async def send(prompt: list[int]) -> Answer:
                body = {
                    "prompt": prompt,
                    "max_tokens": NUM_TOKENS,
                    "temperature": 0,
                    "return_token_ids": True,
                }
                content = (await client.post("/v1/completions", json=body)).json()
                counts = content["metrics"]["speculative_decoding"]
                return content["choices"][0]["token_ids"], counts["per_step_accepted"] or []

            return [*await asyncio.gather(*map(send, prompts))]

    return asyncio.run(run())


def answer_during(root: str, prompts: list[list[int]], swap: Any) -> list[Answer]:
    """Send all prompts at once, and swap while they are answered."""
    results = list[list[Answer]]()
    thread = threading.Thread(target=lambda: results.append(answer_all(root, prompts)))
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    swap()
    assert thread.is_alive()
    thread.join()
    return results[0]


def check_rounds(
    answers: list[Answer], drafter: Path, prompts: list[list[int]], target: Target
) -> None:
    """The rounds of vLLM are those of our chain with a drafter; a limit cuts the last one."""
    own = load_for_decoding(drafter, target)
    for prompt, (tokens, accepted) in zip(prompts, answers):
        decoded = decode(target, [prompt], Greedy(), NUM_TOKENS, own, Chain(DEPTH))[0]
        assert decoded.output == tokens
        complete = [length - 1 for length in decoded.complete_round_lengths]
        assert accepted[: len(complete)] == complete


@pytest.fixture(scope="module")
def push_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DrafterSwapper, Path]]:
    """Start a server that takes weights; its drafter is the trained one under much noise."""
    swapper = make_swapper(swap="push")
    first = write_changed(tmp_path_factory.mktemp("first") / "drafter", 3.0)
    try:
        start_drafter(swapper, first)
        yield swapper, first
    finally:
        swapper.close()


@pytest.mark.slow
def test_a_pushed_drafter_drafts_as_our_chain(
    push_server: tuple[DrafterSwapper, Path], prompts: list[list[int]], tiny: Target, tmp_path: Path
) -> None:
    """Before, during and after every push, and after a refusal, the outputs are the same, and
    the rounds are ours.
    """
    swapper, first = push_server
    root = swapper.servers.active.root
    second = TRAINED
    hashes = {folder: hash_weights(folder) or "" for folder in (first, second)}
    before = answer_all(root, prompts)
    check_rounds(before, first, prompts, tiny)
    assert swapper.takes_weights and swapper.is_served(first, hashes[first])
    assert swapper.swap(second, hashes[second]).way == "push"
    assert swapper.is_served(second, hashes[second]) and not swapper.is_served(first, hashes[first])
    after = answer_all(root, prompts)
    check_rounds(after, second, prompts, tiny)
    assert sum(map(len, (rounds for _, rounds in after))) < sum(
        map(len, (rounds for _, rounds in before))
    )
    for folder in (first, second):
        during = answer_during(root, prompts, partial(swapper.push, folder, hashes[folder]))
        assert [tokens for tokens, _ in during] == [tokens for tokens, _ in before]
    wrong = tmp_path / "drafter"
    wrong.mkdir()
    swapper.export = lambda directory, digest: wrong  # type: ignore[method-assign]
    with pytest.raises(RunError, match="update_weights: status 500"):
        swapper.push(second, hashes[second])
    assert answer_all(root, prompts) == after


@pytest.mark.slow
def test_streams_are_counted_as_full_answers_or_not_at_all(
    push_server: tuple[DrafterSwapper, Path], prompts: list[list[int]]
) -> None:
    """With usage, a stream gives the tokens and rounds of the full answer; without it, the
    request is not measurable.
    """
    swapper, _ = push_server

    def request_recorded(**fields: Any) -> RecordedConversation:
        body = {"prompt": prompts[0], "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
        reply = httpx.post(
            f"{swapper.servers.active.root}/v1/completions", json=body, timeout=120, trust_env=False
        )
        exchange = Exchange("/v1/completions", json.dumps(body).encode(), reply.content)
        recorded = parse_exchange(exchange, KindRegistry(4), swapper.server.parse_rounds)
        assert recorded is not None
        return recorded

    full = request_recorded()
    with_usage = request_recorded(stream=True, stream_options={"include_usage": True})
    without = request_recorded(stream=True)
    with_ids = request_recorded(stream=True, return_token_ids=True)
    assert full.accepted and (full.accepted, full.num_tokens) == (
        with_usage.accepted,
        with_usage.num_tokens,
    )
    assert (without.mean_accepted, without.num_tokens, without.answer) == (None, None, full.answer)
    assert (with_ids.mean_accepted, with_ids.num_tokens) == (None, full.num_tokens)


@pytest.mark.slow
def test_a_shared_output_layer_is_refused_and_a_second_server_serves(
    prompts: list[list[int]], tiny: Target, tmp_path: Path
) -> None:
    """With the target's own output layer at the start, a push would change the target. Then a
    second server is started, new requests go to it, and the first one answers its open streams
    before it ends."""
    first = write_changed(
        tmp_path / "drafter", 0.0, load_tiny().model.lm_head.weight.detach().float()
    )
    swapper = make_swapper(swap="auto")
    digest = hash_weights(TRAINED) or ""
    proxy = Proxy(swapper.settings, swapper.servers, Recorder(0.0))
    try:
        start_drafter(swapper, first)
        earlier = swapper.started
        with serve_in_thread(
            proxy, "127.0.0.1", find_free_port(), proxy.open_connections
        ) as thread:
            swapper.thread = thread
            root = f"http://127.0.0.1:{thread.server.config.port}"
            before = answer_all(root, prompts)
            outcomes = list[Any]()
            swaps = threading.Thread(target=lambda: outcomes.append(swapper.swap(TRAINED, digest)))
            swaps.start()
            during = list[list[Answer]]()
            while swaps.is_alive():
                during.append(answer_all(root, prompts))
            swaps.join()
            assert outcomes[0].way == "start" and "shares this module" in outcomes[0].push_error
            assert len(during) > 2
            for answers in during:
                assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in before]
            check_rounds(answer_all(root, prompts), TRAINED, prompts, tiny)
            assert earlier is not None
            earlier.engine.process.wait(60)
    finally:
        swapper.close()
