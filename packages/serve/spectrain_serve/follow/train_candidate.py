"""The process that trains a candidate: `python -m spectrain_serve.follow.train_candidate FOLDER`.

FOLDER/plan.json names the drafter to continue and the settings; new.jsonl and replay.jsonl hold the
recorded conversations. The process writes data.jsonl, and FOLDER/run with the drafter in it, which
is complete or absent.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from spectrain.config.build import register_resolvers
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.errors import RunError
from spectrain.models.target import Target
from spectrain_serve.continuation import plan_continuation, train_on_examples

from .examples import make_example
from .reservoir import read_conversations
from .settings import FollowSettings

SERVER_SOURCE = "spectrain_serve.training.server_source.ServerSource"


def train_candidate(folder: Path) -> None:
    """Train the candidate that a folder plans."""
    plan = json.loads((folder / "plan.json").read_text())
    register_resolvers()
    spec = RunSpec.from_nodes(plan["spec"])
    target: Target = spec.target.build()
    new, replayed = (
        [*read_examples(folder / f"{name}.jsonl", target)] for name in ("new", "replay")
    )
    if not new:
        raise RunError(f"{folder}: none of the recorded conversations can be trained on")
    train_on_examples(spec, target, mix_examples(new, replayed, plan["replay"]), folder)


def read_examples(path: Path, target: Target) -> list[Example]:
    """Return the conversations of a file as training sequences."""
    examples = (make_example(conversation, target) for conversation in read_conversations(path))
    return [example for example in examples if example is not None]


def mix_examples(
    new: list[Example], replayed: list[Example], share: float, seed: int = 0
) -> list[Example]:
    """Return new conversations, with replayed ones as the share of the whole, repeated where there
    are too few, in random order."""
    generator = random.Random(seed)
    count = round(len(new) * share / (1 - share)) if share < 1 else len(replayed)
    chosen = [replayed[number % len(replayed)] for number in range(count)] if replayed else []
    mixed = [*new, *chosen] if share < 1 else chosen
    generator.shuffle(mixed)
    return mixed


def plan_training(spec: RunSpec, drafter: str, settings: FollowSettings, adapter: Any) -> RunSpec:
    """Return the settings with which a candidate continues a drafter."""
    trainer: dict[str, Any] = {"max_minutes": settings.train_minutes}
    if settings.lr is not None:
        trainer["lr"] = settings.lr
    nodes = plan_continuation(spec, drafter, trainer, adapter).to_nodes()
    source = nodes["source"].get("_target_", "")
    server = dict(spec.server.node)
    if settings.states_url is not None and source != SERVER_SOURCE:
        nodes["source"] = {"_target_": SERVER_SOURCE}
    if nodes["source"].get("_target_") == SERVER_SOURCE:
        nodes["server"] = server | (
            {} if settings.states_url is None else {"url": settings.states_url}
        )
    return RunSpec.from_nodes(nodes)


if __name__ == "__main__":
    os.nice(int(os.environ.get("SPECTRAIN_FOLLOW_NICE", "10")))
    train_candidate(Path(sys.argv[1]))
