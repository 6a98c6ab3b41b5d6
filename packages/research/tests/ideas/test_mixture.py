"""Mixture of Attentions: the layer attention by hand, cuts, and what is trained is what is
decoded.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain_research.mixture import drafter as module
from spectrain_research.mixture.drafter import MixtureOfAttentions, sample_steps, see_before_cuts
from tests.drafters.forced import shaken, walk
from tests.factories import random_batch

STEPS = 3


@pytest.fixture(scope="module")
def drafter(shallow: Target) -> MixtureOfAttentions:
    drafter: MixtureOfAttentions = shaken(
        MixtureOfAttentions(shallow, num_steps=STEPS, vocab_size=512), shallow
    )
    return drafter


def test_training_equals_decoding_along_the_true_path(
    shallow: Target, drafter: MixtureOfAttentions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log q after every cut, out of the training loss with cuts that are forced, is that of
    drafting along the true path.
    """
    batch = random_batch(shallow, drafter.layers)
    trained = {}
    for offset in range(STEPS):
        steps = ((torch.arange(32) + offset) % STEPS).minimum(torch.arange(32)).expand(2, -1)
        monkeypatch.setattr(module, "sample_steps", lambda *_, steps=steps: steps)
        states: list[Tensor] = []

        def record_states(
            self: Supervision, hidden: Tensor, *rest: Any, states: list[Tensor] = states
        ) -> tuple[Tensor, Tensor]:
            states.append(hidden)
            return hidden.sum(), torch.zeros(len(hidden))

        monkeypatch.setattr(Supervision, "judge_states", record_states)
        with torch.no_grad():
            drafter.loss(batch, shallow, TrainingState())
            log_q = drafter.lm_head(states[0]).log_softmax(-1)
        entries = [(row, entry) for row in range(2) for entry in range(30)]
        for (row, entry), log_q_of_cuts in zip(entries, log_q, strict=True):
            step = int(steps[row, entry])
            trained[row, entry - step, step] = log_q_of_cuts
    count = 0
    for row, index, log_q_of_cuts in walk(drafter, shallow, batch.tokens, STEPS):
        for step in range(STEPS):
            if (row, index, step) in trained:
                torch.testing.assert_close(
                    log_q_of_cuts[step], trained[row, index, step], rtol=1e-3, atol=1e-3
                )
                count += 1
    assert count > 20


def test_layer_attention_is_a_mean_over_layers(
    shallow: Target, drafter: MixtureOfAttentions
) -> None:
    """Every head by hand over the layers of one token; the other tokens do not matter."""
    torch.manual_seed(1)
    states = torch.randn(1, 2, len(drafter.read_layers), shallow.width)
    attention = drafter.layer_attention
    x = drafter.layer_norm(states[0, 1])
    parts = attention.qkv_proj(attention.input_layernorm(x)).unflatten(
        -1, (3, -1, attention.head_dim)
    )
    q, k, v = parts.permute(1, 2, 0, 3)
    attended = ((q @ k.mT / attention.head_dim**0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)
    x = x + attention.o_proj(attended)
    x = x + attention.mlp(attention.post_attention_layernorm(x))
    torch.testing.assert_close(drafter.mix_layers(states)[0, 1], x.mean(0), rtol=1e-4, atol=1e-5)


def test_packed_equals_padded_and_cuts_are_bounded(
    shallow: Target, drafter: MixtureOfAttentions
) -> None:
    padded = random_batch(shallow, drafter.layers, (2, 20))
    packed = Batch(
        padded.tokens.flatten()[None], padded.loss_mask.flatten()[None], lengths=(20, 20)
    )
    packed = replace(
        packed, features=shallow.features(packed.tokens, drafter.layers, packed.lengths)
    )
    with torch.no_grad():
        first, second = (
            drafter.loss(batch, shallow, TrainingState(step=4)) for batch in (padded, packed)
        )
    torch.testing.assert_close(first.total, second.total, rtol=1e-4, atol=1e-4)
    assert torch.equal(first.counts, second.counts) and int(first.counts.sum()) == 36
    steps = sample_steps(padded, STEPS, 0, 4)
    assert steps[:, 0].tolist() == [0, 0] and set(steps.flatten().tolist()) == set(range(STEPS))
    visible = see_before_cuts(padded.positions, steps)
    assert torch.equal(visible.sum(-1), torch.arange(1, 21) - steps)
