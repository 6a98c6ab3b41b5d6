"""Drift: a target's judgement of texts, by hand and where the answer is already certain."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.acceptance.typical import TypicalAcceptance
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.ngram import Ngram
from spectrain.eval.drift import Text, agreement, own_answers, quality, rule_drift, target_drift
from spectrain.eval.metrics import Turn
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.trees import Chain


def make_texts() -> list[Text]:
    """Prompts with answers of unequal length."""
    return [
        (torch.randint(3, 2000, (p,)).tolist(), torch.randint(3, 2000, (a,)).tolist())
        for p, a in ((7, 3), (2, 9), (1, 1))
    ]


def make_turn(
    prompt: list[int], plain: list[int] | None = None, drafted: list[int] | None = None
) -> Turn:
    return Turn(
        "id",
        0,
        "any",
        Generation(prompt, list(plain or [])),
        Generation(prompt, list(drafted or [])),
    )


def decode_greedily(target: Target, prompt: list[int], count: int = 8) -> list[int]:
    return decode(target, [prompt], Greedy(), count)[0].output


def make_scaled_target(factor: float) -> Target:
    """The tiny target with every logit times `factor`."""
    target = load_tiny()
    with torch.no_grad():
        target.decoder.norm.weight.mul_(factor)  # type: ignore[union-attr, operator]
    return target


def test_quality_by_hand(tiny: Target) -> None:
    """Perplexity and share of likeliest tokens, pooled over the tokens of all answers, each
    after its own prefix.
    """
    loss = 0.0
    best = 0
    count = 0
    cases = [*make_texts(), ([5, 6, 7], decode_greedily(tiny, [5, 6, 7]))]
    for prompt, answer in cases:
        for position, token in enumerate(answer):
            logits = tiny.run(
                torch.tensor([prompt + answer[:position]]), ForwardPlan(logits=True)
            ).logits
            assert logits is not None
            loss -= math.log(float(logits[0, -1].double().softmax(-1)[token]))
            best += int(logits[0, -1].argmax()) == token
            count += 1
    result = quality(tiny, cases)
    assert result["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-3)
    assert result["most_likely"] == pytest.approx(best / count, abs=1e-4) and 0 < best < count


def test_quality_of_a_target_that_knows_nothing() -> None:
    """Equal logits have the perplexity of the vocabulary's size, and their likeliest token is
    the first.
    """
    head = SimpleNamespace(logits=lambda final: torch.zeros(len(final), 50))

    def features(tokens, layers, texts):
        return SimpleNamespace(at_layer=lambda layer: torch.zeros(*tokens.shape, 4))

    uniform: Any = SimpleNamespace(device="cpu", head=head, features=features)
    assert quality(uniform, [([1, 2], [0, 3, 0]), ([1], [4])]) == {
        "perplexity": 50.0,
        "most_likely": 0.5,
    }


def test_target_drift_of_a_target_from_itself(tiny: Target) -> None:
    """Nothing has drifted: the same likeliest tokens, answers and perplexities, and its greedy
    answers are its likeliest.
    """
    result = target_drift(
        tiny, tiny, own_answers(tiny, [prompt for prompt, _ in make_texts()], 8), 8
    )
    assert result["agreement"] == 1.0 and result["same_answers"] == result["checked"] == 3
    assert (
        result["original"] == result["trained"]
        and result["original"]["most_likely"] == 1.0
        and result["kl"] == 0.0
    )


def test_target_drift_of_a_surer_target(tiny: Target) -> None:
    """Doubled logits choose the same tokens with more certainty: only the perplexity moves; the
    divergence is KL(p || q).
    """
    answers = own_answers(tiny, [prompt for prompt, _ in make_texts()], 8)
    result = target_drift(tiny, make_scaled_target(2.0), answers, 8)
    assert result["agreement"] == 1.0 and result["same_answers"] == result["checked"] == 3
    assert result["trained"]["most_likely"] == 1.0
    assert 1 <= result["trained"]["perplexity"] < result["original"]["perplexity"]
    rows = []
    for prompt, answer in answers:
        final = tiny.features(torch.tensor([prompt + answer]), ("final",)).at_layer("final")
        rows.append(tiny.head.logits(final)[0, len(prompt) - 1 : -1])
    p = torch.cat(rows).softmax(-1)
    q = (2 * torch.cat(rows)).softmax(-1)
    assert result["kl"] == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), abs=1e-3)


def test_target_drift_of_an_opposite_target(tiny: Target) -> None:
    """Negated logits agree nowhere, repeat no answer and find the original's answers as unlikely
    as can be.
    """
    prompts = [prompt for prompt, _ in make_texts()]
    result = target_drift(tiny, make_scaled_target(-1.0), own_answers(tiny, prompts, 8), 8)
    assert (
        result["agreement"] == 0.0
        and result["same_answers"] == 0
        and result["trained"]["most_likely"] == 0.0
    )
    assert result["original"] == quality(
        tiny, [(prompt, decode_greedily(tiny, prompt)) for prompt in prompts]
    )
    assert result["trained"]["perplexity"] > result["original"]["perplexity"]


def test_rule_drift_counts_the_tokens_that_a_rule_changed(tiny: Target) -> None:
    """Greedy answers are all likeliest; with the last of eight tokens replaced, seven of eight
    are.
    """
    prompts = [[5, 6, 7, 8], [40, 41]]
    plain = [decode_greedily(tiny, prompt) for prompt in prompts]
    assert [len(answer) for answer in plain] == [8, 8]
    drafted = [[*answer[:-1], (answer[-1] + 1) % 2000] for answer in plain]
    result = rule_drift(tiny, [make_turn(*case) for case in zip(prompts, plain, drafted)])
    assert (
        result["autoregressive"]["most_likely"] == 1.0 and result["drafted"]["most_likely"] == 0.875
    )
    assert result["drafted"]["perplexity"] > result["autoregressive"]["perplexity"]


def test_rule_drift_of_typical_acceptance(tiny: Target) -> None:
    """Among one candidate typical acceptance is greedy, so nothing drifts; at a high temperature
    it is far from likeliest.
    """
    prompts = [[5, 6, 7, 8, 5, 6, 7], [40, 41, 42, 40, 41]]
    plain = [decode_greedily(tiny, prompt) for prompt in prompts]
    sides = []
    for rule in (TypicalAcceptance(top_k=1), TypicalAcceptance(temperature=3.0)):
        drafted = decode(tiny, prompts, rule, 8, Ngram(tiny), Chain(3))
        sides.append(
            rule_drift(
                tiny, [make_turn(p, a, d.output) for p, a, d in zip(prompts, plain, drafted)]
            )
        )
    assert sides[0]["drafted"] == sides[0]["autoregressive"] == sides[1]["autoregressive"]
    assert sides[0]["drafted"]["most_likely"] == 1.0
    assert sides[1]["drafted"]["most_likely"] < 0.5 and sides[1]["drafted"]["perplexity"] > 10


def test_agreement_is_what_stands_before_the_first_difference() -> None:
    """Equal answers agree wholly, others up to where they part, one that ends early as far as it
    goes; pooled over tokens.
    """
    assert agreement([([1, 2, 3, 4], [1, 2, 3, 4])]) == {
        "agreement": 1.0,
        "same_answers": 1,
        "checked": 1,
    }
    result = agreement([([1, 2, 3, 4], [1, 9, 3, 4]), ([5, 6], [5]), ([7, 8], [7, 8])])
    assert result == {"agreement": 0.5, "same_answers": 1, "checked": 3}
