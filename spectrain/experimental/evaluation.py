"""The evaluation with the parts of experimental ideas: what `eval=default` constructs.

The core's evaluation knows none of them. A setting and a part of an idea are added here, and removed here with the idea.
"""

from dataclasses import dataclass
from typing import Literal

from spectrain.config.values import Count, Seed, Share
from spectrain.eval.parts import Part
from spectrain.eval.run import Evaluation

from .adversary.evaluation import Adversary, Search
from .overlap.evaluation import Overlapping
from .transport.evaluation import Optimum


@dataclass
class ExperimentalEvaluation(Evaluation):
    """Decodes what its settings ask for, experimental parts included; all settings are keys of `eval`."""

    # Number of edits of every prompt to try, in search of one that slows the drafter down; null tries none.
    adversary: Count | None = None
    # Largest number of words that one edit inserts into a prompt.
    adversary_words: Count = 4
    # Share of the answer's tokens that must stay the target's most likely ones after an edit.
    adversary_same: Share = 0.9
    # Seed of the random edits.
    adversary_seed: Seed = 0
    # Measure how much any lossless rule could keep of the drafts, by depth, and how much each rule does keep.
    optimum: bool = False
    # Draft in a second process while the target verifies: post drafts behind the text with all drafts kept; pearl also lets the
    # target step while a draft is made anew; outcomes drafts behind several likely results of the verification.
    overlap: Literal["post", "pearl", "outcomes"] | None = None
    # With eval.overlap=outcomes, how many likely results of the verification to draft ahead for.
    outcomes: Count = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self.search: Search | None = None
        if self.adversary is not None:
            self.search = Search(self.adversary, self.adversary_words, self.adversary_same, self.adversary_seed)

    def extra_parts(self) -> list[Part]:
        parts: list[Part] = []
        if self.search is not None:
            parts.append(Adversary(self.search, self.chosen, self.max_new_tokens, self.check))
        if self.optimum:
            parts.append(Optimum(self.max_new_tokens))
        if self.overlap is not None:
            parts.append(Overlapping(self.overlap == "pearl", self.outcomes if self.overlap == "outcomes" else 0))
        return parts
