"""Why a server does not draft as our own chain does: decode as it would with one fault after the
other.

A fault must show in the first round that differs, so a cause is first tested on the shortest
answers, only up to that round. Most causes fail there after one or two prompts. One that passes is
tested on whole answers; the search ends with the first one that explains every round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spectrain.drafters.base import Drafter
from spectrain.eval.identity import first_difference
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder

from .agreement import (
    DifferingPair,
    RoundAgreement,
    compare_rounds,
    decode_prompts,
    find_differing,
)

# Answers on which a cause is tested up to the first round that differs, and as a whole.
NUM_SCREENED = 3
NUM_CONFIRMED = 4
# Share of the differing rounds that a cause must explain.
MIN_EXPLAINED = 0.7
# Seconds after which no further cause is tested.
MAX_SECONDS = 120.0


@dataclass(frozen=True)
class Cause:
    """A fault that may explain a disagreement, and the decoding that a server with this fault
    would do.
    """

    name: str
    # Completes "the server decodes with ..".
    description: str
    remedy: str
    load: Callable[[], tuple[Target, Drafter]]


CauseLister = Callable[[int], Iterator[Cause]]
"""Yields the causes, given the position in a sequence at which the first round differs."""


@dataclass(frozen=True)
class ConfirmedCause:
    """A cause with the agreement of its decoding with the server's answers."""

    cause: Cause
    agreement: RoundAgreement

    def to_json(self) -> dict[str, Any]:
        agreement = {**asdict(self.agreement), "share": round(self.agreement.share, 4)}
        cause = self.cause
        return {
            "name": cause.name,
            "description": cause.description,
            "remedy": cause.remedy,
            "agreement": agreement,
        }


@dataclass
class SearchResult:
    """The most likely cause, if one was found, and what was tested."""

    cause: ConfirmedCause | None = None
    tested: list[Cause] = field(default_factory=list)
    seconds: float = 0.0
    # Whether the time was over before every cause was tested.
    is_cut: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the entries of summary.json."""
        return {
            "cause": None if self.cause is None else self.cause.to_json(),
            "tested": [
                {"name": cause.name, "description": cause.description} for cause in self.tested
            ],
            "search": {"seconds": round(self.seconds, 1), "is_cut": self.is_cut},
        }


class CauseSearch:
    """Tests causes on answers whose rounds differ from ours."""

    def __init__(
        self, pairs: Sequence[DifferingPair], builder: TreeBuilder, max_new_tokens: int
    ) -> None:
        self.pairs = sorted(pairs, key=lambda pair: pair.position)
        self.builder, self.max_new_tokens = builder, max_new_tokens

    def run(self, causes: CauseLister) -> SearchResult:
        """Test one cause after the other, up to one that explains every round or until the time
        is over.
        """
        result = SearchResult()
        began = time.monotonic()
        for cause in causes(self.pairs[0].position):
            if time.monotonic() - began > MAX_SECONDS:
                result.is_cut = True
                break
            result.tested.append(cause)
            decoder = cause.load()
            if not self._is_possible(decoder):
                continue
            confirmed = ConfirmedCause(cause, self._measure(decoder))
            if self._is_better(confirmed, result.cause):
                result.cause = confirmed
            if confirmed.agreement.equal == confirmed.agreement.checked:
                break
        result.seconds = time.monotonic() - began
        return result

    def _is_possible(self, decoder: tuple[Target, Drafter]) -> bool:
        """Tell whether a cause explains the first differing rounds of the shortest answers; one
        of three may not.
        """
        screened = self.pairs[:NUM_SCREENED]
        failures_left = len(screened) // 3
        for pair in screened:
            if not self._explains(pair, decoder):
                failures_left -= 1
            if failures_left < 0:
                return False
        return True

    def _explains(self, pair: DifferingPair, decoder: tuple[Target, Drafter]) -> bool:
        """Decode up to the first differing round, and tell whether it is now the server's."""
        limit = min(self.max_new_tokens, pair.start + self.builder.depth + 1)
        [generation] = decode_prompts(*decoder, self.builder, [pair.served], limit)
        shared = first_difference(pair.served.output, generation.output)
        if shared is not None and shared < pair.start + (pair.served_length or 1):
            return False
        return all(
            differing.start > pair.start
            for differing in find_differing([pair.served], [generation])
        )

    def _measure(self, decoder: tuple[Target, Drafter]) -> RoundAgreement:
        """Decode whole answers, and compare their rounds with the server's."""
        served = [pair.served for pair in self.pairs[:NUM_CONFIRMED]]
        return compare_rounds(
            served, decode_prompts(*decoder, self.builder, served, self.max_new_tokens)
        )

    def _is_better(self, candidate: ConfirmedCause, best: ConfirmedCause | None) -> bool:
        """Tell whether a cause explains most of the differing rounds, and more of them than the
        best one.
        """
        pairs = self.pairs[:NUM_CONFIRMED]
        base = compare_rounds([pair.served for pair in pairs], [pair.own for pair in pairs]).share
        share = candidate.agreement.share
        return share > base + MIN_EXPLAINED * (1 - base) and (
            best is None or share > best.agreement.share
        )
