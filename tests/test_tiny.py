"""The tiny target has real language statistics, so that acceptance lengths measured on it mean
something.
"""

import pytest
import torch

from spectrain.data.chat import tokenize_prompt
from spectrain.data.readers import EmbeddedReader
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.eval.prompts import read_prompts
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2

LENGTH = 48


@pytest.fixture(scope="module")
def prompts(tiny: Target) -> list[list[int]]:
    """Return the held-out prompts, on subjects that the tiny target was never trained on."""
    openings = [
        [{"role": "user", "content": prompt.turns[0]}] for prompt in read_prompts(None, 30).prompts
    ]
    return [tokenize_prompt(tiny.template, opening) for opening in openings]


def measure_acceptance(
    tiny: Target, prompts: list[list[int]], drafter: Drafter, builder: Chain | Eagle2
) -> float:
    rounds = [
        n
        for p in prompts
        for g in decode(tiny, [p], Greedy(), LENGTH, drafter, builder)
        for n in g.complete_round_lengths
    ]
    return sum(rounds) / len(rounds)


@pytest.mark.slow
def test_entropy_of_held_out_text(tiny: Target, prompts: list[list[int]]) -> None:
    """Over its own sampled answers to held-out prompts, the next token has at least two nats of
    entropy.
    """
    entropies = []
    for row, prompt in enumerate(prompts):
        answer = decode(tiny, [prompt], Match(1.0), LENGTH, sequence_ids=[row])[0].output
        logits = tiny.run(torch.tensor([prompt + answer]), ForwardPlan(logits=True)).logits
        assert logits is not None
        log_p = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    assert torch.cat(entropies).mean() >= 2.0


@pytest.mark.slow
def test_copying_does_not_explain_it(tiny: Target, prompts: list[list[int]]) -> None:
    """N-gram lookup accepts at most two tokens per forward."""
    assert measure_acceptance(tiny, prompts, Ngram(tiny), Chain(3)) <= 2.0


@pytest.mark.slow
def test_an_untrained_drafter_knows_nothing(tiny: Target, prompts: list[list[int]]) -> None:
    """EAGLE-3 before its first step accepts fewer than 1.2 tokens per forward, even with a tree."""
    drafter = Eagle3(tiny, ttt_steps=3).eval()
    drafter.prepare(
        tiny,
        EmbeddedReader(limit=50).make_dataset(tiny.template).token_counts(tiny.head.vocab_size),
    )
    assert measure_acceptance(tiny, prompts, drafter, Eagle2(depth=5, budget=16, top_k=4)) < 1.2
