"""Measured times and gains of rounds of one batch size and number of threads."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from .draft_choice import DraftChoice
from .measurements import Latency
from .verify_fit import VerifyFit

# Rounds in a row with the same batch size and number of threads after which its verification is timed.
SETTLED_ROUNDS = 4
# Verification is timed again where drafted rounds take this factor more or less than modelled, compared with plain ones ...
UNSTEADY_FACTOR = 1.25
# ... or the text is this many times longer than the longest timed one, after rounds of this many times its duration.
LENGTH_FACTOR, PAUSE_FACTOR = 2.0, 100.0

# Rounds that a ratio of 1 counts for before any was observed.
PRIOR_RATIOS = 4


@dataclass
class DrafterGain:
    """The drafter's expected gain over copies of one bucket: running means over the rounds in which it ran."""

    num_tokens: float = 0.0
    num_levels: float = 1.0
    verify_seconds: float = 0.0  # added seconds of the larger tree
    num_trials: int = 0
    rounds_skipped: int = 0  # rounds without the drafter since the last trial

    def needs_trial(self) -> bool:
        """Tell whether trials are too few or too long ago."""
        self.rounds_skipped += 1
        return self.num_trials < 4 or self.rounds_skipped >= 16 * self.num_trials

    def update_means(self, tokens: float, levels: int, verifying: float, rate: float) -> None:
        self.num_trials, self.rounds_skipped = self.num_trials + 1, 0
        rate = max(rate, 1 / self.num_trials)
        self.num_tokens += rate * (tokens - self.num_tokens)
        self.num_levels += rate * (levels - self.num_levels)
        self.verify_seconds += rate * (verifying - self.verify_seconds)


@dataclass
class RoundCosts:
    """What rounds of one batch size and number of threads take, and whether they draft."""

    latency: Latency
    choice: DraftChoice
    start_seconds: float  # running mean of the first draft step
    step_seconds: float  # of every further draft step
    copy_seconds: float = 0.0  # drafting time of a round that only copies
    num_copied: int = 0  # rounds that only copied
    reading_seconds: float = 0.0  # of each token that the drafter reads beyond those of one round
    # The drafter's gains by bucket of the copies' expected tokens.
    drafter_gains: dict[int, DrafterGain] = field(default_factory=lambda: defaultdict(DrafterGain))
    # Observed over modelled seconds of rounds with copies: running means, with the drafter (True) and without (False), and the
    # rounds in them.
    time_ratios: dict[bool, float] = field(default_factory=lambda: {False: 1.0, True: 1.0})
    num_ratios: dict[bool, int] = field(default_factory=lambda: {False: PRIOR_RATIOS, True: PRIOR_RATIOS})
    # Seconds to verify every size, by context length.
    verify_curves: dict[int, list[float]] = field(default_factory=dict)
    # Fit of verification times to the rounds; None keeps the measured ones.
    fit: VerifyFit | None = None
    # Whether verification was timed for this batch size and number of threads.
    is_timed: bool = False
    # Seconds of the last timing, and those of all rounds since then.
    timing_seconds: float = 0.0
    round_seconds: float = 0.0

    def record_ratio(self, has_drafter: bool, ratio: float, memory: int) -> None:
        """Record how much longer than modelled a round with copies took; means are taken over the last `memory` rounds."""
        self.num_ratios[has_drafter] = min(self.num_ratios[has_drafter] + 1, memory)
        self.time_ratios[has_drafter] += (ratio - self.time_ratios[has_drafter]) / self.num_ratios[has_drafter]

    def needs_timing(self, length: int, num_rounds: int) -> bool:
        """Tell whether to time verification before a round behind `length` tokens, the `num_rounds`-th in a row."""
        if not self.is_timed:
            return num_rounds >= SETTLED_ROUNDS
        if self.round_seconds < PAUSE_FACTOR * self.timing_seconds:
            return False
        relative_cost = self.choice.relative_cost
        is_unsteady = max(relative_cost, 1 / relative_cost) > UNSTEADY_FACTOR
        return is_unsteady or length > LENGTH_FACTOR * max(self.latency.verify_seconds)

    def set_times(self, length: int, seconds: dict[int, float], batch: int) -> None:
        """Replace the verification times by those measured for these sizes behind `length` tokens."""
        self.latency = replace(self.latency, verify_seconds={length: seconds}, batch=batch)
        self.choice.comparisons.clear()
        self.choice.comparisons.append(1.0)
        self.verify_curves.clear()
        self.fit = None if self.fit is None else VerifyFit(self.fit.memory)
        self.is_timed = True
