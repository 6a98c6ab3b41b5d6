"""Amphista: without its layers it is Medusa's heads, and what is trained is what is decoded."""

from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.drafters.medusa import Medusa
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain_research.amphista.drafter import Amphista
from tests.decoding.rounds import begun, proposed
from tests.drafters.forced import Probe, shaken, walk
from tests.factories import random_batch

HEADS = 3


def make_drafter(target: Target, **options: Any) -> Amphista:
    return shaken(Amphista(target, **{"num_heads": HEADS, "vocab_size": 512, **options}), target)  # type: ignore[no-any-return]


@pytest.mark.parametrize("rank", [None, 9])
def test_without_its_layers_it_is_medusas_heads(shallow: Target, rank: int | None) -> None:
    """Loss, hits, gradients and log q are those of Medusa with the same weights."""
    drafter = make_drafter(shallow, attention_layers=0, adaptation_layers=0, head_rank=rank)
    medusa = Medusa(shallow, num_heads=HEADS, vocab_size=512, loss="forward_kl", head_rank=rank)
    medusa.load_state_dict(drafter.state_dict(), strict=True)
    batch = random_batch(shallow, ("final",), has_prompt=True)
    results = []
    for candidate in (drafter, medusa):
        losses = candidate.loss(batch, shallow, TrainingState())
        losses.total.backward()
        gradients = {name: p.grad for name, p in candidate.named_parameters()}
        probe = Probe(([[20]], [[0]]), ([[30]], [[1]]))
        with torch.no_grad():
            proposed(candidate, begun(shallow, [[5, 6, 7, 8]], candidate, probe), probe)
        results.append((losses.terms, losses.hits, losses.counts, gradients, probe.log_q))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def compute_training_log_q(
    drafter: Amphista, target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> list[dict[Any, Tensor]]:
    """Return log q of every head at every (row, index), out of the training loss."""
    states: list[Tensor] = []
    judge = Supervision.judge_states
    monkeypatch.setattr(
        Supervision,
        "judge_states",
        lambda self, hidden, *rest: states.append(hidden) or judge(self, hidden, *rest),
    )
    with torch.no_grad():
        drafter.loss(batch, target, TrainingState())
        supervision = Supervision(drafter, batch)
        log_q = [
            head.lm_head(x).log_softmax(-1) for head, x in zip(drafter.heads, states, strict=True)
        ]
        positions = [
            [(int(b), int(t)) for b, t in supervision.is_supervised(k).nonzero()]
            for k in range(HEADS)
        ]
        return [dict(zip(keys, rows, strict=True)) for keys, rows in zip(positions, log_q)]


@pytest.mark.parametrize(("attention", "adaptation"), [(1, 2), (2, 0), (0, 3)])
def test_training_equals_decoding(
    shallow: Target, attention: int, adaptation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over rounds that commit unequally many tokens, some of them undrafted, log q of training
    and of decoding are equal.
    """
    drafter = make_drafter(shallow, attention_layers=attention, adaptation_layers=adaptation)
    batch = random_batch(shallow, ("final",), has_prompt=True)
    trained = compute_training_log_q(drafter, shallow, batch, monkeypatch)
    compared = 0
    for row, index, log_q in walk(drafter, shallow, batch.tokens, HEADS):
        for k in range(HEADS):
            if (row, index) in trained[k]:
                torch.testing.assert_close(log_q[k], trained[k][row, index], rtol=1e-3, atol=1e-3)
                compared += 1
    assert compared > 12


def test_every_head_reads_every_other(shallow: Target) -> None:
    """With attention over heads each head's output changes with any other's blocks; without it,
    it does not.
    """
    stage = torch.randn(5, shallow.width)
    for attention in (0, 1):
        drafter = make_drafter(shallow, attention_layers=attention, adaptation_layers=1)
        for changed in range(HEADS):
            with torch.no_grad():
                before = drafter.mix_heads(stage)
                drafter.heads[changed].blocks[0].linear.weight.mul_(3)  # type: ignore[union-attr, operator]
                moved = (drafter.mix_heads(stage) - before).abs().amax((0, 2)) > 1e-6
            assert moved.tolist() == [bool(attention) or k == changed for k in range(HEADS)]


@pytest.mark.parametrize("num_heads", [1, 2, 5])
def test_it_starts_as_the_targets_own_head(shallow: Target, num_heads: int) -> None:
    """Before training every head gives the target's next-token distribution over the draft
    vocabulary.
    """
    drafter = Amphista(shallow, num_heads=num_heads, vocab_size=256)
    drafter.prepare(shallow, torch.arange(shallow.head.vocab_size))
    probe = Probe(*[([[20]], [[step]]) for step in range(num_heads - 1)])
    context = begun(shallow, [[5, 6, 7, 8]], drafter, probe)
    expected = shallow.head.logits(context.new_features.at_layer("final")[:, -1])[
        :, drafter.draft_ids
    ].log_softmax(-1)
    with torch.no_grad():
        proposed(drafter, context, probe)
    log_q = torch.cat(probe.log_q, dim=1)
    torch.testing.assert_close(log_q, expected[:, None].expand_as(log_q), rtol=1e-4, atol=1e-4)
