"""Calibration of estimated acceptance: temperatures, errors, and the rounds that they come from."""

import numpy as np
import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.dspark import DSpark, DSparkConfig
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_serve.times.confidence import (
    NUM_BINS,
    TEMPERATURES,
    JudgedRounds,
    calibrate,
    compute_survival,
    fit_temperatures,
    measure_error,
    measure_errors,
    record_rounds,
)

POSITIONS = 4


def simulate_rounds(count: int, temperatures: list[float], seed: int) -> JudgedRounds:
    """Draw rounds whose draft tokens are accepted with the probability of estimates at these
    temperatures.
    """
    random = np.random.default_rng(seed)
    logits = random.normal(1.0, 1.5, (count, len(temperatures)))
    chances = 1 / (1 + np.exp(-logits / np.array(temperatures)))
    accepted = (random.random(chances.shape) < chances).cumprod(axis=1).astype(bool)
    return JudgedRounds(1 / (1 + np.exp(-logits)), accepted)


def test_error_is_that_of_the_definition() -> None:
    random = np.random.default_rng(0)
    probs = random.random(200)
    outcomes = random.random(200) < 0.5
    expected = 0.0
    for bin in range(NUM_BINS):
        inside = [at for at, prob in enumerate(probs) if bin <= prob * NUM_BINS < bin + 1]
        if inside:
            expected += len(inside) / 200 * abs(probs[inside].mean() - outcomes[inside].mean())
    assert measure_error(probs, outcomes) == pytest.approx(expected)


def test_temperatures_of_the_rounds_are_found_and_mend_the_error() -> None:
    truth = [2.0, 1.0, 0.5, 3.0]
    fitted = fit_temperatures(simulate_rounds(6_000, truth, seed=1))
    # Three steps of the grid.
    assert np.abs(np.log(np.array(fitted) / truth)).max() < 3.01 * np.log(
        TEMPERATURES[1] / TEMPERATURES[0]
    )
    result = calibrate(simulate_rounds(6_000, truth, 1), simulate_rounds(6_000, truth, 2))
    assert max(result["ece_after"]) < 0.03 < 0.05 < max(result["ece_before"])
    assert result["rounds"] == result["judged_rounds"] == 6_000


def test_right_estimates_keep_their_error() -> None:
    rounds = simulate_rounds(6_000, [1.0] * POSITIONS, seed=3)
    assert fit_temperatures(rounds) == pytest.approx([1.0] * POSITIONS, rel=0.42)
    assert max(measure_errors(rounds, [1.0] * POSITIONS)) < 0.03


def test_survival_is_the_product_of_scaled_estimates() -> None:
    estimates = np.array([[0.9, 0.5], [0.2, 0.8]])
    assert compute_survival(estimates, [1.0, 1.0]) == pytest.approx(estimates.cumprod(axis=1))
    # A logit over 2 is the root of the odds.
    root = np.sqrt(estimates / (1 - estimates))
    assert compute_survival(estimates, [2.0, 2.0]) == pytest.approx(
        (root / (1 + root)).cumprod(axis=1)
    )


def test_few_rounds_are_refused() -> None:
    rounds = simulate_rounds(60, [1.0], seed=0)
    with pytest.raises(UserError, match=r"eval\.confidence=true: 10 rounds"):
        calibrate(rounds, JudgedRounds(rounds.estimates[:10], rounds.accepted[:10]))


def test_recorded_rounds_are_those_of_decoding(tiny: Target) -> None:
    """Estimates change no round, and a round's accepted tokens are those that decoding emits."""
    torch.manual_seed(0)
    drafter = DSpark(tiny, DSparkConfig(block_size=5, num_layers=1, rank=8))
    counts = torch.ones(tiny.head.vocab_size)
    counts[tiny.tokenizer.all_special_ids] = 0  # a mask among them
    drafter.prepare(tiny, counts)
    prompts = [tiny.tokenizer.encode(text) for text in ("Why is the sky?", "Name a fruit.")]
    builder = Chain(POSITIONS)
    rounds = record_rounds(tiny, drafter, builder, Greedy(), prompts, 6)
    plain = [decode(tiny, [prompt], Greedy(), 6, drafter, builder)[0] for prompt in prompts]
    lengths = [length for answer in plain for length in answer.round_lengths]
    assert (1 + rounds.accepted.sum(axis=1)).tolist() == lengths
    assert rounds.estimates.shape == (len(lengths), POSITIONS)
    # The first estimate of a round belongs to its root.
    assert ((rounds.estimates > 0) & (rounds.estimates < 1)).all()
    assert not drafter.capabilities.estimates_acceptance
