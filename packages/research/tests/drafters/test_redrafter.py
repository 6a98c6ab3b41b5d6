"""ReDrafter: training and decoding are the same, and both equal the equations written out."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_research.redrafter.drafter import Redrafter
from tests.decoding.rounds import begun, proposed
from tests.drafters.forced import Probe, shaken, walk
from tests.factories import random_batch

STEPS = 3


def make_drafter(target: Target, cell: Literal["silu", "linear"] = "silu") -> Redrafter:
    drafter = Redrafter(target, num_steps=STEPS, num_blocks=1, vocab_size=512, cell=cell)
    return shaken(drafter, target)  # type: ignore[no-any-return]


def by_hand(drafter: Redrafter, tokens: Tensor, final: Tensor) -> Tensor:
    """Return log q [V] behind tokens [k + 1], of which the first follows the state `final` [D]."""
    embedded = drafter.head.embed(tokens[None])[0]
    is_linear = drafter.cell == "linear"
    state = drafter.rnn_w.weight @ embedded[0] if is_linear else embedded[0]
    for next_embedded in embedded[1:]:
        state = (
            drafter.rnn_u.weight @ state + drafter.rnn_w.weight @ next_embedded + drafter.rnn_w.bias
        )
        state = state if is_linear else F.silu(state)
    mixed = torch.cat([state, final])
    for block in drafter.blocks:
        mixed = mixed + F.silu(block.get_submodule("linear")(mixed))
    return (drafter.lm_head.weight @ mixed).log_softmax(-1)


@pytest.mark.parametrize("cell", ["silu", "linear"])
def test_decoding_is_the_papers_recurrence_along_the_true_path(
    shallow: Target, cell: Literal["silu", "linear"]
) -> None:
    """Over rounds of one to four tokens, some without a draft, every step equals section 3.1 or
    TensorRT-LLM's form.
    """
    drafter = make_drafter(shallow, cell)
    batch = random_batch(shallow, drafter.layers)
    assert batch.features is not None
    final = batch.features.at_layer("final")
    for row, index, log_q in walk(drafter, shallow, batch.tokens, STEPS):
        for step in range(STEPS):
            expected = by_hand(
                drafter, batch.tokens[row, index + 1 : index + 2 + step], final[row, index]
            )
            torch.testing.assert_close(log_q[step], expected, rtol=1e-3, atol=1e-3)


def test_the_loss_is_of_what_is_decoded(shallow: Target) -> None:
    """The loss is sum_k decay^k KL(p || q_k) over the draft vocabulary, with q_k by hand at
    every supervised index.
    """
    drafter = make_drafter(shallow)
    batch = random_batch(shallow, drafter.layers)
    assert batch.features is not None
    final = batch.features.at_layer("final")
    ids = drafter.draft_ids
    total = 0.0
    supervision = Supervision(drafter, batch)
    with torch.no_grad():
        for step in range(STEPS):
            for row, index in supervision.is_supervised(step).nonzero().tolist():
                p = shallow.head.logits(final[row, index + 1 + step])
                if not drafter.t2d[p.argmax()]:
                    continue
                log_p = p[ids].log_softmax(-1)
                log_q = by_hand(
                    drafter, batch.tokens[row, index + 1 : index + 2 + step], final[row, index]
                )
                total += drafter.step_decay**step * float((log_p.exp() * (log_p - log_q)).sum())
        losses = drafter.loss(batch, shallow, TrainingState())
    assert total > 0
    assert float(losses.total) == pytest.approx(total, rel=1e-4)


def test_an_untrained_drafter_repeats_the_target(shallow: Target) -> None:
    """Before training every step has the target's log probabilities after the last state, within
    the draft vocabulary.
    """
    drafter = Redrafter(shallow, vocab_size=512).eval()
    drafter.prepare(shallow, torch.randint(0, 1000, (shallow.head.vocab_size,)))
    context = begun(shallow, [[5, 6, 7, 8]], drafter, Chain(1), 40)
    probe = Probe(([[20, 30]], [[0, 0]]))
    with torch.no_grad():
        proposed(drafter, context, probe)
        last = context.new_features.at_layer("final")[:, int(context.num_new[0]) - 1]
        expected = shallow.head.logits(last)[:, drafter.draft_ids].float().log_softmax(-1)
    for log_q in (probe.log_q[0][:, 0], probe.log_q[1][:, 0], probe.log_q[1][:, 1]):
        torch.testing.assert_close(log_q, expected, rtol=1e-4, atol=1e-4)
