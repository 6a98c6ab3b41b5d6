"""Tests of whether texts have a distribution, by chi-squared tests with a known power.

A text is a tuple of tokens. It is compared either with known probabilities or with texts of a
second sample. Outcomes are compared in strata, as by prompt, and the statistics of all strata are
added. Outcomes that are rare form one cell with others that begin alike; which ones are rare is
decided by the probabilities or by both samples together, so that it does not depend on which sample
a text is from.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import bdtrc, chdtrc, chdtri, chndtrinc

Outcome = tuple[int, ...]
"""Tokens: those of a text, or one of them."""

POWER = 0.99
"""Chance with which a test finds the distance that is stated as visible."""
LEAST_COUNT = 10.0
LEAST_SHARE = 0.02
"""A cell has at least so many texts, and at least this share of its stratum."""
ROUNDING_SHARE = 1e-4
"""Share of texts for which rounding may decide whether top-k or top-p leaves a token out."""


class Interval(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Stratum:
    """Drafted outcomes, and the probabilities or the outcomes of a second sample."""

    drafted: Sequence[Outcome]
    probabilities: Mapping[Outcome, float] | None = None
    plain: Sequence[Outcome] = ()

    @property
    def effective_size(self) -> float:
        """Return the size of the drafted sample that would see as much against probabilities."""
        size = len(self.drafted)
        if self.has_probabilities:
            return size
        return size * len(self.plain) / max(1, size + len(self.plain))

    @property
    def has_probabilities(self) -> bool:
        return self.probabilities is not None

    @property
    def num_unreachable(self) -> int:
        """Return the number of drafted outcomes that have no probability."""
        if self.probabilities is None:
            return 0
        return sum(self.probabilities.get(outcome, 0.0) <= 0 for outcome in self.drafted)

    def weights(self) -> dict[Outcome, float]:
        """Return the number of texts that each outcome is expected to have, of both samples
        together if there are two.
        """
        if self.probabilities is not None:
            size = len(self.drafted)
            return {outcome: size * chance for outcome, chance in self.probabilities.items()}
        return dict(Counter((*self.drafted, *self.plain)))


@dataclass(frozen=True)
class Cells:
    """The counts of a stratum by cell."""

    # Drafted outcomes that were counted, and those that are expected, [cells].
    observed: np.ndarray
    expected: np.ndarray
    # Outcomes of the second sample; None if probabilities are known.
    plain: np.ndarray | None

    @property
    def freedom(self) -> int:
        return len(self.observed) - 1

    @property
    def statistic(self) -> float:
        """Return Pearson's statistic."""
        own = float(((self.observed - self.expected) ** 2 / self.expected).sum())
        if self.plain is None:
            return own
        expected = self.expected * self.plain.sum() / self.observed.sum()
        return own + float(((self.plain - expected) ** 2 / expected).sum())


def merge_rare(weights: Mapping[Outcome, float]) -> dict[Outcome, Outcome]:
    """Return the cell of each outcome. Rare outcomes share a cell with those that begin alike, and
    a last rare cell joins the smallest other one.
    """
    least = max(LEAST_COUNT, LEAST_SHARE * sum(weights.values()))
    cells = {outcome: outcome for outcome in weights}
    sizes = Counter[Outcome]()
    for outcome, weight in weights.items():
        sizes[outcome] += weight  # type: ignore[assignment]
    for length in range(max(map(len, weights), default=0), 0, -1):
        rare = [cell for cell in sizes if len(cell) == length and sizes[cell] < least]
        for cell in rare:
            sizes[cell[:-1]] += sizes.pop(cell)
        moved = set(rare)
        cells = {key: cell[:-1] if cell in moved else cell for key, cell in cells.items()}
    if () in sizes and sizes[()] < least and len(sizes) > 1:
        smallest = min((cell for cell in sizes if cell), key=lambda cell: (sizes[cell], cell))
        cells = {key: cell or smallest for key, cell in cells.items()}
    return cells


def count_cells(stratum: Stratum) -> Cells:
    """Count the outcomes of a stratum by cell. Outcomes without a probability join the cell of all
    rare ones, or the last cell; they are counted apart.
    """
    weights = stratum.weights()
    cell_of = merge_rare(weights)
    cells = sorted(set(cell_of.values()))
    index = {cell: number for number, cell in enumerate(cells)}

    def count(outcomes: Sequence[Outcome]) -> np.ndarray:
        numbers = [index.get(cell_of.get(outcome, ()), 0) for outcome in outcomes]
        return np.bincount(numbers, minlength=len(cells)).astype(np.float64)

    expected = np.zeros(len(cells))
    for outcome, weight in weights.items():
        expected[index[cell_of[outcome]]] += weight
    observed = count(stratum.drafted)
    if stratum.has_probabilities:
        return Cells(observed, expected, None)
    expected *= len(stratum.drafted) / max(1, len(stratum.drafted) + len(stratum.plain))
    return Cells(observed, expected, count(stratum.plain))


@dataclass(frozen=True)
class DistributionTest:
    """A test of whether drafted outcomes have their distribution."""

    # What was compared.
    name: str
    # Drafted outcomes that were compared, and the degrees of freedom.
    texts: int
    freedom: int
    p_value: float
    # As `Stratum.effective_size`, summed over strata.
    effective_size: float

    def visible_distance(self, level: float) -> float:
        """Return the total variation distance over the test's cells, averaged over strata, that is
        found at this level with a chance of `POWER` or more, whatever its form.

        By Cauchy's and Schwarz's inequality, a distance d adds a noncentrality of at least 4 d^2
        times the effective size.
        """
        critical = float(chdtri(self.freedom, level))
        needed = float(chndtrinc(critical, self.freedom, 1 - POWER))
        return min(1.0, (needed / 4 / self.effective_size) ** 0.5)


def compare_strata(name: str, strata: Sequence[Stratum]) -> DistributionTest | None:
    """Test whether the outcomes of all strata have their distribution; None where there are too
    few of them to tell.
    """
    compared = [
        (stratum, cells)
        for stratum in strata
        if stratum.effective_size > 0
        for cells in [count_cells(stratum)]
        if cells.freedom > 0
    ]
    if not compared:
        return None
    freedom = sum(cells.freedom for _, cells in compared)
    statistic = sum(cells.statistic for _, cells in compared)
    return DistributionTest(
        name,
        sum(len(stratum.drafted) for stratum, _ in compared),
        freedom,
        float(chdtrc(freedom, statistic)),
        sum(stratum.effective_size for stratum, _ in compared),
    )


def test_reachable(name: str, strata: Sequence[Stratum]) -> DistributionTest | None:
    """Test whether more texts than rounding explains have a token that top-k or top-p leaves out;
    None without known probabilities.
    """
    texts = sum(len(stratum.drafted) for stratum in strata if stratum.has_probabilities)
    if not texts:
        return None
    count = sum(stratum.num_unreachable for stratum in strata)
    p_value = float(bdtrc(count - 1, texts, ROUNDING_SHARE)) if count else 1.0
    return DistributionTest(name, texts, 0, p_value, texts)


test_reachable.__test__ = False  # type: ignore[attr-defined]


def estimate_distance(strata: Sequence[Stratum]) -> Interval:
    """Estimate the total variation distance, averaged over strata, from below.

    One half of the texts chooses the outcomes that are too frequent, the other half says by how
    much; then the halves change places. So chance adds nothing, and equal distributions give 0 on
    average.
    """
    total = sum(len(stratum.drafted) for stratum in strata)
    value = 0.0
    variance = 0.0
    for stratum in strata:
        share = len(stratum.drafted) / total
        pairs = [_measure_excess(stratum, half) for half in (0, 1)]
        value += share * sum(distance for distance, _ in pairs) / 2
        # The errors of the two halves depend on each other, so they add in full.
        variance += (share * sum(error for _, error in pairs) / 2) ** 2
    margin = 1.96 * variance**0.5
    return Interval(value, value - margin, value + margin)


def _measure_excess(stratum: Stratum, half: int) -> tuple[float, float]:
    """Return by how much the outcomes that one half has too often are too frequent in the other,
    and the standard error of this.
    """
    chosen, judged = (stratum.drafted[start::2] for start in (half, 1 - half))
    if stratum.probabilities is not None:
        cells = merge_rare(stratum.weights())
        own = Counter(cells.get(outcome, ()) for outcome in chosen)
        chances = Counter[Outcome]()
        for outcome, chance in stratum.probabilities.items():
            chances[cells[outcome]] += chance  # type: ignore[assignment]
        excess = {cell for cell in own if own[cell] > chances[cell] * len(chosen)}
        rate = _share_inside(judged, cells, excess)
        expected = sum(chances[cell] for cell in excess)
        return rate - expected, _rate_variance(rate, judged) ** 0.5
    halves = [stratum.plain[start::2] for start in (half, 1 - half)]
    cells = merge_rare(stratum.weights())
    own = Counter(cells[outcome] for outcome in chosen)
    other = Counter(cells[outcome] for outcome in halves[0])
    excess = {cell for cell in own if own[cell] * len(halves[0]) > other[cell] * len(chosen)}
    rate = _share_inside(judged, cells, excess)
    reference = _share_inside(halves[1], cells, excess)
    variance = _rate_variance(rate, judged) + _rate_variance(reference, halves[1])
    return rate - reference, variance**0.5


def _rate_variance(rate: float, outcomes: Sequence[Outcome]) -> float:
    """Return the variance of a rate that was measured on these outcomes."""
    return rate * (1 - rate) / max(1, len(outcomes))


def _share_inside(
    outcomes: Sequence[Outcome], cells: Mapping[Outcome, Outcome], inside: set[Outcome]
) -> float:
    """Return the share of outcomes whose cell is one of `inside`."""
    return sum(cells.get(outcome, ()) in inside for outcome in outcomes) / max(1, len(outcomes))
