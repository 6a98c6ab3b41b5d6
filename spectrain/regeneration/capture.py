"""Answers together with the states of their tokens: what decides on the store that gets them."""

from __future__ import annotations

from pathlib import Path

from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.data.readers import ConversationReader
from spectrain.drafters.base import Stage
from spectrain.errors import UserError
from spectrain.features.base import FeaturesRead
from spectrain.features.stored_source import StoredSource
from spectrain.models.target import Target

from .answer_states import AnswerStates


def list_engine_settings(spec: RunSpec, writer: GroupSpec) -> list[str]:
    """Return the keys that the command sets and that only this project's own engine reads."""
    is_set = {
        "target": spec.target.layer == "command",
        "run": spec.run is not None,
        "tree": spec.tree.layer == "command",
        "writer": writer.layer == "command",
    }
    return [key for key, value in is_set.items() if value]


def check_captured(spec: RunSpec) -> None:
    """Raise a UserError unless the command says for which target and drafter states are
    captured.
    """
    for key, group in (("target", spec.target), ("recipe", spec.drafter)):
        if not group:
            raise UserError(
                f"capture=true: say {key}=NAME, which decides on the layers that are captured"
            )


def find_captured_stage(spec: RunSpec, target: Target) -> Stage:
    """Return the stage of the recipe's drafter whose features are captured."""
    stage: Stage = spec.drafter.build(target=target).stages[0]
    return stage


def open_states(
    spec: RunSpec,
    target: Target,
    stage: Stage,
    data: ConversationReader,
    folder: Path,
    # The server that fills the store, as its manifest names it; None where the target runs here.
    engine: str | None = None,
) -> AnswerStates:
    """Return the states of the answers in a folder, with an open store."""
    source: StoredSource = GroupSpec(
        "source", "store", {"path": str(folder / "features"), **spec.source.settings}
    ).build()
    source.engine = engine
    source.prepare(target, FeaturesRead(stage.layers, stage.final_reach), None)
    store = source.own_store
    if store is None:
        raise UserError(
            f"source.path={source.path}: this cache is another project's; choose another folder"
        )
    reads_tail = stage.final_reach is None
    return AnswerStates(store, stage.layers, target, data, reads_tail=reads_tail)
