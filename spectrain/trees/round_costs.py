"""Measured times and gains of rounds of one batch size and number of threads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .draft_choice import DraftChoice
from .drafter_over_copies import CopyCosts
from .estimates import RunningMean, TimeRatios, VerifyFit
from .measurements import Latency

# Verification is timed after so many rounds in a row with the same batch size and number of
# threads, if all rounds with them took so many times as long as the timing does, ...
SETTLED_ROUNDS = 4
PAUSE_FACTOR = 100.0
# ... and again where drafted rounds take this factor more or less than modelled, compared with
# plain ones, or the text is so many times longer than the longest timed one.
UNSTEADY_FACTOR = 1.25
LENGTH_FACTOR = 2.0


@dataclass
class RoundCosts:
    """What rounds of one batch size and number of threads take, and what decides whether they
    draft.
    """

    latency: Latency
    # Shared with other numbers of threads.
    choice: DraftChoice
    copies: CopyCosts
    # Seconds of the first draft step, of every further one, and of each token that the drafter
    # reads beyond those of one round.
    start_seconds: RunningMean
    step_seconds: RunningMean
    reading_seconds: RunningMean
    # Ratios of the observed to the modelled seconds of rounds.
    time_ratios: TimeRatios = field(default_factory=TimeRatios)
    # Seconds to verify every size, by context length.
    verify_curves: dict[int, list[float]] = field(default_factory=dict)
    # Fit of verification times to the rounds; None keeps the measured ones.
    fit: VerifyFit | None = None
    # Whether verification was timed for this batch size and number of threads.
    is_timed: bool = False
    # Seconds of the last timing, or of the first one as expected, and those of all rounds since
    # then.
    timing_seconds: float = 0.0
    round_seconds: float = 0.0

    def estimate_drafting(self, levels: float) -> float:
        """Return the expected seconds of a draft of so many levels, or of copies alone for none."""
        if not levels:
            return self.copies.draft_seconds.value
        return self.start_seconds.value + (levels - 1) * self.step_seconds.value

    def record_drafting(self, levels: int, seconds: float, memory: int) -> None:
        """Record the seconds of a draft of so many levels, or of copies alone for none."""
        if levels > 1:
            self.step_seconds.add(
                max(0.0, (seconds - self.start_seconds.value) / (levels - 1)), memory
            )
        elif levels == 1:
            self.start_seconds.add(seconds, memory)
        else:
            self.copies.draft_seconds.add(seconds, memory)

    def needs_timing(self, length: int, num_rounds: int) -> bool:
        """Tell whether to time verification behind `length` tokens, after `num_rounds` rounds in
        a row.
        """
        if num_rounds < SETTLED_ROUNDS or self.round_seconds < PAUSE_FACTOR * self.timing_seconds:
            return False
        if not self.is_timed:
            return True
        relative_cost = self.choice.relative_cost
        is_unsteady = max(relative_cost, 1 / relative_cost) > UNSTEADY_FACTOR
        return is_unsteady or length > LENGTH_FACTOR * max(self.latency.verify_seconds)

    def set_times(self, length: int, seconds: dict[int, float], batch: int) -> None:
        """Replace the verification times by those measured for these sizes behind `length`
        tokens.
        """
        self.latency = replace(self.latency, verify_seconds={length: seconds}, batch=batch)
        self.time_ratios = TimeRatios()
        self.choice.comparisons.clear()
        self.choice.comparisons.append(1.0)
        self.verify_curves.clear()
        self.fit = None if self.fit is None else VerifyFit(self.fit.memory)
        self.is_timed = True
