"""The choice, in a round with copies, between the copies alone and a drafter that runs too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from .base import RoundResult
from .copy_tree import CopyTree
from .estimates import RunningMean, TimeRatios

# Trials of the drafter that are made in any case, and rounds without it, per trial so far, after
# which another one is due.
FIRST_TRIALS = 4
ROUNDS_PER_TRIAL = 16
# Rounds that count as fully realised gains before any was observed.
PRIOR_ROUNDS = 4


@dataclass
class DrafterGain:
    """What the drafter adds to copies that promise about as many tokens: running means over the
    rounds in which it ran.
    """

    tokens: RunningMean = field(default_factory=RunningMean)
    levels: RunningMean = field(default_factory=lambda: RunningMean(1.0))
    # added seconds of the larger tree
    verify_seconds: RunningMean = field(default_factory=RunningMean)
    num_trials: int = 0
    rounds_skipped: int = 0  # rounds without the drafter since the last trial

    def needs_trial(self) -> bool:
        """Tell whether trials are too few or too long ago."""
        self.rounds_skipped += 1
        return (
            self.num_trials < FIRST_TRIALS
            or self.rounds_skipped >= ROUNDS_PER_TRIAL * self.num_trials
        )

    def record_trial(self, tokens: float, levels: int, verify_seconds: float, memory: int) -> None:
        self.num_trials = self.num_trials + 1
        self.rounds_skipped = 0
        self.tokens.add(tokens, memory)
        self.levels.add(levels, memory)
        self.verify_seconds.add(verify_seconds, memory)


@dataclass
class CopyCosts:
    """What rounds with copies of one batch size take and gain, with the drafter and without it."""

    draft_seconds: RunningMean = field(default_factory=RunningMean)  # of a round that only copies
    # The drafter's gains by bucket of the copies' expected tokens.
    gains: dict[int, DrafterGain] = field(default_factory=lambda: defaultdict(DrafterGain))


class DrafterOverCopies:
    """Decides whether the drafter runs in a round that has copies whose acceptance is estimated.

    It runs if decoding the tokens that it adds would take longer without it, the cost of the larger
    tree and of tokens that it has not read included. Rounds with the drafter and without it take
    longer or shorter than modelled, each by a ratio that is observed. The drafter's gain is
    estimated from earlier rounds whose copies promised as many tokens, times the fraction of such
    gains that was realised: tokens accepted beyond what copies alone would have yielded. From time
    to time the drafter runs anyway, to update the estimate; less often as trials accumulate.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory  # rounds over which means are taken
        self.copies: CopyTree | None = None  # the best tree of this round's copies alone
        self.promised: float | None = None  # expected gain over them in this round
        self.mean_promised = RunningMean(1.0, PRIOR_ROUNDS)
        self.mean_realised = RunningMean(1.0, PRIOR_ROUNDS)

    def needs_drafter(
        self,
        copies: CopyTree,
        costs: CopyCosts,
        ratios: TimeRatios,
        drafting_seconds: Callable[[float], float],
        reading_seconds: float,
    ) -> bool:
        """Begin a round with these copies, and tell whether the drafter runs.

        `drafting_seconds` returns the seconds of a draft of so many levels, and `reading_seconds`
        are those of unread tokens.
        """
        self.copies = copies
        gain = costs.gains[copies.gain_bucket]
        drafting = drafting_seconds(max(1.0, gain.levels.value))
        alone = ratios.estimate_copy_round(False, costs.draft_seconds.value + copies.seconds)
        together = (
            ratios.estimate_copy_round(True, drafting + copies.seconds + gain.verify_seconds.value)
            + reading_seconds
        )
        added = gain.tokens.value * min(
            1.0, max(0.0, self.mean_realised.value / max(self.mean_promised.value, 1e-6))
        )
        return (
            gain.needs_trial() or (copies.num_tokens + added) * alone > copies.num_tokens * together
        )

    def record_draft(self, best: CopyTree, levels: int, costs: CopyCosts) -> None:
        """Record the best tree of this round's copies and of the drafter's `levels` levels
        together.
        """
        if self.copies is not None:
            self.promised = best.num_tokens - self.copies.num_tokens
            gain = costs.gains[self.copies.gain_bucket]
            gain.record_trial(
                self.promised, levels, best.seconds - self.copies.seconds, self.memory
            )

    def finish_round(self, round: RoundResult) -> bool:
        """Record what was accepted in the round, and tell whether it had copies."""
        copies = self.copies
        promised = self.promised
        self.copies = None
        self.promised = None
        # a finished row emits nothing
        if copies is not None and promised is not None and min(round.counts.tolist()):
            self.mean_promised.add(promised, self.memory)
            self.mean_realised.add(copies.drafter_gain(round), self.memory)
        return copies is not None
