"""OWL: what is trained is what is decoded, the cell by hand, and masks that change no logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.experimental.owl.drafter import Owl, find_tokens
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from tests.decoding.rounds import begun, proposed
from tests.factories import random_batch

from .forced import Probe, shaken

STEPS = 3


@pytest.fixture(scope="module")
def drafter(shallow: Target) -> Owl:
    made: Owl = shaken(Owl(shallow, num_steps=STEPS, mask_ratio=0.2), shallow)
    return made


@torch.no_grad()
def by_hand(drafter: Owl, target: Target, text: list[int], further: list[int]) -> list[Tensor]:
    """log q [V] after a text, of which the target has run all but the last token, and after each of the further tokens."""
    tokens = torch.tensor([[*text[:-1], 0]])
    index = torch.tensor([[-1] * (len(text) - 1) + [0]])
    with drafter.insert_masks(target, index):
        start = target.run(tokens, ForwardPlan(layers=("final",))).at_layer("final")[0, -1]
    state, memory, found = start, torch.zeros_like(start), []
    cell = drafter.cell
    for token in [text[-1], *further]:
        embedded = drafter.head.embed(torch.tensor([token]))[0]
        gates = cell.weight_ih @ embedded + cell.bias_ih + cell.weight_hh @ state + cell.bias_hh
        enter, forget, new, show = gates.chunk(4)
        memory = forget.sigmoid() * memory + enter.sigmoid() * new.tanh()
        state = show.sigmoid() * memory.tanh()
        found.append(drafter.head.logits(start + drafter.output.weight @ state).log_softmax(-1))
    return found


def test_decoding_is_the_recurrence(shallow: Target, drafter: Owl) -> None:
    """In the first round, and after a verified one from the state at the mask behind the accepted node."""
    prompt, builder = [5, 6, 7, 8, 9], Chain(3)
    probe = Probe(([[20]], [[0]]), ([[30]], [[1]]))
    context = begun(shallow, [prompt], drafter, builder)
    with torch.inference_mode():
        for number in range(2):
            root = int(context.root)
            text = context.tokens[0, : int(context.lengths) + 1].tolist()
            proposed(drafter, context, probe)
            for said, expected in zip(probe.said, by_hand(drafter, shallow, text, [20, 30])):
                torch.testing.assert_close(said[0, 0], expected, rtol=1e-3, atol=1e-3)
            assert text[-1] == root
            if not number:
                tree = proposed(drafter, context, builder)
                seen = drafter.verify(context, tree)
                accepted = Greedy().accept(tree, seen, context.sequence_ids, context.positions(tree) + 1)
                context.commit(tree, seen, accepted)
                drafter.commit(context, accepted)


def test_masks_change_no_logits(shallow: Target, drafter: Owl) -> None:
    """The logits of a verified tree are, bit for bit, those with another vector at the masks; outputs are the target's."""
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    found = []
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
            found.append(logits)
    assert torch.equal(*found)
    for builder in (Chain(3), Eagle2(3, 8, 3)):
        expected = [one.output for one in decode(shallow, prompts, Greedy(), 16, ignore_eos=True)]
        assert [one.output for one in decode(shallow, prompts, Greedy(), 16, drafter, builder, ignore_eos=True)] == expected


def test_the_loss_is_of_what_is_decoded(shallow: Target, drafter: Owl) -> None:
    """The sum over masks and steps of decay^k KL(p || q_k), by hand, times tokens over weights."""
    batch = random_batch(shallow, ())
    blocks = drafter.make_blocks(batch, TrainingState())
    rows, masks = blocks.supervised.nonzero().unbind(1)
    total, weights = 0.0, 0.0
    with torch.no_grad():
        final = shallow.run(batch.tokens, ForwardPlan(layers=("final",))).at_layer("final")
        for step in range(STEPS):
            index, judged = find_tokens(blocks, batch, rows, masks, step)
            for row, at, is_judged in zip(rows.tolist(), index.tolist(), judged.tolist()):
                if is_judged:
                    first = at - step
                    tokens = batch.tokens[row].tolist()
                    log_q = by_hand(drafter, shallow, tokens[: first + 1], tokens[first + 1 : at + 1])[-1]
                    log_p = shallow.head.logits(final[row, at]).log_softmax(-1)
                    total += drafter.step_decay**step * float(F.kl_div(log_q, log_p, log_target=True, reduction="sum"))
                    weights += drafter.step_decay**step
        losses = drafter.loss(batch, shallow, TrainingState())
    assert weights > 5
    assert float(losses.total) == pytest.approx(total * float(batch.loss_mask.sum()) / weights, rel=1e-3)
