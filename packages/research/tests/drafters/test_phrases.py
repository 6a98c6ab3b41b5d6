"""Phrases, shared subtrees, gated retrieval and tables equal plain versions of themselves."""

from collections import defaultdict
from math import sqrt
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.context import Context
from spectrain.drafters.hybrid import Hybrid
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Rollout
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.graph_drafting.drafter import GraphDrafting, GraphRollout
from spectrain_research.next_token_tables.bigrams import Bigrams, BigramTable
from spectrain_research.next_token_tables.trigrams import Trigrams, TrigramTable, search_tree
from spectrain_research.ouroboros.drafter import Ouroboros
from spectrain_research.ouroboros.phrases import find_agreeing_runs
from spectrain_research.respec.drafter import ReSpec, RootEntropyRollout
from spectrain_research.shared.phrase_pool import PhrasePool
from tests.decoding.rounds import Keeping, placed
from tests.drafters.test_contract import EAGLE3
from tests.trees.tables import check_structure

PROMPTS = [[5, 7, 9, 5, 7, 9, 5, 7], [40, 50, 60, 40]]
LIMIT = 24
WIDE = Eagle2(4, 10, 3)


class RecordingOuroboros(Ouroboros):
    """Records every tree, the target's predictions at its nodes, and what was accepted."""

    rounds: ClassVar[list[tuple[TokenTree, Tensor, AcceptedPath, list[bool], int]]] = []

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        super().commit(context, accepted)
        assert self.tree is not None
        working = [count > 0 for count in context.num_new.tolist()]
        self.rounds.append(
            (self.tree, torch.tensor(self.answers), accepted, working, self.num_inner)
        )


def rejected_runs(
    tree: TokenTree, answers: Tensor, path: list[int], row: int
) -> set[tuple[int, ...]]:
    """By trying all paths of a tree, find the runs of rejected nodes that agree with the
    prediction before each.
    """
    runs = set()
    for node in range(tree.tokens.shape[1]):
        nodes = [int(node_index) for node_index in tree.ancestors[row, node].nonzero()[:, 0]]
        run: list[int] = []
        for parent, child in zip(nodes, nodes[1:]):
            agrees = bool(tree.tokens[row, child] == answers[row, parent]) and child not in path
            run = [*run, int(tree.tokens[row, child])] if agrees else []
        if len(run) > 1 and bool(tree.valid[row, node]):
            runs.add(tuple(run))
    return {
        run for run in runs if not any(run != other and run == other[: len(run)] for other in runs)
    }


@pytest.mark.parametrize("builder", [Chain(4), WIDE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "inner", ["ngram", {"choice": "causal", "num_layers": 1}], ids=["ngram", "causal"]
)
def test_ouroboros_equals_a_plain_version(shallow: Target, inner: object, builder: Chain) -> None:
    """The output is greedy; pools hold the rejected runs; counts of added nodes and hits are
    those of the recorded trees.
    """
    drafter = RecordingOuroboros(
        shallow, inner, phrases=2, length=4, phrases_from_text=False
    ).eval()  # type: ignore[arg-type]
    drafter.rounds.clear()
    plain = decode(shallow, PROMPTS, Greedy(), LIMIT)
    assert [row.output for row in decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, builder)] == [
        row.output for row in plain
    ]
    runs: list[set[tuple[int, ...]]] = [set(), set()]
    hits = added = 0
    for tree, answers, accepted, working, num_inner in drafter.rounds:
        check_structure(tree)
        for row in [row for row in range(2) if working[row]]:
            path = accepted.path[row, : accepted.counts[row]].tolist()
            for node in range(num_inner, tree.tokens.shape[1]):
                hits += node in path
                added += bool(tree.valid[row, node])
            runs[row] |= {run[:4] for run in rejected_runs(tree, answers, path, row)}
    assert (drafter.num_hits, drafter.num_added) == (hits, added) and added <= len(
        drafter.rounds
    ) * 2 * drafter.max_added
    for pool, expected in zip(drafter.pools, runs):
        assert {phrase for phrases in pool.phrases.values() for phrase in phrases} == expected


def test_a_rejected_phrase_is_drafted_later(shallow: Target) -> None:
    """Tokens that were wrong only because of an earlier one become a phrase, which is then
    drafted after its first token.
    """
    tokens = [1, 9, 4, 5, 6, 8]
    parents = [-1, 0, 1, 2, 3, 2]
    answers = [2, 4, 5, 6, 0, 0]
    assert find_agreeing_runs(tokens, parents, answers, [False] + [True] * 5) == [[4, 5, 6]]
    assert (
        find_agreeing_runs(tokens, parents, answers, [False, True, True, False, False, False]) == []
    )
    drafter = Ouroboros(shallow, {"choice": "causal", "num_layers": 1}, phrases=2, length=3)
    drafter.pools = [PhrasePool(3, 2)]
    for phrase in ([4, 5, 6, 7], [4, 8, 1], [3, 2], [4, 5, 6], [4, 8, 2], [7]):
        drafter.pools[0].add_phrase(phrase)
    assert drafter.pools[0].phrases == {4: [(4, 5, 6), (4, 8, 2)], 3: [(3, 2)]}
    tree = drafter._append_phrases(TokenTree.from_chain(torch.tensor([[1, 4]])))
    assert tree.tokens.tolist() == [[1, 4, 8, 2, 5, 6]] and tree.parents.tolist() == [
        [-1, 0, 1, 2, 1, 4]
    ]


class PairRollout(Rollout):
    """A rollout whose distribution depends on a node's last two tokens alone."""

    def __init__(self, root: Tensor) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(6, 6, 6, generator=generator).log_softmax(-1)
        self.last = root[:, None].expand(-1, 2)[:, None]  # [B, nodes, 2]

    def start(self) -> Tensor:
        return self.table[self.last[..., 0], self.last[..., 1]]

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        new = torch.stack(
            [self.last.gather(1, parents[..., None].expand(-1, -1, 2))[..., 1], tokens], dim=-1
        )
        self.last = torch.cat([self.last, new], dim=1)
        return self.table[new[..., 0], new[..., 1]]


@pytest.mark.parametrize("roots", [[2], [1, 4]], ids=["one", "two"])
def test_shared_subtrees_equal_drafted_ones(shallow: Target, roots: list[int]) -> None:
    """If two tokens decide q, the graph's tree is the drafted one, and each pair of tokens is
    run once.
    """
    builder = Eagle2(6, 40, 5)
    context = placed(shallow, [[root, root] for root in roots], builder)
    tails = [[root, root] for root in roots]
    drafted = builder.expand(context, PairRollout(torch.tensor(roots)))
    inner = PairRollout(torch.tensor(roots))
    graph = GraphRollout(inner, tails, 2)
    tree = builder.expand(context, graph)
    assert torch.equal(tree.tokens, drafted.tokens) and torch.equal(tree.parents, drafted.parents)
    distinct = [len(set(tails)) for tails in graph.tails]
    assert graph.num_run == sum(distinct) - len(roots) and graph.num_nodes == len(roots) * 25
    assert inner.last.shape[1] >= max(distinct) and (
        len(roots) > 1 or inner.last.shape[1] == distinct[0]
    )
    with pytest.raises(UserError, match="drafter.inner=jacobi: it runs the target"):
        GraphDrafting(shallow, "jacobi")


def test_retrieval_is_gated_by_entropy(shallow: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lookups the rounds are the inner drafter's, with all of them those of
    drafter=hybrid; lookups are counted.
    """
    inner = {"choice": "eagle3", **EAGLE3}
    torch.manual_seed(0)
    hybrid = Hybrid(shallow, inner).eval()
    token_lists: dict[str, list[list[list[int]]]] = {}
    counts = {}
    entropies: list[float] = []
    start = RootEntropyRollout.start

    def note_entropy(rollout: RootEntropyRollout) -> torch.Tensor:
        log_q = start(rollout)
        assert rollout.root_entropy is not None
        entropies.extend(rollout.root_entropy.tolist())
        return log_q

    monkeypatch.setattr(RootEntropyRollout, "start", note_entropy)
    for name, entropy in (("never", 0.0), ("always", None)):
        drafter = ReSpec(shallow, inner, entropy=entropy).eval()
        drafter.load_state_dict(hybrid.state_dict())
        builder = Keeping(WIDE)
        generations = decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, builder)
        assert [row.output for row in generations] == [
            row.output for row in decode(shallow, PROMPTS, Greedy(), LIMIT)
        ]
        token_lists[name], counts[name] = (
            [sorted(tree.tokens[0].tolist()) for tree in builder.trees],
            drafter,
        )
    for name, other in (("always", hybrid), ("never", hybrid.inner)):
        builder = Keeping(WIDE)
        decode(shallow, PROMPTS, Greedy(), LIMIT, other, builder)
        assert token_lists[name] == [sorted(tree.tokens[0].tolist()) for tree in builder.trees]
    assert counts["never"].num_lookups == counts["never"].num_joined == 0
    assert counts["always"].num_lookups == counts["always"].num_rows
    # A gate at the mean entropy opens in some rounds.
    drafter = ReSpec(shallow, inner, entropy=sum(entropies) / len(entropies)).eval()
    drafter.load_state_dict(hybrid.state_dict())
    decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, WIDE)
    assert 0 < drafter.num_lookups < drafter.num_rows
    rollout = RootEntropyRollout(PairRollout(torch.tensor([2, 3])))
    log_q = rollout.start()
    assert rollout.root_entropy is not None
    torch.testing.assert_close(
        rollout.root_entropy, torch.distributions.Categorical(logits=log_q[:, 0]).entropy()
    )


def test_copies_join_by_their_chance(shallow: Target) -> None:
    """If no copy is likely enough, the drafter's tree stays as it is, but the copies are still
    judged.
    """
    drafter = ReSpec(shallow, {"choice": "eagle3", **EAGLE3}, entropy=None, chance=1.0).eval()
    decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, WIDE)
    assert (
        drafter.num_joined == 0 < drafter.num_lookups
        and drafter.copying.estimator.trials[0].sum() > 0
    )


def test_a_bigram_table_is_what_single_tokens_predict(shallow: Target, tmp_path: Path) -> None:
    """The table equals forwards of one token, and loads as saved; chains take the likeliest token;
    another target is refused."""
    drafter = Bigrams(shallow, str(tmp_path / "table"), top=3, copies=False)
    table = drafter.target_table
    for token in (3, 700, 2047):
        logits = shallow.head.logits(
            shallow.features(torch.tensor([[token]]), ("final",)).at_layer("final")
        )[0, 0]
        best = logits.softmax(-1).topk(3)
        assert table.tokens[token].tolist() == best.indices.tolist()
        torch.testing.assert_close(
            torch.from_numpy(table.probs[token]), best.values, rtol=1e-3, atol=1e-5
        )
    tree = drafter.propose_tree([9, 700], 2, 0)
    firsts = table.tokens[700].tolist()
    assert tree.tokens == [
        700,
        *(token for first in firsts for token in (first, int(table.tokens[first, 0]))),
    ]
    assert tree.parents == [-1, 0, 1, 0, 3, 0, 5]
    again = BigramTable.load_or_make(str(tmp_path / "table"), shallow, 3)
    assert (again.tokens == table.tokens).all() and (again.probs == table.probs).all()
    with pytest.raises(UserError, match="it was made with another target or drafter.top"):
        Bigrams(shallow, str(tmp_path / "table"), top=4)
    np.save(tmp_path / "table" / "tokens.npy", table.tokens[:, :2])
    np.save(tmp_path / "table" / "probs.npy", table.probs[:, :2])
    with pytest.raises(UserError, match="its arrays do not belong together"):
        Bigrams(shallow, str(tmp_path / "table"), top=3)


def search_paths(
    shares: dict, pair: tuple[int, int], depth: int, simulations: int, constant: float
) -> set[tuple[int, ...]]:
    """Return the paths of a PUCT search by its definition, with statistics by path."""
    visits: dict[tuple[int, ...], int] = defaultdict(int)
    values: dict[tuple[int, ...], float] = defaultdict(float)
    paths: set[tuple[int, ...]] = set()
    for _ in range(simulations):
        path: tuple[int, ...] = ()
        path_prob = 1.0
        pair_now = pair
        while shares.get(pair_now) and len(path) < depth:
            total = 1 + sum(visits[(*path, token)] for token in shares[pair_now])
            scores = {}
            for token, share in shares[pair_now].items():
                times = visits[(*path, token)]
                mean = values[(*path, token)] / times if times else 0.0
                scores[token] = mean + constant * share * sqrt(total) / (1 + times)
            token = max(scores, key=lambda candidate: scores[candidate])
            path_prob = path_prob * shares[pair_now][token]
            path = (*path, token)
            pair_now = (pair_now[1], token)
            if path not in paths:
                paths.add(path)
                break
        for end in range(1, len(path) + 1):
            visits[path[:end]] += 1
            values[path[:end]] += path_prob
    return paths


@pytest.mark.parametrize("constant", [0.0, 0.3, 1.0, 4.0])
def test_trigrams_are_searched_by_puct(constant: float) -> None:
    """The tree of a search is that of its definition, and a pair with too many tokens drops its
    lightest.
    """
    table = TrigramTable(3)
    table.add_text(torch.randint(0, 5, (300,)).tolist())
    shares = {pair: table.next_probs(pair) for pair in table.weights}
    tree = search_tree(table, (1, 2), 4, 25, constant)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:]):
        paths.append((*paths[parent], token))
    assert set(paths[1:]) == search_paths(shares, (1, 2), 4, 25, constant) and len(
        set(paths)
    ) == len(paths)
    small = TrigramTable(2)
    for token, weight in ((5, 0.5), (6, 0.2), (7, 0.4), (5, 0.1)):
        small.add_weight((1, 2), token, weight)
    assert small.weights == {(1, 2): {5: pytest.approx(0.6), 7: 0.4}}


class RecordingTrigrams(Trigrams):
    """Records the texts, the trees and the target's logits of every round."""

    rounds: ClassVar[list[tuple[list[list[int]], TokenTree, Tensor, list[bool]]]] = []

    def verify(self, context: Context, tree: TokenTree) -> Features:
        features = super().verify(context, tree)
        assert features.logits is not None
        texts = [list(row.tokens) for row in self.copying.texts.rows]
        self.rounds.append((texts, tree, features.logits.clone(), context.active.tolist()))
        return features


def test_trigrams_learn_from_every_verified_node(shallow: Target) -> None:
    """Weights are the target's probabilities after each pair, summed one by one; the output is
    greedy.
    """
    drafter = RecordingTrigrams(shallow, top=2048)
    drafter.rounds.clear()
    generations = decode(shallow, PROMPTS, Greedy(), 8, drafter, Chain(3))
    assert [row.output for row in generations] == [
        row.output for row in decode(shallow, PROMPTS, Greedy(), 8)
    ]
    sums: dict[tuple[int, int], Tensor] = defaultdict(lambda: torch.zeros(2048))
    for texts, tree, logits, working in drafter.rounds:
        for row in [row for row, works in enumerate(working) if works]:
            for node in tree.valid[row].nonzero()[:, 0].tolist():
                path = [
                    int(tree.tokens[row, ancestor])
                    for ancestor in tree.ancestors[row, node].nonzero()[:, 0]
                ]
                pair = tuple([*texts[row][:-1], *path][-2:])
                sums[pair] += logits[row, node].softmax(-1)  # type: ignore[index]
    assert sums.keys() == drafter.table.weights.keys() and len(sums) > 8
    for pair, total in sums.items():
        weights = torch.tensor([drafter.table.weights[pair][token] for token in range(2048)])
        torch.testing.assert_close(weights, total)
