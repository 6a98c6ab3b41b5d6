"""A score that may take so many minutes decodes as many prompts as fit, by a clock that only
decoding moves.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from spectrain.eval.metrics import Turn
from spectrain.eval.noise import ENOUGH, find_disturbed
from spectrain.eval.prompts import Prompt, take_turns
from spectrain.eval.time_limit import (
    DECIDED,
    MIN_PROMPTS,
    TimeLimit,
    is_decided,
    sequential_evidence,
)
from spectrain.eval.turns import Interleaving, TurnRequest
from tests.eval.test_noise import make_generation

SECONDS = 12.0  # of one prompt, decoded autoregressively, by a drafter and by the oracle


class Clocked(Interleaving):
    """Decodes nothing; each prompt takes `SECONDS`, and every fourth baseline is slow if times
    are unsteady.
    """

    def __init__(self, limit: TimeLimit | None, clock: list[float], unsteady: bool = False) -> None:
        decoder: Any = MagicMock()
        systems: Any = [SimpleNamespace(name="drafter", is_timed=True)]
        super().__init__(decoder, systems, [], decoder, 8, 1, limit)
        self.clock, self.unsteady = clock, unsteady

    def _decode_conversations(self, prompts: Any) -> None:
        self.clock[0] += SECONDS
        slow = 4.0 if self.unsteady and self.num_prompts % 4 == 0 else 1.0
        self.turns["drafter"].append(make_turn(6.0 * slow))
        self.batches.append([MagicMock()])

    def _is_speed_decided(self) -> bool:
        return False


def make_turn(plain: float = 6.0, drafted: float = 5.0) -> Turn:
    return Turn("a", 0, "all", make_generation([1] * 6, plain), make_generation([2, 2, 2], drafted))


def count_prompts(
    monkeypatch: pytest.MonkeyPatch, minutes: float | None, unsteady: bool = False, **settings: Any
) -> int:
    """Return how many of 60 prompts are decoded in so many minutes."""
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    limit = None if minutes is None else TimeLimit(minutes, clock=lambda: clock[0], **settings)
    decoding = Clocked(limit, clock, unsteady)
    decoding.run([SimpleNamespace(tokenize_for=lambda target: [1])] * 60)  # type: ignore[list-item]
    return decoding.num_prompts


class Counted(Interleaving):
    """Counts tokens without decoding, and records the key of every text's random draws."""

    def __init__(self, clock: list[float]) -> None:
        systems: Any = [
            SimpleNamespace(name="drafter", is_timed=True),
            SimpleNamespace(name="chain", is_timed=False),
        ]
        decoder: Any = MagicMock()
        decoder.target.max_length = 100
        super().__init__(decoder, systems, [], None, 8, 1, TimeLimit(60, clock=lambda: clock[0]))
        self.turns["chain"] = []
        self.keys: list[int] = []

    def _make_request(self, prompt: Any, answers: Any, sequence_id: int) -> TurnRequest:
        self.keys.append(sequence_id)
        return TurnRequest(prompt, len(answers), [1], sequence_id)

    def _decode_untimed(self, batch: Sequence[TurnRequest]) -> Any:
        return {"chain": [make_generation([2], 1.0) for _ in batch]}


def test_counted_texts_share_no_random_draws() -> None:
    """A later turn is another text than the first turn of the next conversation."""
    counted = Counted([100.0])
    prompts: Any = [
        SimpleNamespace(
            id=str(number),
            category="all",
            num_answers=1 + number % 3,
            tokenize_for=lambda target, answers: [1],
        )
        for number in range(13)
    ]
    counted._count(prompts)
    num_texts = sum(prompt.num_answers for prompt in prompts)
    assert len(counted.turns["chain"]) == len(counted.keys) == len({*counted.keys}) == num_texts


def test_as_many_prompts_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes over the seconds of a prompt; the check of each output takes half a prompt's time
    here, the report three.
    """
    assert count_prompts(monkeypatch, None) == 60
    assert count_prompts(monkeypatch, 4, checks=False, reports=False) == 4 * 60 / SECONDS
    assert count_prompts(monkeypatch, 6, checks=True, reports=False) == 6 * 60 / (1.5 * SECONDS)
    assert count_prompts(monkeypatch, 6, checks=True, reports=True) == (6 * 60 - 3 * SECONDS) // (
        1.5 * SECONDS
    )
    assert count_prompts(monkeypatch, 0.1) == MIN_PROMPTS


def test_disturbed_pairs_are_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of baselines of which every fourth one is slow, those are decoded again, each once."""
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    decoding = Clocked(TimeLimit(60, clock=lambda: clock[0]), clock, unsteady=True)
    monkeypatch.setattr(decoding, "_decode_pairs", lambda system, batch: [make_turn()])
    decoding.run([SimpleNamespace(tokenize_for=lambda target: [1])] * 9)  # type: ignore[list-item]
    assert decoding.repeated == {("drafter", 0), ("drafter", 4), ("drafter", 8)}
    assert not find_disturbed(decoding.turns["drafter"])


def test_the_timing_ends_when_the_speed_is_decided() -> None:
    """Pairs of a steady ratio decide after as many as an interval needs; equal pairs never do."""
    fast = [make_turn(drafted=5.0 + number / 50) for number in range(20)]
    assert not is_decided(fast[: ENOUGH - 1]) and is_decided(fast[:ENOUGH])
    equal = [make_turn(drafted=5.0 + (-1) ** number) for number in range(20)]
    per_token = [make_turn(plain=5.0 + (-1) ** number, drafted=5.0) for number in range(20)]
    assert not is_decided([*equal[:10], *per_token[:10]])


def test_sequential_evidence_may_be_looked_at_after_every_value() -> None:
    """Of 2,000 series without an effect at most 5 % ever reach 20, the inverse of 5 %; with an
    effect of one standard deviation, nearly all do. It is the likelihood ratio by numbers.
    """
    draws = np.random.default_rng(0).normal(size=(2000, 30))

    def reach(values: Any) -> float:
        hits = [
            any(sequential_evidence(row[:end].tolist()) >= DECIDED for end in range(2, 31))
            for row in values
        ]
        return float(np.mean(hits))

    assert reach(draws) <= 0.05
    assert reach(draws[:200] + 1) >= 0.9
    values = draws[0, :6]
    scales = np.exp(np.linspace(-8, 8, 4001))[:, None]
    effects = np.linspace(-9, 9, 2001)

    def likelihood(effect: Any) -> Any:
        rest = (values**2).sum() / scales**2 - 2 * effect * values.sum() / scales
        return np.exp(-(rest + len(values) * effect**2) / 2) * scales ** -len(values)

    mixed = (likelihood(effects) * np.exp(-(effects**2) / 2)).sum() * (effects[1] - effects[0])
    ratio = mixed / np.sqrt(2 * np.pi) / likelihood(np.zeros(1)).sum()
    assert sequential_evidence(values.tolist()) == pytest.approx(ratio, rel=1e-3)


def test_any_first_part_covers_the_categories() -> None:
    prompts = [Prompt(name, name[0], ["?"], []) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    assert [prompt.id for prompt in take_turns(prompts)] == ["a1", "b1", "c1", "a2", "c2", "a3"]
