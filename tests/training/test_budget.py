"""How long a training lasts, when it stops, and which of its weights are the result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import UserError
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.training import run as job
from spectrain.training import settings
from spectrain.training import validation as held_out_look
from spectrain.training.checkpoints import TrainingResult
from spectrain.training.settings import Muon, Wsd
from spectrain.training.trainer import Trainer


def examples(count: int, seed: int) -> list[Example]:
    torch.manual_seed(seed)
    return [Example(row, [place >= 6 for place in range(16)]) for row in torch.randint(3, 2000, (count, 16)).tolist()]


def drafter(target: Target) -> Eagle3:
    torch.manual_seed(0)
    made = Eagle3(target, ttt_steps=1, vocab_size=2048)
    made.prepare(target, torch.arange(target.head.vocab_size))
    return made


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of every answer."""
    monkeypatch.setattr(held_out_look, "ANSWER_TOKENS", 4)


class Killed(Exception):
    """Stands for a kill between two steps."""


def fit(
    target: Target, run: Path, kill_at: int = 0, held_out: int = 0, on_step: Callable[[Any], None] | None = None, **options: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], TrainingResult]:
    """Weights, metrics and facts of a training that may be killed once and gone on with."""
    trainer = Trainer(**{"lr": 1e-3, "max_steps": 8, "batch_tokens": 32, "log_every": 1, "save_every": 3, **options})
    data = Dataset(examples(12, 5), 12, 0, 0, held_out=examples(held_out, 6))
    made = drafter(target)

    def after(step: int) -> None:
        if on_step is not None:
            on_step(made)
        if step == kill_at:
            raise Killed

    if kill_at:
        with pytest.raises(Killed):
            trainer.fit(made, target, data, LiveSource(), run, on_step=after)
        return fit(target, run, 0, held_out, on_step, **options)
    trained = trainer.fit(made, target, data, LiveSource(), run, on_step=after)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {name: value.clone() for name, value in made.state_dict().items()}, lines, trained


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def forecasts(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Looks find these by step, whatever the drafter is."""
    steps = iter(values)
    monkeypatch.setattr(job, "measure_acceptance", lambda *_: {"forecast": next(steps), "acceptance": []})


class Clock:
    """A clock that a training's steps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
        self.now, self.pace = 0.0, pace
        monkeypatch.setattr(settings.time, "monotonic", lambda: self.now)


def stepping(clock: Clock) -> Callable[[settings.Budget, Any], None]:
    """A tick before which the clock moves by a step."""
    tick = settings.Budget.record_time

    def moved(self: settings.Budget, shared: Any) -> None:
        clock.now += clock.pace
        tick(self, shared)

    return moved


# Resumed equals uninterrupted


@pytest.mark.parametrize("options", [
    {"ema": 0.7, "schedule": Wsd(0.5)}, {"ema": 0.7, "optimizer": Muon(), "eval_every": 2, "keep_best": True, "held_out": 1},
], ids=["ema and wsd", "ema, muon and looks"])  # fmt: skip
def test_resumed_equals_uninterrupted(shallow: Target, tmp_path: Path, options: dict[str, Any]) -> None:
    """The result, and every line but its times, after a kill between two checkpoints."""
    whole, lines, trained = fit(shallow, tmp_path / "whole", **options)
    resumed, again, told = fit(shallow, tmp_path / "cut", kill_at=5, **options)
    assert_equal(whole, resumed)
    kept = ("step", "loss", "lr", "held_out")
    assert [[line.get(key) for key in kept] for line in lines] == [[line.get(key) for key in kept] for line in again]
    assert trained.result_step == told.result_step


# By the clock


@pytest.mark.parametrize("pace", [0.5, 2.0])
def test_minutes_end_a_training_and_plan_its_rate(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace: float
) -> None:
    """Machines of different speed take the same time, and at the same time have the same rate, up to a step."""
    clock = Clock(monkeypatch, pace)
    trainer = {"max_minutes": 0.2, "max_steps": None, "save_every": None, "warmup": 0.25}
    monkeypatch.setattr(settings.Budget, "record_time", stepping(clock))
    _, lines, trained = fit(shallow, tmp_path, **trainer)
    assert abs(clock.now - 12) <= pace and trained.num_steps == pytest.approx(12 / pace, abs=1)
    peak = max(lines, key=lambda line: line["lr"])
    assert abs(peak["step"] * pace - 3) <= 2 * pace
    assert lines[-1]["lr"] < 0.25 * peak["lr"]


def test_a_resumed_training_goes_on_with_the_time_left(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps of one length, killed and resumed is uninterrupted; a pause before a part counts for nothing."""
    clock, start = Clock(monkeypatch, 1.0), settings.Budget.resume_from
    monkeypatch.setattr(settings.Budget, "record_time", stepping(clock))

    def paused(self: settings.Budget, spent: settings.TimeSpent) -> None:
        clock.now += 100
        start(self, spent)

    monkeypatch.setattr(settings.Budget, "resume_from", paused)
    found = [fit(shallow, tmp_path / str(at), kill_at=at, max_minutes=0.1, max_steps=None) for at in (0, 5)]
    assert found[0][2].num_steps == found[1][2].num_steps == 6
    assert_equal(found[0][0], found[1][0])


def test_a_slow_first_step_plans_nothing() -> None:
    """What is compiled in it says nothing of the others: the share of the rest counts."""
    made = settings.Budget(None, 1.0)
    made.time_spent = settings.TimeSpent(20.0, 20.0)
    assert made.num_steps(1) == settings.ASSUMED_STEPS
    made.time_spent = settings.TimeSpent(24.0, 20.0)
    assert made.num_steps(3) == 1 + 2 * 40 / 4 and not made.is_done(3)
    assert settings.Budget(15, 1.0).num_steps(0) == 15 and settings.Budget(15, None).is_done(15)


# By what is gained


def test_the_best_look_is_the_result(shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as they were at the highest forecast; on the way only those that may still be wanted lie on the disk."""
    forecasts(monkeypatch, [1.1, 1.4, 1.3, 1.4])
    seen: list[dict[str, torch.Tensor]] = []
    keep = lambda made: seen.append({name: value.clone() for name, value in made.state_dict().items()})  # noqa: E731
    weights, lines, trained = fit(shallow, tmp_path, on_step=keep, held_out=1, eval_every=2, keep_best=True)
    assert trained.result_step == 4 and trained.num_steps == 8
    assert_equal(seen[3], weights)
    assert [line["step"] for line in lines if "held_out" in line] == [2, 4, 6, 8]
    assert [path.name for path in (tmp_path / "checkpoints").glob("best-*")] == ["best-000004"]


def test_a_training_that_gains_nothing_stops(shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many looks in a row; a gain begins the count anew."""
    forecasts(monkeypatch, [1.2, 1.1, 1.3, 1.3, 1.2, 1.4])
    _, lines, trained = fit(shallow, tmp_path, held_out=1, eval_every=1, stop_after=2)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and trained.num_steps == trained.result_step == 5


# Averages


def test_averages_by_their_formula(shallow: Target, tmp_path: Path) -> None:
    """The result is the recursion over the weights after every step, which themselves are those of a plain training."""
    seen: list[dict[str, torch.Tensor]] = []
    keep = lambda made: seen.append({name: p.detach().clone() for name, p in made.named_parameters()})  # noqa: E731
    plain, *_ = fit(shallow, tmp_path / "plain", max_steps=4)
    weights, *_ = fit(shallow, tmp_path / "averaged", max_steps=4, ema=0.25, on_step=keep)
    for name, value in seen[0].items():
        for step, later in enumerate(seen[1:], 2):
            newest = 1 - min(0.25, (1 + step) / (10 + step))
            value = value + newest * (later[name] - value)
        torch.testing.assert_close(weights[name], value, atol=1e-7, rtol=1e-5)
    assert_equal({name: value for name, value in plain.items() if name in seen[-1]}, seen[-1])
    assert any(not torch.equal(value, plain[name]) for name, value in weights.items())


def test_what_is_looked_at_is_the_average(shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look sees the weights that would be saved, and leaves the training's own."""
    seen: list[dict[str, torch.Tensor]] = []

    def look(made: Eagle3, *_: Any) -> dict[str, float]:
        seen.append({name: value.clone() for name, value in made.state_dict().items()})
        return {"forecast": 1.0, "acceptance": []}

    monkeypatch.setattr(job, "measure_acceptance", look)
    weights, *_ = fit(shallow, tmp_path, held_out=1, ema=0.5, eval_every=4)
    assert_equal(weights, seen[-1])
    kept = load_file(tmp_path / "checkpoints" / "step-000006" / "optimizer.safetensors")
    assert sum(name.startswith("ema.drafter.") for name in kept) == sum(1 for _ in drafter(shallow).parameters())


# What is refused


@pytest.mark.parametrize("options", [{"keep_best": True}, {"stop_after": 2}, {"eval_every": 5}])
def test_looks_need_something_to_look_at(shallow: Target, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"trainer.{next(iter(options))}=.*nothing is held out.*data.held_out=0.02"):
        fit(shallow, tmp_path, held_out=0, **options)
