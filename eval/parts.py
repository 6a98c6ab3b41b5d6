"""Parts that installed packages add to `eval=default`: their settings join the keys of `eval`,
their extensions the score.

A part is a dataclass whose fields are settings. Its entry point is in the group `spectrain.eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spectrain.eval.extensions import EvalExtension
from spectrain.eval.selection import EngineEvaluation


class EvalPart:
    """Settings of `eval`, and what they add to an evaluation. It adds nothing unless a subclass
    overrides a method.
    """

    def prepare(self, evaluation: EngineEvaluation) -> None:
        """Give the evaluation the settings that follow from those of the part, before they are
        checked.
        """

    def check(self, evaluation: EngineEvaluation) -> None:
        """Raise UserError if the settings of the part do not go together, or not with those of
        the evaluation.
        """

    def extensions(self, evaluation: EngineEvaluation) -> list[EvalExtension]:
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

    @property
    def leaves_out_baselines(self) -> bool:
        """Whether systems of its own are compared, so that the baselines of this engine are left
        out.
        """
        return False

    @classmethod
    def draw_axis(cls, axes: Sequence[dict[str, Any]], id: str) -> dict[str, Any] | None:
        """Return what a page shows of the entries `axis` of summaries: `title`, `plot`, `tables`
        of a caption, titles and rows of cells, and `notes`; None unless the part writes them.
        """
        return None
