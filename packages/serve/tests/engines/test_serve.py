"""What `spectrain serve` starts, in vLLM itself: captured states equal our own, and simulated
acceptance has its rates.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module

from spectrain.config.spec import RunSpec
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from spectrain.servers.ports import find_free_port
from spectrain_serve.engines.launch import start_engine
from spectrain_serve.engines.serve import (
    find_captured_layers,
    find_served_drafter,
    launch_target,
    write_untrained,
)
from spectrain_serve.servers.base import Completion, CompletionRequest, Server
from spectrain_serve.servers.vllm import VllmServer, VllmSettings

pytest.importorskip("vllm")

# Around the limits of vLLM's blocks of 128 tokens.
LENGTHS = (5, 40, 127, 128, 129, 300)


@pytest.fixture
def spec() -> RunSpec:
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        words = [
            "drafter=eagle3",
            "target=tiny",
            "++drafter.vocab_size=256",
            "++target.dtype=float32",
        ]
        return RunSpec.from_config(compose("train", overrides=words), words)


def make_server(**settings: Any) -> VllmServer:
    return VllmServer(
        VllmSettings(python=sys.executable, port=find_free_port(), concurrency=4, **settings)
    )


def complete_all(server: Server, requests: Sequence[CompletionRequest]) -> list[Completion]:
    async def run() -> list[Completion]:
        async with server:
            return list(await asyncio.gather(*(server.complete(request) for request in requests)))

    server.check_ready()
    return asyncio.run(run())


def test_captured_states_are_those_of_our_forward(
    spec: RunSpec, tiny: Target, tmp_path: Path
) -> None:
    """Prompts and answers, up to rounding, each layer in its place, the last one without the
    final norm.
    """
    layers = find_captured_layers(spec)
    server = make_server(states_folder=str(tmp_path / "states"))
    launch = launch_target(TargetFiles("tiny"), server)
    torch.manual_seed(3)
    prompts = [torch.randint(3, tiny.head.vocab_size, (length,)).tolist() for length in LENGTHS]
    cases = [(prompt, count) for prompt in prompts for count in (1, 9)]
    requests = [CompletionRequest(prompt, count, captures_states=True) for prompt, count in cases]
    with start_engine(server, replace(launch, capture_layers=layers)) as engine:
        completions = complete_all(engine.server, requests)
    for (prompt, _), completion in zip(cases, completions):
        assert (
            completion.states is not None
            and completion.token_ids is not None
            and completion.state_tokens is not None
        )
        assert completion.state_layers == layers == (2, 4, 5, tiny.num_layers)
        assert (
            completion.state_tokens
            == [*prompt, *completion.token_ids][: len(completion.state_tokens)]
        )
        assert len(completion.state_tokens) == len(prompt) + len(completion.token_ids) - 1
        ours = tiny.features(torch.tensor([completion.state_tokens]), layers).hidden[0]
        error = (completion.states - ours).flatten(1).norm(dim=1) / ours.flatten(1).norm(dim=1)
        assert error.max() < 1e-4
    assert not list((tmp_path / "states").iterdir())


def test_simulated_acceptance_has_its_rates(spec: RunSpec, tmp_path: Path) -> None:
    """An untrained drafter is accepted at the rates, within four standard errors; later tokens
    only after earlier ones.
    """
    rates = [0.7, 0.4, 0.2]
    server = make_server(acceptance_rates=rates)
    drafter = find_served_drafter(write_untrained(spec, tmp_path / "untrained"), "vllm")
    drafter.write(tmp_path / "drafter")
    launch = drafter.make_launch(server, tmp_path / "drafter")
    prompts = [[5 + number, 17, 40, 8 * number] for number in range(12)]
    with start_engine(server, launch) as engine:
        engine.server.settings.extra = {"ignore_eos": True}
        completions = complete_all(
            engine.server, [CompletionRequest(prompt, 401) for prompt in prompts]
        )
    accepted = [
        count
        for completion in completions
        if completion.rounds is not None
        for count in completion.rounds.accepted
    ]
    for position, rate in enumerate(rates):
        measured = sum(count > position for count in accepted) / len(accepted)
        assert measured == pytest.approx(rate, abs=4 * (rate * (1 - rate) / len(accepted)) ** 0.5)
