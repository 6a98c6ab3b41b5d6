"""The settings of `spectrain follow`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectrain.cli.interface import compose_config, hydra_context
from spectrain.errors import RunError
from spectrain.output.verbosity import command_output
from spectrain.servers.ports import find_free_port
from spectrain_serve.follow.command import resolve_follow_spec, run_proxy
from spectrain_serve.follow.follower import TrafficFollower
from spectrain_serve.follow.proxy import Proxy, Recorder
from tests.config.test_resolve import run

from .test_follower import follower

__all__ = ["follower", "run"]


@pytest.mark.parametrize(
    "setting, group, choice, expected",
    [
        ({}, "optimizer", "muon", {}),
        ({"optimizer": "adamw"}, "optimizer", "adamw", {}),
        ({"trainer.epochs": 3}, "trainer", "default", {"lr": 0.1, "epochs": 3}),
        ({"tree": "chain"}, "tree", "chain", {"depth": 3}),
        ({"tree.depth": 2}, "tree", "chain", {"depth": 2}),
    ],
    ids=["nothing", "a choice", "a setting", "the same choice", "a tree's setting"],
)
def test_a_candidate_is_trained_as_its_run_was(
    run: Path, setting: dict[str, Any], group: str, choice: str, expected: dict[str, Any]
) -> None:
    """What conf/ chooses for `spectrain follow` stands below the run's own settings."""
    with hydra_context():
        config, words = compose_config("follow", {"run": run, "server": "vllm", **setting})
        spec, _ = resolve_follow_spec(config, words)
    assert (getattr(spec, group).choice, getattr(spec, group).settings) == (choice, expected)


def test_json_names_the_addresses_once_clients_may_send(
    follower: TrafficFollower, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is one document on the standard output; the sentences go to the error stream."""
    listen = f"127.0.0.1:{find_free_port()}"
    follower.settings = replace(follower.settings, listen=listen)
    # The loop ends at once, and the command with it.
    monkeypatch.setattr(follower, "run", lambda: None)
    proxy = Proxy(follower.settings, follower.swapper.servers, Recorder(0.0))
    with command_output("normal", as_json=True), pytest.raises(RunError, match="has ended"):
        run_proxy(follower, proxy)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "follows": "http://127.0.0.1:1",
        "url": f"http://{listen}/v1",
        "metrics": f"http://{listen}/metrics",
        "page": f"http://{listen}/follow",
        "ledger": str(follower.folder.ledger),
    }
    assert f"http://{listen}/v1" in printed.err and "control key" in printed.err
