"""Pruned trees hold what an early exit finds likely, and decoding with them gives the very
tokens that it gives without.
"""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.acceptance.typical import TypicalAcceptance
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target
from spectrain.trees import Auto, Chain, Eagle2, Static, TreeBuilder
from spectrain.trees.measurements import Calibration, Latency
from spectrain.trees.token_tree import Children, TokenTree
from spectrain_research.kangaroo.drafter import Kangaroo
from spectrain_research.layer_skip.drafter import LayerSkipping
from spectrain_research.lookahead.drafter import Lookahead
from spectrain_research.on_policy.interleaved import InterleavedSampling
from spectrain_research.pruning.pruning import Pruning
from spectrain_research.shared.early_head import EarlyHead, fit_early_heads
from spectrain_research.traversal.rule import Traversal
from tests.trees.tables import Path, check_structure, paths

LIMIT = 8
TEXTS = (
    "The bees find the hive. The bees",
    "one two three four one two three four one two",
    "What is it?",
)
# where the drafter has been when the tree is pruned
EXITS = {"early_exit": 5, "layer_skip": 6, "kangaroo": 2}
DRAFTERS = ("ngram", "eagle3", *EXITS)
TREE = Eagle2(depth=4, budget=10, top_k=3)


@pytest.fixture(scope="module")
def prompts(tiny: Target) -> list[list[int]]:
    """Three prompts of different lengths."""
    return [tiny.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def drafters(tiny: Target) -> dict[str, Drafter]:
    """Some draft with a part of the target, some do not; the trainable ones are untrained."""
    torch.manual_seed(0)
    eagle3 = Eagle3(tiny, vocab_size=512)
    kangaroo = Kangaroo(tiny, EXITS["kangaroo"])
    for drafter in (eagle3, kangaroo):
        drafter.prepare(tiny, torch.randint(0, 1000, (tiny.head.vocab_size,)))
    skipping = LayerSkipping(tiny, skipped=[EXITS["layer_skip"]])
    exiting = EarlyExit(tiny, EXITS["early_exit"])
    return {
        "ngram": Ngram(tiny),
        "eagle3": eagle3,
        "early_exit": exiting,
        "layer_skip": skipping,
        "kangaroo": kangaroo,
    }


class RecordingPruning(Pruning):
    """Records every text with the tree before and after."""

    def __init__(self, layer: int, top_k: int) -> None:
        super().__init__(layer, top_k)
        self.rounds: list[tuple[list[list[int]], TokenTree, TokenTree]] = []

    def __call__(self, context: Context, tree: TokenTree) -> TokenTree:
        pruned = super().__call__(context, tree)
        ends = context.cache.lengths.tolist()
        texts = [tokens[: end + 1] for tokens, end in zip(context.tokens.tolist(), ends)]
        self.rounds.append((texts, tree, pruned))
        return pruned


def expected_paths(
    target: Target, text: list[int], proposed: list[Path], layer: int, top_k: int
) -> list[Path]:
    """Return the paths whose every token is among the `top_k` most likely that the first layers
    predict after the text so far."""
    likely: dict[Path, list[int]] = {}

    def is_likely(path: Path) -> bool:
        if not path:
            return True
        if path[:-1] not in likely:
            logits = target.run(
                torch.tensor([[*text, *path[:-1]]]),
                ForwardPlan(logits=True, span=LayerSpan(last=layer)),
            ).logits
            assert logits is not None
            likely[path[:-1]] = logits[0, -1].topk(top_k).indices.tolist()
        return path[-1] in likely[path[:-1]] and is_likely(path[:-1])

    return [path for path in proposed if is_likely(path)]


@pytest.mark.sweep(2, free=("name", "layer", "batch"))
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("layer", [3, 6])
@pytest.mark.parametrize("batch", [1, 3])
def test_remaining_nodes_are_the_likely_nodes(
    tiny: Target,
    prompts: list[list[int]],
    drafters: dict[str, Drafter],
    name: str,
    layer: int,
    batch: int,
) -> None:
    """The remaining nodes are, in their order, those that runs of the first layers over every full
    path find likely; a layer that drafting has been through is refused."""
    if layer < EXITS.get(name, 0):
        with pytest.raises(UserError, match=f"use {EXITS[name]} or more"):
            Session(tiny, Greedy(), drafters[name], TREE, changes=(Pruning(layer, 2),)).decode(
                prompts[:batch], 8
            )
        return
    pruning = RecordingPruning(layer, top_k=2 if name in EXITS else 20)
    Session(tiny, Greedy(), drafters[name], TREE, changes=(pruning,)).decode(
        prompts[:batch], 8, ignore_eos=True
    )
    for texts, tree, pruned in pruning.rounds:
        check_structure(pruned)
        assert pruned.tokens.shape[1] == pruned.valid.sum(1).max()
        for row, text in enumerate(texts):
            assert paths(pruned, row) == expected_paths(
                tiny, text, paths(tree, row), layer, pruning.top_k
            )
    sizes = [(tree.valid.sum(), pruned.valid.sum()) for _, tree, pruned in pruning.rounds]
    assert any(after < before for before, after in sizes) and any(
        after > batch for _, after in sizes
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "rule",
    [Greedy(), Match(temperature=0.8, top_k=50, top_p=0.95, seed=5)],
    ids=lambda rule: rule.name,
)
def test_pruned_decoding_equals_autoregressive(
    tiny: Target,
    prompts: list[list[int]],
    drafters: dict[str, Drafter],
    name: str,
    batch: int,
    rule: AcceptanceRule,
) -> None:
    """Whatever is pruned, the output is that of decoding without a drafter, with the same random
    draws.
    """
    rows = [4, 9, 2][:batch]
    plain = decode(tiny, prompts[:batch], rule, LIMIT, sequence_ids=rows)
    for layer, top_k in ((max(4, EXITS.get(name, 0)), 1), (7, 4)):
        session = Session(tiny, rule, drafters[name], TREE, changes=(Pruning(layer, top_k),))
        pruned = session.decode(prompts[:batch], LIMIT, sequence_ids=rows)
        assert [result.output for result in pruned] == [alone.output for alone in plain]


@pytest.mark.sweep(2, free=("name", "batch"))
@pytest.mark.parametrize("name", ["ngram", "early_exit", "eagle3", "kangaroo"])
@pytest.mark.parametrize("batch", [1, 3])
def test_top_k_of_the_full_vocabulary_prunes_nothing(
    tiny: Target, prompts: list[list[int]], drafters: dict[str, Drafter], name: str, batch: int
) -> None:
    """Where every token is likely, rounds, depths and nodes are those of decoding without
    pruning.
    """
    plain = decode(tiny, prompts[:batch], Greedy(), LIMIT, drafters[name], TREE)
    for top_k in (tiny.head.vocab_size, tiny.head.vocab_size + 1):
        result = Session(tiny, Greedy(), drafters[name], TREE, changes=(Pruning(6, top_k),)).decode(
            prompts[:batch], LIMIT
        )
        for item, other in zip(result, plain):
            assert (item.output, item.round_lengths, item.depths, item.node_counts) == (
                other.output,
                other.round_lengths,
                other.depths,
                other.node_counts,
            )
            assert item.pruned_counts == other.pruned_counts == [0] * len(item.round_lengths)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["ngram", "early_exit"])
def test_nodes_and_pruned_nodes_add_up(
    tiny: Target, prompts: list[list[int]], drafters: dict[str, Drafter], name: str, batch: int
) -> None:
    """A round's nodes are those that are left, its pruned ones the others, together all that was
    proposed.
    """
    pruning = RecordingPruning(6, 2)
    result = Session(tiny, Greedy(), drafters[name], TREE, changes=(pruning,)).decode(
        prompts[:batch], LIMIT
    )
    for row, generation in enumerate(result):
        trees = [paths(tree, row) for _, tree, _ in pruning.rounds][: len(generation.round_lengths)]
        left = [paths(pruned, row) for _, _, pruned in pruning.rounds][
            : len(generation.round_lengths)
        ]
        assert generation.node_counts == [len(nodes) for nodes in left]
        # of what was proposed
        assert generation.depths == [max(map(len, nodes)) for nodes in trees]
        assert [
            sum(pair) for pair in zip(generation.node_counts, generation.pruned_counts, strict=True)
        ] == [len(nodes) for nodes in trees]
    assert any(sum(generation.pruned_counts) for generation in result)


@pytest.mark.sweep(1, free=("name", "children"))
@pytest.mark.parametrize("children", ["sampled", "without_replacement"])
@pytest.mark.parametrize("name", ["eagle3", "early_exit"])
def test_drawn_trees_are_pruned_too(
    tiny: Target,
    prompts: list[list[int]],
    drafters: dict[str, Drafter],
    name: str,
    children: Children,
) -> None:
    """Siblings that were drawn, equal ones among them, stay or leave by their tokens, and the
    output is greedy decoding's.
    """
    drawn = [[0], [1], [2], [0, 0], [1, 0], [1, 1], [2, 0], [0, 0, 0], [1, 0, 0]]
    pruning = RecordingPruning(6, 20)
    builder = Static(paths=drawn, children=children, temperature=0.3)
    result = Session(tiny, Greedy(), drafters[name], builder, changes=(pruning,)).decode(
        prompts, LIMIT
    )
    assert [generation.output for generation in result] == [
        generation.output for generation in decode(tiny, prompts, Greedy(), LIMIT)
    ]
    twins = 0
    for texts, tree, pruned in pruning.rounds:
        for row, text in enumerate(texts):
            expected = expected_paths(tiny, text, paths(tree, row), 6, pruning.top_k)
            assert paths(pruned, row) == expected
            twins += len(expected) - len(set(expected))
    assert (twins > 0) == (children == "sampled")


REFUSED: list[AcceptanceRule] = [
    RecursiveRejection(),
    SpeculativeSampling(),
    Block(),
    Traversal(),
    TypicalAcceptance(),
    InterleavedSampling(),
]


@pytest.mark.parametrize("rule", REFUSED, ids=lambda rule: rule.name)
def test_pruning_refuses_rejection_rules(
    tiny: Target, prompts: list[list[int]], drafters: dict[str, Drafter], rule: AcceptanceRule
) -> None:
    """A rule that accepts a node by its probability would be wrong about what is left; the
    message says what to use.
    """
    with pytest.raises(UserError, match=f"acceptance={rule.name}: .*acceptance=greedy or match"):
        Pruning(2, 4).check_settings(rule, tiny)
    with pytest.raises(UserError, match=f"acceptance={rule.name}"):
        Session(
            tiny, rule, drafters["early_exit"], Chain(2, "sampled"), changes=(Pruning(2, 4),)
        ).decode(prompts[:1], 4)


def test_both_halves_of_propd_run_together(
    tiny: Target, prompts: list[list[int]], drafters: dict[str, Drafter]
) -> None:
    """Trees sized by measured time, whose times are fitted while decoding, are pruned: the same
    output, and they learn sizes as they were before and acceptance as it is after."""
    builder = Auto(4, 10, 3, refit=True)
    times = {size: 1e-3 + 1e-6 * size for size in (1, 2, 10)}
    builder.prepare(Calibration(latency=Latency({0: times}, {0: dict.fromkeys(times, 1e-9)}, 1e-9)))
    # The times above are not this machine's: the choice of plain steps would be one by chance, and
    # so would new timing.
    builder.round_policy.refresh_times = lambda *_: None  # type: ignore[method-assign]
    builder.round_policy.costs.choice.should_draft = lambda *_: (
        builder.round_policy.num_rounds % 4 > 0
    )  # type: ignore[method-assign]
    session = Session(tiny, Greedy(), drafters["early_exit"], builder, changes=(Pruning(6, 1),))
    generations = session.decode(prompts[:1], 24)
    assert [generation.output for generation in generations] == [
        generation.output for generation in decode(tiny, prompts[:1], Greedy(), 24)
    ]
    drafted = [
        nodes + dropped
        for nodes, dropped in zip(generations[0].node_counts, generations[0].pruned_counts)
    ]
    assert sum(generations[0].pruned_counts) > 0 and builder.round_policy.tree_sizes == [
        size for size in drafted if size > 1
    ]
    assert (
        builder.round_policy.costs.fit is not None and builder.round_policy.costs.fit.num_rounds > 0
    )


def test_pruning_refuses_mask_nodes(tiny: Target, prompts: list[list[int]]) -> None:
    """Lookahead's window holds no tokens of the text, so likely ones cannot be picked from it."""
    with pytest.raises(UserError, match="eval.prune_layer"):
        Session(tiny, Greedy(), Lookahead(tiny), TREE, changes=(Pruning(2, 4),)).decode(
            prompts[:1], 8
        )


@pytest.mark.parametrize(
    ("layer", "top_k", "message"),
    [
        (0, 4, "eval.prune_layer=0"),
        (-1, 4, "eval.prune_layer=-1"),
        (2, 0, "eval.prune_top=0"),
        (8, 4, "eval.prune_layer=8: tiny has 8 layers"),
        (9, 4, "eval.prune_layer=9: tiny has 8 layers"),
    ],
)
def test_pruning_refuses_invalid_settings(
    tiny: Target,
    prompts: list[list[int]],
    drafters: dict[str, Drafter],
    layer: int,
    top_k: int,
    message: str,
) -> None:
    """The message names the setting, its value and, where it depends on the target, how many
    layers that has.
    """
    with pytest.raises(UserError, match=message):
        Session(tiny, Greedy(), drafters["ngram"], TREE, changes=(Pruning(layer, top_k),)).decode(
            prompts[:1], 4
        )


def test_pruned_and_unpruned_first_rounds_are_equal(
    tiny: Target, prompts: list[list[int]], drafters: dict[str, Drafter]
) -> None:
    """The first tree is the one that is proposed without pruning: pruning sees it and does not
    shape it.
    """
    pruning = RecordingPruning(6, 2)
    full = RecordingPruning(6, tiny.head.vocab_size)
    for each in (pruning, full):
        Session(tiny, Greedy(), drafters["early_exit"], TREE, changes=(each,)).decode(prompts, 4)
    assert [paths(pruning.rounds[0][1], row) for row in range(3)] == [
        paths(full.rounds[0][2], row) for row in range(3)
    ]


# Parts of trees


def random_tree(random: Random, batch: int, num_nodes: int) -> TokenTree:
    """A tree with padding and nodes that only draft, every node with another token and
    distribution.
    """
    tokens = torch.stack([torch.randperm(1000)[:num_nodes] for _ in range(batch)])
    parents = torch.tensor(
        [
            [random.randrange(node) if node else -1 for node in range(num_nodes)]
            for _ in range(batch)
        ]
    )
    full = TokenTree.from_parents(tokens, parents)
    valid = mark_rooted(full, torch.rand(batch, num_nodes) < 0.8)
    q = torch.rand(batch, num_nodes, 5)
    ids = torch.arange(5) * 7
    return replace(
        full,
        valid=valid,
        can_emit=torch.rand(batch, num_nodes) < 0.7,
        children="sampled",
        q=q,
        draft_ids=ids,
    )


def mark_rooted(tree: TokenTree, marked: Tensor) -> Tensor:
    """Those marked nodes whose ancestors are marked, the root always."""
    marked = marked.clone()
    marked[:, 0] = True
    return (marked[:, None] | ~tree.ancestors).all(-1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("num_nodes", [1, 2, 9, 70])
def test_selected_tree_has_the_marked_nodes(batch: int, num_nodes: int) -> None:
    """Every marked node, and none but padding besides, is there in the same order with the same
    path, q, validity and emission."""
    for seed in range(4):
        tree = random_tree(Random(seed), batch, num_nodes)
        keep = mark_rooted(tree, torch.rand(batch, num_nodes) < 0.8)
        part = tree.select_nodes(keep)
        check_structure(part)
        assert part.tokens.shape[1] == keep.sum(1).max()
        assert part.children == tree.children and part.draft_ids is tree.draft_ids
        assert part.q is not None and tree.q is not None
        for row in range(batch):
            marked = keep[row].nonzero()[:, 0]
            new = slice(0, len(marked))
            assert not part.valid[row, len(marked) :].any()
            for name in ("tokens", "valid", "can_emit", "q"):
                assert torch.equal(getattr(part, name)[row, new], getattr(tree, name)[row, marked])
            for index, node in enumerate(marked.tolist()):
                above = tree.ancestors[row, node]
                assert (
                    torch.equal(
                        part.tokens[row, part.ancestors[row, index]], tree.tokens[row, above]
                    )
                    and part.ancestors[row, index, new].sum() == above.sum()
                )


def test_selecting_all_nodes_returns_the_tree() -> None:
    """Marking every node changes nothing; marking the root leaves a tree of one node."""
    tree = random_tree(Random(0), 3, 12)
    every = tree.select_nodes(torch.ones(3, 12, dtype=torch.bool))
    for name in ("tokens", "parents", "valid", "can_emit", "q"):
        assert torch.equal(getattr(every, name), getattr(tree, name))
    root = tree.select_nodes(torch.arange(12).expand(3, -1) == 0)
    assert torch.equal(root.tokens, tree.tokens[:, :1]) and root.parents.tolist() == [[-1]] * 3


def test_selection_works_without_distributions() -> None:
    """Deterministic children have no q, and their part has none either."""
    chain: TreeBuilder = Chain(3)
    tree = TokenTree.from_chain(torch.arange(3, 3 + chain.budget)[None])
    part = tree.select_nodes(torch.tensor([[True, True, False, False]]))
    assert part.q is None and part.is_chain and part.tokens.tolist() == [[3, 4]]


# The fitted head


def test_fitted_head_is_optimal_for_its_rank() -> None:
    """Of the logits that ridge regression gives, no rank r comes closer: what is missed are the
    last singular values.
    """
    torch.manual_seed(0)
    normed = torch.randn(60, 12)
    head = torch.randn(40, 12)
    bias = torch.randn(40)
    final = normed @ torch.randn(12, 12) + 0.1 * torch.randn(60, 12)
    x = normed.double()
    y = final.double()
    item = torch.eye(12, dtype=torch.float64)
    strength = x.pow(2).mean() * 60
    change = torch.linalg.lstsq(
        torch.cat([x, strength.sqrt() * item]), torch.cat([y - x, 0 * item])
    ).solution
    expected = x @ (item + change) @ head.double().T
    values = torch.linalg.svdvals(expected)
    for rank in (1, 4, 12):
        fitted = EarlyHead.from_states(normed, final, head, bias, rank)
        assert fitted.down.shape == (12, rank) and fitted.up.shape == (40, rank)
        missed = ((fitted(normed) - bias).double() - expected).norm()
        torch.testing.assert_close(missed, values[rank:].norm(), rtol=1e-3, atol=1e-3)


def test_pruning_with_a_fitted_head_is_lossless(
    tiny: Target, prompts: list[list[int]], drafters: dict[str, Drafter]
) -> None:
    """Heads are fitted for each layer, prune, cost less than the target's own, and leave the
    output as it is.
    """
    prunings = [Pruning(2, 4), Pruning(4, 8)]
    fit_early_heads(tiny, prunings, prompts, 64)
    plain = [item.output for item in decode(tiny, prompts, Greedy(), LIMIT)]
    assert any(pruning.head is not None for pruning in prunings)
    for pruning in prunings:
        result = Session(tiny, Greedy(), drafters["eagle3"], TREE, changes=(pruning,)).decode(
            prompts, LIMIT
        )
        assert [item.output for item in result] == plain and sum(
            sum(item.pruned_counts) for item in result
        ) > 0
        assert (pruning.count_multiply_adds(tiny) < Pruning(2, 4).count_multiply_adds(tiny)) == (
            pruning.head is not None
        )


def test_worse_head_is_not_used(
    tiny: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On answers that it was not fitted on it must be as good as the target's own head."""
    worthless = EarlyHead(torch.zeros(tiny.width, 1), torch.zeros(tiny.head.vocab_size, 1), None)
    monkeypatch.setattr(EarlyHead, "from_states", lambda *arguments: worthless)
    pruning = Pruning(6, 4)
    fit_early_heads(tiny, [pruning], prompts, 8)
    assert pruning.head is None
