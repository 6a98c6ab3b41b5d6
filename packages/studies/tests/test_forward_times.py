"""MoESD's model of a forward's time: its terms by hand, and a fit to times that it made."""

import random
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain_studies.axes.forward_times import (
    ForwardTimes,
    describe_forward_times,
    find_expert_share,
    fit_forward_times,
    list_features,
    roofline_growth,
)
from spectrain_studies.axes.points import RoundTimes
from spectrain_studies.axes.sweep import summarize_forward_times
from tests.targets import cut_tiny

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SPARSE = ForwardTimes(1 / 16, 64.0, 1.003, (2e-3, 1e-3, 20e-3, 0.5e-3), 0.0)
DENSE = ForwardTimes(1.0, 32.0, 1.01, (5e-3, 4e-3, 0.0, 0.0), 0.0)


def test_share_of_chosen_experts_is_the_papers() -> None:
    """N(t) = E (1 - ((E - K) / E)^t): of 512 experts, four rows of ten each choose 38.8."""
    assert 512 * list_features(4, 10 / 512, 8, 1.1)[2] == pytest.approx(38.8, abs=0.05)
    assert list_features(1, 1 / 16, 8, 1.1)[2] == pytest.approx(1 / 16)


def test_growth_is_smooth_at_the_ridge() -> None:
    """Below it a row multiplies the time by the factor; behind it the time is the tangent."""
    assert roofline_growth(3, 8, 1.1) == pytest.approx(1.1**3)
    step = 1e-4
    below = (roofline_growth(8, 8, 1.1) - roofline_growth(8 - step, 8, 1.1)) / step
    above = (roofline_growth(8 + step, 8, 1.1) - roofline_growth(8, 8, 1.1)) / step
    assert above == pytest.approx(below, rel=1e-3)
    assert roofline_growth(18, 8, 1.1) - roofline_growth(17, 8, 1.1) == pytest.approx(above)


def test_chosen_experts_are_those_of_random_rows() -> None:
    """Drawn rows that choose 2 of 16 experts each choose so large a share of them together."""
    source = random.Random(0)
    model = ForwardTimes(2 / 16, 1e9, 1.0, (0.0, 0.0, 1.0, 0.0), 0.0)
    for rows in (1, 4, 12):
        shares = [
            len({expert for _ in range(rows) for expert in source.sample(range(16), 2)}) / 16
            for _ in range(4000)
        ]
        assert model.estimate_seconds(rows) == pytest.approx(sum(shares) / 4000, rel=0.02)


@pytest.mark.parametrize("made", [SPARSE, DENSE], ids=["experts", "dense"])
def test_a_fit_predicts_new_sizes(made: ForwardTimes) -> None:
    """Times with errors of 1 % give the efficiency of other sizes to 3 %."""
    source = random.Random(1)
    rows = [count * width for count in SIZES for width in (1, 5)]
    seconds = [made.estimate_seconds(count) * source.gauss(1, 0.01) for count in rows]
    fitted = fit_forward_times(rows, seconds, made.share)
    assert fitted is not None and fitted.error < 0.02
    for texts in (3, 12, 48, 100):
        assert fitted.estimate_efficiency(texts, 5) == pytest.approx(
            made.estimate_efficiency(texts, 5), rel=0.03
        )
    assert fit_forward_times(rows[:4], seconds[:4], made.share) is None


def test_experts_make_moderate_batches_the_best() -> None:
    """Few texts choose few experts, so that more rows read more weights; many texts choose all of
    them. Without experts one text is the best.
    """
    assert 4 < SPARSE.find_best_batch(5, 128) < 128
    assert DENSE.find_best_batch(5, 128) == 1
    edges = SPARSE.estimate_efficiency(1, 5), SPARSE.estimate_efficiency(128, 5)
    assert max(edges) < SPARSE.estimate_efficiency(SPARSE.find_best_batch(5, 128), 5)


def test_a_sweep_says_what_the_fit_says() -> None:
    """The sweep's steps have a row a text, its rounds as many as it verified."""
    times = {
        size: RoundTimes(
            1.0, SPARSE.estimate_seconds(size), 1.0, 0.0, SPARSE.estimate_seconds(5 * size), 5.0
        )
        for size in SIZES
    }
    fitted = summarize_forward_times(times, SPARSE.share)
    assert fitted is not None and fitted["nodes"] == 5 and fitted["largest"] == 128
    assert fitted["best_batch"] == pytest.approx(SPARSE.find_best_batch(5, 128), rel=0.2)
    (sentence,) = describe_forward_times(fitted)
    assert f"with {fitted['best_batch']} of up to 128 texts" in sentence
    assert summarize_forward_times({1: times[1], 2: times[2]}, 1.0) is None


def test_a_target_without_experts_chooses_all_of_its_weights() -> None:
    """With experts it is the share that the architecture's configuration gives a row."""
    assert find_expert_share(cut_tiny(1)) == 1.0
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=8,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    assert find_expert_share(SimpleNamespace(model=model)) == 2 / 8  # type: ignore[arg-type]
