"""The choice between a round with a draft and a plain step, by measured times and tokens of
earlier rounds.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from .base import RoundReason
from .estimates import RunningMean

# Share of all steps that trials of a drafter that does not pay may lose, and that plain steps may
# lose where it pays.
TRIAL_ALLOWANCE = 0.004
STEP_ALLOWANCE = 0.003
# Rounds that an expected gain counts for before any was drafted.
PRIOR_ROUNDS = 4
# Comparisons that are made as soon as a drafted round was timed, because modelled costs may be
# wrong by half at first.
FIRST_COMPARISONS = 5
# Drafted rounds that the cost of reading a prompt, or skipped tokens, is spread over.
ROUNDS_PER_READING = 32
# Last comparisons that count.
NUM_COMPARISONS = 9
DRAFTED = ("pays", "prepared", "trial")
"""The reasons for which a round drafts."""


class DraftChoice:
    """Decides before every round whether to draft, for one batch size.

    The unit of gains and costs is a plain step. A drafted round gains its tokens and costs its
    time; the mean gain over the last drafted rounds decides. The other kind of round is tried now
    and then: each round of the better kind saves a share of its steps, and a trial is due as soon
    as the savings cover its expected loss. So trials lose this share at most, a drafter that loses
    little is tried often, and a trial that gains pays for the next one.

    Costs are modelled ones, times how much longer than modelled drafted rounds took compared with
    plain ones (`TimeRatios`).
    """

    def __init__(self, tokens: float, cost: float, window: int = 64) -> None:
        # Drafted rounds over which means are taken.
        self.window = window
        # Running means of tokens and modelled cost of drafted rounds, at first what is expected.
        self.tokens = RunningMean(tokens, PRIOR_ROUNDS)
        self.cost = RunningMean(cost, PRIOR_ROUNDS)
        # Steps that trials may lose.
        self.savings = 0.0
        # Time ratio of drafted rounds over that of plain steps, one per trial.
        self.comparisons: deque[float] = deque([1.0], maxlen=NUM_COMPARISONS)
        # Whether the drafter proposed nothing in the last round, in which it may have prepared the
        # next one.
        self.is_preparing = False
        # Whether drafting was expected to pay in this round, and whether any round was drafted.
        self.prefers_draft = True
        self.has_drafted = False
        # Whether the last round was drafted, and the number of comparisons so far.
        self.was_drafted = False
        self.num_compared = 0

    def expect_round(self, tokens: float, cost: float) -> None:
        """Replace the expected tokens and cost of a drafted round, if none was drafted yet."""
        if not self.has_drafted:
            self.tokens.value = tokens
            self.cost.value = cost

    @property
    def relative_cost(self) -> float:
        """How much longer drafted rounds take than plain steps, relative to their modelled
        times.
        """
        return median(self.comparisons)

    @property
    def mean_gain(self) -> float:
        """The tokens of a drafted round minus its cost, on average."""
        return self.tokens.value - self.cost.value * self.relative_cost

    def should_draft(self, reading_cost: float = 0.0, is_comparable: bool = True) -> bool:
        """Tell whether the next round drafts; `decide` says why."""
        return self.decide(reading_cost, is_comparable) in DRAFTED

    def decide(self, reading_cost: float = 0.0, is_comparable: bool = True) -> RoundReason:
        """Return why the next round drafts or does not, if the drafter has to read skipped tokens
        first for `reading_cost` steps.

        `is_comparable`: its time will be that of other rounds, and drafted ones were timed, so that
        a plain step may be tried for comparison.
        """
        self.prefers_draft = self.mean_gain > reading_cost / ROUNDS_PER_READING
        expected_loss = self.mean_gain if self.prefers_draft else reading_cost - self.mean_gain
        if self.is_preparing:
            return "prepared"
        if self.prefers_draft and is_comparable and self.num_compared < FIRST_COMPARISONS:
            # Between two of these steps a round drafts.
            return "comparison" if self.was_drafted else "pays"
        is_affordable = self.savings >= expected_loss
        if self.prefers_draft:
            return "comparison" if is_affordable else "pays"
        return "trial" if is_affordable else "does not pay"

    def may_draft(self, num_rounds: int, reading_cost: float = 0.0) -> bool:
        """Tell whether one of the next `num_rounds` rounds may draft, if those before it are
        plain steps.
        """
        savings = self.savings + TRIAL_ALLOWANCE * (num_rounds - 1)
        prefers_draft = self.mean_gain > reading_cost / ROUNDS_PER_READING
        return prefers_draft or self.is_preparing or savings >= reading_cost - self.mean_gain

    def record_plain(self, comparison: float | None = None) -> None:
        """Record a round without a draft, and its comparison with drafted ones, if there is one."""
        self.was_drafted = False
        if self.prefers_draft:
            self._add_comparison(comparison)
            self.savings = max(0.0, self.savings - self.mean_gain)
        else:
            self.savings += TRIAL_ALLOWANCE

    def record_draft(
        self, tokens: float, cost: float, comparison: float | None = None, reading_cost: float = 0.0
    ) -> None:
        """Record a drafted round of `tokens` tokens: `cost` modelled steps, and `reading_cost`
        steps for skipped tokens.

        `comparison` is its comparison with plain rounds, if there is one.
        """
        if not self.prefers_draft:
            self._add_comparison(comparison)
        had_gained = self.mean_gain > 0
        gain = tokens - cost * self.relative_cost
        self.has_drafted = self.was_drafted = True
        self.savings += STEP_ALLOWANCE * tokens if self.prefers_draft else gain - reading_cost
        self.tokens.add(tokens, self.window)
        self.cost.add(cost, self.window)
        if had_gained != (self.mean_gain > 0):
            self.savings = 0.0

    def _add_comparison(self, comparison: float | None) -> None:
        if comparison is not None:
            self.num_compared += 1
            self.comparisons.append(comparison)
