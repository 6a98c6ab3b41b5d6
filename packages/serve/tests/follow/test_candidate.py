"""How a candidate is trained: what it continues, for how long, and from which hidden states."""

from typing import Any

import pytest

from spectrain.config.spec import RunSpec
from spectrain_serve.follow.settings import FollowSettings
from spectrain_serve.follow.train_candidate import SERVER_SOURCE, plan_training

SERVING = "http://127.0.0.1:8000/v1"
SPEC = RunSpec.from_nodes(
    {
        "drafter": {"_target_": "spectrain.drafters.eagle3.Eagle3"},
        "source": {"_target_": "spectrain.features.live_source.LiveSource"},
        "server": {
            "_target_": "spectrain_serve.servers.vllm.VllmServer",
            "url": SERVING,
            "retries": 2,
        },
        "trainer": {
            "_target_": "spectrain.training.trainer.Trainer",
            "resume": "auto",
            "max_steps": 3,
            "lr": 1e-3,
        },
        "eval": {"_target_": "spectrain.eval.run.Evaluation"},
    }
)


def plan(spec: RunSpec = SPEC, **settings: Any) -> dict[str, Any]:
    return plan_training(
        spec, "runs/serving", FollowSettings(train_minutes=2, **settings), None
    ).to_nodes()


def test_a_candidate_continues_the_serving_drafter_for_its_minutes() -> None:
    nodes = plan(lr=1e-4)
    assert nodes["drafter"]["init"] == "runs/serving"
    trainer = nodes["trainer"]
    assert (trainer["max_minutes"], trainer["lr"]) == (2, 1e-4) and not {
        "resume",
        "max_steps",
    } & trainer.keys()
    assert not nodes.get("eval") and not nodes.get("server")


@pytest.mark.parametrize("source", [None, SERVER_SOURCE])
def test_states_come_from_the_engine_where_it_is_named(source: str | None) -> None:
    """By follow.states_url, or by source=server from the server itself; all other settings of
    the server stay.
    """
    spec = (
        SPEC
        if source is None
        else RunSpec.from_nodes({**SPEC.to_nodes(), "source": {"_target_": source, "ahead": 2}})
    )
    nodes = plan(spec, states_url="http://127.0.0.1:8001/v1")
    assert nodes["source"] == {"_target_": SERVER_SOURCE} | ({} if source is None else {"ahead": 2})
    assert nodes["server"] == {**SPEC.server.node, "url": "http://127.0.0.1:8001/v1"}
    own = plan(spec)
    assert own.get("server", {}) == ({} if source is None else SPEC.server.node)
