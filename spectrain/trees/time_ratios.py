"""How much longer than modelled rounds take with one number of threads."""

from __future__ import annotations

from collections import deque
from statistics import median

# Last rounds of one kind whose median is compared with a round of the other kind, and last rounds with copies that count.
COMPARED_ROUNDS, COPY_ROUNDS = 5, 9


class TimeRatios:
    """Observed over modelled seconds of the last rounds, with the drafter (True) and without it (False).

    Every number of threads has its own, because its model errs in its own way. Medians count, because beside busy processes
    some rounds take several times as long.
    """

    def __init__(self) -> None:
        self.rounds = {kind: deque[float](maxlen=COMPARED_ROUNDS) for kind in (False, True)}
        self.copy_rounds = {kind: deque[float]([1.0], maxlen=COPY_ROUNDS) for kind in (False, True)}

    @property
    def has_drafted(self) -> bool:
        """Whether a drafted round was timed."""
        return bool(self.rounds[True])

    def compare(self, is_drafted: bool, ratio: float | None) -> float | None:
        """Add the ratio of a round, and return how many times those of plain rounds the ratios of drafted ones are.

        The round is compared with the last rounds of the other kind only, so that a change of the machine's load affects both.
        A `ratio` of None is that of a round whose time is not that of others. Returns None where nothing can be compared.
        """
        if ratio is None:
            return None
        self.rounds[is_drafted].append(ratio)
        if not (others := self.rounds[not is_drafted]):
            return None
        return ratio / median(others) if is_drafted else median(others) / ratio

    def correct_copies(self, with_drafter: bool, seconds: float) -> float:
        """Return the expected seconds of a round with copies that is modelled to take `seconds`."""
        return median(self.copy_rounds[with_drafter]) * seconds
