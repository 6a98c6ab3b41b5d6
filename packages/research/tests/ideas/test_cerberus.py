"""Cerberus: heads by hand, training = decoding, and a gate that is the entropy of the target."""

import pytest
import torch
import torch.nn.functional as F

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain.trees.rollout import Draft
from spectrain_research.cerberus.drafter import Cerberus
from tests.decoding.rounds import begun
from tests.drafters.forced import shaken, walk
from tests.factories import random_batch


def make_drafter(target: Target, max_entropy: float | None = None) -> Cerberus:
    drafter: Cerberus = shaken(
        Cerberus(target, num_heads=3, num_layers=2, vocab_size=512, max_entropy=max_entropy), target
    )
    return drafter


def test_training_equals_decoding_and_the_recurrence(shallow: Target) -> None:
    """Along true texts, log q of every depth is the recurrence by hand on the target's state;
    the loss sums its divergences.
    """
    drafter = make_drafter(shallow)
    batch = random_batch(shallow, ("final",))
    expected = {}
    assert batch.features is not None
    final = batch.features.at_layer("final")
    for row, index, log_q_of_depth in walk(drafter, shallow, batch.tokens, 3):
        h = s = final[row, index]
        for depth, head in enumerate(drafter.heads):
            for block in head.blocks:
                s = s + F.silu(block.weight @ torch.cat([h, s]) + block.bias)
            expected[row, index, depth] = (head.lm_head.weight @ s).log_softmax(-1)
            torch.testing.assert_close(
                log_q_of_depth[depth], expected[row, index, depth], rtol=1e-3, atol=1e-3
            )
    assert len(expected) > 20
    with torch.no_grad():
        states = drafter.run_heads(final, 3)
        losses = drafter.loss(batch, shallow, TrainingState())
        for depth in range(3):
            log_q = drafter.heads[depth].lm_head(states[depth][:, : 30 - depth]).log_softmax(-1)
            labels = final[:, 1 + depth : 31]
            log_p = shallow.head.logits(labels)[..., drafter.draft_ids].log_softmax(-1)
            inside = drafter.t2d[shallow.head.logits(labels).argmax(-1)]
            divergence = (log_p.exp() * (log_p - log_q)).sum(-1)[inside].sum()
            assert float(losses.terms[f"head{depth}"]) == pytest.approx(
                0.8 ** (depth + 1) * float(divergence), rel=2e-2
            )


def test_the_gate_is_the_targets_entropy(shallow: Target) -> None:
    """Between the entropies of two texts one row drafts and the other does not; the output is
    greedy at any threshold.
    """
    prompts = [[5, 6, 7, 8], [11, 12, 13, 14]]
    context = begun(shallow, prompts, make_drafter(shallow), Chain(3))
    final = context.last_state(context.new_features.at_layer("final"))[:, 0]
    log_p = shallow.head.logits(final).double().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    sure = int(entropy.argmin())
    middle = float(entropy.mean())
    expected = [
        generation.output for generation in decode(shallow, prompts, Greedy(), 12, ignore_eos=True)
    ]
    with torch.inference_mode():
        tree = Chain(3).grow(context, make_drafter(shallow, middle).draft(context))
        assert tree.valid.sum(1).tolist() == [4 if row == sure else 1 for row in range(2)]
        assert make_drafter(shallow, 0.0).draft(context) == Draft()
    for threshold in (0.0, middle, 100.0):
        for builder in (Chain(3), Eagle2(3, 8, 3)):
            generations = decode(
                shallow,
                prompts,
                Greedy(),
                12,
                make_drafter(shallow, threshold),
                builder,
                ignore_eos=True,
            )
            assert [generation.output for generation in generations] == expected
