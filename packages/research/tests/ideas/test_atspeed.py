"""AtSpeed's loss: its definition, where it is smallest, and that of a batch by plain forwards."""

import pytest
import torch

from spectrain.drafters.base import TrainingState
from spectrain.models.target import Target
from spectrain_research.atspeed.drafter import AtSpeed, alignment_loss
from tests.factories import random_batch
from tests.targets import make_random_target


def test_alignment_loss_is_its_definition() -> None:
    """The loss is that of sums over the three most likely tokens; it is zero where all of q is on
    them in proportion to p, and only there."""
    torch.manual_seed(0)
    p = torch.randn(5, 8).softmax(-1)
    q = torch.randn(5, 8).softmax(-1)
    for row, value in enumerate(alignment_loss(p.log(), q.log(), 3).tolist()):
        best = sorted(range(8), key=lambda token: -float(p[row, token]))[:3]
        mass_p, mass_q = (float(sum(part[row, token] for token in best)) for part in (p, q))
        inside = sum(
            float(q[row, token])
            / mass_q
            * float(torch.log(q[row, token] / mass_q / (p[row, token] / mass_p)))
            for token in best
        )
        assert value == pytest.approx(inside - float(torch.tensor(mass_q).log()), abs=1e-5)
    top = p.topk(3, dim=-1)
    ideal = torch.full_like(p, 1e-12).scatter(
        -1, top.indices, top.values / top.values.sum(-1, keepdim=True)
    )
    assert alignment_loss(p.log(), ideal.log(), 3).abs().max() < 1e-5
    assert alignment_loss(p.log(), q.log(), 3).min() > 1e-3


def test_loss_of_a_batch_equals_plain_forwards() -> None:
    """The sum over supervised tokens of both terms, by the target's and the drafter's logits."""
    target: Target = make_random_target(2048, num_layers=3)
    drafter = AtSpeed(target, num_layers=2, top_k=4, data_weight=0.3)
    batch = random_batch(target, ("final",), (2, 12), has_prompt=True)
    losses = drafter.loss(batch, target, TrainingState())
    predicts = batch.next_is_supervised
    labels = batch.tokens.roll(-1, dims=1)[batch.next_is_supervised]
    with torch.no_grad():
        log_p, log_q = (
            model.model(batch.tokens).logits[predicts].log_softmax(-1)
            for model in (target, drafter.model)
        )
    torch.testing.assert_close(
        losses.terms["alignment"], 0.7 * alignment_loss(log_p, log_q, 4).sum(), rtol=1e-4, atol=1e-3
    )
    data = -log_q.gather(-1, labels[:, None]).sum()
    torch.testing.assert_close(losses.terms["data"], 0.3 * data, rtol=1e-4, atol=1e-3)
    losses.total.backward()
    assert any(
        parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        for parameter in drafter.parameters()
    )
