"""Verification on the device: kernels, interpreted, equal the references, and those equal the
rules and the target.
"""

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from spectrain.kernels import sampling_cuts, tree_verify
from spectrain.kernels import tree_recursive as recursive_module
from spectrain.kernels.counter import gumbel_noise, host_key, make_key
from spectrain.kernels.sampling_cuts import EMPTY_BITS, VerifyTiles
from spectrain.kernels.tree_recursive import tree_recursive
from spectrain.kernels.tree_verify import tree_greedy, tree_match
from spectrain.kernels.tree_walks import (
    SamplingSpec,
    TreeNodes,
    Verdict,
    shape_logits,
    tree_greedy_reference,
    tree_match_reference,
    tree_recursive_reference,
)
from spectrain.trees.token_tree import TokenTree
from tests.decoding.walking import walk
from tests.sampling import pairwise

triton = pytest.importorskip(
    "triton", reason="triton is not installed, so there are no kernels to interpret"
)
tl = triton.language
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
interpreter = pytest.mark.skipif(
    VERSION < (3, 7) and tuple(int(part) for part in numpy.__version__.split(".")[:2]) >= (2, 4),
    reason="the interpreter of triton before 3.7 cannot loop to a bound in a tensor with numpy 2.4",
)

SHAPES = ("chain", "star", "random", "padded")
SIZES = (1, 2, 5, 16, 64, 65, 100)
CUTS = ((1.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.6), (0.9, 7, 0.8))  # temperature, top-k, top-p
ACCEPT = 2
SAMPLE = 3
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def use_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels, through triton's interpreter, with blocks so small that a row takes several."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    sizes = {name: VerifyTiles(64, 4) for name in ("ARGMAX_TILES", "SAMPLE_TILES", "CUT_TILES")}
    # some rows have more candidates
    sizes |= {"PART_TILES": VerifyTiles(8, 4), "MAX_CANDIDATES": 16}
    for module in (tree_verify, recursive_module):
        for name in sizes.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, sizes[name])
    yield


def parents_of(shape: str, batch: int, num_nodes: int) -> Tensor:
    index = torch.arange(num_nodes)
    drawn = (torch.rand(batch, num_nodes) * index).long()
    parents = {
        "chain": (index - 1).expand(batch, -1),
        "star": torch.zeros_like(drawn),
        "random": drawn,
        "padded": torch.where(index < num_nodes * torch.rand(batch, 1), drawn, 0),
    }[shape].clone()
    parents[:, 0] = -1
    return parents


def make_trees(shape: str, num_nodes: int, tokens: Tensor) -> tuple[TokenTree, TreeNodes]:
    """Trees over `tokens` [B, N], some of whose nodes are not valid or not emitted, twins among
    the siblings.
    """
    batch = len(tokens)
    parents = parents_of(shape, batch, num_nodes)
    valid, emitted = torch.rand(2, batch, num_nodes) < 0.95
    if shape == "padded":
        valid &= (parents > 0) | (torch.arange(num_nodes) < 3)
    tree = TokenTree(tokens, parents, valid, emitted, "sampled")
    return tree, TreeNodes(tokens, parents, valid & emitted, int(tree.depths.max()), num_nodes)


def make_agreeing_trees(
    shape: str, num_nodes: int, choice: Any, batch: int = 3
) -> tuple[TokenTree, TreeNodes]:
    """Trees whose nodes carry, three times in four, the token that `choice` [B, N] names after
    their parent.
    """
    tree, nodes = make_trees(shape, num_nodes, torch.zeros(batch, num_nodes, dtype=torch.int64))
    chosen = choice.gather(1, nodes.parents.clamp(min=0))
    nodes.tokens.copy_(torch.where(torch.rand(batch, num_nodes) < 0.75, chosen, chosen + 1))
    return tree, nodes


def assert_same(actual: Verdict, expected: Verdict) -> None:
    for item, other in zip(actual, expected):
        assert item.dtype == torch.int64 and torch.equal(item, other), (actual, expected)


def assert_walks(actual: Verdict, tree: TokenTree, choice: Tensor, height: int) -> None:
    """Check that the verdict is that of tests.decoding.walking.walk for the same choices, its path
    padded to the tree's height."""
    expected = walk(tree, choice)
    path = expected.path[:, torch.arange(height + 1).clamp(max=expected.path.shape[1] - 1)]
    assert_same(actual, Verdict(path, expected.counts, expected.bonus))


def logits_of(
    batch: int, num_nodes: int, num_tokens: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits with ties and with -inf, whose rows are a view of wider ones."""
    logits = torch.randn(batch, num_nodes, num_tokens + 3)
    logits = torch.where(torch.rand_like(logits) < 0.3, (logits * 4).round() / 4, logits)
    logits[torch.rand_like(logits) < 0.1] = float("-inf")
    logits[..., 1] = 1.0
    return logits.to(dtype)[..., :num_tokens]


def draws_of(
    batch: int, num_nodes: int, purpose: int, cut: tuple[float, int, float]
) -> SamplingSpec:
    # often the same as the node's before
    positions = torch.randint(0, 4, (batch, num_nodes)).cumsum(1)
    return SamplingSpec(host_key(purpose, 11), torch.randint(0, 1 << 40, (batch,)), positions, *cut)


def draw_choices(logits: Tensor, draws: SamplingSpec) -> Tensor:
    """[B, N] tokens drawn at every node, one after the other."""
    chosen = torch.zeros(logits.shape[:2], dtype=torch.int64)
    for b, row in enumerate(draws.sequence_keys.tolist()):
        for n, position in enumerate(draws.positions[b].tolist()):
            scores = shape_logits(logits[b, n], draws.temperature, draws.top_k, draws.top_p)
            chosen[b, n] = (
                scores + gumbel_noise(make_key(SAMPLE, 11, row, position), len(scores))
            ).argmax()
    return chosen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_nodes", SIZES)
def test_greedy_reference_equals_walk(num_nodes: int, shape: str) -> None:
    """The reference accepts what `walk` accepts by the argmax, twins and padding included."""
    logits = logits_of(5, num_nodes, 37)
    tree, nodes = make_agreeing_trees(shape, num_nodes, logits.argmax(-1), batch=5)
    assert_walks(tree_greedy_reference(nodes, logits), tree, logits.argmax(-1), nodes.height)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "num_nodes, shape", [(1, "chain"), (5, "star"), (16, "random"), (40, "padded"), (9, "chain")]
)
def test_match_reference_equals_walk(
    num_nodes: int, shape: str, cut: tuple[float, int, float]
) -> None:
    """The reference accepts what `walk` accepts by draws made node by node."""
    logits = torch.randn(4, num_nodes, 37)
    draws = draws_of(4, num_nodes, SAMPLE, cut)
    choice = draw_choices(logits, draws)
    tree, nodes = make_agreeing_trees(shape, num_nodes, choice, batch=4)
    assert_walks(tree_match_reference(nodes, logits, draws), tree, choice, nodes.height)


@interpreter
@pytest.mark.parametrize(
    "num_nodes",
    [1, 5, 65, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 16, 64, 100))],
)
def test_greedy_kernel_equals_reference(num_nodes: int, use_interpreter: None) -> None:
    """Kernel = reference for every shape and dtype, ties, -inf and vocabularies that fill no
    block.
    """
    for index, shape in enumerate(SHAPES if num_nodes < 64 else SHAPES[2:]):
        logits = logits_of(2, num_nodes, 50 + 7 * index, DTYPES[index % 3])
        _, nodes = make_agreeing_trees(shape, num_nodes, logits.argmax(-1), batch=2)
        assert_same(tree_greedy(nodes, logits), tree_greedy_reference(nodes, logits))


def match_agrees(
    num_nodes: int, shape: str, cut: tuple[float, int, float], dtype: torch.dtype
) -> Verdict:
    """The kernels' answer is the reference's, for trees that mostly carry what is drawn."""
    logits = logits_of(2, num_nodes, 97, dtype)
    draws = draws_of(2, num_nodes, SAMPLE, cut)
    every = (
        draws.shape_logits(logits)
        + gumbel_noise(make_key(SAMPLE, 11, draws.sequence_keys[:, None], draws.positions), 97)
    ).argmax(-1)
    _, nodes = make_agreeing_trees(shape, num_nodes, every, batch=2)
    result = tree_match(nodes, logits, draws)
    assert_same(result, tree_match_reference(nodes, logits, draws))
    return result


@pytest.mark.sweep(2, free=("num_nodes", "shape", "cut", "dtype"))
@interpreter
@pytest.mark.parametrize(
    "num_nodes, shape, cut, dtype",
    [
        (1, "chain", CUTS[3], torch.float32),
        (5, "star", CUTS[1], torch.float16),
        (5, "chain", CUTS[2], torch.bfloat16),
        (7, "random", CUTS[3], torch.float32),
        (16, "padded", CUTS[0], torch.bfloat16),
        pytest.param(16, "random", CUTS[3], torch.float32, marks=pytest.mark.slow),
        (65, "random", CUTS[0], torch.float16),
    ],
)
def test_match_kernel_equals_reference(
    num_nodes: int,
    shape: str,
    cut: tuple[float, int, float],
    dtype: torch.dtype,
    use_interpreter: None,
) -> None:
    """Kernel = reference, with top-k and top-p and without, in every dtype; and more than the
    root is accepted.
    """
    assert match_agrees(num_nodes, shape, cut, dtype).counts.max() > (num_nodes > 1)


@interpreter
@pytest.mark.slow
@pytest.mark.parametrize("num_nodes, shape, cut, dtype", pairwise(SIZES, SHAPES, CUTS, DTYPES))
def test_match_kernel_equals_reference_everywhere(
    num_nodes: int,
    shape: str,
    cut: tuple[float, int, float],
    dtype: torch.dtype,
    use_interpreter: None,
) -> None:
    """Kernel = reference where every two of sizes, shapes, cuts and dtypes meet."""
    match_agrees(num_nodes, shape, cut, dtype)


@interpreter
def test_equal_scores_choose_the_first_token(use_interpreter: None) -> None:
    """The first of equal maxima in different blocks counts, and the first of a row of -inf."""
    logits = torch.zeros(1, 3, 200)
    logits[0, 0, [70, 150]] = 1.0
    logits[0, 1, :] = float("-inf")
    nodes = TreeNodes(
        torch.tensor([[0, 70, 0]]),
        torch.tensor([[-1, 0, 1]]),
        torch.ones(1, 3, dtype=torch.bool),
        2,
        1,
    )
    result = tree_greedy(nodes, logits)
    assert result.path.tolist() == [[0, 1, 2]] and result.bonus.tolist() == [0]
    assert_same(result, tree_greedy_reference(nodes, logits))


@triton.jit
def _cut_kernel(
    logits_ptr,
    allowed_ptr,
    num_tokens,
    temperature,
    top_k,
    top_p,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """Write which tokens of one row the cut allows."""
    logits_ptr += tl.program_id(0) * num_tokens
    _, cut = sampling_cuts.find_cut(logits_ptr, num_tokens, temperature, top_k, top_p, SHIFT, BLOCK)
    for start in range(0, num_tokens, BLOCK):
        x, columns = sampling_cuts.load_logits(logits_ptr, start, num_tokens, BLOCK)
        allowed = (sampling_cuts.float_order(x, SHIFT) >= cut) & (x > float("-inf"))
        tl.store(
            allowed_ptr + tl.program_id(0) * num_tokens + columns,
            allowed,
            mask=columns < num_tokens,
        )


@pytest.mark.sweep(2, free=("top_k", "top_p", "dtype"))
@interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "top_k, top_p",
    [(1, 1.0), (5, 1.0), (40, 1.0), (0, 0.05), (0, 0.5), (0, 0.95), (20, 0.7), (90, 0.999)],
)
def test_bisection_cuts_like_sorting(top_k: int, top_p: float, dtype: torch.dtype) -> None:
    """Kernel and reference allow the same tokens; where the last ones tie, all of them."""
    temperature = 0.8
    num_tokens = 93
    distinct = torch.stack([torch.randperm(num_tokens) * 0.05 - 2.5 for _ in range(3)])
    few = torch.randn(1, num_tokens).masked_fill(torch.arange(num_tokens) > 12, float("-inf"))
    # 0 of either sign
    tied = (torch.randn(2, num_tokens) * 2).round() / 2 * torch.tensor([[1.0], [-1.0]])
    logits = torch.cat([distinct, few, tied]).to(dtype)
    allowed = torch.zeros(logits.shape, dtype=torch.bool)
    settings = (temperature, top_k or None, top_p if top_p < 1 else None)
    _cut_kernel[(len(logits),)](
        logits, allowed, num_tokens, *settings, SHIFT=EMPTY_BITS[dtype], BLOCK=64
    )
    draws = SamplingSpec(0, torch.zeros(1), torch.zeros(1, 1), temperature, top_k, top_p)
    assert torch.equal(allowed, draws.shape_logits(logits) > float("-inf"))


@triton.jit
def _candidate_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    allowed_ptr,
    enough_ptr,
    top_ptr,
    mass_ptr,
    count_ptr,
    candidates_ptr,
    num_tokens,
    num_parts,
    temperature,
    top_k,
    top_p,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Write which tokens of one row the cut allows, and whether its candidates were enough to
    tell.
    """
    row = tl.program_id(0)
    logits_ptr += row * num_tokens
    _, cut, enough = sampling_cuts.cut_from_candidates(
        logits_ptr, top_ptr, mass_ptr, count_ptr, candidates_ptr, row, num_tokens, num_parts,
        temperature, top_k, top_p,
        SHIFT, BLOCK, BLOCK_S, CANDIDATES,
    )  # fmt: skip
    tl.store(enough_ptr + row, enough)
    for start in range(0, num_tokens, BLOCK):
        x, columns = sampling_cuts.load_logits(logits_ptr, start, num_tokens, BLOCK)
        allowed = (sampling_cuts.float_order(x, SHIFT) >= cut) & (x > float("-inf"))
        tl.store(allowed_ptr + row * num_tokens + columns, allowed, mask=columns < num_tokens)


@interpreter
@pytest.mark.sweep(2, free=("dtype", "top_k", "top_p"))
# of -inf beside what stands for a part's largest logit
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(
    "dtype, top_k, top_p",
    [
        (torch.float32, 5, 1.0),
        (torch.bfloat16, 0, 0.6),
        (torch.float32, 7, 0.8),
        (torch.float16, 50, 0.9),
    ],
)
def test_candidates_cut_like_sorting(
    dtype: torch.dtype, top_k: int, top_p: float, use_interpreter: None
) -> None:
    """Peaked rows are cut by their candidates alone, flat ones and large top-k by bisection; all
    as the reference cuts.
    """
    temperature = 0.8
    num_tokens = 60
    peaked = torch.randn(2, num_tokens) * 4
    few = torch.randn(1, num_tokens).masked_fill(torch.arange(num_tokens) > 12, float("-inf"))
    logits = torch.cat([peaked, few, torch.zeros(1, num_tokens)])[None].to(dtype)
    allowed = torch.zeros(logits.shape[1:], dtype=torch.bool)
    enough = torch.zeros(len(allowed), dtype=torch.int32)
    settings = temperature, top_k or None, top_p if top_p < 1 else None
    parts = tree_verify.find_candidates(logits, temperature, top_k or None)
    _candidate_kernel[(len(allowed),)](
        logits,
        allowed,
        enough,
        *parts,
        num_tokens,
        parts.num_parts,
        *settings,
        SHIFT=EMPTY_BITS[dtype],
        BLOCK=64,
        BLOCK_S=8,
        CANDIDATES=tree_verify.MAX_CANDIDATES,
    )
    draws = SamplingSpec(0, torch.zeros(1), torch.zeros(1, 1), temperature, top_k, top_p)
    assert torch.equal(allowed, draws.shape_logits(logits[0]) > float("-inf"))
    assert enough.tolist()[:2] == [top_k < 50] * 2 and not enough[3]


def draw_trees(
    shape: str,
    num_nodes: int,
    q: Tensor,
    draft_ids: Tensor | None,
    without: bool,
    most_children: int,
) -> tuple[TokenTree, TreeNodes]:
    """Trees whose children were drawn from their parents' q [B, N, U], twins included where
    drawn with replacement.
    """
    batch, _, size = q.shape
    tree, nodes = make_trees(shape, num_nodes, torch.zeros(batch, num_nodes, dtype=torch.int64))
    same = (nodes.parents[:, :, None] == nodes.parents[:, None]) & nodes.can_accept[:, None]
    order = (same & torch.ones(num_nodes, num_nodes).tril(-1).bool()).sum(-1)
    nodes.can_accept.logical_and_(order < min(size, most_children))
    # [B, N, U]
    ranked = (q.log() - torch.empty_like(q).exponential_().log()).argsort(-1, descending=True)
    if not without:
        ranked = torch.multinomial(q.flatten(0, 1), most_children, replacement=True).view(
            batch, num_nodes, -1
        )
    parents = nodes.parents.clamp(min=0)
    index = order.clamp(max=ranked.shape[-1] - 1)
    token = ranked.gather(1, parents[..., None].expand_as(ranked)).gather(2, index[..., None])[
        ..., 0
    ]
    nodes.tokens.copy_(token if draft_ids is None else draft_ids[token])
    return tree, TreeNodes(
        nodes.tokens, nodes.parents, nodes.can_accept, nodes.height, most_children
    )


def recursive_agrees(
    num_nodes: int, shape: str, cut: tuple[float, int, float], without: bool, size: int, dtype: Any
) -> None:
    """The kernels' answer is the reference's, for trees drawn from a q that is not the target's:
    three at once, but one of 64 nodes or of 100, of which the interpreter takes a minute."""
    batch = 1 if num_nodes in (64, 100) else 3
    logits = logits_of(batch, num_nodes, 90, dtype)
    q = (torch.randn(batch, num_nodes, size) * 2).softmax(-1)
    draft_ids = None if size == 90 else torch.randperm(90)[:size]
    _, nodes = draw_trees(shape, num_nodes, q, draft_ids, without, 5)
    draws = draws_of(batch, num_nodes, ACCEPT, cut)
    result = tree_recursive(nodes, logits, q, draft_ids, without, draws)
    assert_same(result, tree_recursive_reference(nodes, logits, q, draft_ids, without, draws))


@pytest.mark.sweep(2, free=("num_nodes", "shape", "cut", "size", "dtype", "without"))
@interpreter
@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize(
    "num_nodes, shape, cut, size, dtype",
    [
        (1, "chain", CUTS[3], 90, torch.float32),
        (5, "chain", CUTS[0], 90, torch.float32),
        (6, "star", CUTS[2], 30, torch.bfloat16),
        (16, "random", CUTS[1], 30, torch.float16),
        (16, "padded", CUTS[3], 90, torch.float32),
        (65, "random", CUTS[0], 30, torch.float32),
    ],
)
def test_recursive_kernel_equals_reference(
    num_nodes: int,
    shape: str,
    cut: tuple[float, int, float],
    size: int,
    dtype: Any,
    without: bool,
    use_interpreter: None,
) -> None:
    """Kernel = reference: with and without replacement, whole and reduced vocabularies, cuts,
    twins, padding, dtypes.
    """
    recursive_agrees(num_nodes, shape, cut, without, size, dtype)


@interpreter
@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize(
    "num_nodes, shape, cut, size, dtype", pairwise(SIZES, SHAPES, CUTS, (30, 90), DTYPES)
)
def test_recursive_kernel_equals_reference_everywhere(
    num_nodes: int,
    shape: str,
    cut: tuple[float, int, float],
    size: int,
    dtype: torch.dtype,
    without: bool,
    use_interpreter: None,
) -> None:
    """Kernel = reference, with replacement and without, where every two sizes, shapes, cuts,
    vocabularies and dtypes meet.
    """
    recursive_agrees(num_nodes, shape, cut, without, size, dtype)


TREES = {"chain": (-1, 0, 1), "tree": (-1, 0, 0, 0, 1, 1, 2, 2, 3)}


def excess_of(
    parents: tuple[int, ...],
    without: bool,
    cut: tuple[float, int, float],
    subset: bool,
    judged_without: bool | None = None,
) -> tuple[float, float]:
    """By how many deviations chi-squared of the first two tokens of many verdicts exceeds its mean,
    and how many were kept.

    The target is a table: what follows a token hangs on that token alone, so two tokens have the
    chances p(x) p(y | x).
    """
    batch = 30000
    num_tokens = 12
    num_nodes = len(parents)
    size = 7 if subset else num_tokens
    draft_ids = torch.randperm(num_tokens)[:size] if subset else None
    table = torch.randn(num_tokens, num_tokens) * 1.2
    guess = (table[:, draft_ids] if draft_ids is not None else table) + 2 * torch.randn(
        num_tokens, size
    )
    tokens = torch.zeros(batch, num_nodes, dtype=torch.int64)
    q = torch.zeros(batch, num_nodes, size)
    for node in range(num_nodes):
        q[:, node] = guess[tokens[:, node]].softmax(-1)
        children = [child for child, parent in enumerate(parents) if parent == node]
        if children:
            ids = torch.multinomial(q[:, node], len(children), replacement=not without)
            tokens[:, children] = ids if draft_ids is None else draft_ids[ids]
    trees = torch.tensor(parents).expand(batch, -1)
    nodes = TreeNodes(tokens, trees, torch.ones_like(trees, dtype=torch.bool), 2, 3)
    draws = SamplingSpec(
        host_key(ACCEPT, 1),
        torch.arange(batch),
        TokenTree.from_parents(tokens, trees).depths + 17,
        *cut,
    )
    judged = without if judged_without is None else judged_without
    path, counts, bonus = tree_recursive_reference(
        nodes, table[tokens], q, draft_ids, judged, draws
    )
    chances = shape_logits(table, *cut).double().softmax(-1)
    emitted = torch.where(
        torch.arange(2) + 1 < counts[:, None], tokens.gather(1, path[:, 1:]), bonus[:, None]
    )
    follow = torch.multinomial(chances[emitted[:, 0]].float(), 1)[:, 0]
    second = torch.where(counts > 1, emitted[:, 1], follow)
    expected = (chances[0][:, None] * chances).flatten() * batch
    result = torch.bincount(emitted[:, 0] * num_tokens + second, minlength=num_tokens**2).double()
    assert result[expected == 0].sum() == 0
    result = result[expected > 0]
    expected = expected[expected > 0]
    if (rare := expected < 5).any():
        result, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (result, expected))
    free = len(result) - 1
    return float(((result - expected).square() / expected).sum() - free) / (2 * free) ** 0.5, float(
        counts.double().mean()
    )


@pytest.mark.sweep(2, free=("parents", "without", "subset"))
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_recursive_emits_the_target(parents: tuple[int, ...], without: bool, subset: bool) -> None:
    """The first two tokens of 30000 verdicts are distributed as the target's: chi-squared, cut
    or not.
    """
    for cut in ((1.0, 0, 1.0), (0.8, 6, 0.9)):
        deviations, accepted = excess_of(parents, without, cut, subset)
        assert abs(deviations) < 4.5 and accepted > 1.2


def test_wrong_recursive_rule_fails_the_test() -> None:
    """That test has power: children drawn without replacement, judged as if drawn with it, miss
    the target by far.
    """
    assert excess_of(TREES["tree"], True, (1.0, 0, 1.0), False, judged_without=False)[0] > 20


def test_rows_are_independent() -> None:
    """A row's verdict is the same alone and in a batch."""
    logits = logits_of(4, 9, 31)
    q = torch.rand(4, 9, 31).softmax(-1)
    _, nodes = draw_trees("random", 9, q, None, True, 4)
    draws = draws_of(4, 9, ACCEPT, CUTS[3])
    together = (
        tree_match_reference(nodes, logits, draws),
        tree_recursive_reference(nodes, logits, q, None, True, draws),
    )
    for b in range(4):
        row = slice(b, b + 1)
        item = TreeNodes(
            nodes.tokens[row], nodes.parents[row], nodes.can_accept[row], nodes.height, 4
        )
        few = SamplingSpec(draws.key, draws.sequence_keys[row], draws.positions[row], *CUTS[3])
        assert_same(
            tree_match_reference(item, logits[row], few), Verdict(*(x[row] for x in together[0]))
        )
        alone = tree_recursive_reference(item, logits[row], q[row], None, True, few)
        assert_same(alone, Verdict(*(x[row] for x in together[1])))


def test_kernels_do_not_synchronize() -> None:
    """The operators trace without values: their shapes follow from shapes alone."""
    _, nodes = make_trees("random", 6, torch.zeros(2, 6, dtype=torch.int64))
    meta = [
        x.to("meta") for x in (nodes.tokens, nodes.parents, nodes.can_accept, torch.zeros(2, 6, 9))
    ]
    for op, rest in (
        (torch.ops.spectrain.tree_match, (None, None, 0, 1.0, None, None)),
        (
            torch.ops.spectrain.tree_recursive,
            (meta[3], None, True, meta[0][:, 0], meta[0], 0, 1.0, None, 0.5),
        ),
    ):
        assert [tuple(x.shape) for x in op(*meta, 4, *rest)] == [(2, 5), (2,), (2,)]
