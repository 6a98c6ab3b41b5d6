"""Pruned drafts whose places copies take: which nodes a tree has."""

import math
from dataclasses import replace

import pytest
import torch

from spectrain.copying.trie import Trie
from spectrain.drafters.hybrid import Hybrid
from spectrain.models.target import Target
from spectrain.trees import Eagle2
from spectrain.trees.base import merge_tries
from spectrain.trees.token_tree import TokenTree
from spectrain_research.graft.drafter import Graft
from tests.decoding.rounds import placed

INNER = {"choice": "eagle3", "vocab_size": 512}
BUILDER = Eagle2(depth=4, budget=9, top_k=3)
# The last token of each is the root, and what follows its earlier occurrences is copied.
TEXTS = [[5, 6, 7, 8, 5, 6, 9, 5, 6, 7, 8, 11, 5, 6], [3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4]]
# Drafted below the root, as token, parent and probability given its path; some are copied too.
DRAFT = [(7, 0, 0.5), (3, 0, 0.3), (40, 0, 0.1), (8, 1, 0.6), (4, 2, 0.5), (41, 1, 0.2)]
DRAFT += [(42, 4, 0.5), (3, 5, 0.4)]
Path = tuple[int, ...]


def make_draft() -> TokenTree:
    """Return the same drafted tree for both texts, with the log-probability of every path."""
    probs = [1.0]
    for _, parent, chance in DRAFT:
        probs.append(probs[parent] * chance)
    tokens = torch.tensor([[text[-1], *(token for token, _, _ in DRAFT)] for text in TEXTS])
    parents = torch.tensor([[-1, *(parent for _, parent, _ in DRAFT)]] * 2)
    tree = TokenTree.from_parents(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))
    return replace(tree, scores=torch.tensor([probs] * 2).log())


def list_paths(tree: TokenTree, row: int) -> dict[Path, float]:
    """Return the score of the path from the root to every node of a text."""
    paths: dict[int, Path] = {0: ()}
    scores: dict[Path, float] = {}
    for node in range(1, tree.tokens.shape[1]):
        if bool(tree.valid[row, node]):
            paths[node] = (*paths[int(tree.parents[row, node])], int(tree.tokens[row, node]))
            scores[paths[node]] = 0.0 if tree.scores is None else float(tree.scores[row, node])
    return scores


def list_copies(trie: Trie) -> dict[Path, float]:
    """Return the chance of every path of copies that fits into the tree."""
    paths: dict[int, Path] = {0: ()}
    for node in range(1, len(trie)):
        paths[node] = (*paths[trie.parents[node]], trie.tokens[node])
    return {
        path: trie.weights[node] for node, path in paths.items() if 0 < len(path) <= BUILDER.depth
    }


def merge(target: Target, prune: float) -> tuple[list[dict[Path, float]], list[set[Path]]]:
    """Return the copies of every text and the likely drafted nodes, with the chances that
    drafter=hybrid gives them, and the paths of the tree of both.
    """
    context = placed(target, TEXTS, BUILDER, [len(text) for text in TEXTS])
    context.active.fill_(True)
    drafters = [Graft(target, inner=INNER, prune=prune) for _ in range(2)]
    for drafter in drafters:
        drafter.copying.propose_copies(context)
    draft = make_draft()
    assert draft.scores is not None
    likely = replace(draft, valid=draft.scores.exp() >= prune)
    chances = [list_copies(trie) for trie in Hybrid._merge_tries(drafters[0], likely)]
    tree = merge_tries(context, drafters[1]._merge_tries(draft), BUILDER)
    return chances, [{*list_paths(tree, row)} for row in range(len(TEXTS))]


@pytest.mark.parametrize("prune", [0.08, 0.12, 0.2, 0.4])
def test_likely_nodes_stay_and_copies_fill_the_other_places(shallow: Target, prune: float) -> None:
    """No other drafted node stays, and no copy that is left out is likelier than one that is in."""
    filled = 0
    for row, (copies, merged) in enumerate(zip(*merge(shallow, prune), strict=True)):
        drafted = list_paths(make_draft(), row)
        kept = {path for path, score in drafted.items() if score >= math.log(prune)}
        added = merged - kept
        assert 0 < len(kept) < len(drafted)
        assert kept <= merged and kept | added <= copies.keys()
        assert len(merged) == min(BUILDER.budget - 1, len(copies))
        left = [path for path in copies.keys() - merged if path[:-1] in {(), *merged}]
        assert max((copies[path] for path in left), default=0) <= min(
            (copies[path] for path in added), default=1
        )
        filled += len(added)
    assert filled


def test_the_ends_are_the_drafter_alone_and_copies_alone(shallow: Target) -> None:
    """The draft has as many nodes as the tree has places."""
    assert len(DRAFT) == BUILDER.budget - 1
    _, merged = merge(shallow, 0.0)
    assert merged == [{*list_paths(make_draft(), row)} for row in range(len(TEXTS))]
    copies, merged = merge(shallow, 1.0)
    for chances, paths in zip(copies, merged, strict=True):
        assert paths and paths <= chances.keys()
