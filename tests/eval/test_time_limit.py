"""A score that may take so many minutes decodes as many prompts as fit, by a clock that only
decoding moves.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from spectrain.errors import UserError
from spectrain.eval.metrics import Turn
from spectrain.eval.prompts import Prompt, take_turns
from spectrain.eval.settings import DecodingSettings
from spectrain.eval.time_limit import MIN_PROMPTS, TimeLimit
from spectrain.eval.turns import Interleaving
from tests.eval.test_noise import make_generation

SECONDS = 12.0  # of one prompt, decoded autoregressively, by a drafter and by the oracle


class Clocked(Interleaving):
    """Decodes nothing; each prompt takes `SECONDS`, and every third baseline is slow if times
    are unsteady.
    """

    def __init__(self, limit: TimeLimit | None, clock: list[float], unsteady: bool = False) -> None:
        decoder: Any = MagicMock()
        systems: Any = [SimpleNamespace(name="drafter", is_timed=True)]
        super().__init__(decoder, systems, [], decoder, 8, 1, limit)
        self.clock, self.unsteady = clock, unsteady

    def _decode_conversations(self, prompts: Any) -> None:
        self.clock[0] += SECONDS
        slow = 4.0 if self.unsteady and self.num_prompts % 3 == 0 else 1.0
        self.turns["drafter"].append(
            Turn(
                "a", 0, "all", make_generation([1] * 6, 6.0 * slow), make_generation([2, 2, 2], 5.0)
            )
        )


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


def test_unsteady_times_leave_time_to_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding every pair again takes as long as decoding, so only half of the prompts fit."""
    settings = {"checks": False, "reports": False}
    assert count_prompts(monkeypatch, 8, unsteady=True, **settings) == 8 * 60 / SECONDS / 2
    assert count_prompts(monkeypatch, 8, unsteady=True, repeats=1, **settings) == 8 * 60 / SECONDS


def test_any_first_part_covers_the_categories() -> None:
    prompts = [Prompt(name, name[0], ["?"], []) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    assert [prompt.id for prompt in take_turns(prompts)] == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(UserError, match="eval.max_minutes=0"):
        DecodingSettings(max_minutes=0)
