"""What an evaluation is given to score."""

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
    """A drafter with its tree and rule, and what a run knows about it."""

    target: Target
    drafter: Drafter
    builder: TreeBuilder
    rule: AcceptanceRule
    setting: dict[str, Any]  # what the numbers depend on, besides what the evaluation knows
    make_untrained: Callable[[], Drafter] | None = None  # makes the same drafter as it was before training
    load_original: Callable[[], Target] | None = None  # loads the target as it was, where the drafter's training changed it
    open_store: Callable[[], Datastore | None] = lambda: None  # the answers that it was trained on, to copy from
    save_learned: Callable[[Drafter], None] | None = None  # keeps a drafter that has learnt while it was scored
    default_builder: TreeBuilder | None = (
        None  # the tree that it came with, where one that this machine's times favour is scored first
    )
