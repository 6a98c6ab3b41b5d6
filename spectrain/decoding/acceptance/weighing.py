"""Rules that weigh the target's p against the drafter's q: lossless for children that were drawn from q. V vocabulary."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spectrain.kernels.tree_verify import tree_recursive
from spectrain.randomness import ACCEPT
from spectrain.trees.token_tree import Accepted, TokenTree

from .base import DRAWN, Siblings, Vector, nodes_of
from .walking import Dice, VerifiedTree, Walking, normalised, offers, ratio, share, without


class Recursive(Walking):
    """Recursive rejection sampling (SpecInfer, Miao et al., 2023; RSD, Jeon et al., 2024; Sequoia, Chen et al., 2024).

    Children in the order they were drawn: keep x with probability min(1, P(x) / Q(x)), else P becomes the normalised
    max(P - Q, 0) and, drawn without replacement, Q loses x. Where none is kept, the next token is drawn from P.
    """

    name = "recursive"
    lossless = True
    children = DRAWN
    on_device = True

    def __call__(self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> Accepted:
        """What `judge` decides one by one, of all sequences at once, with the same random numbers."""
        if tree.tokens.shape[1] == 1:  # nothing to weigh
            q, ids, without_replacement = logits.new_ones(len(sequence_ids), 1, 1), None, False
        else:
            self.check(tree.children, not self.chains_only or tree.is_chain)
            assert tree.q is not None, "a tree with drawn children says what they were drawn from"
            q, ids, without_replacement = tree.q, tree.draft_ids, tree.children == "without_replacement"
        draws = self.draws(ACCEPT, sequence_ids, positions)
        return Accepted(*tree_recursive(nodes_of(tree), logits, q, ids, without_replacement, draws))

    def judge(self, tree: VerifiedTree, dice: Dice) -> tuple[list[int], int]:
        path = [0]
        while True:
            node = path[-1]
            p = tree.p(node)
            q: Vector = tree.q(node) if tree.children[node] else None
            for number, child in enumerate(tree.children[node]):
                token = tree.tokens[child]
                if dice.coin(ratio(p[token], q[token]), node, number):
                    path.append(child)
                    break
                p = normalised((p - q).clip(0), p)
                if tree.without_replacement:
                    q = without(q, token)
            else:
                return path, dice.draw(p, node)

    def chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        p, q, found, left = siblings.p, siblings.q, [], 1
        for token in siblings.tokens:
            keep = ratio(p[token], q[token])
            found.append(left * keep)
            left = left * (1 - keep)
            p = normalised((p - q).clip(0), p)
            if siblings.without_replacement:
                q = without(q, token)
        return found


class SpeculativeSampling(Recursive):
    """Speculative sampling (Leviathan et al., 2023; Chen et al., 2023): recursive rejection where each node has one child."""

    name = "chain"
    chains_only = True


class PathRule(Walking):
    """A rule that judges a path as a whole. A node's rate is the chance that it or a node below it is kept, over what is drawn
    below it; where a node has failed, its next sibling is visited with what is left of their parent's p and rate."""

    lossless = True
    children = DRAWN

    def chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        p, tokens, left, of_parent = siblings.p, siblings.tokens, 1, rate
        found: list[Any] = [0] * len(tokens)
        for place, q in offers(tokens, siblings.q, siblings.without_replacement):
            keep = self.rate_after(p, q, tokens[place], rate)
            found[place] = left * keep / of_parent if of_parent else 0  # 0: the parent is never kept
            left = left * (1 - keep)
            residual = (rate * p - q).clip(0)
            p, rate = normalised(residual, p), share(residual.sum(), rate)
        return found

    def rate_after(self, p: Vector, q: Vector, token: int, rate: Any = 1) -> Any:
        return ratio(rate * p[token], q[token])


class Block(PathRule):
    """Block verification (Sun et al., 2024, algorithm 2): a path is judged as a whole and keeps no less than token by token.

    Of one drawn path no lossless rule keeps more in a round (theorem 2): it is the transport of the whole path.

    b_i = min(1, b_{i-1} p_i / q_i); the longest prefix i is kept whose coin h_i = r_i / (r_i + 1 - b_i) falls, where r_i is
    the mass of max(b_i p - q, 0) after it, and h of the whole path is its b. The next token is drawn from that residual.
    """

    name = "block"
    chains_only = True

    def judge(self, tree: VerifiedTree, dice: Dice) -> tuple[list[int], int]:
        path, rates = [0], [1]
        while tree.children[path[-1]]:
            (child,) = tree.children[path[-1]]
            token = tree.tokens[child]
            rates.append(self.rate_after(tree.p(path[-1]), tree.q(path[-1]), token, rates[-1]))
            path.append(child)
        if dice.coin(rates[-1], path[-1]):
            return path, dice.draw(tree.p(path[-1]), path[-1])
        for last in range(len(path) - 2, -1, -1):
            node, rate = path[last], rates[last]
            residual = (rate * tree.p(node) - tree.q(node)).clip(0)
            if last == 0 or dice.coin(share(residual.sum(), rate), node):
                return path[: last + 1], dice.draw(normalised(residual, tree.p(node)), node)
        raise AssertionError("the root is always kept")


class Traversal(PathRule):
    """Traversal verification (Weng et al., 2025): from the leaves to the root, so a node counts with all that is below it.

    A node has a rate (the root 1) and a residual P (at first p). Each child, in the order drawn, is visited with rate
    min(1, rate P(x) / Q(x)); where it fails, the mass S of max(rate P - Q, 0) gives the new residual and the new rate
    S / (S + 1 - rate). With no child left the node is kept with its rate. On a chain it is block verification.

    The likeliest children of a node are visited after the one that was drawn, as if each were drawn from itself alone. With
    them it is the optimal transport of a whole round where only the last level branches: above it there is one path, of which
    block verification is the optimum, and the last nodes keep what `Transport` does, the optimum of a node. Where an earlier
    level branches, what lies below one child could be weighed against what lies below another, which no rule here does.
    """

    name = "traversal"
    children = (*DRAWN, "top_and_sampled")

    def judge(self, tree: VerifiedTree, dice: Dice) -> tuple[list[int], int]:
        found = self._visit(tree, dice, 0, 1)
        assert found is not None, "the root is always kept"
        return found

    def _visit(self, tree: VerifiedTree, dice: Dice, node: int, rate: Any) -> tuple[list[int], int] | None:
        p, children = tree.p(node), tree.children[node]
        offered = offers([tree.tokens[child] for child in children], tree.q(node), tree.without_replacement) if children else ()
        for place, q in offered:
            child = children[place]
            found = self._visit(tree, dice, child, self.rate_after(p, q, tree.tokens[child], rate))
            if found is not None:
                return [node, *found[0]], found[1]
            residual = (rate * p - q).clip(0)
            p = normalised(residual, p)
            rate = 1 if node == 0 else share(residual.sum(), rate)
        return ([node], dice.draw(p, node)) if node == 0 or dice.coin(rate, node, number=node) else None
