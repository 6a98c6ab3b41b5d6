"""Relaxed acceptance of copied tokens alone (ReSpec, 2025, section on source-aware
verification). Shapes: B batch, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.config.values import Count, Share
from spectrain.copying.estimates import Proposal
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.trees.token_tree import TokenTree
from spectrain_research.shared.relaxed_rule import RelaxedRule


@dataclass(frozen=True)
class CopiedTree(TokenTree):
    """A tree that says which of its nodes were copied and not drafted."""

    is_copied: Tensor | None = None  # [B, N] bool; None in a tree without copies


def mark_copies(
    tree: TokenTree, proposals: Sequence[Proposal], num_sources: Sequence[int]
) -> CopiedTree:
    """Return the tree with its copied nodes marked.

    The first `num_sources[b]` entries of a text's proposal are copies, the others a drafter's
    nodes. A node that both propose counts as drafted.
    """
    rows = []
    for proposal, num_copied, *row in zip(
        proposals, num_sources, *(part.tolist() for part in (tree.tokens, tree.parents))
    ):
        copied, drafted = (
            {int(node) for nodes, _ in entries for node in nodes}
            for entries in (proposal.entries[:num_copied], proposal.entries[num_copied:])
        )
        trie_nodes: list[int | None] = [0]
        for token, parent in list(zip(*row))[1:]:
            above = trie_nodes[parent]
            trie_nodes.append(None if above is None else proposal.trie.find_child(above, token))
        rows.append([node in copied and node not in drafted for node in trie_nodes])
    fields = {name: getattr(tree, name) for name in TokenTree.__dataclass_fields__}
    return CopiedTree(**fields, is_copied=torch.tensor(rows, device=tree.tokens.device))


class RelaxedCopies(RelaxedRule):
    """Accepts drafted tokens as acceptance=greedy does, and copied ones already if they are likely.
    NOT lossless.

    A copied token x is forgiven where it is among the `top_k` most likely tokens of the target and
    p(x) >= `ratio` max p. Of several ones the likeliest is accepted. With `top_k` = 1 or `ratio` =
    1 the output is the greedy one.
    """

    name = "relaxed_copies"

    def __init__(
        self,
        # Number of the target's most likely tokens that a copied token must be among; 1 gives the
        # greedy output.
        top_k: Count = 3,
        # Smallest probability of a copied token, as a share of the most likely token's.
        ratio: Share = 0.3,
    ) -> None:
        super().__init__()
        self.top_k, self.ratio = top_k, ratio

    def forgiveness_scores(self, tree: TokenTree, features: Features, is_correct: Tensor) -> Tensor:
        if not isinstance(tree, CopiedTree):
            if tree.tokens.shape[1] > 1:
                raise UserError(
                    f"acceptance={self.name}: the trees of this drafter do not say which nodes "
                    "are copies; use drafter=respec"
                )
            return torch.zeros(tree.tokens.shape, device=tree.tokens.device)
        assert features.logits is not None and tree.is_copied is not None
        p = features.logits.float().softmax(-1)
        rows = torch.arange(len(p), device=p.device)[:, None]
        at_parents = p[rows, tree.parents.clamp(min=0)]  # [B, N, V]
        chance = at_parents.gather(2, tree.tokens[..., None])[..., 0]
        is_among_best = (at_parents > chance[..., None]).sum(-1) < self.top_k
        is_likely = chance >= self.ratio * at_parents.max(-1).values
        return chance * (tree.is_copied & is_among_best & is_likely)
