"""EAGLE-3's initial weights by least squares: each fit solves its regression, and a training
goes on from them.
"""

from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters import eagle3
from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers import fitted_start
from spectrain.drafters.layers.fitted_start import (
    EagleFitter,
    RidgeRegression,
    count_fit,
    factorize,
    fit_eagle,
    label_positions,
    measure_fit,
    state_scale,
)
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.errors import RunError, UserError
from spectrain.features.base import BatchRequest, SourceError
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.checked_tensors import save_tensors
from spectrain.models.target import Target
from spectrain.training.checkpoints import load_start, start_weights_path
from spectrain.training.trainer import Trainer

VARIANTS: list[dict[str, Any]] = [
    {},
    {"architecture": {"norm_before_fc": True}},
    {"architecture": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}},
    {"num_layers": 2, "architecture": {"fc_norm": True, "qk_norm": True}},
    {"head_rank": 16, "window": 8},
]


def make_dataset(count: int = 12, length: int = 24) -> Dataset:
    torch.manual_seed(5)
    rows = torch.randint(3, 2000, (count, length)).tolist()
    return Dataset(
        [
            Example(row[: length - n % 5], [i >= 4 for i in range(length - n % 5)])
            for n, row in enumerate(rows)
        ],
        count,
        0,
        0,
    )


def make_drafter(target: Target, **options: Any) -> Eagle3:
    torch.manual_seed(0)
    drafter = Eagle3(target, **{"ttt_steps": 2, "vocab_size": 2048, "start": "fitted", **options})
    drafter.prepare(target, torch.arange(target.head.vocab_size))
    return drafter


def make_batch(target: Target, drafter: Eagle3, dataset: Dataset, packed: bool = False) -> Batch:
    return LiveSource().make_batch(BatchRequest(dataset.examples, target, drafter.layers, packed))


def test_a_regression_solves_its_normal_equations() -> None:
    """The weights are those of least squares with rows sqrt(penalty n) * size of an input added,
    in any number of parts.
    """
    torch.manual_seed(0)
    x = torch.randn(50, 6) * torch.tensor([1, 10, 0.1, 1, 1, 1])
    y = torch.randn(50, 3)
    fit = RidgeRegression()
    for rows in ([*range(20)], [*range(20, 50)]):
        fit.add_rows(x[rows], y[rows])
    # The penalty is relative to the mean square of each input, so with n rows it counts as penalty
    # * sum of its squares.
    size = (0.3 * x.double().square().sum(0)).sqrt()
    expected = torch.linalg.lstsq(
        torch.cat([x.double(), size.diag()]),
        torch.cat([y.double(), torch.zeros(6, 3, dtype=torch.float64)]),
    )
    torch.testing.assert_close(fit.solve(0.3), expected.solution.T, rtol=1e-5, atol=1e-6)
    predictions = x.double() @ fit.solve(0.3).T
    covariance = predictions.T @ predictions / 50
    torch.testing.assert_close(
        fit.predicted_covariance(fit.solve(0.3)), covariance, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("rank", [2, 4, 5, 7])
def test_factors_have_the_smallest_error_of_their_rank(rank: int) -> None:
    """The weighted error of predictions is the sum of the smallest eigenvalues; a full rank
    reproduces the weight.
    """
    torch.manual_seed(0)
    weight, inputs, errors = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((5, 8), (40, 8), (9, 5))
    )
    metric = errors.T @ errors
    metric += 1e-3 * metric.diagonal().mean() * torch.eye(5)  # what keeps it regular
    predictions = inputs @ weight.T
    covariance = predictions.T @ predictions / len(inputs)
    inner, outer = factorize(weight, covariance, errors.T @ errors, rank)
    assert inner.shape == (min(rank, 5), 8) and outer.shape == (5, rank)
    difference = predictions - inputs @ (outer[:, : len(inner)] @ inner).T
    error = torch.einsum("ri,ij,rj->", difference, metric, difference) / len(inputs)
    eigenvalues = torch.linalg.eigvals(covariance @ metric).real.sort().values
    torch.testing.assert_close(error, eigenvalues[: max(0, 5 - rank)].sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
def test_fitted_rows_are_those_of_the_loss(shallow: Target, packed: bool) -> None:
    """A draft step is fitted where it is supervised, to the target's state after token t + 1 +
    step.
    """
    drafter = make_drafter(shallow)
    batch = make_batch(shallow, drafter, make_dataset(), packed)
    supervision = Supervision(drafter, batch)
    for step in range(3):
        assert torch.equal(label_positions(batch, step), supervision.is_supervised(step))


@pytest.mark.sweep(2, free=("options",))
@pytest.mark.parametrize("options", VARIANTS)
def test_every_fit_lowers_the_error_of_the_states(shallow: Target, options: dict[str, Any]) -> None:
    """After each module the mean squared error of predicted states is smaller, and the loss is
    smaller than that of other starts."""
    drafter = make_drafter(shallow, **options)
    batch = make_batch(shallow, drafter, make_dataset(40))
    fitter = EagleFitter(drafter, [batch], state_scale(shallow, [batch]))
    assert batch.features is not None
    states = (batch.features.at_layer("final").float() / fitter.scale).roll(-1, dims=1)
    streams: list[Tensor] = []
    drafter.mlp.register_forward_hook(lambda _, __, output: streams.append(output))
    drafter.post_attention_layernorm.register_forward_pre_hook(
        lambda _, inputs: streams.append(inputs[0])
    )

    def measure_error() -> float:
        streams.clear()
        next(drafter.unroll_steps(batch, 1, TrainingState()))
        rows = label_positions(batch, 0)
        return float((states - streams[0] - streams[1])[rows].square().mean())

    errors = []
    with torch.no_grad():
        fitter.clear_outputs()
        fitter.fit_fc()
        errors.append(measure_error())
        fitter.fit_attention()
        errors.append(measure_error())
        fitter.fit_mlp()
        errors.append(measure_error())
        fitter.fit_sharpness()
    assert all(later < 0.99 * earlier for earlier, later in pairwise(errors)), errors
    losses = {}
    for start in ("target", "random", "fitted"):
        other = (
            drafter if start == "fitted" else make_drafter(shallow, **{**options, "start": start})
        )
        losses[start] = float(other.loss(batch, shallow, TrainingState()).total.detach())
    assert losses["fitted"] < min(losses["target"], losses["random"]), losses


def test_a_start_without_supervised_rows_is_that_of_the_target(shallow: Target) -> None:
    """Texts without loss leave the drafter as `prepare` made it."""
    drafter = make_drafter(shallow)
    untouched = make_drafter(shallow)
    silent = Dataset(
        [
            Example(example.tokens, [False] * len(example.tokens))
            for example in make_dataset().examples
        ],
        12,
        0,
        0,
    )
    fit_eagle(drafter, [make_batch(shallow, drafter, silent)], shallow)
    for name, value in untouched.state_dict().items():
        assert torch.equal(value, drafter.state_dict()[name]), name
    assert not drafter.starts_trained


class RecordingSource(LiveSource):
    """Records the texts that the target runs over."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[list[str]] = []

    def make_batch(self, request: BatchRequest) -> Batch:
        self.texts.append([example.content_hash for example in request.examples])
        return super().make_batch(request)


class Killed(Exception):
    """Stands for a kill between two steps."""


def test_a_training_continues_after_its_fit_and_resumes(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step takes the batch behind those that the fit read; resumed equals uninterrupted,
    rates by fitted sizes included."""

    def fit_small(drafter: Any, *arguments: Any) -> None:
        fit_eagle(drafter, *arguments)
        drafter.fc.weight.data *= 0.01

    monkeypatch.setattr(eagle3, "fit_eagle", fit_small)
    settings: dict[str, Any] = {"lr": "auto", "max_steps": 6, "batch_tokens": 60, "save_every": 2}
    whole = make_drafter(shallow, fit_tokens=100)
    source = RecordingSource()
    Trainer(**settings).fit(whole, shallow, make_dataset(), source, tmp_path / "whole")
    stream = make_dataset().stream_batches(Trainer(**settings).batch_settings)
    expected = [
        [example.content_hash for example in examples]
        for _, examples in zip(range(len(source.texts)), stream)
    ]
    assert source.texts == expected and len(expected) > 6 and whole.starts_trained

    def kill(step: int) -> None:
        if step == 3:
            raise Killed

    with pytest.raises(Killed):
        cut = make_drafter(shallow, fit_tokens=100)
        Trainer(**settings).fit(
            cut, shallow, make_dataset(), LiveSource(), tmp_path / "cut", on_step=kill
        )
    resumed = make_drafter(shallow, fit_tokens=100)
    Trainer(**settings).fit(resumed, shallow, make_dataset(), LiveSource(), tmp_path / "cut")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_fit_reads_as_many_tokens_as_set(
    shallow: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fit stops after the batch that reaches fit_tokens, and the printed number is that of
    the tokens it read.
    """
    source = RecordingSource()
    settings: dict[str, Any] = {"lr": 1e-3, "max_steps": 1000, "batch_tokens": 60}
    trainer = Trainer(**settings)
    drafter = make_drafter(shallow, fit_tokens=100)
    dataset = make_dataset()
    batches = [*zip(range(3), dataset.stream_batches(trainer.batch_settings))]
    counts = [sum(len(example.tokens) for example in examples) for _, examples in batches]

    def stop(step: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        trainer.fit(drafter, shallow, dataset, source, tmp_path, on_step=stop)
    expected = (
        counts[0]
        if counts[0] >= 100
        else counts[0] + counts[1]
        if counts[0] + counts[1] >= 100
        else sum(counts)
    )
    assert f"initial weights fitted to {expected} tokens" in capsys.readouterr().out


def test_the_fitted_start_is_saved(shallow: Target, tmp_path: Path) -> None:
    """A training that changes nothing ends with the weights that it saved before its first step."""
    drafter = make_drafter(shallow, fit_tokens=100)
    trainer = Trainer(lr=1e-30, weight_decay=0.0, max_steps=1, batch_tokens=60)
    trainer.fit(drafter, shallow, make_dataset(), LiveSource(), tmp_path)
    start = make_drafter(shallow, fit_tokens=0)
    untrained = {name: value.clone() for name, value in start.state_dict().items()}
    load_start(tmp_path, start)
    for name, value in drafter.state_dict().items():
        # Entries of 0 change by the rate.
        assert torch.allclose(value, start.state_dict()[name], rtol=1e-6, atol=1e-29), name
    assert not torch.equal(untrained["fc.weight"], start.state_dict()["fc.weight"])
    save_tensors({"fc.weight": torch.zeros(2, 2)}, start_weights_path(tmp_path))
    with pytest.raises(UserError, match="it is of another drafter: fc.weight has another shape"):
        load_start(tmp_path, start)
    Trainer(lr=1e-3, max_steps=1, batch_tokens=60).fit(
        make_drafter(shallow, fit_tokens=0),
        shallow,
        make_dataset(),
        LiveSource(),
        tmp_path / "unfitted",
    )
    assert not start_weights_path(tmp_path / "unfitted").exists()


class LostSource(LiveSource):
    """A server that has gone away."""

    def make_batch(self, request: BatchRequest) -> Batch:
        raise SourceError("server.url: it does not answer")


def test_a_source_that_fails_in_the_fit_says_how_to_go_on(shallow: Target, tmp_path: Path) -> None:
    """The message of the source, and the command that goes on."""
    with pytest.raises(
        RunError,
        match=r"it does not answer; no step was finished; go on with .* trainer\.resume=auto run=",
    ):
        Trainer(max_steps=2, batch_tokens=60).fit(
            make_drafter(shallow), shallow, make_dataset(), LostSource(), tmp_path
        )


def test_a_fit_is_estimated_by_the_speed_of_products(shallow: Target) -> None:
    """A machine that is half as fast takes twice as long, and a smaller vocabulary less long."""

    def make_clock(step: float) -> Callable[[], float]:
        ticks = count()
        return lambda: step * next(ticks)

    drafter = make_drafter(shallow)
    fast, slow = (measure_fit(drafter, make_clock(step)) for step in (1.0, 2.0))
    assert slow.per_token == 2 * fast.per_token > 0 and slow.solving == 2 * fast.solving > 0
    small = make_drafter(shallow, vocab_size=256)
    assert measure_fit(small, make_clock(1.0)).solving < fast.solving


def test_the_operations_of_a_fit_are_counted(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further tokens take what is counted for each, but for attention over these short texts."""
    # The sharpness reads the first batch alone.
    monkeypatch.setattr(fitted_start, "SHARPNESS_ROWS", 1)
    drafter = make_drafter(shallow)
    rows = torch.randint(3, 2000, (6, 40)).tolist()
    dataset = Dataset([Example(row, [True] * 40) for row in rows], 6, 0, 0)
    batch = make_batch(shallow, drafter, dataset)

    def count_operations(num_batches: int) -> int:
        with FlopCounterMode(display=False) as counter:
            fit_eagle(drafter, [batch] * num_batches, shallow)
        return counter.get_total_flops()

    per_token = (count_operations(3) - count_operations(1)) / (2 * batch.tokens.numel())
    assert count_fit(drafter, 240).per_token == pytest.approx(per_token, rel=0.1)
