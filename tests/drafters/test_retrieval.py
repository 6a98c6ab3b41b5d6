"""Copies of the text and of a store, alone and beside a drafter: one tree, whose chances are learnt."""

from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.config.build import GroupSpec, build
from spectrain.config.spec import RunSpec
from spectrain.data.datastore import TEXT_END, hash_vocabulary, write_store
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.calibration import calibrate_builders
from spectrain.decoding.loop import decode
from spectrain.decoding.session import check_compatibility
from spectrain.drafters.hybrid import PATIENCE, Hybrid
from spectrain.drafters.layers.copies import SOURCES, AcceptanceEstimator, Copies, Proposal
from spectrain.drafters.retrieval import Retrieval
from spectrain.errors import UserError
from spectrain.experimental.dyspec.builder import DySpec
from spectrain.models.target import Target
from spectrain.runs.drafters import build_drafter, load_description, save_drafter
from spectrain.trees import Auto, Chain, Eagle2, Static, TreeBuilder
from spectrain.trees.base import Prefix
from spectrain.trees.trie import Trie
from tests.decoding.rounds import Keeping
from tests.drafters.test_contract import EAGLE3, composed

INNER = {"choice": "eagle3", **EAGLE3}


@pytest.fixture
def prompts() -> list[list[int]]:
    return [torch.randint(3, 2000, (length,)).tolist() for length in (7, 4)]


@pytest.fixture
def store(shallow: Target, prompts: list[list[int]], tmp_path: Path) -> str:
    """A store of what the target says, with a wrong token now and then."""
    answers = [one.output for one in decode(shallow, prompts, Greedy(), 24)]
    texts = [[*prompt, *(token ^ (at % 7 == 6) for at, token in enumerate(said))] for prompt, said in zip(prompts, answers)]
    write_store(tmp_path / "store", texts, ["What?"], [], {"tokenizer": hash_vocabulary(shallow.tokenizer)})
    return str(tmp_path / "store")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("builder", [Chain(4), Eagle2(4, 10, 3), DySpec(4, 10, children="deterministic")], ids=lambda b: b.name)
@pytest.mark.parametrize("family", ["retrieval", "hybrid"])
def test_drafted_equals_plain(shallow: Target, prompts: list[list[int]], store: str, family: str, builder: TreeBuilder) -> None:
    """Greedily and by matching; trees keep their budget, siblings are merged, a chain is one, and the store is copied from."""
    for rule in (Greedy(), Match(0.8, seed=3)):
        drafter = Retrieval(shallow, store) if family == "retrieval" else Hybrid(shallow, INNER, store).eval()
        kept = Keeping(builder)
        plain, found = decode(shallow, prompts, rule, 24), decode(shallow, prompts, rule, 24, drafter, kept)
        assert [one.output for one in found] == [one.output for one in plain]
        for tree in kept.trees:
            tree.check_structure()
            assert tree.tokens.shape[1] <= builder.budget and int(tree.depths.max()) <= builder.depth
            assert not builder.is_chain or tree.is_chain
        if rule.name == "greedy":
            assert max(count for one in found for count in one.round_lengths) > 2


def copies(*found: tuple[int, list[int]]) -> Copies:
    return Copies(np.array([length for length, _ in found]), np.array([tokens for _, tokens in found]))


def test_sources_meet_in_one_tree(shallow: Target) -> None:
    """What two sources say of the same path is one node with two sayings, and the surest of them counts."""
    proposal, chances = Proposal.from_copies([copies((2, [5, 6]), (1, [5, 7]))], 0), AcceptanceEstimator()
    proposal.add_draft([1, 5, 9, 8], [-1, 0, 0, 1], [0.0, -0.1, -3.0, -0.2], [True, True, False, True])
    trie = proposal.weigh_trie(chances)
    assert trie.tokens == [-1, 5, 6, 7, 8] and np.bincount(proposal.nodes).tolist() == [0, 2, 1, 1, 1]
    assert trie.weights[1] == chances(proposal.estimates)[proposal.nodes == 1].max() and trie.weights[0] == 1
    assert all(trie.weights[node] <= trie.weights[trie.parents[node]] for node in range(1, len(trie)))


def plainly(found: list[Copies], least: float) -> dict[tuple[int, ...], list[tuple[str, int, float, int]]]:
    """Paths in the order in which continuations, one after another, make nodes for them, and what each source says there:
    tokens that match, share, places."""
    said: dict[tuple[int, ...], list[tuple[str, int, float, int]]] = {}
    for source, one in zip(SOURCES, found):
        weights: dict[tuple[int, ...], float] = {(): float((2.0**one.lengths).sum())}
        places: dict[tuple[int, ...], list[int]] = {}
        for length, tokens in zip(one.lengths.tolist(), one.tokens.tolist()):
            rest = tokens[: tokens.index(TEXT_END)] if TEXT_END in tokens else tokens
            for path in (tuple(rest[: end + 1]) for end in range(len(rest))):
                weights[path] = weights.get(path, 0.0) + 2.0**length
                places.setdefault(path, []).append(length + len(path) - 1)
        for path, lengths in places.items():
            if weights[path] >= least * weights[()]:
                saying = source, lengths[0], weights[path] / weights[path[:-1]], len(lengths)
                said.setdefault(path, []).append(saying)
    return said


@pytest.mark.parametrize("least", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (0, 9), (7, 40)])
def test_one_pass_equals_one_by_one(sizes: tuple[int, int], least: float) -> None:
    """The same nodes in the same order, and the same sayings, as tries that are grown place by place."""
    for kinds in (2, 4, 30):
        found = []
        for size in sizes:
            tokens = torch.randint(0, kinds, (size, 5)).numpy()
            tokens[np.arange(5) >= torch.randint(1, 9, (size, 1)).numpy()] = TEXT_END
            found.append(Copies(torch.randint(1, 17, (size,)).sort(descending=True).values.numpy(), tokens))
        proposal, wanted = Proposal.from_copies(found, least), plainly(found, least)
        trie = proposal.trie
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(trie.tokens[1:], trie.parents[1:]):
            paths.append((*paths[parent], token))
        assert paths == [(), *wanted] and trie.depths == [len(path) for path in paths]
        assert all(trie.find_child(paths.index(path[:-1]), path[-1]) == paths.index(path) for path in wanted)
        if wanted:
            said = sorted(zip((paths[node] for node in proposal.nodes), *map(np.ndarray.tolist, proposal.estimates)))
            assert said == sorted((path, *kind_of(*saying)) for path, sayings in wanted.items() for saying in sayings)


def kind_of(source: str, length: int, share: float, count: int) -> tuple[int, float]:
    """A saying's class and estimate, from their definition."""
    classes = length if length < 4 else 4 if length < 6 else 5 if length < 9 else 6
    shares = 0 if share > 0.97 else 1 + min(7, int(-1.5 * log2(max(share, 1e-3))))
    estimate = 0.02 + 0.9 * share * (length / (length + 1) if length else 1.0)
    return int(
        np.ravel_multi_index((SOURCES.index(source), classes, shares, min(count, 3)), AcceptanceEstimator().trials.shape)
    ), estimate


def test_trust_is_learnt(shallow: Target) -> None:
    """A source that is always wrong falls behind one that is always right, and no node is judged where the path left it."""
    chances = AcceptanceEstimator()
    for _ in range(30):
        proposal = Proposal.from_copies([copies((3, [5, 6])), copies((3, [7, 8]))], 0)
        chances.update_counts(proposal, [7, 9])
    trie = proposal.weigh_trie(chances)
    context, below, store, _ = trie.weights[1:]
    assert store > 0.9 and context < 0.1 and trie.best_nodes(1, 2) == [0, 3]
    assert chances.trials[SOURCES.index("context")].sum() == 30 and below <= context
    assert chances.hits[SOURCES.index("store")].sum() == 30 and chances.trials[SOURCES.index("store")].sum() == 60


def test_a_hybrid_judges_every_source(shallow: Target, prompts: list[list[int]], store: str) -> None:
    """What the drafter, the text and the store say is judged by what follows."""
    drafter = Hybrid(shallow, INNER, store).eval()
    decode(shallow, prompts, Greedy(), 24, drafter, Eagle2(4, 10, 3))
    trials, hits = drafter.copying.estimator.trials, drafter.copying.estimator.hits
    assert all(one.any() for one in trials) and (hits <= trials).all()


def test_what_weighs_q_is_refused(shallow: Target) -> None:
    """Copies have no q, and none is drawn."""
    for drafter in (Retrieval(shallow), Hybrid(shallow, INNER)):
        with pytest.raises(UserError, match="acceptance=recursive.*copied tokens have none"):
            check_compatibility(drafter, Chain(2), RecursiveRejection())
        check_compatibility(drafter, Chain(2), Match(1.0))
    with pytest.raises(UserError, match="tree.children=sampled: copied tokens are not drawn"):
        check_compatibility(drafter, Chain(2, "sampled"), Match(1.0))


def test_a_hybrid_takes_a_drafter_by_its_directory(shallow: Target, tmp_path: Path) -> None:
    """With its settings and weights, and, saved, is whole without that directory; what copies itself is no drafter inside."""
    inner: Any = build({**composed("drafter=eagle3").drafter, **EAGLE3}, target=shallow)
    config = composed("drafter=eagle3", "target=tiny", "+drafter.vocab_size=512", "+drafter.ttt_steps=3")
    save_drafter(tmp_path / "inner", inner, RunSpec.from_nodes(config))
    node = {"_target_": "spectrain.drafters.hybrid.Hybrid", "inner": str(tmp_path / "inner")}
    drafter: Any = build_drafter(GroupSpec.from_node("drafter", node), shallow)
    assert drafter.inner.state_dict().keys() == inner.state_dict().keys()
    assert all(torch.equal(value, drafter.inner.state_dict()[key]) for key, value in inner.state_dict().items())
    save_drafter(tmp_path / "whole", drafter, RunSpec.from_nodes(composed("drafter=hybrid", "target=tiny")))
    saved = load_description(tmp_path / "whole", None)["drafter"]
    assert saved["inner"]["choice"] == "eagle3" and saved["inner"]["vocab_size"] == 512
    assert build(saved, target=shallow).state_dict().keys() == drafter.state_dict().keys()
    for wrong, words in {"ngram": "copies too", "retrieval": "copies too", "no/such": "no drafter in it"}.items():
        with pytest.raises(UserError, match=words):
            build_drafter(GroupSpec.from_node("drafter", {**node, "inner": wrong}), shallow)
    with pytest.raises(UserError, match="_target_"):
        build({**node, "inner": {"choice": "eagle3", "architecture": {"_target_": "os.system"}}}, target=shallow)


def test_trees_are_searched_over_the_drafters_own_hits(shallow: Target, prompts: list[list[int]], store: str) -> None:
    """Calibration forces chains on the drafter inside, without copies; what is decoded then has both and is the target's."""
    drafter, builder = Hybrid(shallow, INNER, store).eval(), Static(depth=3, budget=6)
    calibrate_builders(shallow, drafter, [builder], Greedy(), prompts[:1], 8)
    found = decode(shallow, prompts, Greedy(), 24, drafter, builder)
    assert builder.paths
    assert [one.output for one in found] == [one.output for one in decode(shallow, prompts, Greedy(), 24)]


class Asking(Eagle2):
    """EAGLE-2, which leaves the drafter out by a fixed pattern."""

    def __init__(self, pattern: str) -> None:
        super().__init__(4, 10, 3)
        self.pattern, self.asked = pattern, 0

    def needs_drafter(self, prefix: Prefix, tries: list[Trie]) -> bool:
        self.asked += 1
        return self.pattern[(self.asked - 1) % len(self.pattern)] == "d"


@pytest.mark.sweep(3, free=("pattern",))
@pytest.mark.parametrize("pattern", ["d", "c", "dc", "cccd", "dcc"])
def test_a_drafter_that_was_left_out_catches_up(shallow: Target, prompts: list[list[int]], store: str, pattern: str) -> None:
    """Rounds of copies alone emit the target's tokens, and a drafter that is asked again has read every committed one."""
    drafter, builder = Hybrid(shallow, INNER, store).eval(), Asking(pattern)
    read: list[list[int]] = []
    draft = drafter.inner.draft

    def noted(context: Any) -> Any:
        read.append(context.lengths.tolist())
        found = draft(context)
        assert drafter.inner.cache.lengths.tolist() == read[-1]  # type: ignore[union-attr, operator]
        return found

    drafter.inner.draft = noted  # type: ignore[method-assign]
    plain, found = decode(shallow, prompts, Greedy(), 32), decode(shallow, prompts, Greedy(), 32, drafter, builder)
    assert [one.output for one in found] == [one.output for one in plain]
    rounds = max(len(one.round_lengths) for one in found)
    assert builder.asked <= rounds and len(read) == rounds if pattern == "d" else len(read) < rounds
    assert drafter.copying.estimator.trials[SOURCES.index("store")].any()


def test_after_so_many_tokens_it_is_asked_anyway(shallow: Target, prompts: list[list[int]]) -> None:
    """What it catches up with must fit behind the text."""
    drafter = Hybrid(shallow, INNER).eval()
    drafts: list[int] = []
    draft = drafter.inner.draft
    drafter.inner.draft = lambda context: drafts.append(context.new_features.tokens.shape[1]) or draft(context)  # type: ignore
    plain = decode(shallow, prompts[:1], Greedy(), 2 * PATIENCE, ignore_eos=True)
    found = decode(shallow, prompts[:1], Greedy(), 2 * PATIENCE, drafter, Asking("c"), ignore_eos=True)
    assert found[0].output == plain[0].output
    assert len(drafts) > 1 and max(drafts[1:], default=0) <= PATIENCE and max(drafts) <= PATIENCE + len(prompts[0])


@pytest.mark.parametrize("family", ["retrieval", "hybrid"])
def test_trees_by_the_clock_weigh_copies(shallow: Target, prompts: list[list[int]], store: str, family: str) -> None:
    """Times are measured of what copies too, by trees of the sizes that are noted; what is decoded then is the target's."""
    drafter = Retrieval(shallow, store) if family == "retrieval" else Hybrid(shallow, INNER, store).eval()
    builder = Auto(depth=4, budget=12, top_k=3)
    calibration = calibrate_builders(shallow, drafter, [builder], Greedy(), prompts[:1])
    assert calibration is not None and calibration.latency is not None
    assert all(set(verify) == {1, 2, 4, 8, 12} for verify in calibration.latency.verify_seconds.values())
    kept = Keeping(builder)
    found = decode(shallow, prompts, Greedy(), 24, drafter, kept)
    assert [one.output for one in found] == [one.output for one in decode(shallow, prompts, Greedy(), 24)]
    assert all(tree.tokens.shape[1] <= 12 for tree in kept.trees) and max(map(len, (one.round_lengths for one in found))) < 24
