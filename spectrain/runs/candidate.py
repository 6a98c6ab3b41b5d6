"""The object that an evaluation scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spectrain.data.datastore import Datastore
from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.trees import TreeBuilder


@dataclass
class Candidate:
    """A drafter with its tree and acceptance rule, and what a run knows about it."""

    target: Target
    drafter: Drafter
    builder: TreeBuilder
    rule: AcceptanceRule
    # What the results depend on, besides the evaluation's own settings.
    setting: dict[str, Any]
    # Makes the same drafter as before training.
    make_untrained: Callable[[], Drafter] | None = None
    # Loads the original target if the drafter's training changed it.
    load_original: Callable[[], Target] | None = None
    # Opens the training answers, for retrieval.
    open_store: Callable[[], Datastore | None] = lambda: None
    # Saves a drafter that learned while it was scored.
    save_learned: Callable[[Drafter], None] | None = None
    # The tree that it came with, where one that this machine's times favour is scored first.
    default_builder: TreeBuilder | None = None
    # Makes the same drafter with its fitted initial weights; None where training began with others.
    make_start: Callable[[], Drafter] | None = None
