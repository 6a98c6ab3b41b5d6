"""Decoding with every draft right: the ceiling of a better drafter, and how often the drafter itself would have been right."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spectrain.decoding.calibration import PresetChainBuilder, TeacherForcedBuilder
from spectrain.decoding.generation import Generation
from spectrain.eval.systems import Decoder, System
from spectrain.trees.measurements import expected_length


class Oracle:
    """The drafter runs over the target's own answers, all of which are drafted and kept."""

    def __init__(self, first: System, decoder: Decoder) -> None:
        self.decoder = decoder
        self.forced = TeacherForcedBuilder({}, first.builder, first.rule)
        self.system = System("oracle", "every draft right", first.drafter, self.forced, decoder.rule)
        # Where the drafter decodes in captured rounds, the loop takes the notes, and the time is that of captured ones.
        self.captured = (
            None if decoder.why_eager(first) is not None else replace(self.system, builder=PresetChainBuilder(self.forced))
        )
        self.is_open = True  # closed where the drafter drafts by itself: nothing can be forced on it

    @property
    def rolled_out(self) -> bool:
        return any(self.forced.counts)

    def decode(
        self, prompts: list[list[int]], limit: int, sequence_ids: list[int], answers: Sequence[Generation]
    ) -> list[Generation]:
        """Decode what the target answered once more."""
        self.forced.sequences = {key: one.prompt + one.output for key, one in zip(sequence_ids, answers)}
        found = self.decoder(self.system, prompts, limit, sequence_ids)
        if self.captured is not None:
            found = self.decoder(self.captured, prompts, limit, sequence_ids)
        self.is_open = self.rolled_out
        return found

    def summary(self, entry: dict[str, Any]) -> dict[str, Any]:
        """How often the drafter is right on the target's own text, beside how often decoding kept a draft.

        `agreement_by_depth` is how often the first child that the rule judges is kept, EAGLE's n-alpha: depth d reads d - 1 of
        the drafter's own states and the true tokens. `acceptance_length` is what a chain would reach if depths were
        independent. `overlap_by_depth` is the sum of min(p, q), how often a drawn token is kept where p and q have the rule's
        and the tree's temperatures (p has 1 where the rule draws nothing); `likeliest_by_depth` is how often both have the
        same most likely token; `forecast` is the acceptance length of a chain that either promises.
        """
        agreement, overlap, likeliest = (
            [hits[0] for hits in self.forced.hit_rates],
            self.forced.mean_overlap,
            self.forced.top1_agreement,
        )
        length = expected_length(rounded(agreement))
        return {
            "agreement_by_depth": rounded(agreement),
            "gap_by_depth": rounded([kept - right for kept, right in zip(entry["acceptance_by_depth"], rounded(agreement))]),
            "acceptance_length": round(length, 4),
            "gap": round(entry["acceptance_length"]["pooled"] - length, 4),
            "overlap_by_depth": rounded(overlap),
            "likeliest_by_depth": rounded(likeliest),
            "forecast": {"sampled": round(expected_length(overlap), 4), "greedy": round(expected_length(likeliest), 4)},
        }


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]
