"""Rejection sampling rules, which compare p with q: lossless for children that were drawn from
q. V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spectrain.kernels.tree_recursive import tree_recursive
from spectrain.randomness import ACCEPT
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .base import DRAWN_CHILDREN, Siblings, Vector, make_nodes
from .sequential import (
    RandomSource,
    SequentialRule,
    VerifiedTree,
    acceptance_ratio,
    iterate_siblings,
    normalize_weights,
    remove_token,
    residual_rate,
)


class RecursiveRejection(SequentialRule):
    """Recursive rejection sampling (SpecInfer, Miao et al., 2023; RSD, Jeon et al., 2024; Sequoia,
    Chen et al., 2024).

    Children in the order they were drawn: keep x with probability min(1, P(x) / Q(x)), else P
    becomes the normalised max(P - Q, 0) and, drawn without replacement, Q loses x. Where none is
    kept, the next token is drawn from P.
    """

    name = "recursive"
    lossless = True
    children = DRAWN_CHILDREN
    on_device = True
    # Coins are flipped on the path that is kept alone, and a node whose children are all rejected
    # gets its token at once.
    revisits_positions = False

    def __call__(
        self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        """Decide for all sequences at once what `select_path` decides for one, with the same
        random numbers.
        """
        if tree.tokens.shape[1] == 1:  # nothing to weigh
            q = logits.new_ones(len(sequence_ids), 1, 1)
            ids = None
            without_replacement = False
        else:
            self.check_children(tree.children, not self.chains_only or tree.is_chain)
            assert tree.q is not None, "a tree with drawn children has their distribution q"
            q = tree.q
            ids = tree.draft_ids
            without_replacement = tree.children == "without_replacement"
        draws = self.make_draws(ACCEPT, sequence_ids, positions)
        return AcceptedPath(
            *tree_recursive(make_nodes(tree), logits, q, ids, without_replacement, draws)
        )

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path = [0]
        while True:
            node = path[-1]
            p = tree.p(node)
            q: Vector = tree.q(node) if tree.children[node] else None
            for number, child in enumerate(tree.children[node]):
                token = tree.tokens[child]
                p = self.move_mass(p, token)
                if random.flip_coin(acceptance_ratio(p[token], q[token]), node, number):
                    path.append(child)
                    break
                p = normalize_weights((p - q).clip(0), p)
                if tree.without_replacement:
                    q = remove_token(q, token)
            else:
                return path, random.draw_token(p, node)

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        p = siblings.p
        q = siblings.q
        chances = []
        open_chance = 1
        for token in siblings.tokens:
            p = self.move_mass(p, token)
            accept_chance = acceptance_ratio(p[token], q[token])
            chances.append(open_chance * accept_chance)
            open_chance = open_chance * (1 - accept_chance)
            p = normalize_weights((p - q).clip(0), p)
            if siblings.without_replacement:
                q = remove_token(q, token)
        return chances

    def move_mass(self, p: Vector, token: int) -> Vector:
        """Return the distribution by which a draft is judged: p itself; a lossy rule may move
        mass to the draft.
        """
        return p


class SpeculativeSampling(RecursiveRejection):
    """Speculative sampling (Leviathan et al., 2023; Chen et al., 2023): recursive rejection
    where each node has one child.
    """

    name = "chain"
    chains_only = True


class PathRule(SequentialRule):
    """A rule that decides on a path as a unit. A node's rate is the chance that it or a descendant
    is accepted, over the draws below it. After a rejected node, its next sibling is visited with
    the residual of their parent's p and rate."""

    lossless = True
    children = DRAWN_CHILDREN

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        p = siblings.p
        tokens = siblings.tokens
        open_chance = 1
        parent_rate = rate
        chances: list[Any] = [0] * len(tokens)
        for index, q in iterate_siblings(tokens, siblings.q, siblings.without_replacement):
            accept_chance = self.child_rate(p, q, tokens[index], rate)
            # 0: the parent is never kept
            chances[index] = open_chance * accept_chance / parent_rate if parent_rate else 0
            open_chance = open_chance * (1 - accept_chance)
            residual = (rate * p - q).clip(0)
            p = normalize_weights(residual, p)
            rate = residual_rate(residual.sum(), rate)
        return chances

    def child_rate(self, p: Vector, q: Vector, token: int, rate: Any = 1) -> Any:
        return acceptance_ratio(rate * p[token], q[token])


class Block(PathRule):
    """Block verification (Sun et al., 2024, algorithm 2): judge a path as a unit, which accepts no
    less than token by token.

    No lossless rule accepts more of one drawn path in a round (theorem 2). With b_i = min(1,
    b_{i-1} p_i / q_i), the longest prefix i is accepted whose coin with probability h_i = r_i /
    (r_i + 1 - b_i) succeeds; r_i is the mass of max(b_i p - q, 0) after it, and h of the full path
    is its b. The next token is drawn from that residual.
    """

    name = "block"
    chains_only = True

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path = [0]
        rates = [1]
        while tree.children[path[-1]]:
            (child,) = tree.children[path[-1]]
            token = tree.tokens[child]
            rates.append(self.child_rate(tree.p(path[-1]), tree.q(path[-1]), token, rates[-1]))
            path.append(child)
        if random.flip_coin(rates[-1], path[-1]):
            return path, random.draw_token(tree.p(path[-1]), path[-1])
        for last in range(len(path) - 2, -1, -1):
            node = path[last]
            rate = rates[last]
            residual = (rate * tree.p(node) - tree.q(node)).clip(0)
            if last == 0 or random.flip_coin(residual_rate(residual.sum(), rate), node):
                return path[: last + 1], random.draw_token(
                    normalize_weights(residual, tree.p(node)), node
                )
        raise AssertionError("the root is always accepted")
