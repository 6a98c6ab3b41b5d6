"""Training while a server computes the features: a stand-in returns the tiny target's states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packages.serve.tests.servers.stand_in import (  # noqa: F401
    LAYERS,
    ModelStandIn,
    capturing_server,
)
from packages.serve.tests.training.test_server_capture import negate
from spectrain.data.chat import Example
from spectrain.data.dataset import Batching, BatchQueue, Dataset
from spectrain.errors import RunError, UserError
from spectrain.runs.train import train_and_score
from spectrain.training.checkpoints import latest_checkpoint
from spectrain_serve.training.server_source import describe_waiting
from tests.features.test_capture import SETTINGS, composed, losses

TRAINING = (
    "+trainer.max_steps=8",
    "+trainer.log_every=1",
    "+trainer.batch_tokens=256",
    "+trainer.save_every=2",
)


def train_from_server(run: Path, server: ModelStandIn, *more: str) -> list[float]:
    words = (
        "source=server",
        "server=vllm",
        f"+server.url={server.url}",
        "+server.retries=1",
        f"run={run}",
    )
    train_and_score(composed(*SETTINGS, *TRAINING, *words, *more))
    return losses(run)


def test_batches_come_in_the_same_order_with_the_position_of_the_last_taken() -> None:
    """A queue passes on each batch `count` batches ahead, and its position is that of a stream
    without a queue.
    """
    dataset = Dataset([Example([number, number], [False, True]) for number in range(7)], 7, 0, 0)
    batching = Batching(4, seed=1)
    ahead = list[list[Example]]()
    queue = BatchQueue(dataset.stream_batches(batching), 3, ahead.append)
    stream = dataset.stream_batches(batching)
    for taken in range(1, 12):
        assert next(queue) == next(stream) and queue.state_dict() == stream.state_dict()
        assert len(ahead) == taken + 3
    resumed = BatchQueue(
        dataset.stream_batches(batching, state=queue.state_dict()), 0, lambda _: None
    )
    assert next(resumed) == next(queue)


def test_training_from_a_server_is_training_from_the_target(
    tmp_path: Path, server: ModelStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses are those of source=live up to the states' rounding, with a target that has no
    layers too; the wait for the server is printed, and is a share of the time in the metrics."""
    train_and_score(composed(*SETTINGS, *TRAINING, "source=live", f"run={tmp_path / 'live'}"))
    live = losses(tmp_path / "live")
    assert train_from_server(tmp_path / "served", server) == pytest.approx(live, rel=1e-4)
    assert (
        "the trainer waited" in (printed := capsys.readouterr().out)
        and "is the bottleneck" in printed
    )
    last = json.loads((tmp_path / "served" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= last["time_share"]["server"] <= last["time_share"]["target"] + 0.01
    assert train_from_server(tmp_path / "head", server, "+target.parts=head") == pytest.approx(
        live, rel=1e-4
    )
    assert not [*(tmp_path / "states").iterdir()]


@pytest.mark.slow
def test_a_persistent_store_spares_requests(tmp_path: Path, server: ModelStandIn) -> None:
    """With source.keep=true every sequence is requested once in all epochs, and a second run
    requests only its probes.
    """
    keep = ("+source.keep=true", f"+source.path={tmp_path / 'store'}")
    first = train_from_server(tmp_path / "one", server, *keep)
    count = server.num_captured
    assert count <= 4 + 12
    assert train_from_server(tmp_path / "two", server, *keep) == first
    assert server.num_captured <= count + 4
    assert first == pytest.approx(train_from_server(tmp_path / "three", server), rel=1e-6)


def test_a_server_that_goes_away_stops_the_training_at_a_checkpoint(
    tmp_path: Path, server: ModelStandIn
) -> None:
    """One sentence says how to resume, and the resumed run has the losses of one that was never
    stopped.
    """
    uninterrupted = train_from_server(tmp_path / "whole", server)
    before = server.num_captured
    server.alter_file = lambda path, number: server.stop() if number == before + 9 else None
    with pytest.raises(
        RunError,
        match=r"server\.url: .*ConnectError.*step \d+ is saved; go on with.*trainer\.resume=auto",
    ):
        train_from_server(tmp_path / "stopped", server, "+source.ahead=1", "+server.concurrency=2")
    assert latest_checkpoint(tmp_path / "stopped") is not None
    server.alter_file = lambda path, number: None
    server.start()
    assert train_from_server(tmp_path / "stopped", server, "+trainer.resume=auto") == pytest.approx(
        uninterrupted, rel=1e-6
    )


@pytest.mark.slow
def test_wrong_states_are_requested_again_or_stop_the_training(
    tmp_path: Path, server: ModelStandIn
) -> None:
    """States of another model, once, change no loss; if they are always wrong, the run ends with
    the reason.
    """
    right = train_from_server(tmp_path / "right", server)
    before = server.num_captured
    server.alter_states = lambda states, tokens, number: (
        negate(states, tokens) if number == before + 7 else (states, tokens)
    )
    assert train_from_server(tmp_path / "once", server, "+server.concurrency=1") == pytest.approx(
        right, rel=1e-6
    )
    before = server.num_captured
    server.alter_states = lambda states, tokens, number: (
        negate(states, tokens) if number > before + 6 else (states, tokens)
    )
    with pytest.raises(RunError, match="where its states give"):
        train_from_server(tmp_path / "always", server)


def test_mistakes_are_named_before_anything_is_written(
    tmp_path: Path, server: ModelStandIn
) -> None:
    """A missing server, one without capture, and a store without a folder are refused before the
    run's folder exists.
    """
    base = (*SETTINGS, f"run={tmp_path / 'run'}")
    for words, message in (
        (("source=server",), "source=server: name the server"),
        (("source=live", "server=vllm"), "requests nothing of a server; use source=server"),
        (
            ("source=server", "server=openai", f"+server.url={server.url}"),
            "server=openai: this server captures no states",
        ),
        (
            ("source=server", "server=vllm", "+source.keep=true"),
            r"source\.keep=true source\.path=DIR",
        ),
    ):
        with pytest.raises(UserError, match=message):
            train_and_score(composed(*base, *words))
    assert not (tmp_path / "run").exists()


def test_the_bottleneck_is_named() -> None:
    assert "the server is the bottleneck" in describe_waiting(5.0, 10.0, 0)
    assert describe_waiting(0.1, 10.0, 2).endswith(
        "the trainer is the bottleneck; 2 sequences were requested again"
    )
