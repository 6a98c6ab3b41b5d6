"""Pipelines: the simulator by hand and against real processes, and processes whose output is
greedy.
"""

import time
from statistics import mean

import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_research.pipelines.processes import Pipeline
from spectrain_research.pipelines.simulator import (
    PipelineSetup,
    PipelineSimulator,
    simulate_remote_drafter,
    simulate_shared_drafter,
    simulate_systems,
)


def simulate_seconds(setup: PipelineSetup, wrong: set[int], num_tokens: int) -> float:
    return PipelineSimulator(setup, lambda position: position not in wrong).simulate_text(
        num_tokens
    )


def test_right_drafts_fill_the_stages() -> None:
    """One run in flight takes all stages for depth + 1 tokens; full pipelines take their slowest
    part for a run.
    """
    stages = (1.0, 1.0, 1.0, 1.0)
    assert simulate_seconds(PipelineSetup(stages, 0.5, 3), set(), 400) == pytest.approx(
        (4 + 1.5) * 100
    )
    assert simulate_seconds(PipelineSetup(stages, 0.1, 3, 6), set(), 3000) == pytest.approx(
        1000, rel=0.02
    )
    assert simulate_seconds(PipelineSetup(stages, 0.5, 3, 6), set(), 3000) == pytest.approx(
        1500, rel=0.02
    )
    assert simulate_seconds(PipelineSetup((1.0, 3.0), 0.1, 2, 4), set(), 2000) == pytest.approx(
        3000, rel=0.02
    )
    assert simulate_seconds(
        PipelineSetup(stages, 0.0, 1, 4, exit_stage=1), set(), 2000
    ) == pytest.approx(4000, rel=0.02)


def test_wrong_drafts_empty_the_pipeline() -> None:
    """By hand: two stages of 1 s, runs of one draft of 0.5 s, two in flight. The second draft is
    wrong.
    """
    # Runs are sent at 0.5 and 1; the first passes stages at 0.5 to 1.5 and 1.5 to 2.5, the second
    # at 1.5 to 2.5 and 2.5 to 3.5. At 2.5 the first run has emitted both of its tokens and cancels
    # the second one, which stage 2 has not begun. The next runs are sent at 3 and 3.5.
    setup = PipelineSetup((1.0, 1.0), 0.5, 1, 2)
    assert simulate_seconds(setup, {1}, 2) == 2.5
    assert simulate_seconds(setup, {1}, 4) == 3.0 + 2
    # With a second stage of 3 s, the first run ends at 4.5. Without early cancellation the second
    # one then occupies it to 7.5.
    assert simulate_seconds(PipelineSetup((1.0, 3.0), 0.5, 1, 2), {1}, 4) == 5.0 + 1 + 3
    assert (
        simulate_seconds(PipelineSetup((1.0, 3.0), 0.5, 1, 2, cancels_early=False), {1}, 4)
        == 7.5 + 3
    )
    every = set(range(100))
    assert simulate_seconds(PipelineSetup((1.0, 1.0), 0.0, 2, 3), every, 50) >= 100


def test_texts_share_a_drafter() -> None:
    """The throughput is that of the slower part once there are enough texts, and alone that of
    both parts.
    """
    assert simulate_shared_drafter(1, 1.0, 2.0, 3.0) == pytest.approx(1.0, rel=0.01)
    assert simulate_shared_drafter(4, 1.0, 2.0, 3.0) == pytest.approx(1.5, rel=0.01)
    throughputs = simulate_systems(4, 4, 3, {"draft": 0.01, "verify": 1.0}, 0.8)
    assert (
        throughputs["pipeinfer"] > throughputs["pipeinfer_without_cancellation"] * 0.99
        and throughputs["pipeinfer"] > throughputs["one_run"] > 1
    )


def test_a_remote_drafter_waits_for_its_answers() -> None:
    """By hand: drafts of 3 at 0.1 s each, verified in 1 s, 0.5 s away: 1.8 s for 4 tokens. Runs in
    flight hide the way. A link without length changes nothing.
    """
    setup = PipelineSetup((1.0,), 0.1, 3, round_trip=0.5)
    assert simulate_seconds(setup, set(), 400) == pytest.approx(1.8 * 100)
    ahead = PipelineSetup((1.0,), 0.1, 3, 4, round_trip=0.5)
    assert simulate_seconds(ahead, set(), 3000) == pytest.approx(1000, rel=0.02)
    # At once wrong: a round gives one token and costs the whole way.
    every = set(range(100))
    assert simulate_seconds(setup, every, 50) == pytest.approx(1.8 * 50)
    times = {"draft": 0.1, "verify": 1.0}
    near = simulate_remote_drafter(3, 3, times, 0.8, 0.0)
    assert near["remote"] == simulate_systems(1, 3, 3, times, 0.8)["one_run"]


def test_a_remote_drafter_gains_up_to_its_break_even() -> None:
    """At the round-trip time that is named, waiting for answers is as fast as plain decoding."""
    times = {"draft": 0.1, "verify": 1.0}
    end = simulate_remote_drafter(3, 3, times, 0.8, 0.0)["break_even"]
    assert end == pytest.approx(0.8 + 0.64 + 0.512 - 0.3)
    assert simulate_remote_drafter(3, 3, times, 0.8, end)["remote"] == pytest.approx(1, rel=0.02)
    assert simulate_remote_drafter(3, 3, times, 0.8, 2 * end)["remote"] < 0.75


class ScriptedDrafts:
    """Drafts the right continuation of a text but at some positions, after waiting."""

    def __init__(self, answer: list[int], start: int, wrong: set[int], seconds: float) -> None:
        self.answer = answer
        self.start = start
        self.wrong = wrong
        self.seconds = seconds

    def __call__(self, text: list[int], num_tokens: int) -> list[int]:
        time.sleep(num_tokens * self.seconds)
        first = len(text) - self.start
        positions = range(first, min(first + num_tokens, len(self.answer)))
        return [self.answer[at] + (at - 1 in self.wrong) for at in positions]


@pytest.mark.parametrize("stages, in_flight", [(2, 1), (2, 3)])
def test_processes_take_the_simulated_time(shallow: Target, stages: int, in_flight: int) -> None:
    """With stages and drafts that wait, two processes decode greedily in the time that the
    simulator says, given what a stage and a draft took. Waiting takes no core, and the layers of
    the target take a small part of the time.
    """
    prompt = [5, 6, 7, 8]
    limit = 20
    delay = 0.03
    draft = 0.004
    answer = decode(shallow, [prompt], Greedy(), limit + 12, ignore_eos=True)[0].output
    wrong = {3, 8, 9}
    script = ScriptedDrafts(answer, len(prompt), wrong, draft)
    pipeline = Pipeline(stages, in_flight, delay, draft_tokens=script)
    session = Session(shallow, Greedy(), None, Chain(3), changes=(pipeline,))
    assert session.decode([prompt], limit, ignore_eos=True)[0].output == answer[:limit]
    ratios = []
    for _ in range(3):
        pipeline.stage_seconds.clear()
        pipeline.draft_seconds.clear()
        generation = session.decode([prompt], limit, ignore_eos=True)[0]
        assert generation.output == answer[:limit]
        taken = tuple(mean(column) for column in zip(*pipeline.stage_seconds))
        setup = PipelineSetup(taken, mean(pipeline.draft_seconds) / 3, 3, in_flight)
        ratios.append(generation.decode_seconds / simulate_seconds(setup, wrong, limit - 1))
    assert 0.85 < min(ratios) < 1.3


def test_drafts_of_a_drafter_pass_the_stages(shallow: Target) -> None:
    """n-gram drafts in three stages with runs in flight give the greedy text, several texts one
    after another.
    """
    pipeline = Pipeline(3, 4)
    session = Session(shallow, Greedy(), Ngram(shallow), Chain(2), changes=(pipeline,))
    for prompt in ([5, 6, 7, 5, 6, 7, 5, 6], [40, 41, 40, 41, 40]):
        expected = decode(shallow, [prompt], Greedy(), 16, ignore_eos=True)[0].output
        assert session.decode([prompt], 16, ignore_eos=True)[0].output == expected
    assert pipeline.num_runs > 4
    with pytest.raises(UserError, match="one length"):
        Session(
            shallow, Greedy(), Ngram(shallow), Chain(2, stop=0.5), changes=(Pipeline(),)
        ).decode([[5]], 4)
    with pytest.raises(UserError, match="at once"):
        session.decode([[5, 6], [7, 8]], 4)
    torch.set_num_threads(torch.get_num_threads())
