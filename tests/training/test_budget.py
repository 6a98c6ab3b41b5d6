"""How long a training lasts, when it stops, and which of its weights are the result."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.capabilities import FitSeconds
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.medusa import Medusa
from spectrain.errors import UserError
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.training import budget as training_budget
from spectrain.training import run as training_run
from spectrain.training import validation
from spectrain.training.checkpoints import TrainingResult
from spectrain.training.initial_fit import FitPlan
from spectrain.training.settings import Muon, Wsd
from spectrain.training.trainer import Trainer
from spectrain.training.validation import Validation
from spectrain.training.validation_history import ValidationHistory


def make_examples(count: int, seed: int) -> list[Example]:
    torch.manual_seed(seed)
    return [
        Example(row, [position >= 6 for position in range(16)])
        for row in torch.randint(3, 2000, (count, 16)).tolist()
    ]


def make_drafter(target: Target) -> Eagle3:
    torch.manual_seed(0)
    drafter = Eagle3(target, ttt_steps=1, vocab_size=2048)
    drafter.prepare(target, torch.arange(target.head.vocab_size))
    return drafter


@pytest.fixture(autouse=True)
def shorten_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit validation to answers of four tokens."""
    monkeypatch.setattr(validation, "ANSWER_TOKENS", 4)


class Killed(Exception):
    """Stands for a kill between two steps."""


def fit_drafter(
    target: Target,
    run: Path,
    kill_at: int = 0,
    held_out: int = 0,
    on_step: Callable[[Any], None] | None = None,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], TrainingResult]:
    """Return weights, metrics and result of a training that may be killed once and resumed."""
    trainer = Trainer(
        **{
            "lr": 1e-3,
            "max_steps": 8,
            "batch_tokens": 32,
            "log_every": 1,
            "save_every": 3,
            **options,
        }
    )
    data = Dataset(make_examples(12, 5), 12, 0, 0, held_out=make_examples(held_out, 6))
    drafter = make_drafter(target)

    def end_step(step: int) -> None:
        if on_step is not None:
            on_step(drafter)
        if step == kill_at:
            raise Killed

    if kill_at:
        with pytest.raises(Killed):
            trainer.fit(drafter, target, data, LiveSource(), run, on_step=end_step)
        return fit_drafter(target, run, 0, held_out, on_step, **options)
    result = trainer.fit(drafter, target, data, LiveSource(), run, on_step=end_step)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {name: value.clone() for name, value in drafter.state_dict().items()}, lines, result


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def set_forecasts(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Let validation measure these forecasts, one after the other."""
    steps = iter(values)

    def measure_next(*_: object) -> Validation:
        return Validation({"forecast": next(steps), "agreement": [], "places": [2000]}, [])

    monkeypatch.setattr(training_run, "measure_acceptance", measure_next)


class Clock:
    """A clock that the steps of a training move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
        self.now = 0.0
        self.pace = pace
        monkeypatch.setattr(training_budget.time, "monotonic", lambda: self.now)


def make_moving_tick(clock: Clock) -> Callable[[training_budget.Budget, Any], None]:
    """Return a tick before which the clock moves by a step."""
    tick = training_budget.Budget.record_time

    def move_and_tick(self: training_budget.Budget, shared: Any) -> None:
        clock.now += clock.pace
        tick(self, shared)

    return move_and_tick


# Resumed equals uninterrupted


@pytest.mark.parametrize(
    "options",
    [
        {"ema": 0.7, "schedule": Wsd(0.5)},
        {"ema": 0.7, "optimizer": Muon(), "eval_every": 2, "keep_best": True, "held_out": 1},
    ],
    ids=["ema and wsd", "ema, muon and looks"],
)
def test_resumed_equals_uninterrupted(
    shallow: Target, tmp_path: Path, options: dict[str, Any]
) -> None:
    """After a kill between two checkpoints the result and every logged line but its times are
    the same.
    """
    uninterrupted, lines, result = fit_drafter(shallow, tmp_path / "whole", **options)
    resumed, resumed_lines, resumed_result = fit_drafter(
        shallow, tmp_path / "cut", kill_at=5, **options
    )
    assert_equal(uninterrupted, resumed)
    keys = ("step", "loss", "lr", "held_out")
    assert [[line.get(key) for key in keys] for line in lines] == [
        [line.get(key) for key in keys] for line in resumed_lines
    ]
    assert result.result_step == resumed_result.result_step


@pytest.mark.parametrize("kill_at", [2, 5])
def test_resumed_equals_uninterrupted_with_rates_by_sizes(
    shallow: Target, tmp_path: Path, kill_at: int
) -> None:
    """Rates by sizes, a schedule and two stages, of which the second trains adapters of the
    target: the rates are those of the weights before the first step, in either stage.
    """

    def train_heads(run: Path, kill: int = 0) -> tuple[dict[str, torch.Tensor], list[Any]]:
        target = copy.deepcopy(shallow)
        torch.manual_seed(0)
        drafter = Medusa(
            target, num_heads=2, vocab_size=64, adapt="lora", rank=2, self_distillation=True
        )
        drafter.prepare(target, torch.arange(target.head.vocab_size))
        data = Dataset(make_examples(12, 5), 12, 0, 0, held_out=make_examples(2, 6))
        settings: dict[str, Any] = {"schedule": Wsd(0.5), "log_every": 1, "save_every": 2}
        trainer = Trainer(
            lr="auto", warmup=0.3, max_steps=8, batch_tokens=32, eval_every=4, **settings
        )

        def end_step(step: int) -> None:
            if step == kill:
                raise Killed

        if kill:
            with pytest.raises(Killed):
                trainer.fit(drafter, target, data, LiveSource(), run, on_step=end_step)
            return train_heads(run)
        trainer.fit(drafter, target, data, LiveSource(), run, on_step=end_step)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        weights = {**drafter.state_dict(), **target.state_dict()}
        return weights, [(line["lr"], line["loss"], line.get("held_out")) for line in lines]

    uninterrupted, lines = train_heads(tmp_path / "whole")
    resumed, resumed_lines = train_heads(tmp_path / "cut", kill_at)
    assert_equal(uninterrupted, resumed)
    assert len(lines) == 8 and lines == resumed_lines


# Minutes


@pytest.mark.parametrize("pace", [0.5, 2.0])
def test_minutes_end_a_training_and_plan_its_rate(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace: float
) -> None:
    """Machines of different speed take the same time, and have the same rate at the same time,
    up to a step.
    """
    clock = Clock(monkeypatch, pace)
    trainer = {"max_minutes": 0.2, "max_steps": None, "save_every": None, "warmup": 0.25}
    monkeypatch.setattr(training_budget.Budget, "record_time", make_moving_tick(clock))
    _, lines, result = fit_drafter(shallow, tmp_path, **trainer)
    assert abs(clock.now - 12) <= pace and result.num_steps == pytest.approx(12 / pace, abs=1)
    peak = max(lines, key=lambda line: line["lr"])
    assert abs(peak["step"] * pace - 3) <= 2 * pace
    assert lines[-1]["lr"] < 0.25 * peak["lr"]


def test_a_resumed_training_goes_on_with_the_time_left(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps of equal length a resumed run equals an uninterrupted one; a pause between does
    not count.
    """
    clock = Clock(monkeypatch, 1.0)
    start = training_budget.Budget.resume_from
    monkeypatch.setattr(training_budget.Budget, "record_time", make_moving_tick(clock))

    def resume_after_pause(self: training_budget.Budget, spent: training_budget.TimeSpent) -> None:
        clock.now += 100
        start(self, spent)

    monkeypatch.setattr(training_budget.Budget, "resume_from", resume_after_pause)
    trainings = [
        fit_drafter(
            shallow, tmp_path / str(kill_step), kill_at=kill_step, max_minutes=0.1, max_steps=None
        )
        for kill_step in (0, 5)
    ]
    assert trainings[0][2].num_steps == trainings[1][2].num_steps == 6
    assert_equal(trainings[0][0], trainings[1][0])


def test_a_slow_first_step_plans_nothing() -> None:
    """The first step may compile, so the number of steps is planned from the time of the others."""
    budget = training_budget.Budget(None, 1.0)
    budget.time_spent = training_budget.TimeSpent(20.0, 20.0)
    assert budget.num_steps(1) == training_budget.ASSUMED_STEPS
    budget.time_spent = training_budget.TimeSpent(24.0, 20.0)
    assert budget.num_steps(3) == 1 + 2 * 40 / 4 and not budget.is_done(3)
    assert budget.total_seconds(3) == 60.0 and budget.seconds_left == 36.0 and budget.is_paced
    assert training_budget.Budget(15, 1.0).num_steps(0) == 15 and training_budget.Budget(
        15, None
    ).is_done(15)


# Validation


def test_the_best_validation_is_the_result(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result has the weights of the highest forecast, and of these checkpoints only the best
    one is on disk.
    """
    set_forecasts(monkeypatch, [1.0, 1.1, 1.4, 1.3, 1.4])
    history: list[dict[str, torch.Tensor]] = []

    def record_weights(drafter):
        return history.append({name: v.clone() for name, v in drafter.state_dict().items()})

    weights, lines, result = fit_drafter(
        shallow, tmp_path, on_step=record_weights, held_out=1, eval_every=2, keep_best=True
    )
    assert result.result_step == 4 and result.num_steps == 8
    assert_equal(history[3], weights)
    assert [line["step"] for line in lines if "held_out" in line] == [2, 4, 6, 8]
    assert [path.name for path in (tmp_path / "checkpoints").glob("best-*")] == ["best-000004"]


@pytest.mark.parametrize("keep_best", [False, True, None])
def test_a_training_below_its_start_says_so(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_best: bool | None
) -> None:
    """The drafter is measured before the first step; that is in the metrics, and the best
    weights may be those of the start.
    """
    set_forecasts(monkeypatch, [1.5, 1.2, 1.4])
    weights, lines, result = fit_drafter(
        shallow, tmp_path, held_out=1, eval_every=4, keep_best=keep_best
    )
    assert lines[0]["held_out_at_start"]["forecast"] == 1.5
    assert [line["forecast_at_start"] for line in lines if "held_out" in line] == [1.5, 1.5]
    assert result.gain is not None and (result.gain.start, result.gain.end) == (
        1.5,
        1.5 if keep_best is not False else 1.4,
    )
    sentence = result.gain.describe()
    if keep_best is not False:
        assert result.result_step == 0 and sentence.startswith(
            "Training added nothing to its start: 1.500 tokens per forward"
        )
        assert_equal(dict(make_drafter(shallow).state_dict()), weights)
    else:
        assert sentence.startswith(
            "Training took 6.7 % from its start: 1.500 -> 1.400 tokens per forward"
        )


def test_a_training_above_its_start_says_nothing(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without held-out data nothing is known, and a killed run remembers its start."""
    set_forecasts(monkeypatch, [1.5, 1.4, 1.4, 1.6])
    _, lines, result = fit_drafter(
        shallow, tmp_path / "better", kill_at=5, held_out=1, eval_every=3, max_steps=6
    )
    assert result.gain is not None and result.gain.start == lines[-1]["forecast_at_start"] == 1.5
    assert fit_drafter(shallow, tmp_path / "plain", max_steps=1)[2].gain is None


def test_what_a_training_added_is_said_with_its_interval() -> None:
    """Both ends were measured at the same places, so the interval is that of the paired
    differences.
    """
    history = ValidationHistory()
    for step, forecast, influences in (
        (0, 1.360, [0.03, -0.03]),
        (40, 1.424, [0.031, -0.031]),
        (60, 1.300, [0.0, 0.0]),
    ):
        history.add_forecast(forecast, step, Validation({"places": [2000, 703]}, influences))
    gain = history.measure_gain(history.takes_best(None), 60)
    assert gain is not None and gain.result_step == 40
    # Student's t of one degree of freedom is 12.706, and the error of the differences 0.002.
    assert gain.interval == pytest.approx(
        [0.064 - 12.706 * 0.002, 0.064 + 12.706 * 0.002], abs=1e-3
    )
    assert gain.describe() == (
        "Training added 4.7 % to its start: 1.360 -> 1.424 tokens per forward over 2,703 held-out "
        "positions (95 % interval of the difference +0.039 to +0.089); the result has the weights "
        "of step 40, the best of 60"
    )


def test_the_default_keeps_the_start_where_every_step_is_worse() -> None:
    """It also keeps the last weights where the best ones are better by chance only."""
    worse = ValidationHistory()
    chance = ValidationHistory()
    for step, forecast in ((0, 1.5), (4, 1.4), (8, 1.45)):
        worse.add_forecast(forecast, step, Validation({"places": [2000]}, [0.1, -0.1]))
    assert worse.takes_best(None) and worse.best_step == 0
    for step, forecast, influences in (
        (0, 1.4, [0.1, -0.1]),
        (4, 1.51, [0.1, -0.1]),
        (8, 1.5, [-0.1, 0.1]),
    ):
        chance.add_forecast(forecast, step, Validation({"places": [2000]}, influences))
    assert not chance.takes_best(None) and chance.takes_best(True) and not worse.takes_best(False)


def test_a_training_that_gains_nothing_stops(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training stops after `stop_after` validations in a row without a gain."""
    set_forecasts(monkeypatch, [1.0, 1.2, 1.1, 1.3, 1.3, 1.2, 1.4])
    _, lines, result = fit_drafter(shallow, tmp_path, held_out=1, eval_every=1, stop_after=2)
    assert [line["step"] for line in lines] == [
        1,
        2,
        3,
        4,
        5,
    ] and result.num_steps == result.result_step == 5


# Averages


def test_averages_by_their_formula(shallow: Target, tmp_path: Path) -> None:
    """The result is the recursion over the weights of every step, which are those of a training
    without averages.
    """
    history: list[dict[str, torch.Tensor]] = []

    def record_weights(drafter):
        return history.append({n: p.detach().clone() for n, p in drafter.named_parameters()})

    plain, *_ = fit_drafter(shallow, tmp_path / "plain", max_steps=4)
    weights, *_ = fit_drafter(
        shallow, tmp_path / "averaged", max_steps=4, ema=0.25, on_step=record_weights
    )
    for name, value in history[0].items():
        for step, newer in enumerate(history[1:], 2):
            share = 1 - min(0.25, (1 + step) / (10 + step))
            value = value + share * (newer[name] - value)
        torch.testing.assert_close(weights[name], value, atol=1e-7, rtol=1e-5)
    assert_equal({name: value for name, value in plain.items() if name in history[-1]}, history[-1])
    assert any(not torch.equal(value, plain[name]) for name, value in weights.items())


def test_validation_measures_the_average(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation measures the weights that would be saved, and leaves the training's own
    unchanged.
    """
    validated: list[dict[str, torch.Tensor]] = []

    def record_validated(drafter: Eagle3, *_: Any) -> Validation:
        validated.append({name: value.clone() for name, value in drafter.state_dict().items()})
        return Validation({"forecast": 1.0, "agreement": []}, [])

    monkeypatch.setattr(training_run, "measure_acceptance", record_validated)
    weights, *_ = fit_drafter(shallow, tmp_path, held_out=1, ema=0.5, eval_every=4)
    assert_equal(weights, validated[-1])
    saved = load_file(tmp_path / "checkpoints" / "step-000006" / "optimizer.safetensors")
    assert sum(name.startswith("ema.drafter.") for name in saved) == sum(
        1 for _ in make_drafter(shallow).parameters()
    )


# Refusals


@pytest.mark.parametrize("options", [{"keep_best": True}, {"stop_after": 2}, {"eval_every": 5}])
def test_validation_needs_held_out_data(
    shallow: Target, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(
        UserError, match=f"trainer.{next(iter(options))}=.*nothing is held out.*data.held_out=0.1"
    ):
        fit_drafter(shallow, tmp_path, held_out=0, **options)


# Fit


class TimedFit:
    """A fit whose texts and solution move a clock, with the plan that is made of their seconds."""

    def __init__(
        self, per_token: float, fit_per_token: float, solving: float, limit: float
    ) -> None:
        self.now = 0.0
        self.per_token = per_token
        self.speed = FitSeconds(fit_per_token, solving)
        self.limit = limit
        self.plan = FitPlan(self.speed, lambda: self.limit - self.now, lambda: self.now)

    def read(self, examples: list[Example]) -> int:
        """Read texts as long as there is time; return the number of texts."""
        num_texts = 0
        while num_texts < len(examples):
            count = self.plan.count_texts(examples[num_texts:])
            if not count:
                break
            self._read(examples[num_texts : num_texts + count])
            num_texts += count
        self.now += self.speed.solving + self.plan.num_tokens * self.speed.per_token
        return num_texts

    def _read(self, examples: list[Example]) -> None:
        def move() -> Any:
            self.now += self.per_token * sum(len(example.tokens) for example in examples)

        self.plan.read(examples, move)


@pytest.mark.parametrize("per_token", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("solving", [0.0, 30.0])
def test_a_fit_ends_in_its_share_of_the_time(per_token: float, solving: float) -> None:
    """It reads as many texts as leave the time to solve, and one more would end too late, however
    slow a token is."""
    examples = make_examples(40, 0)
    fit = TimedFit(per_token, 0.05, solving, limit=72.0)
    num_texts = fit.read(examples)
    assert num_texts > 0 and fit.now <= 72.0
    is_out_of_time = fit.now + 16 * (per_token + 0.05) > 72.0
    assert num_texts == 40 or is_out_of_time
    assert fit.plan.num_tokens == 16 * num_texts


def test_a_fit_whose_solution_takes_too_long_reads_nothing() -> None:
    fit = TimedFit(0.01, 0.05, solving=80.0, limit=72.0)
    assert fit.read(make_examples(4, 0)) == 0


def test_a_fit_without_a_limit_reads_all_texts_at_once() -> None:
    fit = TimedFit(0.4, 0.05, solving=80.0, limit=math.inf)
    assert fit.plan.count_texts(make_examples(40, 0)) == 40


def test_the_last_validation_is_in_the_time_of_a_training() -> None:
    """Steps end earlier by what a validation took, and their number is planned by that."""
    budget = training_budget.Budget(None, 1.0)
    budget.reserved = 12.0
    budget.time_spent = training_budget.TimeSpent(24.0, 20.0)
    assert budget.num_steps(3) == 1 + 2 * 28 / 4 and budget.seconds_left == 24.0
    budget.time_spent = training_budget.TimeSpent(47.5, 20.0)
    assert budget.is_done(15) and not training_budget.Budget(None, 1.0).is_done(15)


def test_a_quick_last_validation_ends_a_training_too(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps do not go on after the last validation where it took less time than the first."""
    clock = Clock(monkeypatch, 1.0)
    monkeypatch.setattr(training_budget.Budget, "record_time", make_moving_tick(clock))
    measured: list[float] = []
    judge = training_run.measure_acceptance

    def measure(*args: Any) -> Validation:
        clock.now += 4.0 if not measured else 0.5
        measured.append(clock.now)
        return judge(*args)

    monkeypatch.setattr(training_run, "measure_acceptance", measure)
    monkeypatch.setattr(training_run.time, "perf_counter", lambda: clock.now)
    trainer = {"max_minutes": 0.2, "max_steps": None, "save_every": None, "held_out": 2}
    _, lines, result = fit_drafter(shallow, tmp_path, **trainer)
    assert [line["step"] for line in lines if "held_out" in line] == [result.num_steps]
    assert clock.now == 4.0 + result.num_steps + 0.5 <= 12.0
