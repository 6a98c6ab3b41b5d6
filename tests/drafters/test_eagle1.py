"""EAGLE-1 and HASS: the layer is Llama's, what is trained is what is decoded, the losses are the
papers'.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle1 import Eagle1
from spectrain.drafters.layers.llama_layer import llama_config
from spectrain.drafters.layers.losses import forward_kl, top_k_loss
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from tests.factories import random_batch

from .forced import shaken, walk

STEPS = 3


def make_drafter(target: Target, **options: Any) -> Eagle1:
    return shaken(Eagle1(target, **{"num_steps": STEPS, "noise": 0.0, **options}), target, 0.1)  # type: ignore[no-any-return]


def unroll_steps(drafter: Eagle1, batch: Batch) -> list[Tensor]:
    """Compute the features [B, T, D] of every step, as HASS trains them: each step reads the one
    before it as a constant.
    """
    assert batch.features is not None
    hidden = batch.features.at_layer("final")
    keys_values = []
    states = []
    for step in range(STEPS):
        hidden, step_keys_values = drafter.run_step(batch, hidden.detach(), step, keys_values[:])
        keys_values.append(step_keys_values)
        states.append(hidden)
    return states


@torch.no_grad()
def test_the_layer_is_llamas_without_its_first_norm(shallow: Target) -> None:
    """The first step's features are those of transformers' own layer over fc [E(x); f]."""
    drafter = make_drafter(shallow, bias=True)
    batch = random_batch(shallow, drafter.layers)
    assert batch.features is not None and drafter.fc.bias is not None
    config = llama_config(shallow)
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0)
    state = {k: v for k, v in drafter.state_dict().items() if not k.startswith("fc.")}
    layer.load_state_dict(state | {"input_layernorm.weight": torch.ones(shallow.width)})
    layer.register_module("input_layernorm", nn.Identity())
    embedded = shallow.head.embed(batch.tokens.roll(-1, dims=1))
    x = (
        torch.cat([embedded, batch.features.at_layer("final")], dim=-1) @ drafter.fc.weight.T
        + drafter.fc.bias
    )
    positions = torch.arange(x.shape[1])[None]
    expected = layer(
        x, position_embeddings=LlamaRotaryEmbedding(config)(x, positions), position_ids=positions
    )
    actual, _ = drafter.run_step(batch, batch.features.at_layer("final"), 0, [])
    torch.testing.assert_close(
        actual, expected if isinstance(expected, Tensor) else expected[0], rtol=1e-4, atol=1e-4
    )


def test_training_equals_decoding_along_the_true_path(shallow: Target) -> None:
    """Harmonized context alignment: every training step's log q is that of drafting after the
    same true tokens.
    """
    drafter = make_drafter(shallow)
    batch = random_batch(shallow, drafter.layers)
    with torch.no_grad():
        trained = [drafter.log_q(hidden) for hidden in unroll_steps(drafter, batch)]
    for row, index, log_q in walk(drafter, shallow, batch.tokens, STEPS):
        for step in range(STEPS):
            torch.testing.assert_close(log_q[step], trained[step][row, index], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("top_k_weight", [0.0, 0.7])
def test_the_loss_and_its_gradient_are_the_papers(shallow: Target, top_k_weight: float) -> None:
    """The loss is SmoothL1, 0.1 of the divergence and the top-K term of every step; gradients
    stay within a step.
    """
    drafter = make_drafter(shallow, top_k_weight=top_k_weight, step_decay=0.5)
    batch = random_batch(shallow, drafter.layers)
    assert batch.features is not None
    final = batch.features.at_layer("final")
    supervision = Supervision(drafter, batch)
    expected = torch.zeros(())
    for step, hidden in enumerate(unroll_steps(drafter, batch)):
        rows = supervision.is_supervised(step)
        next_features = final.roll(-1 - step, dims=1)
        log_p, log_q = (
            shallow.head.logits(part[rows]).log_softmax(-1) for part in (next_features, hidden)
        )
        loss = F.smooth_l1_loss(hidden[rows], next_features[rows], reduction="none").mean(
            -1
        ) + 0.1 * forward_kl(log_p, log_q)
        expected = expected + 0.5**step * (loss + top_k_weight * top_k_loss(log_p, log_q)).sum()
    losses = drafter.loss(batch, shallow, TrainingState())
    assert ("top_k" in losses.terms) == bool(top_k_weight)
    torch.testing.assert_close(losses.total, expected, rtol=1e-4, atol=1e-3)
    parameters = list(drafter.parameters())
    gradients, expected_gradients = (
        torch.autograd.grad(total, parameters) for total in (losses.total, expected)
    )
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-3)


def test_through_time_there_is_more_gradient(shallow: Target) -> None:
    """Without `detach` the loss is the same and its gradient is not."""
    drafter = make_drafter(shallow)
    batch = random_batch(shallow, drafter.layers)
    losses = []
    gradients = []
    for detach in (True, False):
        drafter.detach = detach
        result = drafter.loss(batch, shallow, TrainingState())
        losses.append(result.total.detach())
        gradients.append(torch.autograd.grad(result.total, drafter.fc.weight)[0])
    torch.testing.assert_close(*losses)
    assert not torch.allclose(*gradients, rtol=1e-2)


def test_noise_is_the_conversations_own(shallow: Target) -> None:
    """Noise is at most noise / 2 times 512 / length, drawn anew every step, the same in a batch,
    alone and with padding.
    """
    drafter = make_drafter(shallow, noise=0.2)
    batch = random_batch(shallow, drafter.layers)
    zeros = torch.zeros(2, 32, shallow.width)
    drawn = drafter._with_noise(batch, zeros, 3)
    assert 0.95 < float(drawn.abs().max()) / (0.1 * 512 / 32) <= 1
    assert not torch.equal(drawn, drafter._with_noise(batch, zeros, 4))
    padded = Batch(F.pad(batch.tokens[:1], (0, 5)), F.pad(batch.loss_mask[:1], (0, 5)))
    alone = drafter._with_noise(padded, torch.zeros(1, 37, shallow.width), 3)
    assert torch.equal(alone[0, :32], drawn[0]) and not alone[0, 32:].any()


def test_an_untrained_drafter_repeats_the_feature(shallow: Target) -> None:
    """fc initially returns the target's feature, and a top-K term needs the target's
    distribution.
    """
    drafter = Eagle1(shallow)
    drafter.prepare(shallow, torch.zeros(shallow.head.vocab_size))
    hidden = torch.randn(1, 4, shallow.width)
    torch.testing.assert_close(drafter.inputs(torch.tensor([[3, 4, 5, 6]]), hidden), hidden)
    with pytest.raises(UserError, match=r"drafter\.top_k_weight"):
        Eagle1(shallow, loss="cross_entropy", top_k_weight=1.0)
    with pytest.raises(
        UserError, match=r"drafter\.token_weight=0.*: all terms of the loss have weight 0"
    ):
        Eagle1(shallow, regression_weight=0.0, token_weight=0.0)
