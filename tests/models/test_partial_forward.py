"""A tree whose nodes were run in parts, in another order and among others, is verified as one
that was run at once.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.features import Layer
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.loading import load_hf
from spectrain.models.partial_forward import NodeLevel, PartialForward
from spectrain.models.target import Target
from spectrain.trees.token_tree import Children, TokenTree
from tests.models.architectures import save_small
from tests.models.test_target import SIZE, VOCAB, WINDOW, build, random_tokens
from tests.targets import count_attention_nodes
from tests.trees.tables import check_structure

LAYERS = 4
EVERY: tuple[Layer, ...] = (*range(LAYERS + 1), "final")
SIZED: dict[str, Any] = {**SIZE, "num_hidden_layers": LAYERS}
MODELS: dict[str, Any] = {
    "llama": hf.LlamaConfig(**SIZED),
    "mistral": hf.MistralConfig(**SIZED, sliding_window=WINDOW),
}
NODES = 10
# tokens of trees: as many as a node has children at most, and fewer
TREE_TOKENS = [3, 4, 5, 6]
TWINS = [3, 4]
OTHER_TOKENS = range(40, VOCAB)  # tokens of nodes that are in no tree
DRAFTING: list[tuple[int, tuple[int, ...]]] = [
    (1, ()),
    (2, ()),
    (3, ()),
    (LAYERS, (2,)),
    (LAYERS, (0,)),
    (LAYERS, (3, 1)),
    (3, (2,)),
]


@pytest.fixture(scope="module", params=MODELS)
def target(request: pytest.FixtureRequest, tiny: Target) -> Target:
    """Four layers of random weights; attention sees everything, or a window that the committed
    tokens fill.
    """
    return build(request.param, MODELS[request.param], tiny)[0]


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual.float(), expected.float(), atol=1e-4, rtol=1e-4)


class Case:
    """Two equal caches after one ragged batch of prompts: one for the tree in parts, one for the
    tree at once.
    """

    def __init__(
        self, target: Target, lengths: list[int], layers: tuple[Layer, ...] = EVERY
    ) -> None:
        self.target = target
        self.batch = len(lengths)
        self.layers = layers
        self.tokens = random_tokens(len(lengths), 64)
        self.lengths = torch.tensor(lengths)
        self.cache, self.reference_cache = self._make_cache(), self._make_cache()

    def _make_cache(self) -> TreeCache:
        cache = self.target.new_cache(self.batch, 64)
        self.target.prefill(self.tokens[:, : int(self.lengths.max())], self.lengths, cache, ())
        return cache

    def make_part(
        self, last: int, skipped: Collection[int] = (), layers: tuple[Layer, ...] = EVERY
    ) -> PartialForward:
        return PartialForward(self.target, self.cache, last, skipped, layers)

    @property
    def root(self) -> Tensor:
        return self.tokens.gather(1, self.cache.lengths[:, None])[:, 0]

    def tree(self, children: Children, random: Random, root: Tensor | None = None) -> TokenTree:
        """Trees with padding that differ from row to row; the same token often comes below
        different nodes.
        """
        tokens = (self.root if root is None else root)[:, None].repeat(1, NODES)
        parents = torch.full_like(tokens, -1)
        valid = torch.ones_like(tokens, dtype=torch.bool)
        for row in range(self.batch):
            for node in range(1, NODES):
                parents[row, node] = parent = random.randrange(max(0, node - 4), node)
                valid[row, node] = valid[row, parent] and random.random() < 0.85
                real_siblings = (
                    (parents[row, :node] == parent) & valid[row, :node] & valid[row, node]
                )
                taken = (
                    set()
                    if children == "sampled"
                    else set(tokens[row, :node][real_siblings].tolist())
                )
                tokens[row, node] = random.choice(
                    [
                        token
                        for token in (TWINS if children == "sampled" else TREE_TOKENS)
                        if token not in taken
                    ]
                )
        tree = replace(TokenTree.from_parents(tokens, parents, valid), children=children)
        check_structure(tree)
        return tree

    def commit(self, tree: TokenTree, random: Random) -> None:
        """Keep one path of real nodes in both caches; the last of three rows, which is done,
        keeps none.
        """
        paths = torch.zeros(self.batch, NODES, dtype=torch.int64)
        counts = torch.zeros(self.batch, dtype=torch.int64)
        for row in range(self.batch):
            last = random.choice(tree.valid[row].nonzero()[:, 0].tolist())
            path = tree.ancestors[row, last].nonzero()[:, 0]
            paths[row, : len(path)], counts[row] = path, 0 if row == 2 else len(path)
        for cache in (self.cache, self.reference_cache):
            cache.commit(paths, counts)


def paths_of(tokens: Tensor, parents: Tensor) -> list[tuple[int, ...]]:
    """The tokens from the root to every node of a row."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist()):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def run_shuffled_part(
    partial: PartialForward, tree: TokenTree, random: Random
) -> tuple[TokenTree, list[NodeLevel]]:
    """Run a part of the tree, shuffled among nodes that it does not hold; return all nodes that
    ran, and their levels.
    """
    batch = len(tree.tokens)
    root = tree.tokens[:, 0]
    levels = [partial.run_root(root)]
    # which node of the tree each given one is
    nodes: list[list[int | None]] = [[0] for _ in range(batch)]
    tokens = root[:, None]
    parents = torch.full_like(root[:, None], -1)
    for width in (2, 3, 3):
        new: list[list[tuple[int, int]]] = []
        for row, row_nodes in enumerate(nodes):
            index = {node: order for order, node in enumerate(row_nodes) if node is not None}
            above = tree.parents[row].tolist()
            open_nodes = [
                n
                for n in tree.valid[row].nonzero()[:, 0].tolist()
                if n not in index and above[n] in index
            ]
            chosen: list[int | None] = [
                *random.sample(open_nodes, min(len(open_nodes), random.randint(0, width)))
            ]
            chosen += [None] * (width - len(chosen))
            random.shuffle(chosen)
            new.append(
                [
                    (random.choice(OTHER_TOKENS), random.randrange(len(row_nodes)))
                    if node is None
                    else (int(tree.tokens[row, node]), index[above[node]])
                    for node in chosen
                ]
            )
            row_nodes += chosen
        added = torch.tensor(new)
        levels.append(partial.run_children(added[..., 0], added[..., 1]))
        tokens = torch.cat([tokens, added[..., 0]], dim=1)
        parents = torch.cat([parents, added[..., 1]], dim=1)
    return TokenTree.from_parents(tokens, parents), levels


def assert_verified(case: Case, partial: PartialForward, tree: TokenTree, random: Random) -> None:
    """Finishing a tree and verifying it agree at every real node, and so does the next tree
    after the accepted path.
    """
    actual = partial.run_tree(tree)
    expected = case.target.verify(tree, case.reference_cache, case.layers)
    assert actual.layers == case.layers and actual.hidden.shape == expected.hidden.shape
    assert actual.logits is not None and expected.logits is not None and expected.logits.std() > 0.1
    assert_close(actual.logits[tree.valid], expected.logits[tree.valid])
    assert_close(actual.hidden[tree.valid], expected.hidden[tree.valid])
    assert (
        case.cache.uncommitted == case.reference_cache.uncommitted == NODES
        or tree.tokens.shape[1] < NODES
    )
    case.commit(tree, random)
    following = case.tree("deterministic", random, random_tokens(case.batch))
    again = [
        case.target.verify(following, cache, EVERY) for cache in (case.cache, case.reference_cache)
    ]
    assert torch.equal(case.cache.lengths, case.reference_cache.lengths)
    for tensor, reference in (
        (again[0].logits, again[1].logits),
        (again[0].hidden, again[1].hidden),
    ):
        assert tensor is not None and reference is not None
        assert_close(tensor[following.valid], reference[following.valid])


CHILDREN = pytest.mark.parametrize("children", ["deterministic", "sampled"])
LENGTHS = pytest.mark.parametrize("lengths", [[9], [4, 9, 7]], ids=["one", "ragged"])


@pytest.mark.sweep(10)
@CHILDREN
@LENGTHS
@pytest.mark.parametrize(("last", "skipped"), DRAFTING)
def test_finishing_a_partial_forward_equals_verifying(
    target: Target, last: int, skipped: tuple[int, ...], lengths: list[int], children: Children
) -> None:
    """Logits and features at the nodes of a tree, of which some were run while drafting, are
    those of one verification.
    """
    for seed in range(3):
        random = Random(seed)
        case = Case(target, lengths)
        tree = case.tree(children, random)
        partial = case.make_part(last, skipped)
        run_shuffled_part(partial, tree, random)
        assert_verified(case, partial, tree, random)


@LENGTHS
@pytest.mark.parametrize("layers", [(), (2,), (1, 3), (0, 4), ("final",)], ids=str)
def test_partial_forwards_return_requested_features(
    target: Target, lengths: list[int], layers: tuple[Layer, ...]
) -> None:
    """Whether layers lie below, at or above the exit, features are these layers' in their order."""
    random = Random(0)
    case = Case(target, lengths, layers)
    tree = case.tree("deterministic", random)
    partial = case.make_part(2, layers=layers)
    run_shuffled_part(partial, tree, random)
    assert_verified(case, partial, tree, random)


@LENGTHS
@pytest.mark.parametrize(("last", "skipped"), DRAFTING)
def test_partial_features_equal_the_layers(
    target: Target, last: int, skipped: tuple[int, ...], lengths: list[int]
) -> None:
    """Given level by level, nodes have the states and positions of one run of the same layers
    over all of them.
    """
    random = Random(1)
    case = Case(target, lengths)
    part_tree, levels = run_shuffled_part(
        case.make_part(last, skipped), case.tree("deterministic", random), random
    )
    positions = case.reference_cache.lengths[:, None] + part_tree.depths
    expected = target.run(
        part_tree.tokens,
        ForwardPlan(
            layers=(min((last, *skipped)), "final"),
            positions=positions,
            mask=part_tree.ancestors,
            cache=case.reference_cache,
            span=LayerSpan(last=last, skipped=skipped),
        ),
    )
    assert_close(
        torch.cat([level.features.at_layer("final") for level in levels], dim=1),
        expected.at_layer("final"),
    )
    assert_close(
        torch.cat([level.features.at_layer(expected.layers[0]) for level in levels], dim=1),
        expected.at_layer(expected.layers[0]),
    )
    assert torch.equal(torch.cat([level.positions for level in levels], dim=1), positions)
    start = 0
    for level in levels:
        end = start + level.positions.shape[1]
        assert torch.equal(level.visible, part_tree.ancestors[:, start:end, :end])
        start = end


@pytest.mark.sweep(8)
@CHILDREN
@LENGTHS
@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize(
    ("last", "skipped", "deeper"),
    [
        (1, (), 2),
        (1, (), 3),
        (2, (), 2),
        (3, (), 2),
        (LAYERS, (2,), 3),
        (LAYERS, (0,), 1),
        (LAYERS, (3, 1), 3),
    ],
)
def test_deeper_and_smaller_trees_equal_verifying(
    target: Target,
    last: int,
    skipped: tuple[int, ...],
    deeper: int,
    drafted: bool,
    lengths: list[int],
    children: Children,
) -> None:
    """A tree that was run up to a later layer, and then lost branches, is verified like the tree
    that is left.
    """
    for seed in range(2):
        random = Random(seed)
        case = Case(target, lengths)
        tree = case.tree(children, random)
        partial = case.make_part(last, skipped)
        if drafted:
            run_shuffled_part(partial, tree, random)
        partial.run_to_layer(tree, deeper)
        assert partial.exit_layer == max(deeper, min((last, *skipped)))
        if seed:
            likely = torch.tensor([[random.random() < 0.8 for _ in range(NODES)] for _ in lengths])
            likely[:, 0] = True
            tree = tree.select_nodes((likely[:, None] | ~tree.ancestors).all(-1) & tree.valid)
        assert_verified(case, partial, tree, random)


@pytest.mark.sweep(3)
@CHILDREN
@pytest.mark.parametrize("deeper", [None, 3])
def test_no_layer_runs_a_node_twice(target: Target, children: Children, deeper: int | None) -> None:
    """Layers below the exit run what was given and the paths of the tree that were not; later
    ones the tree, once.
    """
    for seed in range(12):
        random = Random(seed)
        case = Case(target, [9])
        tree = case.tree(children, random)
        partial = case.make_part(2)
        with count_attention_nodes(target) as calls:
            part_tree, _ = run_shuffled_part(partial, tree, random)
            if deeper is not None:
                partial.run_to_layer(tree, deeper)
            partial.run_tree(tree)
        part_paths = paths_of(part_tree.tokens[0], part_tree.parents[0])
        paths = [
            path
            for path, valid in zip(paths_of(tree.tokens[0], tree.parents[0]), tree.valid[0])
            if valid
        ]
        missing = [path for path in paths if path not in part_paths]
        assert [sum(nodes) for nodes in calls[:2]] == [len(part_paths) + len(missing)] * 2
        assert calls[2:] == [[NODES]] * 2


def test_layers_that_attend_twice_align_their_cache(tmp_path: Path, tiny: Target) -> None:
    """LongCat's layers have two attentions each: each gets back what the first two layers ran in
    another order.
    """
    save_small("longcat_flash", tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    target = load_hf(str(tmp_path), "longcat", device="cpu")
    caches = [target.new_cache(2, 32) for _ in range(2)]
    prompts = random_tokens(2, 8)
    tokens = random_tokens(2, 4)
    for cache in caches:
        target.prefill(prompts, torch.tensor([8, 5]), cache, ())
    part = PartialForward(target, caches[0], 2)
    part.run_root(tokens[:, 0])
    part.run_children(tokens[:, [2, 1]], torch.zeros(2, 2, dtype=torch.int64))
    part.run_children(tokens[:, 3:], torch.full((2, 1), 2))
    tree = TokenTree.from_parents(tokens, torch.tensor([[-1, 0, 0, 1]] * 2))
    assert_close(part.run_tree(tree).logits, target.verify(tree, caches[1]).logits)
    for cache in caches:
        cache.commit(torch.tensor([[0, 1, 3]] * 2), torch.tensor([3, 2]))
    assert_close(*(target.verify(TokenTree.from_chain(tokens), cache).logits for cache in caches))
    with pytest.raises(UserError, match="no attention of their own"):
        target.get_sublayer(0, "attention")
