"""Feature stores filled from a server: a stand-in returns the tiny target's states, and faults
of every kind.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.serve.tests.servers.stand_in import (  # noqa: F401
    LAYERS,
    ModelStandIn,
    capturing_server,
)
from spectrain.errors import RunError, UserError
from spectrain.features.capture import capture_features
from spectrain.features.store import FeatureStore
from spectrain.models.loading import load_tiny
from spectrain.runs.train import train_and_score
from spectrain_serve.training import server_capture, server_states
from tests.features.test_capture import SETTINGS, composed, losses

CONVERSATIONS = 12


def capture_from_server(path: Path, server: ModelStandIn, *more: str) -> None:
    words = (
        "source=store",
        f"source.path={path}",
        "server=vllm",
        f"+server.url={server.url}",
        "+server.retries=2",
    )
    capture_features(composed(*SETTINGS, *words, *more))


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of every stored sequence, by name."""
    store = FeatureStore(path)
    tensors = {}
    for key in store.shard_names:
        tensors |= {
            f"{key}/{name}": tensor for name, tensor in (store._load_tensors(key) or {}).items()
        }
    return tensors


@pytest.fixture(scope="module")
def own_tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return what the target itself stores."""
    path = tmp_path_factory.mktemp("own")
    capture_features(composed(*SETTINGS, "source=store", f"source.path={path}"))
    return read_all(path)


def test_a_store_from_a_server_is_that_of_the_target(tmp_path: Path, server: ModelStandIn) -> None:
    """Every sequence is stored once, equal to what the target itself stores up to rounding; the
    folder of states is left empty, and a training reads the store without a request."""
    capture_from_server(tmp_path / "served", server, "+server.concurrency=4")
    capture_features(composed(*SETTINGS, "source=store", f"source.path={tmp_path / 'own'}"))
    served = read_all(tmp_path / "served")
    own = read_all(tmp_path / "own")
    assert (
        served.keys() == own.keys()
        and len(FeatureStore(tmp_path / "served").shard_names) == CONVERSATIONS
    )
    for name, tensor in served.items():
        torch.testing.assert_close(tensor, own[name], rtol=1e-4, atol=1e-4)
    assert not [*(tmp_path / "states").iterdir()]
    manifest = json.loads((tmp_path / "served" / "manifest.json").read_text())
    assert manifest["engine"].startswith("vllm: ") and not manifest["weights"]
    count = len(server.bodies)
    for source in (f"source.path={tmp_path / 'served'}", f"source.path={tmp_path / 'own'}"):
        run = tmp_path / Path(source).name
        words = (
            "source=store",
            source,
            "+source.capture=false",
            f"run={tmp_path / 'run' / run.name}",
            "+trainer.max_steps=3",
            "+trainer.log_every=1",
        )
        train_and_score(composed(*SETTINGS, *words))
    assert len(server.bodies) == count
    assert losses(tmp_path / "run" / "served") == pytest.approx(
        losses(tmp_path / "run" / "own"), rel=1e-4
    )
    capture_from_server(tmp_path / "served", server)
    assert len(server.bodies) == count + server_states.NUM_PROBES


def shift_ids(states: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return states, tokens[1:] + tokens[:1]


def drop_prefix(states: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Lose a cached prefix, as engines have done."""
    return states[16:], tokens[16:]


def zero_row(states: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return states.index_fill(0, torch.tensor([3]), 0.0), tokens


def make_infinite(states: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return states.index_fill(0, torch.tensor([3]), float("inf")), tokens


def negate(states: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Give the states of another model."""
    return -states, tokens


ALTERED = {
    "wrong ids": (shift_ids, "the server returned the states of other tokens"),
    "prefix caching": (drop_prefix, "states for .* tokens"),
    "zeros": (zero_row, "a state is zero"),
    "not finite": (make_infinite, "not finite"),
    "other states": (negate, "where its states give"),
}


@pytest.mark.sweep(1, free=("kind",))
@pytest.mark.parametrize("kind", ALTERED)
def test_wrong_states_are_requested_again_and_never_stored(
    kind: str,
    tmp_path: Path,
    server: ModelStandIn,
    own_tensors: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A sequence whose states are wrong once is captured by its second request. One whose states
    are always wrong is named with its reason in the store's folder and not stored; the same command
    then captures it and nothing else."""
    alter, reason = ALTERED[kind]
    once = server_states.NUM_PROBES + 2
    always = [*range(server_states.NUM_PROBES + 6, server_states.NUM_PROBES + 9)]
    server.alter_states = lambda states, tokens, number: (
        alter(states, tokens) if number in (once, *always) else (states, tokens)
    )
    with pytest.raises(
        RunError,
        match=rf"1 sequences are still missing; .*{server_capture.FAILURE_FILE} has the reasons",
    ):
        capture_from_server(tmp_path / "store", server, "+server.concurrency=1")
    assert (
        "11 sequences captured" in (printed := capsys.readouterr().out)
        and "2 requested again, 1 failed" in printed
    )
    (failure,) = map(json.loads, (tmp_path / "store" / "failed.jsonl").read_text().splitlines())
    assert re.search(reason, failure["error"]) and failure["tokens"] >= len(failure["first_ids"])
    server.alter_states = lambda states, tokens, number: (states, tokens)
    count = len(server.bodies)
    capture_from_server(tmp_path / "store", server)
    assert len(server.bodies) == count + server_states.NUM_PROBES + 1
    assert not (tmp_path / "store" / "failed.jsonl").exists()
    stored = read_all(tmp_path / "store")
    assert stored.keys() == own_tensors.keys()
    for name, tensor in own_tensors.items():
        torch.testing.assert_close(stored[name], tensor, rtol=1e-4, atol=1e-4)


def cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


FILES = {"cut short": (cut_file, "cannot be read"), "gone": (Path.unlink, "there is no such file")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_damaged_files_are_requested_again(kind: str, tmp_path: Path, server: ModelStandIn) -> None:
    """A file that is cut short or missing, once or always, counts as no answer."""
    harm, reason = FILES[kind]
    once = server_states.NUM_PROBES + 2
    always = [*range(server_states.NUM_PROBES + 6, server_states.NUM_PROBES + 9)]
    server.alter_file = lambda path, number: harm(path) if number in (once, *always) else None
    with pytest.raises(RunError, match="1 sequences are still missing"):
        capture_from_server(tmp_path / "store", server, "+server.concurrency=1")
    assert reason in (tmp_path / "store" / "failed.jsonl").read_text()
    server.alter_file = lambda path, number: None
    capture_from_server(tmp_path / "store", server)
    assert not [*(tmp_path / "states").iterdir()]


def serve_other_model(server: ModelStandIn) -> None:
    """Serve a model of the same shapes and vocabulary with other weights."""
    torch.manual_seed(0)
    head = server.target.head.output
    head.weight.data = head.weight.data[torch.randperm(len(head.weight))]


def serve_short_context(server: ModelStandIn) -> None:
    server.max_length = 128


def serve_other_layers(server: ModelStandIn) -> None:
    server.layers = (1, 3, 5, 8)


def serve_three_layers(server: ModelStandIn) -> None:
    server.layers = (2, 4, 5)
    server.names_layers = False


def serve_no_states(server: ModelStandIn) -> None:
    server.layers = None


def stop_server(server: ModelStandIn) -> None:
    server.stop()


def fail_always(server: ModelStandIn) -> None:
    server.misbehave = lambda body, number: (500, "out of memory", {})


REFUSED = {
    "another model": (
        serve_other_model,
        r"server\.url: it serves another model than target=tiny: after .* the server",
    ),
    "another context length": (
        serve_short_context,
        r"has 128 tokens, and the longest sequence 128.*data\.max_length=127",
    ),
    "other layers": (
        serve_other_layers,
        r"captures layers 1, 3, 5, 8, and this drafter needs 2, 4, 5, 8; start it",
    ),
    "too few layers": (
        serve_three_layers,
        r"captures 3 layers, and this drafter needs 2, 4, 5, 8; start it",
    ),
    "no capture": (serve_no_states, r"captured no states; start it with spectrain serve"),
    "gone": (stop_server, r"no server answers there"),
    "failing": (fail_always, r"a first sequence cannot be captured: .*out of memory"),
}


@pytest.mark.sweep(3, free=("kind",))
@pytest.mark.parametrize("kind", REFUSED)
def test_a_wrong_server_is_refused_before_anything_is_written(
    kind: str, tmp_path: Path, server: ModelStandIn
) -> None:
    """One sentence says what is wrong, and the folder does not exist afterwards."""
    serve, message = REFUSED[kind]
    serve(server)
    with pytest.raises(UserError, match=message) as caught:
        capture_from_server(tmp_path / "store", server, "data.limit=4")
    assert "\n" not in str(caught.value) and not (tmp_path / "store").exists()


def test_layers_without_names_and_more_layers_are_read(
    tmp_path: Path, server: ModelStandIn
) -> None:
    """A file that names no layers holds exactly those that are needed; one that names them may
    hold more.
    """
    server.names_layers = False
    capture_from_server(tmp_path / "unnamed", server, "data.limit=4")
    server.names_layers = True
    server.layers = (0, 2, 4, 5, 7, 8)
    capture_from_server(tmp_path / "more", server, "data.limit=4")
    more = read_all(tmp_path / "more")
    assert all(
        torch.equal(tensor, more[name]) for name, tensor in read_all(tmp_path / "unnamed").items()
    )


def test_a_server_killed_twice_costs_only_what_was_under_way(
    tmp_path: Path, server: ModelStandIn
) -> None:
    """Each time one sentence says how to resume, everything captured so far is stored, and
    nothing is captured twice.
    """
    stored = []
    for _ in range(2):
        before = server.num_captured

        def stop_after(path: Path, number: int, before: int = before) -> None:
            if number == before + server_states.NUM_PROBES + 4:
                server.stop()

        server.alter_file = stop_after
        with pytest.raises(
            RunError,
            match=r"server\.url: .* what was captured is stored in .*; start the server again",
        ):
            capture_from_server(tmp_path / "store", server, "+server.concurrency=1")
        stored.append(len(FeatureStore(tmp_path / "store").shard_names))
        server.start()
    assert stored == [3, 6] or stored == [4, 8]
    server.alter_file = lambda path, number: None
    capture_from_server(tmp_path / "store", server)
    assert len(FeatureStore(tmp_path / "store").shard_names) == CONVERSATIONS


def test_either_of_two_servers_may_go_away(tmp_path: Path, server: ModelStandIn) -> None:
    """If one server stops, the other one captures the rest."""
    other = ModelStandIn(load_tiny(), LAYERS, tmp_path / "states")
    server.alter_file = lambda path, number: (
        server.stop() if number == server_states.NUM_PROBES + 3 else None
    )
    try:
        urls = f"+server.url=[{server.url},{other.url}]"
        words = (
            "source=store",
            f"source.path={tmp_path / 'store'}",
            "server=vllm",
            urls,
            "+server.retries=1",
        )
        server.folder = tmp_path / "first"
        server.folder.mkdir()
        capture_features(composed(*SETTINGS, *words, "+server.concurrency=2"))
    finally:
        other.stop()
    assert (
        len(FeatureStore(tmp_path / "store").shard_names) == CONVERSATIONS
        and other.num_captured > 4
    )


def test_a_full_disk_stores_nothing_wrong(
    tmp_path: Path, server: ModelStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture ends with one sentence, written shards are complete, and the same command
    resumes.
    """

    def fail_to_save(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("spectrain.features.store.save_file", fail_to_save)
        with pytest.raises(UserError, match="the disk is full, so it was not saved"):
            capture_from_server(tmp_path / "store", server, "+source.shard_mb=0.5")
    assert not [*(tmp_path / "store").glob("*.safetensors")] and not [
        *(tmp_path / "store").glob("*.part")
    ]
    capture_from_server(tmp_path / "store", server, "+source.shard_mb=0.5")
    assert len(FeatureStore(tmp_path / "store").shard_names) == CONVERSATIONS


def test_sequences_that_fail_one_after_another_stop_the_capture(
    tmp_path: Path, server: ModelStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that fails repeatedly is not sent the rest of the data."""
    monkeypatch.setattr(server_capture, "STOP_AFTER", 3)
    server.alter_states = lambda states, tokens, number: (
        (states, tokens) if number <= server_states.NUM_PROBES + 2 else negate(states, tokens)
    )
    with pytest.raises(
        RunError,
        match=r"3 sequences failed one after another, the last: .*; what was captured is stored",
    ):
        capture_from_server(tmp_path / "store", server, "+server.concurrency=1")
    assert len(FeatureStore(tmp_path / "store").shard_names) == 2


def test_stores_of_targets_and_servers_do_not_mix(tmp_path: Path, server: ModelStandIn) -> None:
    """A server adds nothing to what the target itself has stored."""
    capture_features(
        composed(*SETTINGS, "data.limit=2", "source=store", f"source.path={tmp_path / 'own'}")
    )
    with pytest.raises(
        UserError, match="the target itself stored its features; choose another folder"
    ):
        capture_from_server(tmp_path / "own", server)
