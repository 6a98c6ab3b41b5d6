"""Copies of the text and of a store, alone and with a drafter, share one tree whose
probabilities are learnt.
"""

from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.config.build import GroupSpec, build
from spectrain.config.spec import RunSpec
from spectrain.copying.estimates import SOURCES, AcceptanceEstimator, Proposal
from spectrain.copying.occurrences import Copies
from spectrain.copying.suffixes import TEXT_END
from spectrain.copying.trie import Trie
from spectrain.data.datastore import hash_vocabulary, write_store
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.calibration import calibrate_builders
from spectrain.decoding.generation import no_callback, run_to_end
from spectrain.decoding.loop import EagerRunner, decode, decode_steps, make_request
from spectrain.decoding.selective import plan_rounds
from spectrain.decoding.session import check_compatibility
from spectrain.drafters.hybrid import PATIENCE, Hybrid
from spectrain.drafters.retrieval import Retrieval
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.runs.drafters import build_drafter, load_description, save_drafter
from spectrain.trees import Auto, Chain, Eagle2, Static, TreeBuilder
from spectrain.trees.base import Prefix, RoundPolicy
from tests.decoding.rounds import Keeping
from tests.drafters.test_contract import EAGLE3, composed
from tests.installed import load_cases
from tests.trees.tables import check_structure

INNER = {"choice": "eagle3", **EAGLE3}


@pytest.fixture
def prompts() -> list[list[int]]:
    return [torch.randint(3, 2000, (length,)).tolist() for length in (7, 4)]


@pytest.fixture
def store(shallow: Target, prompts: list[list[int]], tmp_path: Path) -> str:
    """Write a store of the target's answers, with a wrong token now and then."""
    answers = [generation.output for generation in decode(shallow, prompts, Greedy(), 24)]
    texts = [
        [*prompt, *(token ^ (index % 7 == 6) for index, token in enumerate(answer))]
        for prompt, answer in zip(prompts, answers)
    ]
    write_store(
        tmp_path / "store", texts, ["What?"], [], {"tokenizer": hash_vocabulary(shallow.tokenizer)}
    )
    return str(tmp_path / "store")


# Cases of installed packages.
CASES = load_cases(__name__)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "builder",
    [Chain(4), Eagle2(4, 10, 3), *CASES.get("test_drafted_equals_plain", ())],
    ids=lambda b: b.name,
)
@pytest.mark.parametrize("family", ["retrieval", "hybrid"])
def test_drafted_equals_plain(
    shallow: Target, prompts: list[list[int]], store: str, family: str, builder: TreeBuilder
) -> None:
    """Drafted output equals plain decoding, greedily and by matching; trees keep their budget,
    and the store is copied from.
    """
    for rule in (Greedy(), Match(0.8, seed=3)):
        drafter = (
            Retrieval(shallow, store)
            if family == "retrieval"
            else Hybrid(shallow, INNER, store).eval()
        )
        recorder = Keeping(builder)
        plain = decode(shallow, prompts, rule, 24)
        generations = decode(shallow, prompts, rule, 24, drafter, recorder)
        assert [row.output for row in generations] == [row.output for row in plain]
        for tree in recorder.trees:
            check_structure(tree)
            assert (
                tree.tokens.shape[1] <= builder.budget and int(tree.depths.max()) <= builder.depth
            )
            assert not builder.traits.is_chain or tree.is_chain
        if rule.name == "greedy":
            assert max(count for row in generations for count in row.round_lengths) > 2


def make_copies(*continuations: tuple[int, list[int]]) -> Copies:
    return Copies(
        np.array([length for length, _ in continuations]),
        np.array([tokens for _, tokens in continuations]),
    )


def test_sources_share_a_tree(shallow: Target) -> None:
    """The same path from two sources is one node with two estimates, and the larger of them
    counts.
    """
    proposal = Proposal.from_copies([make_copies((2, [5, 6]), (1, [5, 7]))], 0)
    chances = AcceptanceEstimator()
    proposal.add_draft(
        [1, 5, 9, 8], [-1, 0, 0, 1], [0.0, -0.1, -3.0, -0.2], [True, True, False, True]
    )
    trie = proposal.weigh_trie(chances)
    assert trie.tokens == [-1, 5, 6, 7, 8] and np.bincount(proposal.nodes).tolist() == [
        0,
        2,
        1,
        1,
        1,
    ]
    assert (
        trie.weights[1] == chances(proposal.estimates)[proposal.nodes == 1].max()
        and trie.weights[0] == 1
    )
    assert all(
        trie.weights[node] <= trie.weights[trie.parents[node]] for node in range(1, len(trie))
    )


def collect_estimates_by_path(
    sources: list[Copies], least: float
) -> dict[tuple[int, ...], list[tuple[str, int, float, int]]]:
    """Return paths in the order in which copies make nodes for them, with each source's matching
    tokens, share and count.
    """
    estimates: dict[tuple[int, ...], list[tuple[str, int, float, int]]] = {}
    for source, copies in zip(SOURCES, sources):
        weights: dict[tuple[int, ...], float] = {(): float((2.0**copies.lengths).sum())}
        matches: dict[tuple[int, ...], list[int]] = {}
        for length, tokens in zip(copies.lengths.tolist(), copies.tokens.tolist()):
            rest = tokens[: tokens.index(TEXT_END)] if TEXT_END in tokens else tokens
            for path in (tuple(rest[: end + 1]) for end in range(len(rest))):
                weights[path] = weights.get(path, 0.0) + 2.0**length
                matches.setdefault(path, []).append(length + len(path) - 1)
        for path, lengths in matches.items():
            if weights[path] >= least * weights[()]:
                estimate = source, lengths[0], weights[path] / weights[path[:-1]], len(lengths)
                estimates.setdefault(path, []).append(estimate)
    return estimates


@pytest.mark.parametrize("least", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (0, 9), (7, 40)])
def test_a_single_pass_equals_a_loop_over_copies(sizes: tuple[int, int], least: float) -> None:
    """One pass gives the same nodes in the same order, with the same estimates, as a loop over
    copies.
    """
    for kinds in (2, 4, 30):
        sources = []
        for size in sizes:
            tokens = torch.randint(0, kinds, (size, 5)).numpy()
            tokens[np.arange(5) >= torch.randint(1, 9, (size, 1)).numpy()] = TEXT_END
            sources.append(
                Copies(torch.randint(1, 17, (size,)).sort(descending=True).values.numpy(), tokens)
            )
        proposal = Proposal.from_copies(sources, least)
        expected = collect_estimates_by_path(sources, least)
        trie = proposal.trie
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(trie.tokens[1:], trie.parents[1:]):
            paths.append((*paths[parent], token))
        assert paths == [(), *expected] and trie.depths == [len(path) for path in paths]
        assert all(
            trie.find_child(paths.index(path[:-1]), path[-1]) == paths.index(path)
            for path in expected
        )
        if expected:
            actual = sorted(
                zip(
                    (paths[node] for node in proposal.nodes),
                    *map(np.ndarray.tolist, proposal.estimates),
                )
            )
            assert actual == sorted(
                (path, *cell_and_estimate(*estimate))
                for path, estimates in expected.items()
                for estimate in estimates
            )


def cell_and_estimate(source: str, length: int, share: float, count: int) -> tuple[int, float]:
    """Return the class and the estimate of a source's copy by their definition."""
    classes = length if length < 4 else 4 if length < 6 else 5 if length < 9 else 6
    shares = 0 if share > 0.97 else 1 + min(7, int(-1.5 * log2(max(share, 1e-3))))
    estimate = 0.02 + 0.9 * share * (length / (length + 1) if length else 1.0)
    return int(
        np.ravel_multi_index(
            (SOURCES.index(source), classes, shares, min(count, 3)),
            AcceptanceEstimator().trials.shape,
        )
    ), estimate


def test_trust_is_learnt(shallow: Target) -> None:
    """A source that is always wrong falls below one that is always right; nodes off the accepted
    path are not judged.
    """
    chances = AcceptanceEstimator()
    for _ in range(30):
        proposal = Proposal.from_copies([make_copies((3, [5, 6])), make_copies((3, [7, 8]))], 0)
        chances.update_counts(proposal, [7, 9])
    trie = proposal.weigh_trie(chances)
    context, below, store, _ = trie.weights[1:]
    assert store > 0.9 and context < 0.1 and trie.best_nodes(1, 2) == [0, 3]
    assert chances.trials[SOURCES.index("context")].sum() == 30 and below <= context
    assert (
        chances.hits[SOURCES.index("store")].sum() == 30
        and chances.trials[SOURCES.index("store")].sum() == 60
    )


def test_a_hybrid_judges_every_source(
    shallow: Target, prompts: list[list[int]], store: str
) -> None:
    """The copies of every source, and the drafter's tokens, are judged by the accepted tokens."""
    drafter = Hybrid(shallow, INNER, store).eval()
    decode(shallow, prompts, Greedy(), 24, drafter, Eagle2(4, 10, 3))
    trials, hits = drafter.copying.estimator.trials, drafter.copying.estimator.hits
    assert all(source_trials.any() for source_trials in trials) and (hits <= trials).all()


def test_what_weighs_q_is_refused(shallow: Target) -> None:
    """Rules that need q, and sampled children, are refused, because copies have no q."""
    for drafter in (Retrieval(shallow), Hybrid(shallow, INNER)):
        with pytest.raises(UserError, match="acceptance=recursive.*copied tokens have none"):
            check_compatibility(drafter.capabilities, Chain(2), RecursiveRejection())
        check_compatibility(drafter.capabilities, Chain(2), Match(1.0))
    with pytest.raises(UserError, match="tree.children=sampled: copied tokens are not drawn"):
        check_compatibility(drafter.capabilities, Chain(2, "sampled"), Match(1.0))


def test_a_hybrid_takes_a_drafter_by_its_directory(shallow: Target, tmp_path: Path) -> None:
    """The inner drafter keeps its settings and weights and is saved with the hybrid; a drafter that
    copies is refused inside."""
    inner: Any = build({**composed("drafter=eagle3").drafter, **EAGLE3}, target=shallow)
    config = composed(
        "drafter=eagle3", "target=tiny", "+drafter.vocab_size=512", "+drafter.ttt_steps=3"
    )
    save_drafter(tmp_path / "inner", inner, RunSpec.from_nodes(config))
    node = {"_target_": "spectrain.drafters.hybrid.Hybrid", "inner": str(tmp_path / "inner")}
    drafter: Any = build_drafter(GroupSpec.from_node("drafter", node), shallow)
    assert drafter.inner.state_dict().keys() == inner.state_dict().keys()
    assert all(
        torch.equal(value, drafter.inner.state_dict()[key])
        for key, value in inner.state_dict().items()
    )
    save_drafter(
        tmp_path / "whole", drafter, RunSpec.from_nodes(composed("drafter=hybrid", "target=tiny"))
    )
    saved = load_description(tmp_path / "whole", None).drafter
    assert (
        saved.settings.get("inner")["choice"] == "eagle3"
        and saved.settings.get("inner")["vocab_size"] == 512
    )
    assert saved.build(target=shallow).state_dict().keys() == drafter.state_dict().keys()
    for wrong, words in {
        "ngram": "copies too",
        "retrieval": "copies too",
        "no/such": "no drafter in it",
    }.items():
        with pytest.raises(UserError, match=words):
            build_drafter(GroupSpec.from_node("drafter", {**node, "inner": wrong}), shallow)
    with pytest.raises(UserError, match="_target_"):
        build(
            {**node, "inner": {"choice": "eagle3", "architecture": {"_target_": "os.system"}}},
            target=shallow,
        )


def test_trees_are_searched_over_the_drafters_own_hits(
    shallow: Target, prompts: list[list[int]], store: str
) -> None:
    """Calibration runs chains of the inner drafter without copies; decoding then has both, with
    the target's output.
    """
    drafter = Hybrid(shallow, INNER, store).eval()
    builder = Static(depth=3, budget=6)
    calibrate_builders(shallow, drafter, [builder], Greedy(), prompts[:1], 8)
    generations = decode(shallow, prompts, Greedy(), 24, drafter, builder)
    assert builder.paths
    assert [row.output for row in generations] == [
        row.output for row in decode(shallow, prompts, Greedy(), 24)
    ]


class PatternPolicy(RoundPolicy):
    """Leaves the drafter out by a fixed pattern where there are copies."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_calls = 0

    def needs_drafter(self, prefix: Prefix, copies: list[Trie]) -> bool:
        self.num_calls += 1
        return self.pattern[(self.num_calls - 1) % len(self.pattern)] == "d"


class PatternBuilder(Eagle2):
    """EAGLE-2 that leaves the drafter out by a fixed pattern."""

    def __init__(self, pattern: str) -> None:
        super().__init__(4, 10, 3)
        self.round_policy: PatternPolicy = PatternPolicy(pattern)


@pytest.mark.sweep(3, free=("pattern",))
@pytest.mark.parametrize("pattern", ["d", "c", "dc", "cccd", "dcc"])
def test_a_drafter_that_was_left_out_catches_up(
    shallow: Target, prompts: list[list[int]], store: str, pattern: str
) -> None:
    """Rounds of copies alone emit the target's tokens, and a drafter that runs again has read
    every committed one.
    """
    drafter = Hybrid(shallow, INNER, store).eval()
    builder = PatternBuilder(pattern)
    read: list[list[int]] = []
    draft = drafter.inner.draft

    def record_lengths(context: Any) -> Any:
        read.append(context.lengths.tolist())
        drafted = draft(context)
        assert drafter.inner.cache.lengths.tolist() == read[-1]  # type: ignore[union-attr, operator]
        return drafted

    drafter.inner.draft = record_lengths  # type: ignore[method-assign]
    plain = decode(shallow, prompts, Greedy(), 32)
    generations = decode(shallow, prompts, Greedy(), 32, drafter, builder)
    assert [row.output for row in generations] == [row.output for row in plain]
    rounds = max(len(row.round_lengths) for row in generations)
    assert (
        builder.round_policy.num_calls <= rounds and len(read) == rounds
        if pattern == "d"
        else len(read) < rounds
    )
    assert drafter.copying.estimator.trials[SOURCES.index("store")].any()


def test_features_wait_until_the_drafter_reads_them(
    shallow: Target, prompts: list[list[int]], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a decoding that may draft or not, features of rounds with copies alone are not joined
    before the drafter runs.
    """
    joined: list[int] = []
    join = Features.concat_prefixes
    monkeypatch.setattr(
        Features, "concat_prefixes", lambda parts: joined.append(len(parts)) or join(parts)
    )
    runner = EagerRunner(
        shallow, Greedy(), Hybrid(shallow, INNER, store).eval(), PatternBuilder("cccd")
    )
    request = make_request(shallow, prompts[:1], 32, ignore_eos=True)
    plan_rounds(runner, request)
    (generation,) = run_to_end(decode_steps(runner, request), no_callback)
    assert len(joined) == len(generation.round_lengths) // 4 > 1 and set(joined) == {4}


def test_after_so_many_tokens_the_drafter_is_called_anyway(
    shallow: Target, prompts: list[list[int]]
) -> None:
    """The drafter catches up with at most PATIENCE tokens, which must fit in the context."""
    drafter = Hybrid(shallow, INNER).eval()
    drafts: list[int] = []
    draft = drafter.inner.draft
    drafter.inner.draft = lambda context: (
        drafts.append(context.new_features.tokens.shape[1]) or draft(context)
    )  # type: ignore
    plain = decode(shallow, prompts[:1], Greedy(), 2 * PATIENCE, ignore_eos=True)
    generations = decode(
        shallow, prompts[:1], Greedy(), 2 * PATIENCE, drafter, PatternBuilder("c"), ignore_eos=True
    )
    assert generations[0].output == plain[0].output
    assert (
        len(drafts) > 1
        and max(drafts[1:], default=0) <= PATIENCE
        and max(drafts) <= PATIENCE + len(prompts[0])
    )


@pytest.mark.parametrize("family", ["retrieval", "hybrid"])
def test_trees_by_the_clock_weigh_copies(
    shallow: Target, prompts: list[list[int]], store: str, family: str
) -> None:
    """Calibration also times copies, by trees of the noted sizes, and the decoded output is the
    target's.
    """
    drafter = (
        Retrieval(shallow, store) if family == "retrieval" else Hybrid(shallow, INNER, store).eval()
    )
    builder = Auto(depth=4, budget=12, top_k=3)
    calibration = calibrate_builders(shallow, drafter, [builder], Greedy(), prompts[:1])
    assert calibration is not None and calibration.latency is not None
    assert all(
        set(verify) == {1, 2, 4, 8, 12} for verify in calibration.latency.verify_seconds.values()
    )
    recorder = Keeping(builder)
    generations = decode(shallow, prompts, Greedy(), 24, drafter, recorder)
    assert [row.output for row in generations] == [
        row.output for row in decode(shallow, prompts, Greedy(), 24)
    ]
    assert (
        all(tree.tokens.shape[1] <= 12 for tree in recorder.trees)
        and max(map(len, (row.round_lengths for row in generations))) < 24
    )
