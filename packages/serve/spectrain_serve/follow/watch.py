"""The watch: acceptance by kind of traffic and by position in the draft, over time, with a drift
test for each.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from .drift import DriftTest
from .settings import FollowSettings
from .traffic import RecordedConversation

ALL = "all"
"""The series of all traffic together, which also falls where the mixture of kinds changes."""
WINDOW = 16
"""Requests of a point of the series that the page shows."""
MAX_POINTS = 500


@dataclass
class AcceptancePoint:
    """The mean accepted tokens per draft of some requests of a kind, up to a time."""

    time: float
    mean: float
    drafter: str


@dataclass
class KindSeries:
    """What was measured of a kind of traffic."""

    test: DriftTest
    # Since the last swap: one mean of accepted tokens per draft for each request.
    values: deque[float]
    num_requests: int = 0
    num_rounds: int = 0
    # Tokens of the answers whose server counts them, and requests whose answer holds no rounds.
    num_tokens: int = 0
    num_unmeasured: int = 0
    # Rounds that accepted at least so many tokens, from 1 on.
    accepted_by_position: list[int] = field(default_factory=list)
    points: deque[AcceptancePoint] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    pending: list[float] = field(default_factory=list)
    # Time of the last request at which the sum of the drift test was 0, after which a fall begins
    # (Page, 1954).
    level_until: float = 0.0

    def add(self, conversation: RecordedConversation, drafter: str) -> bool:
        """Add a request; return whether the drift test raises an alarm. One that holds no rounds
        is only counted.
        """
        value = conversation.mean_accepted
        self.num_requests += 1
        self.num_tokens += conversation.num_tokens or 0
        if value is None:
            self.num_unmeasured += 1
            return False
        self.num_rounds += len(conversation.accepted)
        for count in conversation.accepted:
            self.accepted_by_position += [0] * (count - len(self.accepted_by_position))
            for position in range(count):
                self.accepted_by_position[position] += 1
        self.values.append(value)
        self.pending.append(value)
        if len(self.pending) >= WINDOW:
            self.points.append(
                AcceptancePoint(conversation.time, sum(self.pending) / len(self.pending), drafter)
            )
            self.pending.clear()
        is_alarm = self.test.add(value)
        if not self.test.sum:
            self.level_until = conversation.time
        return is_alarm

    @property
    def acceptance_by_position(self) -> list[float]:
        """Return the share of rounds that accept the draft up to each position."""
        return (
            [count / self.num_rounds for count in self.accepted_by_position]
            if self.num_rounds
            else []
        )


@dataclass(frozen=True)
class DriftAlarm:
    """A fall of acceptance that the drift test reports."""

    kind: str
    reference: float
    # Mean accepted tokens per draft of the last requests.
    recent: float
    # Requests from the end of the reference to the alarm.
    num_requests: int
    threshold: float
    # Time after which acceptance fell, in seconds since 1970.
    since: float


class TrafficWatch:
    """The series of all kinds. Half of the rate of false alarms is that of all traffic, and the
    kinds share the other half.
    """

    def __init__(self, settings: FollowSettings) -> None:
        self.settings = settings
        self.series: dict[str, KindSeries] = {}

    def add(self, conversation: RecordedConversation, drafter: str) -> list[DriftAlarm]:
        """Add a request; return the alarms that it raises."""
        alarms = []
        for kind in (ALL, conversation.kind):
            series = self.series.get(kind) or self._begin(kind)
            if series.add(conversation, drafter):
                recent = [*series.values][-WINDOW:]
                test = series.test
                alarms.append(
                    DriftAlarm(
                        kind,
                        test.mean,
                        sum(recent) / len(recent),
                        test.count,
                        test.threshold,
                        series.level_until,
                    )
                )
        return alarms

    def _begin(self, kind: str) -> KindSeries:
        rate = self.settings.false_alarms / 2
        if kind != ALL:
            rate /= self.settings.kinds + 1
        test = DriftTest(self.settings.reference, self.settings.horizon, rate)
        self.series[kind] = KindSeries(
            test, deque(maxlen=4 * max(self.settings.reference, self.settings.rollback_after))
        )
        return self.series[kind]

    def is_filled(self) -> bool:
        """Return whether there have been as many requests since the last swap as a series holds."""
        values = self.series[ALL].values if ALL in self.series else None
        return values is not None and len(values) == values.maxlen

    def restart(self) -> dict[str, list[float]]:
        """Begin anew, as after a swap; return the values of every kind before it."""
        before = {kind: [*series.values] for kind, series in self.series.items()}
        for series in self.series.values():
            series.test.restart()
            series.values.clear()
        return before

    def accept_level(self) -> None:
        """Measure new references on the traffic as it is now, where nothing better could be
        trained.
        """
        for series in self.series.values():
            series.test.restart()


@dataclass(frozen=True)
class LiveComparison:
    """Live acceptance of a kind after a swap against that before it, with the 95 % interval of
    the difference.
    """

    kind: str
    before: float
    after: float
    low: float
    high: float


def compare_live(
    before: dict[str, list[float]], watch: TrafficWatch, least: int
) -> list[LiveComparison]:
    """Compare the acceptance of every kind that has enough requests on both sides of a swap."""
    comparisons = []
    for kind, earlier in before.items():
        later = [*watch.series[kind].values] if kind in watch.series else []
        if kind != ALL and min(len(earlier), len(later)) >= max(2, least):
            error = math.sqrt(squared_error(earlier) + squared_error(later))
            old = sum(earlier) / len(earlier)
            new = sum(later) / len(later)
            comparisons.append(
                LiveComparison(kind, old, new, new - old - 1.96 * error, new - old + 1.96 * error)
            )
    return comparisons


def squared_error(values: list[float]) -> float:
    """Return the squared standard error of a mean."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
