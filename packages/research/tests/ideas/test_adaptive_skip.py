"""Layers that are skipped by a Gaussian process, by the prompt and by a probe: each against a
plain version.
"""

from itertools import chain, combinations

import pytest
import torch
import torch.nn.functional as F

from packages.research.tests.drafters.test_layer_skip import pair
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain_research.layer_skip.adaptive import RIDGE, AdaptiveSkipping
from spectrain_research.layer_skip.drafter import LayerSkipping
from spectrain_research.layer_skip.gaussian import NOISE, GaussianProcess, search_halves
from spectrain_research.layer_skip.sets import SetScorer, is_valid, merge_halves, split_layer
from tests.decoding.rounds import begun

PROMPTS = [[5, 6, 7, 8], [40, 41, 42, 43]]


@pytest.fixture(scope="module")
def target(tiny: Target) -> Target:
    return pair(tiny, 3)[0]


@pytest.fixture(scope="module")
def texts(target: Target) -> list[tuple[list[int], list[int]]]:
    return [
        (prompt, decode(target, [prompt], Greedy(), 8, ignore_eos=True)[0].output)
        for prompt in PROMPTS
    ]


def test_the_process_is_the_closed_form() -> None:
    """Mean and deviation by the inverse of the covariance; the expected improvement by
    integration.
    """
    torch.manual_seed(0)
    bits = torch.randint(2, (5, 8)).double()
    scores = torch.randn(5).double()
    new = torch.randint(2, (3, 8)).double()
    process = GaussianProcess(bits, scores)

    def compute_kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.exp(-(a[:, None] - b).square().sum(-1) / 2)

    inverse = torch.linalg.inv(compute_kernel(bits, bits) + NOISE * torch.eye(5).double())
    scale = scores.std(unbiased=False)
    mean = scores.mean() + compute_kernel(new, bits) @ inverse @ (scores - scores.mean())
    variance = 1 - (compute_kernel(new, bits) @ inverse @ compute_kernel(bits, new)).diagonal()
    torch.testing.assert_close(
        process.predict(new), (mean, scale * variance.clamp(min=1e-12).sqrt()), rtol=1e-5, atol=1e-5
    )
    grid = torch.linspace(-8, 8, 20_001).double()
    density = torch.exp(-grid.square() / 2) / (2 * torch.pi) ** 0.5
    for value, at, deviation in zip(process.expected_improvement(new, 0.3), *process.predict(new)):
        gains = (at + deviation * grid - 0.3).clamp(min=0)
        assert float(value) == pytest.approx(
            float(torch.trapezoid(gains * density, grid)), abs=1e-4
        )


def test_bayes_finds_a_set_near_the_best(
    target: Target, texts: list[tuple[list[int], list[int]]]
) -> None:
    """With 24 of the 56 or so sets of six halves, the result is within 2 % of the best of all."""
    scorer = SetScorer(target, texts, 4)
    halves = [half for layer in range(3) for half in split_layer(layer)]
    every = {merge_halves(some) for some in chain(*(combinations(halves, n) for n in range(1, 6)))}
    best = max(scorer.score_set(skipped) for skipped in every if is_valid(skipped, 3))
    assert scorer.score_set(search_halves(target, texts, 4, 24)) >= 0.98 * best
    drafter = LayerSkipping(target, search_by="bayes", search_steps=12)
    drafter.search(target, texts, 4)
    assert drafter.saved.settings["skipped"]


@pytest.mark.parametrize("builder", [Chain(3), Eagle2(3, 8, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("by", ["prompt", "token"])
def test_adaptive_drafts_are_verified(
    target: Target, texts: list[tuple[list[int], list[int]]], by: str, builder: Chain
) -> None:
    drafter = AdaptiveSkipping(target, by, 1)  # type: ignore[arg-type]
    if drafter.capabilities.search is not None:
        drafter.search(target, texts, 3)
    expected = [
        generation.output for generation in decode(target, PROMPTS, Greedy(), 10, ignore_eos=True)
    ]
    assert [
        generation.output
        for generation in decode(target, PROMPTS, Greedy(), 10, drafter, builder, ignore_eos=True)
    ] == expected


def test_sets_follow_prompt_and_probe(
    target: Target, texts: list[tuple[list[int], list[int]]]
) -> None:
    """The prompt's cosines by hand; the probe is the ridge solution, and its best layer is
    skipped.
    """
    drafter = AdaptiveSkipping(target, "prompt", 1)
    context = begun(target, PROMPTS, drafter, Chain(3))
    with torch.inference_mode():
        drafter.draft(context)
        hidden = target.features(torch.tensor(PROMPTS), tuple(range(4))).hidden
        cosines = [
            float(F.cosine_similarity(hidden[..., k, :], hidden[..., k + 1, :], dim=-1).mean())
            for k in range(3)
        ]
        assert drafter.skipped == {cosines.index(max(cosines))}
        probe = AdaptiveSkipping(target, "token", 1)
        probe.search(target, texts, 3)
        scorer = SetScorer(target, texts, 3)
        inputs = F.pad(F.rms_norm(scorer.final, scorer.final.shape[-1:]), (0, 1), value=1.0)
        plans = [ForwardPlan(layers=("final",), span=LayerSpan(skipped=[k])) for k in range(3)]
        labels = torch.stack(
            [
                (
                    target.head.logits(
                        target.run(scorer.tokens, plan).at_layer("final")[scorer.answers]
                    ).argmax(-1)
                    == scorer.labels
                )
                for plan in plans
            ],
            dim=1,
        ).float()
        assert probe.probe is not None
        weights = probe.probe
        gradient = inputs.T @ (inputs @ weights - labels) + RIDGE * F.pad(
            weights[:-1], (0, 0, 0, 1)
        )
        assert float(gradient.abs().max()) < 1e-3
        context = begun(target, PROMPTS, probe, Chain(3))
        probe.draft(context)
        final = F.rms_norm(context.last_state(context.new_features.at_layer("final"))[:, 0], (32,))
        assert probe.skipped == {int((F.pad(final, (0, 1), value=1.0) @ weights).mean(0).argmax())}
