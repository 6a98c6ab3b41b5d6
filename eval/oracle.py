"""Decoding with every draft right: the ceiling of a better drafter, and how often the drafter
itself would have been right.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spectrain.decoding.generation import Generation
from spectrain.decoding.teacher_forcing import PresetChainBuilder, TeacherForcedBuilder
from spectrain.eval.metrics import SystemSummary
from spectrain.eval.systems import Decoder, System
from spectrain.trees.measurements import expected_length


class Oracle:
    """Runs the drafter over the target's own answers, all of which are drafted and accepted."""

    def __init__(self, first: System, decoder: Decoder) -> None:
        self.decoder = decoder
        self.forced = TeacherForcedBuilder({}, first.builder, first.rule)
        self.system = System(
            "oracle", "every draft right", first.drafter, self.forced, decoder.rule
        )
        # If the drafter decodes in captured rounds, the eager loop counts what is right, and
        # captured rounds give the time.
        is_eager = decoder.why_eager(first) is not None
        self.captured = (
            None if is_eager else replace(self.system, builder=PresetChainBuilder(self.forced))
        )
        # Closed if the drafter drafts by itself: nothing can be forced on it.
        self.is_open = True

    @property
    def rolled_out(self) -> bool:
        """Whether the drafter has drafted along forced tokens."""
        return any(self.forced.counts)

    def decode(
        self,
        prompts: list[list[int]],
        limit: int,
        sequence_ids: list[int],
        answers: Sequence[Generation],
    ) -> list[Generation]:
        """Decode the target's own answers once more."""
        self.forced.sequences = {
            key: answer.prompt + answer.output for key, answer in zip(sequence_ids, answers)
        }
        decoded = self.decoder(self.system, prompts, limit, sequence_ids)
        if self.captured is not None:
            decoded = self.decoder(self.captured, prompts, limit, sequence_ids)
        self.is_open = self.rolled_out
        return decoded

    def summary(self, measured: SystemSummary) -> dict[str, Any]:
        """Return the entry `forced` of summary.json, which compares the drafter on the target's own
        text with decoding.

        agreement_by_depth: how often the first child that the rule judges is accepted, EAGLE's
        n-alpha; depth d reads d - 1 of the drafter's own states and the true tokens.
        acceptance_length: what a chain would reach if depths were independent.
        overlap_by_depth: the sum of min(p, q), how often a sampled token is accepted if p and q
        have the rule's and the tree's temperatures (p is 1 if the rule samples nothing).
        likeliest_by_depth: how often both have the same most likely token.
        forecast: the acceptance length of a chain at the rates of either.
        """
        agreement = round_rates([hits[0] for hits in self.forced.hit_rates])
        overlap = self.forced.mean_overlap
        likeliest = self.forced.top1_agreement
        length = expected_length(agreement)
        gaps = [
            accepted - correct for accepted, correct in zip(measured.acceptance_by_depth, agreement)
        ]
        return {
            "agreement_by_depth": agreement,
            "gap_by_depth": round_rates(gaps),
            "acceptance_length": round(length, 4),
            "gap": round(measured.acceptance_length.pooled - length, 4),
            "overlap_by_depth": round_rates(overlap),
            "likeliest_by_depth": round_rates(likeliest),
            "forecast": {
                "sampled": round(expected_length(overlap), 4),
                "greedy": round(expected_length(likeliest), 4),
            },
        }


def round_rates(values: Sequence[float]) -> list[float]:
    """Round rates to four decimals."""
    return [round(value, 4) for value in values]
