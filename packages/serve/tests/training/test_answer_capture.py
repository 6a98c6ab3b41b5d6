"""Answers and their states from one request: a stand-in gives the tiny target's, and training
reads them without another.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module

from packages.serve.tests.servers.stand_in import (  # noqa: F401
    LAYERS,
    ModelStandIn,
    capturing_server,
)
from packages.serve.tests.training.test_server_capture import negate
from spectrain.cli.overrides import write_overrides
from spectrain.config.spec import read_run
from spectrain.data.chat import tokenize_prompt
from spectrain.data.messages import Conversation
from spectrain.data.readers import JsonlReader
from spectrain.data.shards import FailedRow, PendingRow
from spectrain.errors import RunError, UserError
from spectrain.features.store import FeatureStore
from spectrain.regeneration.answer_states import AnswerStates
from spectrain.regeneration.chat_progress import AnswerError, ChatProgress, GeneratedAnswer
from spectrain.regeneration.command import regenerate_command
from spectrain.regeneration.sampling import Sampling
from spectrain_serve.training.captured_answers import CapturingWriter
from tests.regeneration.capturing import chats, train_on  # noqa: F401


def regenerate(out: Path, server: ModelStandIn, chats: Path, *more: str) -> None:
    words = [
        "target=tiny",
        "server=vllm",
        f"server.url={server.url}",
        "capture=true",
        "recipe=eagle3",
        f"out={out}",
        "data=jsonl",
        f"data.path={chats}",
        "sampling.max_new_tokens=12",
        "server.retries=1",
        *more,
    ]
    # A key alone leaves the setting out.
    dropped = {word for word in more if "=" not in word}
    words = [word for word in words if word.partition("=")[0] not in dropped]
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("regenerate", overrides=write_overrides(words))
    spec, settings = read_run(
        config, ("writer", "sampling", "regenerate", "out", "check", "capture"), words
    )
    regenerate_command(spec, **settings)


@pytest.mark.sweep(1, free=("temperature",))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_and_states_come_from_the_same_request(
    temperature: float,
    tmp_path: Path,
    server: ModelStandIn,
    chats: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each turn takes one request; the store holds the sequences of a training on the answers, with
    the target's own states, and a training that may not capture has the losses of one that runs the
    target."""
    out = tmp_path / "out"
    regenerate(out, server, chats, f"sampling.temperature={temperature}")
    assert len([body for body in server.bodies if body["max_tokens"] == 12]) == 6 + 3
    assert (
        "6 sequences; 6 by the requests of their answers, 0 by requests of their own"
        in capsys.readouterr().out
    )
    dataset = JsonlReader(str(out)).make_dataset(server.target.template)
    store = FeatureStore(out / "features")
    assert {*store.shard_names} == {example.content_hash for example in dataset.examples}
    for example in dataset.examples:
        layers = (2, 4, 5, "final")
        states = store.read_states(example, layers, server.target)
        own = server.target.features(torch.tensor([example.tokens]), layers).hidden[0]
        assert states is not None and states.shape == own.shape
        last = max(number for number, supervised in enumerate(example.mask) if supervised)
        torch.testing.assert_close(states[:last], own[:last], rtol=1e-4, atol=1e-4)
    count = len(server.bodies)
    stored = train_on(
        out,
        tmp_path / "stored",
        "source=store",
        f"source.path={out / 'features'}",
        "+source.capture=false",
    )
    assert stored == pytest.approx(train_on(out, tmp_path / "live", "source=live"), rel=1e-4)
    assert len(server.bodies) == count


@pytest.mark.slow
def test_sequences_that_a_request_did_not_return_are_requested_once(
    tmp_path: Path, server: ModelStandIn, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that was lost after the answers is filled by one request for each sequence, and
    counted.
    """
    out = tmp_path / "out"
    regenerate(out, server, chats)
    for file in (out / "features").glob("features-*"):
        file.unlink()
    capsys.readouterr()
    count = server.num_captured
    regenerate(out, server, chats)
    assert (
        "6 sequences; 0 by the requests of their answers, 6 by requests of their own"
        in capsys.readouterr().out
    )
    assert server.num_captured == count + 8 + 6


@pytest.mark.slow
def test_wrong_states_of_an_answer_are_requested_again(
    tmp_path: Path, server: ModelStandIn, chats: Path
) -> None:
    """Once, they cost another request; always, the conversation fails with the reason and
    nothing of it is stored.
    """
    server.alter_states = lambda states, tokens, number: (
        negate(states, tokens) if number == 10 else (states, tokens)
    )
    regenerate(tmp_path / "once", server, chats, "server.concurrency=1", "sampling.temperature=0")
    assert len(FeatureStore(tmp_path / "once" / "features").shard_names) == 6
    before = server.num_captured + 8
    server.alter_states = lambda states, tokens, number: (
        negate(states, tokens) if before + 2 < number <= before + 5 else (states, tokens)
    )
    regenerate(
        tmp_path / "always",
        server,
        chats,
        "server.concurrency=1",
        "sampling.temperature=0",
        "regenerate.max_failed=0.5",
    )
    assert len(FeatureStore(tmp_path / "always" / "features").shard_names) == 5
    assert "where its states give" in next((tmp_path / "always" / "failed").iterdir()).read_text()


@pytest.mark.slow
def test_a_server_killed_in_the_middle_costs_nothing_that_was_answered(
    tmp_path: Path, server: ModelStandIn, chats: Path
) -> None:
    """The same command goes on, and the store is that of a run without a stop."""
    server.alter_file = lambda path, number: server.stop() if number == 12 else None
    with pytest.raises(RunError, match="one after another"):
        regenerate(
            tmp_path / "out", server, chats, "server.concurrency=1", "regenerate.stop_after=2"
        )
    server.alter_file = lambda path, number: None
    server.start()
    regenerate(tmp_path / "out", server, chats)
    examples = JsonlReader(str(tmp_path / "out")).make_dataset(server.target.template).examples
    assert {*FeatureStore(tmp_path / "out" / "features").shard_names} == {
        example.content_hash for example in examples
    }


def test_a_server_that_samples_wrongly_is_refused(
    tmp_path: Path, server: ModelStandIn, chats: Path
) -> None:
    """Answers that do not follow from their states are noticed before anything is written;
    greedy ones are not concerned.
    """
    server.samples_wrongly = True
    with pytest.raises(
        UserError,
        match=r"the server samples wrongly while it captures; use sampling\.temperature=0",
    ):
        regenerate(tmp_path / "out", server, chats, "sampling.temperature=0.7")
    assert not (tmp_path / "out").exists()
    regenerate(tmp_path / "out", server, chats, "sampling.temperature=0")


def test_mistakes_are_named_before_anything_is_written(
    tmp_path: Path, server: ModelStandIn, chats: Path
) -> None:
    """Capturing takes a recipe, and a server that captures where one is named; without capture a
    recipe has no use.
    """
    for words, message in (
        (("recipe",), "capture=true: say recipe=NAME"),
        (("server=openai",), "server=openai: this server captures no states"),
        (("capture=false",), "drafter: it says which features are captured"),
    ):
        with pytest.raises(UserError, match=message):
            regenerate(tmp_path / "out", server, chats, *words)
    assert not (tmp_path / "out").exists()


PENDING = PendingRow(3, Conversation([{"role": "user", "content": "Hi"}, {"role": "assistant"}]), 0)


def fail_conversation(writer_class: type[CapturingWriter]) -> tuple[CapturingWriter, FailedRow]:
    """Return a writer without a server, and its outcome for a conversation that fails."""
    unused: Any = SimpleNamespace(server=None)
    target: Any = SimpleNamespace(template=None)
    states = AnswerStates(unused, (), target, unused, reads_tail=False)
    writer = writer_class(Sampling(), unused, states)
    outcome = asyncio.run(writer._answer_conversation(PENDING))
    assert isinstance(outcome, FailedRow)
    return writer, outcome


def test_states_of_a_failed_conversation_are_dropped() -> None:
    class FailingWriter(CapturingWriter):
        async def request_answer(
            self, chat: ChatProgress, conversation: Conversation
        ) -> GeneratedAnswer:
            self.states.add_states(chat.pending.id, [1], torch.zeros(1, 1, 4))
            raise AnswerError("failed", "no")

    assert not fail_conversation(FailingWriter)[0].states.captured


def test_a_conversation_that_cannot_be_rendered_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse_prompt(*_: Any) -> list[int]:
        raise UserError("data: the roles must alternate")

    monkeypatch.setattr("spectrain.regeneration.writers.tokenize_prompt", refuse_prompt)
    outcome = fail_conversation(CapturingWriter)[1]
    assert (outcome.kind, outcome.error) == ("failed", "data: the roles must alternate")


def test_the_first_requests_hold_a_question(tmp_path: Path, server: ModelStandIn) -> None:
    """The server is checked with the prompts that are answered, system prompt and question."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "?"},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    regenerate(tmp_path / "out", server, tmp_path / "chats.jsonl")
    assert server.bodies[0]["prompt"] == tokenize_prompt(server.target.template, messages[:2])
