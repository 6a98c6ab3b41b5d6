"""The measurement of schedules in an engine: the servers that it compares, and its ratios."""

import pytest

from lab.benchmarks.engine_schedule import (
    FIXED,
    NEVER,
    SCHEDULED,
    EngineSchedule,
    describe_level,
    make_launches,
)
from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain_serve.scoring.requests import LevelResult, ServedAnswer, ServedRequest
from spectrain_serve.servers.base import Completion, DraftCounters, RequestTimes
from spectrain_serve.times.engine_schedules import SCHEDULE_KEY

RANGES = [[1, 1, 2], [2, 8, 0]]


def make_result(seconds: float, *texts: list[int]) -> LevelResult:
    request = ServedRequest("a", 0, "chat", [1])
    answers: list[ServedAnswer | None] = [
        ServedAnswer(
            request,
            Completion({"content": ""}, "length", len(text), RequestTimes(1.0), token_ids=text),
        )
        for text in texts
    ]
    return LevelResult(2, answers, seconds, DraftCounters(3, 6, (2, 1)))


def test_servers_differ_by_the_schedule_alone() -> None:
    launch = EngineLaunch("target", drafter=DrafterLaunch("eagle3", "drafter", 3))
    launches = make_launches(launch, RANGES)
    assert launches[FIXED] == launch
    assert launches[NEVER].drafter is None
    scheduled = launches[SCHEDULED].drafter
    assert scheduled == DrafterLaunch("eagle3", "drafter", 3, options={SCHEDULE_KEY: RANGES})


def test_gains_are_ratios_of_tokens_per_second() -> None:
    """Twice the tokens per second, in each of two repeats; one of four answers is another text."""
    results = {
        SCHEDULED: [make_result(1.0, [1, 2], [3, 4]), make_result(3.0, [1, 2], [3, 4])],
        FIXED: [make_result(2.0, [1, 2], [3, 9]), make_result(6.0, [1, 2], [3, 4])],
        NEVER: [make_result(1.0, [1, 2], [3, 4]), make_result(3.0, [1, 2], [3, 4])],
    }
    level = describe_level(2, results)
    assert level["gains"][FIXED]["ratio"] == 2
    assert level["gains"][NEVER]["ratio"] == 1
    fixed = level["servers"][FIXED]
    assert fixed["same"] == 3 and level["servers"][NEVER]["same"] == 4
    assert fixed["tokens_per_second"] == 1
    assert (fixed["rounds"], fixed["drafted"], fixed["accepted"]) == (6, 12, 6)


def test_a_drafter_without_measured_times_needs_its_schedule() -> None:
    with pytest.raises(UserError, match="give its schedule too"):
        EngineSchedule("python", run="runs/mine")
    assert EngineSchedule("python", run="runs/mine", ranges=([1, 8, 2],)).ranges == [[1, 8, 2]]
