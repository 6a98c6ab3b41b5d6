"""Greedy identity at length: what drafts in one pass, trained for a little, changes no answer of
sixty.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from spectrain.config.spec import RunSpec
from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.eval.identity import NEAR_TIE, first_difference, logit_gap
from spectrain.eval.prompts import read_prompts
from spectrain.export.converter import read_drafter
from spectrain.export.measure import load_drafter
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.runs.train import train_and_score
from spectrain.trees import Chain, Eagle2, TreeBuilder

PROMPTS = 60
TOKENS = 32
TOGETHER = 12
BUILDERS = (Chain(4), Eagle2(4, 12, 4))


@cache
def reference_answers(target: Target) -> list[tuple[list[int], list[int]]]:
    """Return held-out prompts with the outputs of transformers' generate."""
    prompts = [
        tokenize_prompt(target.template, prompt.opening_conversation)
        for prompt in read_prompts(None, PROMPTS).prompts
    ]
    with reference_model(target) as model:
        return [(prompt, generate(model, prompt, TOKENS, target.stop_ids)) for prompt in prompts]


def draft_answers(target: Target, drafter: Drafter, builder: TreeBuilder) -> Iterator[Generation]:
    """The answers with a drafter, several prompts at a time."""
    prompts = [prompt for prompt, _ in reference_answers(target)]
    for first in range(0, len(prompts), TOGETHER):
        yield from decode(
            target, prompts[first : first + TOGETHER], Greedy(), TOKENS, drafter, builder
        )


def assert_identical(target: Target, drafter: Drafter, builder: TreeBuilder) -> float:
    """Every answer is `generate`'s, or parts from it where the two best logits nearly tie; gives
    tokens per forward.
    """
    generations = list(draft_answers(target, drafter, builder))
    for (prompt, expected), generation in zip(reference_answers(target), generations, strict=True):
        position = first_difference(generation.output, expected)
        assert position is None or logit_gap(target, prompt + expected[:position]) < NEAR_TIE, (
            prompt,
            generation.output,
            expected,
        )
    rounds = [count for generation in generations for count in generation.complete_round_lengths]
    return sum(rounds) / len(rounds)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dflash", "dspark", "dflash2", "peagle"])
def test_sixty_answers_are_the_targets(recipe: str, tiny: Target, tmp_path: Path) -> None:
    """Chains and trees of a drafter that has learnt something, held against transformers'
    generate.
    """
    words = [
        f"recipe={recipe}",
        "target=tiny",
        "eval=none",
        f"run={tmp_path}",
        "++data.limit=60",
        "++trainer.epochs=2",
    ]
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config: Any = compose("train", overrides=words)
    train_and_score(RunSpec.from_config(config, words))
    drafter = load_drafter(read_drafter(tmp_path / "drafter"), tiny)
    lengths = [assert_identical(tiny, drafter, builder) for builder in BUILDERS]
    assert len(reference_answers(tiny)) == PROMPTS and min(lengths) > 1.05, lengths
