"""The training that continues a drafter on token sequences: what its settings change of the run's,
and the run itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.runs.train import train_and_score

EPOCHS = 1000
"""More epochs than any continuation trains; its steps or its minutes end it."""


def plan_continuation(
    spec: RunSpec,
    drafter: str,
    trainer: Mapping[str, Any],
    adapter: Mapping[str, Any] | None = None,
) -> RunSpec:
    """Return the settings of a run as those of a training that continues the drafter of a folder.

    `trainer` replaces settings of the trainer, and says when the training ends. It is neither
    scored nor tracked.
    """
    for key in ("resume", "max_steps", "max_minutes"):
        spec = replace(spec, trainer=spec.trainer.drop_setting(key))
    changed = spec.with_settings("drafter", init=drafter)
    changed = changed.with_settings("trainer", **{"epochs": EPOCHS, **trainer})
    nothing: dict[str, Any] = {"eval": {}, "tracker": {}, "server": {}}
    return RunSpec.from_nodes({**changed.to_nodes(), **nothing, "adapter": adapter or {}})


def train_on_examples(
    spec: RunSpec, target: Target, examples: Iterable[Example], folder: Path
) -> Path:
    """Train on sequences, which FOLDER/data.jsonl then holds; return the run folder FOLDER/run."""
    path = folder / "data.jsonl"
    write_examples(path, examples)
    data = GroupSpec.from_node(
        "data", {"_target_": "spectrain.data.tokens.TokensReader", "path": str(path)}
    )
    nodes = {**spec.to_nodes(), "data": {**data.node, "held_out": 0.0}, "run": str(folder / "run")}
    return train_and_score(RunSpec.from_nodes(nodes), target)


def write_examples(path: Path, examples: Iterable[Example]) -> None:
    """Write examples as data=tokens reads them."""
    rows = [
        {"input_ids": example.tokens, "loss_mask": [*map(int, example.mask)]}
        for example in examples
    ]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
