"""Parts that installed packages add to `eval=default`: their settings join the keys of `eval`,
their extensions the score.

A part is a dataclass whose fields are settings. Its entry point is in the group `spectrain.eval`.
"""

from __future__ import annotations

from spectrain.eval.extensions import EvalExtension
from spectrain.eval.selection import PromptedEvaluation


class EvalPart:
    """Settings of `eval`, and what they add to an evaluation. It adds nothing unless a subclass
    overrides a method.
    """

    def check(self, evaluation: PromptedEvaluation) -> None:
        """Raise UserError if the settings of the part do not go together, or not with those of
        the evaluation.
        """

    def extensions(self, evaluation: PromptedEvaluation) -> list[EvalExtension]:
        """Return what is decoded, checked and written in addition to the drafter."""
        return []

    @property
    def uses_clock(self) -> bool:
        """Whether what is drafted depends on measured times, beyond the tree."""
        return False

    @property
    def varies_trees(self) -> bool:
        """Whether trees of several kinds are decoded, so that the rule must be valid for all of
        them.
        """
        return False
