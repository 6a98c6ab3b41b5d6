"""The head that ends chains: its loss, the minimum of that loss, and its probabilities in a
rollout.
"""

from typing import Any

import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.causal import REJECTION_WEIGHT, Causal, StopHead
from spectrain.errors import UserError
from spectrain.kernels.linear_divergence import HeadTarget, Projection
from spectrain.models.target import Target
from spectrain.trees import Chain
from tests.decoding.rounds import begun, proposed
from tests.drafters.forced import Probe

ROWS = 7
WIDTH = 4
VOCAB = 9


def make_random_predictions(head: StopHead) -> tuple[torch.Tensor, HeadTarget, HeadTarget]:
    """Return states with random predictions of drafter and target after them."""
    torch.manual_seed(0)
    states = torch.randn(ROWS, WIDTH, requires_grad=True)
    drafter, target = (
        HeadTarget(torch.randn(ROWS, WIDTH), Projection(torch.randn(VOCAB, WIDTH)))
        for _ in range(2)
    )
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return states, drafter, target


@pytest.mark.parametrize("num_layers", [0, 2])
def test_loss_equals_plain_python(num_layers: int) -> None:
    """The loss is -alpha log c - w (1 - alpha) log(1 - c), summed over rows, alpha = sum_v min(p,
    q); states get no gradient."""
    head = StopHead(WIDTH, num_layers)
    states, drafter, target = make_random_predictions(head)
    loss = head.loss(states, drafter, target)
    expected = 0.0
    for row in range(ROWS):
        p, q = (predictions(slice(row, row + 1))[0].exp() for predictions in (target, drafter))
        alpha = float(torch.minimum(p, q).sum())
        h = states[row].detach()
        for layer in head.layers:
            x = layer(h)
            h = h + x * x.sigmoid()
        c = float(head.output(h)[0].detach().sigmoid())
        expected -= (
            alpha * torch.tensor(c).log().item()
            + REJECTION_WEIGHT * (1 - alpha) * torch.tensor(1 - c).log().item()
        )
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    loss.backward()
    assert states.grad is None and all(
        parameter.grad is not None for parameter in head.parameters()
    )


def test_it_learns_what_the_weight_makes_of_alpha() -> None:
    """Trained on one row, it predicts c = alpha / (alpha + w (1 - alpha)): a rejection counts w
    times.
    """
    head = StopHead(WIDTH, 0)
    states, drafter, target = make_random_predictions(head)
    first_row = [
        HeadTarget(predictions.final[:1], predictions.head) for predictions in (drafter, target)
    ]
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=100)

    def run_closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = head.loss(states[:1], *first_row)
        loss.backward()
        return loss

    optimizer.step(run_closure)  # type: ignore[no-untyped-call, unused-ignore]
    alpha = torch.minimum(first_row[0](slice(0, 1)), first_row[1](slice(0, 1))).exp().sum()
    torch.testing.assert_close(
        head(states[:1]).sigmoid()[0],
        alpha / (alpha + REJECTION_WEIGHT * (1 - alpha)),
        atol=1e-3,
        rtol=1e-3,
    )


def test_a_rollout_says_it_of_every_node(shallow: Target) -> None:
    """A rollout has the probability after the root and every node, the same for a path at once
    as step by step.
    """
    torch.manual_seed(0)
    drafter: Any = Causal(shallow, num_layers=1, stop_head=1).eval()
    torch.nn.init.normal_(drafter.stop_head.output.weight, std=0.02)
    prompt = [[5, 6, 7, 8]]
    tokens = torch.tensor([[9, 10, 11]])
    results = []
    for at_once in (False, True):
        context = begun(shallow, prompt, drafter, Probe())
        with torch.inference_mode():
            rollout = drafter.draft(context).rollout
            rollout.start()
            probs = [rollout.accept_probs]
            extend_path = (
                rollout.extend_path if at_once else super(type(rollout), rollout).extend_path
            )
            log_q = extend_path(tokens, torch.zeros(1, dtype=torch.int64), 1)
        results.append((torch.cat([*probs, rollout.accept_probs], dim=1), log_q))
    assert (
        results[0][0].shape == (1, 4)
        and 0 < float(results[0][0].min()) < float(results[0][0].max()) < 1
    )
    for first, second in zip(*results):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4)


def test_chains_end_by_it(shallow: Target) -> None:
    """With a sure head no chain ends, with a doubtful one every chain does, and the output is
    greedy. With stop_on=token (BiLD, Kangaroo) the drafter's largest probability decides instead of
    the head."""
    drafter: Any = Causal(shallow, num_layers=1, stop_head=0).eval()
    prompt = [[5, 6, 7, 8]]
    builder = Chain(4, stop=0.3)
    expected = decode(shallow, prompt, Greedy(), 12)[0].output
    by_token = Chain(4, stop=1e-3, stop_on="token")
    trees = []
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
