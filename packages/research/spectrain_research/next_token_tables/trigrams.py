"""Trigrams that follow the target's predictions (ADED, Liu et al., 2024, arXiv 2407.12021)."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from spectrain.config.values import Count, NotNegative
from spectrain.copying.suffixes import TEXT_END
from spectrain.drafters.context import Context
from spectrain.drafters.layers.copies import CopySource
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree

from .proposals import TableDrafter, TableTree

Pair = tuple[int, int]


class TrigramTable:
    """Weights of tokens after two others. A pair retains its `top` heaviest tokens."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.weights: dict[Pair, dict[int, float]] = {}

    def add_text(self, tokens: list[int]) -> None:
        """Count every trigram of a text once; TEXT_END separates texts."""
        for first, second, third in zip(tokens, tokens[1:], tokens[2:]):
            if TEXT_END not in (first, second, third):
                self.add_weight((first, second), third, 1.0)

    def add_weight(self, pair: Pair, token: int, weight: float) -> None:
        """Add weight to a token after a pair; where the pair has too many tokens, its lightest
        one leaves.
        """
        tokens = self.weights.setdefault(pair, {})
        tokens[token] = tokens.get(token, 0.0) + weight
        if len(tokens) > self.top:
            del tokens[min(tokens, key=tokens.__getitem__)]

    def next_probs(self, pair: Pair) -> dict[int, float]:
        """Return the shares of the tokens after a pair."""
        tokens = self.weights.get(pair, {})
        total = sum(tokens.values())
        return {token: weight / total for token, weight in tokens.items()}


class SearchNode:
    """A node of a tree search: its number in the tree, its pair, the shares of its next tokens,
    and visits of its children.
    """

    def __init__(self, index: int, pair: Pair, probability: float, table: TrigramTable) -> None:
        self.index, self.pair, self.probability = index, pair, probability
        self.shares = table.next_probs(pair)
        self.children: dict[int, SearchNode] = {}
        self.visits = dict.fromkeys(self.shares, 0)
        self.values = dict.fromkeys(self.shares, 0.0)

    def choose_token(self, exploration: float) -> int:
        """Return the token with the highest Q + c P sqrt(sum N) / (1 + N), the PUCT score; of
        equals the first.
        """
        root_visits = sqrt(1 + sum(self.visits.values()))

        def puct_score(token: int) -> float:
            visits = self.visits[token]
            mean_value = self.values[token] / visits if visits else 0.0
            return mean_value + exploration * self.shares[token] * root_visits / (1 + visits)

        return max(self.shares, key=puct_score)


def search_tree(
    table: TrigramTable, pair: Pair, depth: int, simulations: int, exploration: float
) -> TableTree:
    """Return the nodes that `simulations` descents from a pair of tokens add, one each, down to a
    depth.

    A descent chooses tokens by their PUCT score until it adds a node or ends; the probability of
    the path to its last node is the value that all nodes on its way receive.
    """
    tree = TableTree.from_root(pair[1])
    root = SearchNode(0, pair, 1.0, table)
    for _ in range(simulations):
        node = root
        steps: list[tuple[SearchNode, int]] = []
        while node.shares and len(steps) < depth:
            token = node.choose_token(exploration)
            steps.append((node, token))
            if token not in node.children:
                share = node.shares[token]
                index = tree.add_node(node.index, token, share)
                node.children[token] = SearchNode(
                    index, (node.pair[1], token), node.probability * share, table
                )
                node = node.children[token]
                break
            node = node.children[token]
        for visited, token in steps:
            visited.visits[token] += 1
            visited.values[token] += node.probability
    return tree


class Trigrams(TableDrafter):
    """Drafts from trigrams by a Monte Carlo tree search.

    The table begins with the trigrams of the store. Every verified node then adds the target's
    probabilities of its `top` tokens to the pair that ends with it: verification has computed them.
    A round's tree is what `budget` - 1 descents find, so the target verifies all of it unless
    copies join.
    """

    capabilities = replace(TableDrafter.capabilities, nestable=False)

    def __init__(
        self,
        target: Target,
        # Folder that spectrain data index wrote, whose trigrams the table begins with; null begins
        # with an empty table.
        store: str | None = None,
        # Number of tokens that a pair retains, and of the target's tokens that a verified node
        # adds.
        top: Count = 8,
        # Constant c of the PUCT score, which weighs unvisited tokens against tokens of high value.
        exploration: NotNegative = 1.0,
        # Whether copies of the text and of the store, as of drafter=retrieval, join the table's
        # tokens.
        copies: bool = False,
        # Largest number of final tokens of the text that are matched in the text itself.
        longest: int = 6,
        # Largest number of matching positions that are read per source.
        matches: int = 200,
    ) -> None:
        super().__init__(CopySource.open(store, target.tokenizer, longest, matches), copies)
        self.top, self.exploration = top, exploration
        self.table = TrigramTable(top)
        datastore = self.capabilities.datastore
        if datastore is not None:
            self.table.add_text(datastore.tokens.tolist())

    def propose_tree(self, text: list[int], depth: int, budget: int) -> TableTree:
        pair = (text[-2] if len(text) > 1 else TEXT_END, text[-1])
        return search_tree(self.table, pair, depth, budget - 1, self.exploration)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        features = super().verify(context, tree)
        assert features.logits is not None
        best = features.logits.float().softmax(-1).topk(self.top)
        columns = (tree.tokens, tree.parents, tree.valid, best.indices, best.values)
        for row, (tokens, parents, valid, ids, probs) in enumerate(
            zip(*(part.tolist() for part in columns))
        ):
            if not bool(context.active[row]):
                continue
            text = self.copying.texts.rows[row].tokens
            for node in filter(valid.__getitem__, range(len(tokens))):
                first = tokens[parents[node]] if node else (text[-2] if len(text) > 1 else TEXT_END)
                for token, probability in zip(ids[node], probs[node]):
                    self.table.add_weight((first, tokens[node]), token, probability)
        return features
