"""OWL: training and decoding are the same, the cell equals its equations, and masks change no
logits.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain_research.owl.drafter import Owl, find_tokens
from tests.decoding.rounds import begun, proposed
from tests.drafters.forced import Probe, shaken
from tests.factories import random_batch

STEPS = 3


@pytest.fixture(scope="module")
def drafter(shallow: Target) -> Owl:
    drafter: Owl = shaken(Owl(shallow, num_steps=STEPS, mask_ratio=0.2), shallow)
    return drafter


@torch.no_grad()
def by_hand(drafter: Owl, target: Target, text: list[int], next_tokens: list[int]) -> list[Tensor]:
    """Return log q [V] after a text of which the target has run all but the last token, and
    after each of the next tokens.
    """
    tokens = torch.tensor([[*text[:-1], 0]])
    index = torch.tensor([[-1] * (len(text) - 1) + [0]])
    with drafter.insert_masks(target, index):
        start = target.run(tokens, ForwardPlan(layers=("final",))).at_layer("final")[0, -1]
    state = start
    memory = torch.zeros_like(start)
    log_qs = []
    cell = drafter.cell
    for token in [text[-1], *next_tokens]:
        embedded = drafter.head.embed(torch.tensor([token]))[0]
        gates = cell.weight_ih @ embedded + cell.bias_ih + cell.weight_hh @ state + cell.bias_hh
        input_gate, forget_gate, candidate, output_gate = gates.chunk(4)
        memory = forget_gate.sigmoid() * memory + input_gate.sigmoid() * candidate.tanh()
        state = output_gate.sigmoid() * memory.tanh()
        log_qs.append(drafter.head.logits(start + drafter.output.weight @ state).log_softmax(-1))
    return log_qs


def test_decoding_is_the_recurrence(shallow: Target, drafter: Owl) -> None:
    """A round's log q equals the equations, in the first round and after a verified one, from the
    state at the accepted mask."""
    prompt = [5, 6, 7, 8, 9]
    builder = Chain(3)
    probe = Probe(([[20]], [[0]]), ([[30]], [[1]]))
    context = begun(shallow, [prompt], drafter, builder)
    with torch.inference_mode():
        for number in range(2):
            root = int(context.root)
            text = context.tokens[0, : int(context.lengths) + 1].tolist()
            proposed(drafter, context, probe)
            for log_q, expected in zip(probe.log_q, by_hand(drafter, shallow, text, [20, 30])):
                torch.testing.assert_close(log_q[0, 0], expected, rtol=1e-3, atol=1e-3)
            assert text[-1] == root
            if not number:
                tree = proposed(drafter, context, builder)
                output = drafter.verify(context, tree)
                accepted = Greedy().accept(
                    tree, output, context.sequence_ids, context.positions(tree) + 1
                )
                context.commit(tree, output, accepted)
                drafter.commit(context, accepted)


def test_masks_change_no_logits(shallow: Target, drafter: Owl) -> None:
    """With other vectors at the masks the logits of a verified tree are the same bit for bit, and
    the output is the target's."""
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    results = []
    with torch.inference_mode():
        for size in (0.0, 1.0):
            context = begun(shallow, prompts, drafter, Eagle2(3, 8, 3))
            tree = proposed(drafter, context, Eagle2(3, 8, 3))
            assert drafter.masks is not None
            before = drafter.masks.clone()
            drafter.masks.add_(size)
            logits = drafter.verify(context, tree).logits
            drafter.masks.copy_(before)
            assert logits is not None
            results.append(logits)
    assert torch.equal(*results)
    for builder in (Chain(3), Eagle2(3, 8, 3)):
        expected = [row.output for row in decode(shallow, prompts, Greedy(), 16, ignore_eos=True)]
        assert [
            row.output
            for row in decode(shallow, prompts, Greedy(), 16, drafter, builder, ignore_eos=True)
        ] == expected


def test_the_loss_is_of_what_is_decoded(shallow: Target, drafter: Owl) -> None:
    """The loss is the sum over masks and steps of decay^k KL(p || q_k), by hand, times tokens
    over weights.
    """
    batch = random_batch(shallow, ())
    blocks = drafter.make_blocks(batch, TrainingState())
    rows, masks = blocks.supervised.nonzero().unbind(1)
    total = 0.0
    weights = 0.0
    with torch.no_grad():
        final = shallow.run(batch.tokens, ForwardPlan(layers=("final",))).at_layer("final")
        for step in range(STEPS):
            index, judged = find_tokens(blocks, batch, rows, masks, step)
            for row, position, is_judged in zip(rows.tolist(), index.tolist(), judged.tolist()):
                if is_judged:
                    first = position - step
                    tokens = batch.tokens[row].tolist()
                    log_q = by_hand(
                        drafter, shallow, tokens[: first + 1], tokens[first + 1 : position + 1]
                    )[-1]
                    log_p = shallow.head.logits(final[row, position]).log_softmax(-1)
                    total += drafter.step_decay**step * float(
                        F.kl_div(log_q, log_p, log_target=True, reduction="sum")
                    )
                    weights += drafter.step_decay**step
        losses = drafter.loss(batch, shallow, TrainingState())
    assert weights > 5
    assert float(losses.total) == pytest.approx(
        total * float(batch.loss_mask.sum()) / weights, rel=1e-3
    )
