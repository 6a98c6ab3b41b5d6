"""The number of threads: the fastest count is chosen, stays in spite of noise, and is chosen
again when times change.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spectrain.models.threads import PERSONAL_VARIABLES
from spectrain_cpu import thread_tuner
from spectrain_cpu.thread_tuner import ChangeCounter, TimedThreadTuner


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads that a tuner sets, instead of setting it."""
    current = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: current[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: current.__setitem__(0, number))
    return current


def make_pair(
    clock: list[float], is_free: Callable[[], bool] = lambda: True
) -> tuple[TimedThreadTuner, TimedThreadTuner]:
    counter = ChangeCounter()
    plain, drafted = (
        TimedThreadTuner((1, 2), counter=counter, clock=lambda: clock[0], free_core=is_free)
        for _ in range(2)
    )
    return plain, drafted


def run_steps(
    tuner: TimedThreadTuner, number: int, seconds: Callable[[int], float], clock: list[float]
) -> list[int]:
    """Run steps that take `seconds` of the count; return the counts."""
    counts = []
    for _ in range(number):
        tuner.set_threads()
        counts.append(torch.get_num_threads())
        clock[0] += seconds(counts[-1])
        tuner.record_step(seconds(counts[-1]))
    return counts


def idle_seconds(threads: int) -> float:
    return {1: 0.0197, 2: 0.0164}[threads]


def busy_seconds(threads: int) -> float:
    return {1: 0.0197, 2: 0.073}[threads]


def test_trial_goes_forwards_and_backwards_and_chooses_the_fastest(settings: list[int]) -> None:
    clock = [0.0]
    tuner, _ = make_pair(clock)
    assert run_steps(tuner, 16, idle_seconds, clock) == [2, 1, 1, 2] * 4
    assert tuner.is_chosen and tuner.summary() == {
        "threads": 2,
        "seconds": {"1": 0.0197, "2": 0.0164},
        "changes": 0,
    }
    assert run_steps(tuner, 20, idle_seconds, clock) == [2] * 20


def test_steps_of_two_kinds_that_alternate_are_shared_alike(settings: list[int]) -> None:
    """A round with a draft takes half as long again as the plain step after it."""
    tuner = TimedThreadTuner((1, 2), counter=ChangeCounter())
    steps = list[tuple[int, float]]()
    while not tuner.is_chosen:
        tuner.set_threads()
        factor = 1.0 + 0.5 * (len(steps) % 2)
        steps.append((torch.get_num_threads(), factor))
        tuner.record_step(factor * idle_seconds(torch.get_num_threads()))
    assert tuner.chosen == 2 and all(
        steps.count((count, factor)) == 4 for count in (1, 2) for factor in (1.0, 1.5)
    )


def test_margin_keeps_the_current_count(settings: list[int]) -> None:
    """A count that becomes faster by less than the margin is not chosen."""
    clock = [0.0]
    tuner, _ = make_pair(clock)
    run_steps(tuner, 16, idle_seconds, clock)
    clock[0] += thread_tuner.LONGEST_PAUSE
    run_steps(tuner, 8, lambda threads: 0.97 if threads == 1 else 1.0, clock)
    assert tuner.chosen == 2 and tuner.seconds == {1: 0.97, 2: 1.0}


def test_slow_count_is_abandoned(settings: list[int]) -> None:
    clock = [0.0]
    tuner, _ = make_pair(clock)
    assert run_steps(tuner, 10, busy_seconds, clock) == [2, 1, 1, 2, *[1] * 6] and tuner.chosen == 1


def test_counts_beyond_a_slow_count_are_not_tried(settings: list[int]) -> None:
    """On 64 cores, a step of one thread may take minutes: the steps with 16 threads show that
    fewer are slower still.
    """
    settings[0], clock = 64, [0.0]
    counts = (1, 2, 4, 8, 16, 32, 64)
    tuner = TimedThreadTuner(counts, 2, ChangeCounter(), lambda: clock[0], lambda: True)
    # The time of what one thread does alone is added.
    assert run_steps(tuner, 10, lambda count: 64 / count + 1, clock) == [
        64,
        32,
        16,
        16,
        32,
        64,
        64,
        32,
        32,
        64,
    ]
    assert tuner.chosen == 64 and [*tuner.seconds] == [64, 32, 16]
    assert tuner.pause == thread_tuner.PAUSE_PER_TRIAL * clock[0]


def test_unsteady_times_start_a_trial_and_other_kinds_follow(settings: list[int]) -> None:
    clock = [0.0]
    plain, drafted = make_pair(clock)
    for tuner in (plain, drafted):
        run_steps(tuner, 100, idle_seconds, clock)
        assert tuner.chosen == 2
    # Two steps of more than twice the usual time, then a slow one in the trial.
    assert run_steps(plain, 12, busy_seconds, clock) == [2, 2, 2, *[1] * 9]
    assert run_steps(drafted, 6, busy_seconds, clock) == [2, *[1] * 5]
    assert (plain.chosen, drafted.chosen, plain.num_changes, drafted.num_changes) == (1, 1, 1, 1)


def test_slow_drift_starts_a_trial(settings: list[int]) -> None:
    """Three of the last five steps are out of the band."""
    clock = [0.0]
    tuner, _ = make_pair(clock)
    run_steps(tuner, 100, idle_seconds, clock)
    counts = run_steps(tuner, 11, lambda threads: {1: 0.0197, 2: 1.5 * 0.0164}[threads], clock)
    assert counts == [2, 2, 2, 2, 1, 1, 2, 2, 1, 1, 2] and tuner.chosen == 1


def test_trials_recur_while_a_core_is_free(settings: list[int]) -> None:
    """The pause doubles while nothing changes, and nothing is tried while the cores are taken."""
    clock = [0.0]
    free = [True]
    tuner, _ = make_pair(clock, lambda: free[0])
    counts = run_steps(tuner, 2000, busy_seconds, clock)
    trials = [step for step in range(10, 2000) if counts[step] == 2]
    gaps = [later - earlier for earlier, later in zip(trials, trials[1:])]
    assert (
        tuner.chosen == 1
        and len(gaps) >= 1
        and all(later > 1.8 * earlier for earlier, later in zip(gaps, gaps[1:]))
    )
    clock[0], free[0] = clock[0] + thread_tuner.LONGEST_PAUSE, False
    assert run_steps(tuner, 8, idle_seconds, clock) == [1] * 8
    free[0] = True
    assert run_steps(tuner, 9, idle_seconds, clock) == [1, 2, 2, 1, 1, 2, 2, 1, 2]


def test_work_scales_the_time(settings: list[int]) -> None:
    tuner = TimedThreadTuner((1, 2), counter=ChangeCounter())
    for work in range(1, 20):
        tuner.set_threads()
        tuner.record_step(work * idle_seconds(torch.get_num_threads()), work)
    assert tuner.seconds == pytest.approx({1: 0.0197, 2: 0.0164})


@pytest.mark.parametrize(
    ("variables", "expected"), [({}, (1, 2, 4, 6)), ({"OMP_NUM_THREADS": "6"}, (6,))]
)
def test_environment_is_respected(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[int, ...]
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    for name in PERSONAL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert thread_tuner.candidate_counts.__wrapped__() == expected
