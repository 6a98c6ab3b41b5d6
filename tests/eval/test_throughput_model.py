"""The surveys' throughput model of chains."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from spectrain.decoding.generation import Generation
from spectrain.eval.headline import describe_headline, list_throughput_models
from spectrain.eval.metrics import Turn
from spectrain.eval.throughput_model import (
    choose_length,
    expect_speedup,
    expect_tokens,
    fit_throughput_model,
    have_equal_lengths,
)


def make_generation(rounds: list[int], depth: int, seconds: dict[str, float]) -> Generation:
    """Rounds that emit so many tokens each, of drafts of this depth."""
    return Generation(
        [1],
        list(range(1 + sum(rounds))),
        rounds,
        [depth] * len(rounds),
        [depth + 1] * len(rounds),
        is_done=True,
        seconds={"prefill": 9.0, "draft": 0.0, "verify": 0.0, "accept": 0.0, "commit": 0.0}
        | seconds,
    )


def test_expected_tokens_are_those_of_a_simulation() -> None:
    """Drafts that are right at random emit E[N] tokens in a round; by the closed form too."""
    source = random.Random(0)
    lengths = []
    for _ in range(20000):
        count = 1
        while count <= 4 and source.random() < 0.7:
            count += 1
        lengths.append(count)
    assert expect_tokens(0.7, 4) == pytest.approx(sum(lengths) / len(lengths), rel=0.02)
    assert expect_tokens(0.7, 4) == pytest.approx((1 - 0.7**5) / 0.3)
    assert expect_tokens(1.0, 4) == 5


def test_the_best_length_is_where_a_longer_one_gains_nothing() -> None:
    """With alpha 0.8 and c 0.04: 4.329 / 1.32, 4.463 / 1.36 and 4.570 / 1.40 for lengths of 8, 9
    and 10. Drafts that cost a step each are never worth it."""
    best, speedup = choose_length(0.8, 0.04)
    assert speedup == expect_speedup(0.8, 0.04, best)
    assert all(expect_speedup(0.8, 0.04, gamma) <= speedup for gamma in range(33))
    assert best == 9 and speedup == pytest.approx(4.463 / 1.36, abs=1e-3)
    assert choose_length(0.8, 1.0) == (0, 1.0)


def test_alpha_counts_judged_tokens() -> None:
    """Rounds of 1, 3 and 4 tokens with drafts of 3 judged 1, 3 and 3 tokens and accepted 0, 2 and
    3; a draft token takes half a step."""
    plain = make_generation([1] * 8, 0, {"verify": 8.0})
    drafted = make_generation([1, 3, 4], 3, {"draft": 4.5, "verify": 6.0})
    model = fit_throughput_model([Turn("a", 0, "all", plain, drafted)])
    assert model is not None
    assert model.alpha == pytest.approx(5 / 7, abs=1e-4)
    assert model.c == 0.5
    assert model.gamma == 3
    assert model.speedup == pytest.approx(expect_tokens(5 / 7, 3) / 2.5, abs=1e-3)
    assert model.expected_tokens == pytest.approx(expect_tokens(5 / 7, 3), abs=1e-3)
    batch = Turn("a", 0, "all", replace(plain, batch_size=4), replace(drafted, batch_size=4))
    assert fit_throughput_model([batch]) == model


def test_the_glossary_has_the_formulas_that_a_score_prints() -> None:
    """The glossary's formulas, computed from the alpha, c and gamma that the first lines print of a
    trace, give the E[N], the V_SD and the best gamma that they print.
    """
    page = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    tokens = re.search(r"E\[N\] = (\(1 - .+?\)) are", page)
    speedup = re.search(r"V_SD = (E\[N\] / \(.+?\)) the", page)
    assert tokens and speedup

    def compute(alpha: float, c: float, gamma: float) -> tuple[float, float]:
        numbers = {"alpha": alpha, "c": c, "gamma": gamma}
        length = eval(tokens[1].replace("^", "**"), numbers)
        formula = speedup[1].replace("E[N]", repr(length)).replace("gamma c", "gamma * c")
        return length, eval(formula, numbers)

    plain = make_generation([1] * 40, 0, {"verify": 40.0})
    drafted = make_generation([1, 3, 4, 2, 4] * 4, 3, {"draft": 60 * 0.0625, "verify": 20.0})
    turns = [Turn("a", 0, "all", plain, drafted)]
    model = fit_throughput_model(turns)
    assert model is not None
    entry = {
        "label": "chain of 3",
        "acceptance_length": {"pooled": 2.8},
        "speedup": {"ratio": 2.0},
        "throughput_model": vars(model),
    }
    (sentence,) = list_throughput_models({**entry, "compared": {}})
    alpha, c, gamma, length, measured, ratio, _, best, best_ratio = map(
        float, re.findall(r"\d+\.?\d*", sentence.split(":", 1)[1])
    )
    assert (gamma, c, measured) == (3, 0.06, 2.8) and alpha == round(model.alpha, 2)
    assert compute(model.alpha, 0.0625, 3) == pytest.approx((length, ratio), abs=0.006)
    choices = {count: compute(model.alpha, 0.0625, count)[1] for count in range(33)}
    assert best == max(choices, key=choices.__getitem__) not in (0, 32)
    assert choices[int(best)] == pytest.approx(best_ratio, abs=0.006)


def test_drafts_of_several_lengths_are_averaged() -> None:
    """A copying drafter drafts nothing in many rounds."""
    plain = make_generation([1] * 4, 0, {"verify": 4.0})
    drafted = replace(
        make_generation([1, 1, 1, 4], 3, {"draft": 0.3, "verify": 4.0}), depths=[0, 0, 0, 3]
    )
    model = fit_throughput_model([Turn("a", 0, "all", plain, drafted)])
    assert model is not None and model.gamma == 0.75 and model.alpha == 1.0
    assert model.expected_tokens == (1 + 1 + 1 + 4) / 4
    assert model.speedup == pytest.approx(1.75 / (0.75 * 0.1 + 1), abs=1e-3)
    # By alpha and c alone a chain of 32 would be 7.86 times as fast, but three rounds of four
    # found nothing to draft.
    assert model.best_gamma is None and model.best_speedup is None


@pytest.mark.parametrize(
    ("depths", "expected"),
    [([3] * 20, True), ([3] * 19 + [0], True), ([3] * 18 + [0, 0], False), ([3, 2], False)],
)
def test_the_lengths_of_a_chain_are_equal(depths: list[int], expected: bool) -> None:
    assert have_equal_lengths(depths) is expected


def test_untimed_or_undrafted_rounds_have_no_model() -> None:
    plain = make_generation([1] * 8, 0, {"verify": 8.0})
    undrafted = make_generation([1] * 8, 0, {"verify": 8.0})
    assert fit_throughput_model([Turn("a", 0, "all", plain, undrafted)]) is None
    untimed = make_generation([2, 2], 1, {"verify": 3.0})
    assert fit_throughput_model([Turn("a", 0, "all", plain, untimed)]) is None


def test_the_headline_has_the_model_of_the_first_chain() -> None:
    """It stands in the first lines beside what was measured; chains after it are for the notes."""
    model = {"alpha": 0.5, "c": 0.25, "gamma": 3.0, "expected_tokens": 1.875, "speedup": 1.0714}
    numbers = {
        "acceptance_length": {"pooled": 1.9},
        "speedup": {"ratio": 0.8},
        "throughput_model": model | {"best_gamma": 1, "best_speedup": 1.2},
        "setting": {"prompts": 4},
    }
    copies = {**numbers, "label": "n-gram", "throughput_model": {**model, "best_gamma": 0}}
    summary = {**numbers, "label": "chain of 3", "compared": {"ngram": copies}}
    first, second = list_throughput_models(summary)
    assert describe_headline({**summary, "server": "vllm"})[-1] == first
    assert first == (
        "In the surveys' symbols, chain of 3: alpha = 0.50, c = 0.25, gamma = 3; E[N] = 1.88, 1.90 "
        "measured; V_SD = 1.07, 0.80 measured; best gamma = 1, V_SD = 1.20."
    )
    assert "n-gram" in second and second.endswith("no gamma gains.")
    for best, end in (
        (None, "its drafts have several lengths, so no gamma is the best."),
        (32, "best gamma = 32 or more, V_SD = 1.20."),
    ):
        own = {**numbers["throughput_model"], "best_gamma": best}
        entry = {**numbers, "label": "chain", "throughput_model": own}
        assert describe_headline({**entry, "compared": {}, "server": "vllm"})[-1].endswith(end)
