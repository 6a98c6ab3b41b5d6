"""Which families learn from drafts that were made during the training, and how.

A family that differs from its base class registers itself, with `find_on_policy.register`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.dflash import DFlash
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.block_drafter import BlockDrafter
from spectrain.drafters.layers.inner_drafters import DrafterWrapper
from spectrain.drafters.layers.vocabulary import VocabularyDrafter
from spectrain.drafters.peagle import PEagle
from spectrain.models.target import Target


@dataclass(frozen=True)
class OnPolicy:
    """Training on drafts that were made during the training: the loss reads which replayed
    drafts were rejected.
    """

    # The drafter as a language model. It can write texts, run side branches of a text and weigh the
    # drafts that it drew.
    language_model: Target | None = None
    # It drafts from the text before a root and reads no draft, so a replayed draft is judged after
    # its own root only.
    drafts_from_root: bool = False
    # Its loss weighs the tokens of a draft that it drew after a root by their advantage.
    learns_windows: bool = False


@singledispatch
def find_on_policy(drafter: Drafter | None) -> OnPolicy | None:
    """Return how a drafter learns from its own drafts; None if it cannot."""
    return None


find_on_policy.register(Causal, lambda drafter: OnPolicy(drafter.model))
find_on_policy.register(VocabularyDrafter, lambda drafter: OnPolicy())
find_on_policy.register(BlockDrafter, lambda drafter: None)
find_on_policy.register(DFlash, lambda drafter: OnPolicy(drafts_from_root=True))
find_on_policy.register(PEagle, lambda drafter: None)
find_on_policy.register(Eagle3, lambda drafter: OnPolicy(learns_windows=True))
find_on_policy.register(DrafterWrapper, lambda drafter: find_on_policy(drafter.inner))
