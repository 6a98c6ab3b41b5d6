"""Drafters' distributions along true paths, over rounds that commit given numbers of tokens. Not
a test itself.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.trees import Rollout, TreeBuilder
from spectrain.trees.base import Prefix, TreeTraits
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from tests.decoding.rounds import begun, proposed
from tests.factories import add_noise


class Probe(TreeBuilder):
    """A builder that asks for the distributions after given nodes, call by call, and drafts
    nothing.
    """

    name = "probe"
    depth = 8
    budget = 16
    max_drafted = 16

    def __init__(
        self, *calls: tuple[list[list[int]], list[list[int]]], by_level: bool = True
    ) -> None:
        # tokens and parents of every call
        self.calls = calls
        self.traits = TreeTraits(drafts_by_level=by_level)
        self.log_q: list[Tensor] = []  # log q [B, F, V] of every call

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        self.log_q = [rollout.start()]
        self.log_q += [
            rollout.extend(torch.tensor(tokens), torch.tensor(parents))
            for tokens, parents in self.calls
        ]
        return TokenTree.from_chain(prefix.root[:, None])


def shaken(drafter: Any, target: Target, size: float = 0.3) -> Any:
    """Prepare a drafter and add noise to every weight, so that everything it reads matters."""
    torch.manual_seed(3)
    drafter.prepare(target, torch.randint(0, 1000, (target.head.vocab_size,)))
    add_noise(drafter.parameters(), size)
    return drafter.eval()


ROUNDS = (
    ([3, 1], True),
    ([1, 4], True),
    ([2, 2], False),
    ([1, 3], False),
    ([4, 1], True),
    ([2, 2], True),
)


@torch.no_grad()
def walk(
    drafter: Drafter, target: Target, tokens: Tensor, depth: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield, for every drafted round and both rows of tokens [2, 32], the row, the index of the
    newest token with features, and log q [depth, V] of the tokens from two further on, after the
    true ones. Some rounds are not drafted."""
    lengths = [6, 3]
    context = begun(
        target, [row[:n].tolist() for row, n in zip(tokens, lengths)], drafter, Probe(), 40
    )
    context.tokens[:, :32] = tokens
    for counts, drafted in ROUNDS:
        if drafted:
            context.catch_up()
            calls = [
                ([[int(row[n + 1 + step])] for row, n in zip(tokens, lengths)], [[step]] * 2)
                for step in range(depth - 1)
            ]
            probe = Probe(*calls)
            proposed(drafter, context, probe)
            log_q = torch.cat(probe.log_q, dim=1)
            yield from ((row, n - 1, log_q[row]) for row, n in enumerate(lengths))
        tree = TokenTree.from_chain(
            torch.stack([row[n : n + 5] for row, n in zip(tokens, lengths)])
        )
        features = target.verify(tree, context.cache, drafter.layers)
        bonus = torch.stack([row[n + count] for row, n, count in zip(tokens, lengths, counts)])
        before = (context.new_features, context.num_new)
        accepted = AcceptedPath(torch.arange(4).expand(2, -1), torch.tensor(counts), bonus)
        context.commit(tree, features, accepted)
        drafter.commit(context, accepted)
        if not drafted:
            context.defer(before)
        lengths = [n + count for n, count in zip(lengths, counts)]
    assert lengths == context.cache.lengths.tolist()
