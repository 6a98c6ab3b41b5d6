"""The supervision of drafters that read features: which positions are supervised, their labels,
and the loss.
"""

import pytest
import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.losses import ACCEPTANCE_LOSSES, DIVERGENCES
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.drafters.medusa import Medusa
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.models.weight_block import OutputLayer

LOSSES = ["cross_entropy", *DIVERGENCES]
STEPS = [0, 1, 3]


def make_dataset() -> Dataset:
    """Sequences of unequal length, supervised in two spans, the last of which may reach the end."""
    rows = torch.randint(3, 2000, (3, 30)).tolist()
    lengths = (30, 22, 17)
    masks = [[5 <= i < 11 or 15 <= i < 24 for i in range(length)] for length in lengths]
    return Dataset([Example(row[: len(mask)], mask) for row, mask in zip(rows, masks)], 3, 0, 0)


def make_drafter(tiny: Target, loss: str) -> Medusa:
    """Make a drafter whose vocabulary is the even tokens, so about half of the labels."""
    drafter = Medusa(tiny, vocab_size=tiny.head.vocab_size // 2, loss=loss)  # type: ignore[arg-type]
    drafter.choose_vocabulary(torch.arange(tiny.head.vocab_size) % 2 == 0)
    return drafter


def make_supervision(tiny: Target, loss: str) -> tuple[Medusa, Supervision, Batch]:
    drafter = make_drafter(tiny, loss)
    batch = LiveSource().make_batch(BatchRequest(make_dataset()[[0, 1, 2]], tiny, drafter.layers))
    return drafter, Supervision(drafter, batch), batch


def judge_log_probs(supervision: Supervision, step: int, log_q: Tensor) -> tuple[Tensor, int, int]:
    """Return loss, hits and count of log q [R, V], which are the states here, because the output
    layer changes nothing.
    """
    identity = OutputLayer(log_q.shape[1], log_q.shape[1], bias=False).requires_grad_(False)
    identity.weight.copy_(torch.eye(log_q.shape[1]))
    loss, is_hit = supervision.judge_states(log_q, identity, supervision.label_index(step))
    return loss, int(is_hit.sum()), len(is_hit)


def list_supervised(batch: Batch, step: int) -> list[tuple[int, int]]:
    """List (row, index) where `step` is judged: token t + 2 + step exists and is the
    assistant's.
    """
    mask = batch.loss_mask.tolist()
    width = batch.tokens.shape[1]
    return [
        (b, t)
        for b in range(len(mask))
        for t in range(width)
        if t + 2 + step < width and mask[b][t + 2 + step]
    ]


def find_labels(tiny: Target, loss: str, batch: Batch, step: int) -> tuple[list[int], Tensor]:
    """Find by brute force the label at every supervised position and the target's logits before
    it.
    """
    logits = tiny.run(batch.tokens, ForwardPlan(logits=True)).logits
    assert logits is not None
    before = torch.stack([logits[b, t + 1 + step] for b, t in list_supervised(batch, step)])
    if loss == "cross_entropy":
        return [int(batch.tokens[b, t + 2 + step]) for b, t in list_supervised(batch, step)], before
    return before.argmax(-1).tolist(), before


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl", "lk_hybrid"])
def test_supervised_indices_and_answers(tiny: Target, loss: str, step: int) -> None:
    """Index t is judged where token t + 2 + step is the assistant's; the label is the data's token
    or the target's likeliest."""
    _, supervision, batch = make_supervision(tiny, loss)
    assert [
        tuple(index) for index in supervision.is_supervised(step).nonzero().tolist()
    ] == list_supervised(batch, step)
    assert (
        supervision.labels[supervision.label_index(step)].tolist()
        == find_labels(tiny, loss, batch, step)[0]
    )
    assert (supervision.target_log_probs is None) == (loss == "cross_entropy")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("loss", LOSSES)
def test_judge_equals_brute_force(tiny: Target, loss: str, step: int) -> None:
    """The summed loss, the hits and the count are those of a plain loop over positions."""
    drafter, supervision, batch = make_supervision(tiny, loss)
    tokens, before = find_labels(tiny, loss, batch, step)
    ids = drafter.draft_ids.tolist()
    scores = torch.randn(len(tokens), len(ids))
    for row, token in enumerate(tokens):
        if token in ids and row % 3:
            scores[row, ids.index(token)] += 20
    log_q = scores.log_softmax(-1)
    total = 0.0
    hits = 0
    for row, token in enumerate(tokens):
        hits += ids[int(log_q[row].argmax())] == token
        if loss == "cross_entropy":
            total -= float(log_q[row, ids.index(token)]) if token in ids else 0.0
            continue
        log_p = (
            before[row].log_softmax(-1)[ids]
            if loss in ACCEPTANCE_LOSSES
            else before[row, ids].log_softmax(-1)
        )
        if token in ids or loss in ACCEPTANCE_LOSSES:
            total += float(DIVERGENCES[loss](log_p, log_q[row]))
    assert {token in ids for token in tokens} == {True, False} and 0 < hits < len(tokens)
    actual, actual_hits, count = judge_log_probs(supervision, step, log_q)
    assert float(actual) == pytest.approx(total, rel=1e-4) and total > 0
    assert actual_hits == hits and count == len(tokens)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_cannot_be_drafted_carries_no_loss(tiny: Target, loss: str) -> None:
    """Labels outside the draft vocabulary have no gradient, except with losses that measure
    acceptance.
    """
    drafter, supervision, batch = make_supervision(tiny, loss)
    inside = drafter.t2d[torch.tensor(find_labels(tiny, loss, batch, 1)[0])]
    scores = torch.randn(len(inside), len(drafter.draft_ids), requires_grad=True)
    judge_log_probs(supervision, 1, scores.log_softmax(-1))[0].backward()
    assert scores.grad is not None
    assert torch.equal(
        scores.grad.abs().amax(-1) > 0,
        torch.ones_like(inside) if loss in ACCEPTANCE_LOSSES else inside,
    )
    assert inside.any() and not inside.all()


def test_a_token_beyond_the_last_draft_id_is_a_miss(tiny: Target) -> None:
    """The data's largest tokens, above every draft id, cost nothing and are never hit."""
    drafter = Medusa(tiny, vocab_size=8, loss="cross_entropy")
    tokens = torch.full((1, 6), 2000)
    batch = LiveSource().make_batch(
        BatchRequest(
            Dataset([Example(tokens[0].tolist(), [True] * 6)], 1, 0, 0)[[0]], tiny, drafter.layers
        )
    )
    loss, hits, count = judge_log_probs(
        Supervision(drafter, batch), 0, torch.randn(4, 8).log_softmax(-1)
    )
    assert (float(loss), hits, count) == (0.0, 0, 4)


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl", "total_variation"])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_sequences_shorter_than_the_heads_reach(tiny: Target, loss: str, length: int) -> None:
    """A batch too short for a step has no supervised position there, and the loss of all heads
    is finite.
    """
    drafter = Medusa(tiny, num_heads=5, vocab_size=64, loss=loss)  # type: ignore[arg-type]
    drafter.prepare(tiny, torch.arange(tiny.head.vocab_size))
    tokens = torch.randint(3, 2000, (length,)).tolist()
    batch = LiveSource().make_batch(
        BatchRequest(
            Dataset([Example(tokens, [True] * length)], 1, 0, 0)[[0]], tiny, drafter.layers
        )
    )
    losses = drafter.loss(batch, tiny, TrainingState())
    assert losses.counts.tolist() == [max(0, length - 2 - step) for step in range(5)]
    assert torch.isfinite(losses.total)
