"""`eval.confidence=true`: a score calibrates the drafter's estimates of acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from spectrain.errors import UserError
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain
from spectrain_serve.times.engine_schedules import describe_confidence


@dataclass
class ConfidenceCalibration(EvalExtension):
    """Decodes the scored prompts again, fits temperatures to the rounds of every other prompt and
    measures them on the rest.
    """

    max_new_tokens: int

    def check(self, candidate: Candidate) -> None:
        builder = candidate.builder
        if not isinstance(builder, Chain) or builder.decides_length:
            raise UserError(
                "eval.confidence=true: it is about chains of one length; use tree=chain without "
                "tree.stop"
            )

    def report(self, results: Results) -> dict[str, Any]:
        """Return `confidence`: temperatures by position, and the calibration errors."""
        from spectrain_serve.times.confidence import calibrate, record_rounds

        system = results.systems[0]
        prompts = [turn.drafted.prompt for turn in results.turns[system.name]]
        halves = [
            record_rounds(
                results.candidate.target,
                system.drafter,
                system.builder,
                system.rule,
                prompts[first::2],
                self.max_new_tokens,
            )
            for first in range(2)
        ]
        if not sum(len(half.estimates) for half in halves):
            raise UserError(
                "eval.confidence=true: this drafter estimates no acceptance; train one with "
                "recipe=dspark, or recipe=gkd drafter.stop_head=1"
            )
        return {"confidence": calibrate(*halves)}

    def print_results(self, console: Console, summary: dict[str, Any]) -> None:
        console.print(describe_confidence("This score", summary["confidence"]), markup=False)
