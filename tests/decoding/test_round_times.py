"""The times of rounds: wall times for results, and work for the builders that compare rounds."""

import time
from typing import Any

import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.ngram import Ngram
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees import Chain, TreeBuilder
from spectrain.trees.base import RoundResult, WrappedBuilder


class Observer(WrappedBuilder):
    """Keeps the seconds of every observed round."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder)
        self.seconds: list[dict[str, float]] = []

    def observe(self, round: RoundResult) -> None:
        self.seconds.append(round.seconds)
        super().observe(round)


@pytest.mark.parametrize("threads", [1, 2])
def test_builders_see_work_and_results_see_time(
    shallow: Target, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Time in which a single thread on a CPU does not run counts in results, not for builders;
    with two threads, for both.
    """
    verify = shallow.verify
    pause = 0.02

    def verify_later(*arguments: Any) -> Features:
        time.sleep(pause)
        return verify(*arguments)

    monkeypatch.setattr(shallow, "verify", verify_later)
    usual = torch.get_num_threads()
    builder = Observer(Chain(3))
    torch.set_num_threads(threads)
    try:
        generation = decode(shallow, [[5, 6, 7, 5, 6, 7, 5]], Greedy(), 8, Ngram(shallow), builder)[
            0
        ]
    finally:
        torch.set_num_threads(usual)
    assert len(builder.seconds) == len(generation.round_seconds) > 1
    for work, seconds in zip(builder.seconds, generation.round_seconds):
        assert work.keys() == seconds.keys() and seconds["verify"] > pause
        if threads > 1:
            assert work["verify"] > pause
        else:
            assert sum(seconds.values()) - sum(work.values()) > pause
