"""The head that ends chains: its loss, what minimises it, and what a rollout says by it."""

from typing import Any

import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.causal import Causal
from spectrain.drafters.layers.stop_head import REJECTION_WEIGHT, StopHead
from spectrain.errors import UserError
from spectrain.kernels.linear_divergence import HeadTarget, Projection
from spectrain.models.target import Target
from spectrain.trees import Chain
from tests.decoding.rounds import begun, proposed
from tests.drafters.forced import Probe

ROWS, WIDTH, VOCAB = 7, 4, 9


def said(head: StopHead) -> tuple[torch.Tensor, HeadTarget, HeadTarget]:
    """States, and what drafter and target say after them."""
    torch.manual_seed(0)
    states = torch.randn(ROWS, WIDTH, requires_grad=True)
    mine, theirs = (HeadTarget(torch.randn(ROWS, WIDTH), Projection(torch.randn(VOCAB, WIDTH))) for _ in range(2))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return states, mine, theirs


@pytest.mark.parametrize("num_layers", [0, 2])
def test_loss_equals_plain_python(num_layers: int) -> None:
    """-alpha log c - w (1 - alpha) log(1 - c), summed over the rows, alpha = sum_v min(p, q); the states learn nothing."""
    head = StopHead(WIDTH, num_layers)
    states, mine, theirs = said(head)
    loss, expected = head.loss(states, mine, theirs), 0.0
    for row in range(ROWS):
        p, q = (one(slice(row, row + 1))[0].exp() for one in (theirs, mine))
        alpha = float(torch.minimum(p, q).sum())
        h = states[row].detach()
        for layer in head.layers:
            x = layer(h)
            h = h + x * x.sigmoid()
        c = float(head.output(h)[0].detach().sigmoid())
        expected -= alpha * torch.tensor(c).log().item() + REJECTION_WEIGHT * (1 - alpha) * torch.tensor(1 - c).log().item()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    loss.backward()
    assert states.grad is None and all(parameter.grad is not None for parameter in head.parameters())


def test_it_learns_what_the_weight_makes_of_alpha() -> None:
    """Trained on one place, it says c = alpha / (alpha + w (1 - alpha)): a rejection counts w times."""
    head = StopHead(WIDTH, 0)
    states, mine, theirs = said(head)
    one = [HeadTarget(other.final[:1], other.head) for other in (mine, theirs)]
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=100)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = head.loss(states[:1], *one)
        loss.backward()
        return loss

    optimizer.step(step)  # type: ignore[no-untyped-call, unused-ignore]
    alpha = torch.minimum(one[0](slice(0, 1)), one[1](slice(0, 1))).exp().sum()
    torch.testing.assert_close(
        head(states[:1]).sigmoid()[0], alpha / (alpha + REJECTION_WEIGHT * (1 - alpha)), atol=1e-3, rtol=1e-3
    )


def test_a_rollout_says_it_of_every_node(shallow: Target) -> None:
    """After the root and every further node; along a path in one step it says what it says step by step."""
    torch.manual_seed(0)
    drafter: Any = Causal(shallow, num_layers=1, stop_head=1).eval()
    torch.nn.init.normal_(drafter.stop_head.output.weight, std=0.02)
    prompt, tokens = [[5, 6, 7, 8]], torch.tensor([[9, 10, 11]])
    found = []
    for at_once in (False, True):
        context = begun(shallow, prompt, drafter, Probe())
        with torch.inference_mode():
            rollout = drafter.draft(context).rollout
            rollout.start()
            heard = [rollout.accept_probs]
            follow = rollout.extend_path if at_once else super(type(rollout), rollout).extend_path
            log_q = follow(tokens, torch.zeros(1, dtype=torch.int64), 1)
        found.append((torch.cat([*heard, rollout.accept_probs], dim=1), log_q))
    assert found[0][0].shape == (1, 4) and 0 < float(found[0][0].min()) < float(found[0][0].max()) < 1
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_chains_end_by_it(shallow: Target) -> None:
    """A head that is sure of every token ends no chain, one that doubts all of them every one, and the output stays greedy.
    With stop_on=token (BiLD, Kangaroo) the drafter's own largest probability decides, and the head nothing."""
    drafter: Any = Causal(shallow, num_layers=1, stop_head=0).eval()
    prompt, builder = [[5, 6, 7, 8]], Chain(4, stop=0.3)
    expected = decode(shallow, prompt, Greedy(), 12)[0].output
    by_token, trees = Chain(4, stop=1e-3, stop_on="token"), []
    for bias, length in ((9.0, 4), (-9.0, 0)):
        torch.nn.init.constant_(drafter.stop_head.output.bias, bias)
        tree = proposed(drafter, begun(shallow, prompt, drafter, builder), builder)
        assert tree.tokens.shape[1] == 1 + length
        assert decode(shallow, prompt, Greedy(), 12, drafter, builder)[0].output == expected
        trees.append(proposed(drafter, begun(shallow, prompt, drafter, by_token), by_token).tokens)
    assert torch.equal(*trees) and trees[0].shape[1] > 1


def test_a_negative_number_of_layers_is_refused(shallow: Target) -> None:
    with pytest.raises(UserError, match=r"drafter\.stop_head=-1: use 0 for a linear head"):
        Causal(shallow, num_layers=1, stop_head=-1)
