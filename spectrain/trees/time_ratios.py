"""Ratios of the observed to the modelled seconds of rounds with one number of threads."""

from __future__ import annotations

from collections import deque
from statistics import median

# Last rounds of one kind whose median is compared with a round of the other kind, and last rounds
# with copies that count.
COMPARED_ROUNDS = 5
COPY_ROUNDS = 9


class TimeRatios:
    """Observed over modelled seconds of the last rounds, with the drafter (True) and without it
    (False).

    Every number of threads has its own, because its model errs in its own way. Medians count,
    because beside busy processes some rounds take several times as long.
    """

    def __init__(self) -> None:
        self.rounds = {kind: deque[float](maxlen=COMPARED_ROUNDS) for kind in (False, True)}
        self.copy_rounds = {kind: deque[float]([1.0], maxlen=COPY_ROUNDS) for kind in (False, True)}

    @property
    def has_drafted(self) -> bool:
        """Whether a drafted round was timed."""
        return bool(self.rounds[True])

    def compare(self, is_drafted: bool, ratio: float | None) -> float | None:
        """Add the ratio of a round, and return the ratio of drafted rounds divided by that of plain
        ones.

        The round is compared with the last rounds of the other kind only, so that a change of the
        machine's load affects both. A `ratio` of None marks a round whose time is not
        representative. Returns None where nothing can be compared.
        """
        if ratio is None:
            return None
        self.rounds[is_drafted].append(ratio)
        if not (others := self.rounds[not is_drafted]):
            return None
        return ratio / median(others) if is_drafted else median(others) / ratio

    def record_copies(self, with_drafter: bool, ratio: float) -> None:
        """Record the ratio of a round with copies."""
        self.copy_rounds[with_drafter].append(ratio)

    def estimate_copy_round(self, with_drafter: bool, seconds: float) -> float:
        """Return the expected seconds of a round with copies that is modelled to take `seconds`."""
        return median(self.copy_rounds[with_drafter]) * seconds
