"""SPACE: the loss is that of the language model and of the masks, and the target's weights learn
both.
"""

import pytest
import torch
import torch.nn.functional as F

from spectrain.drafters.base import TrainingState
from spectrain.models.forward_plan import ForwardPlan
from spectrain_research.space.drafter import Space
from tests.factories import random_batch
from tests.targets import cut_tiny


def test_loss_and_gradients_are_of_both_tasks() -> None:
    """Each term by hand, from a forward with masks and one without; LoRA gets a gradient from
    each alone.
    """
    target = cut_tiny(2)
    drafter = Space(target, num_masks=2, adapter_rank=2, masks_weight=0.5)
    drafter.prepare(target, torch.ones(target.head.vocab_size))
    batch = random_batch(target, (), (2, 16))
    losses = drafter.loss(batch, target, TrainingState())
    final = target.run(batch.tokens, ForwardPlan(layers=("final",))).at_layer("final")
    expected = F.cross_entropy(
        target.head.logits(final[:, :-1]).flatten(0, 1),
        batch.tokens[:, 1:].flatten(),
        reduction="sum",
    )
    assert float(losses.terms["language_model"].detach()) == pytest.approx(
        float(expected), rel=1e-4
    )
    blocks = drafter.make_blocks(batch, TrainingState())
    with drafter.insert_masks(target, blocks.mask_index):
        plan = ForwardPlan(
            layers=("final",),
            positions=blocks.positions,
            mask=blocks.visible,
            lengths=blocks.lengths,
        )
        states = target.run(blocks.tokens, plan).at_layer("final")[blocks.supervised]
    each = F.cross_entropy(
        target.head.logits(states), blocks.labels[blocks.supervised], reduction="none"
    )
    weights = blocks.loss_weights(
        blocks.supervised, batch, 0.9 ** blocks.mask_index[blocks.supervised]
    )
    assert float(losses.terms["masks"].detach()) == pytest.approx(
        0.5 * float((weights * each).sum()), rel=1e-4
    )
    for term in losses.terms.values():
        adapters = torch.autograd.grad(
            term, drafter.target_training.parameters, retain_graph=True, allow_unused=True
        )
        assert any(gradient is not None and bool(gradient.any()) for gradient in adapters)
