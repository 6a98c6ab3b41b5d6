"""Hydra: training equals decoding, and a node's distribution depends on its path."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.context import Context
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer
from spectrain.trees import Chain, Eagle2, Rollout, Static, TreeBuilder
from spectrain.trees.base import Prefix, TreeTraits
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.dyspec.builder import DySpec
from spectrain_research.hydra.drafter import Hydra, _Path
from spectrain_research.opt_tree.builder import OptTree
from tests.decoding.rounds import begun, proposed
from tests.factories import add_noise

HEADS = 3
PREFIX = pytest.mark.parametrize("prefix", [False, True], ids=["hydra", "hydra++"])


def make_drafter(
    shallow: Target, prefix: bool = False, noise: float = 0.3, **options: Any
) -> Hydra:
    """Make a drafter whose every weight is random, so that everything it reads matters."""
    torch.manual_seed(3)
    drafter = Hydra(
        shallow, **{"num_heads": HEADS, "vocab_size": 256, "prefix_attention": prefix, **options}
    )
    drafter.prepare(shallow, torch.randint(0, 1000, (shallow.head.vocab_size,)))
    add_noise(drafter.parameters(), noise)
    return drafter.eval()


class Probe(TreeBuilder):
    """A builder that asks for the distributions after given nodes, level by level, and drafts
    nothing.
    """

    name = "probe"
    depth = HEADS
    budget = 16
    max_drafted = 16
    traits = TreeTraits(drafts_by_level=False)

    def __init__(self, *levels: tuple[list[list[int]], list[list[int]]]) -> None:
        self.levels = levels  # tokens and parents of every call
        self.log_q: list[Tensor] = []  # log q [B, F, V] of every call

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        self.log_q = [rollout.start()]
        self.log_q += [
            rollout.extend(torch.tensor(tokens), torch.tensor(parents))
            for tokens, parents in self.levels
        ]
        return TokenTree.from_chain(prefix.root[:, None])


def begin_round(shallow: Target, drafter: Hydra, prompts: list[list[int]]) -> Context:
    """Begin the first round of these prompts."""
    return begun(shallow, prompts, drafter, Probe(), 40)


@torch.no_grad()
def compute_path_log_q(drafter: Hydra, context: Context, paths: list[list[int]]) -> Tensor:
    """Compute log q [B, depth + 1, V] along one path per row."""
    steps = range(len(paths[0]))
    probe = Probe(*[([[path[step]] for path in paths], [[step]] * len(paths)) for step in steps])
    proposed(drafter, context, probe)
    return torch.cat(probe.log_q, dim=1)


def compute_training_log_q(
    drafter: Hydra, shallow: Target, tokens: Tensor
) -> list[dict[tuple[int, int], Tensor]]:
    """Return log q of every head at every (row, index), out of the training loss."""
    batch = Batch(
        tokens, torch.ones_like(tokens, dtype=torch.bool), shallow.features(tokens, drafter.layers)
    )
    outputs: list[Tensor] = []

    def record_output(head: Any, inputs: Tensor) -> Tensor:
        hidden = type(head).compute_hidden(head, inputs)
        outputs.append(head.lm_head(hidden))
        return hidden  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        for head in drafter.heads:
            patch.setattr(
                head, "compute_hidden", lambda inputs, head=head: record_output(head, inputs)
            )
        with torch.no_grad():
            drafter.loss(batch, shallow, TrainingState())
    supervision = Supervision(drafter, batch)
    results = []
    for k, output in enumerate(outputs):
        positions = [(int(b), int(t)) for b, t in supervision.is_supervised(k).nonzero()]
        assert len(positions) == len(output)
        results.append(dict(zip(positions, output.log_softmax(-1))))
    return results


@PREFIX
@pytest.mark.parametrize("layers", [1, 3])
def test_training_equals_decoding_along_the_true_path(
    shallow: Target, prefix: bool, layers: int
) -> None:
    """Over rounds that commit unequally many tokens, some of them undrafted, every head's log q
    is that of training.
    """
    drafter = make_drafter(shallow, prefix, num_layers=layers)
    tokens = torch.randint(3, 2000, (2, 32))
    trained = compute_training_log_q(drafter, shallow, tokens)
    context = begin_round(shallow, drafter, [tokens[0, :6].tolist(), tokens[1, :3].tolist()])
    context.tokens[:, :32] = tokens
    lengths = [6, 3]
    for counts, drafted in (
        ([3, 1], True),
        ([1, 4], True),
        ([2, 2], False),
        ([1, 3], False),
        ([4, 1], True),
        ([2, 2], True),
    ):
        if drafted:
            context.catch_up()
            paths = [tokens[b, n + 1 : n + HEADS].tolist() for b, n in enumerate(lengths)]
            log_q = compute_path_log_q(drafter, context, paths)
            for b, n in enumerate(lengths):
                for k in range(HEADS):
                    torch.testing.assert_close(
                        log_q[b, k], trained[k][b, n - 1], rtol=1e-3, atol=1e-3
                    )
        tree = TokenTree.from_chain(
            torch.stack([tokens[b, n : n + 5] for b, n in enumerate(lengths)])
        )
        features = shallow.verify(tree, context.cache, drafter.layers)
        bonus = torch.stack(
            [tokens[b, n + count] for b, (n, count) in enumerate(zip(lengths, counts))]
        )
        before = (context.new_features, context.num_new)
        with torch.no_grad():
            context.commit(
                tree,
                features,
                AcceptedPath(torch.arange(4).expand(2, -1), torch.tensor(counts), bonus),
            )
        if not drafted:
            context.defer(before)
        lengths = [n + count for n, count in zip(lengths, counts)]
    assert lengths == context.cache.lengths.tolist() and context.round == 4


def test_prefix_attention_sees_more_than_the_last_state(shallow: Target) -> None:
    """With prefix attention log q changes with an earlier state; without it, it does not."""
    for prefix in (False, True):
        drafter = make_drafter(shallow, prefix)
        results = []
        for scale in (1.0, -1.0):
            context = begin_round(shallow, drafter, [[5, 6, 7, 8]])
            context.new_features.hidden[:, 1] *= scale
            results.append(compute_path_log_q(drafter, context, [[9, 10]]))
        assert torch.equal(*results) != prefix


@PREFIX
def test_nodes_of_equal_depth_depend_on_their_paths(shallow: Target, prefix: bool) -> None:
    """Every node's log q is that of its path fed alone, and no two nodes of a depth have the
    same.
    """
    drafter = make_drafter(shallow, prefix)
    context = begin_round(shallow, drafter, [[5, 6, 7, 8], [9, 10]])
    probe = Probe(
        ([[20, 30], [21, 31]], [[0, 0]] * 2), ([[40, 40, 50], [41, 51, 51]], [[2, 1, 1], [1, 1, 2]])
    )
    with torch.no_grad():
        proposed(drafter, context, probe)
    paths = [[[30, 40], [20, 40], [20, 50]], [[21, 41], [21, 51], [31, 51]]]
    for node in range(3):
        alone = compute_path_log_q(drafter, context, [paths[0][node], paths[1][node]])
        torch.testing.assert_close(probe.log_q[2][:, node], alone[:, 2], rtol=1e-4, atol=1e-4)
        if node < 2:
            alone = compute_path_log_q(drafter, context, [[[20, 30][node]], [[21, 31][node]]])
            torch.testing.assert_close(probe.log_q[1][:, node], alone[:, 1], rtol=1e-4, atol=1e-4)
    for log_q in probe.log_q[1:]:
        for first, second in torch.combinations(torch.arange(log_q.shape[1])).tolist():
            assert (log_q[:, first] - log_q[:, second]).abs().amax(-1).min() > 1e-2


@PREFIX
def test_mixed_depths_in_a_call_agree_with_level_by_level(shallow: Target, prefix: bool) -> None:
    """Nodes of depths 1 and 2, different in every row, have in one call the log q of
    level-by-level calls.
    """
    drafter = make_drafter(shallow, prefix)
    context = begin_round(shallow, drafter, [[5, 6, 7, 8], [9, 10]])
    probe = Probe(([[20], [21]], [[0], [0]]), ([[30, 40], [41, 31]], [[0, 1], [1, 0]]))
    with torch.no_grad():
        proposed(drafter, context, probe)
    deep = compute_path_log_q(drafter, context, [[20, 40], [21, 41]])
    low = compute_path_log_q(drafter, context, [[30, 60], [31, 60]])
    torch.testing.assert_close(
        probe.log_q[2][0], torch.stack([low[0, 1], deep[0, 2]]), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        probe.log_q[2][1], torch.stack([deep[1, 2], low[1, 1]]), rtol=1e-4, atol=1e-4
    )


@PREFIX
def test_dyspec_draws_from_what_each_path_alone_says(
    shallow: Target, prefix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The q that DySpec records at every node, run in calls of mixed depths, is that of the
    node's own path.
    """
    drafter = make_drafter(shallow, prefix)
    calls = []
    original = _Path._log_q

    def watch(self: _Path, read: Tensor, depth: Tensor) -> Tensor:
        calls.append({*depth.flatten().tolist()})
        return original(self, read, depth)

    prompts = [[5, 6, 7, 8], [9, 10]]
    context = begin_round(shallow, drafter, prompts)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(_Path, "_log_q", watch)
        tree = proposed(drafter, context, DySpec(depth=7, budget=24, temperature=0.25))
    assert tree.q is not None and {1, 2} in calls and tree.depths[tree.valid].max() == HEADS
    for b, prompt in enumerate(prompts):
        nodes = [
            n for n in range(tree.tokens.shape[1]) if tree.valid[b, n] and tree.q[b, n].sum() > 0
        ]
        assert len(nodes) > 2
        for node in nodes:
            path = tree.tokens[b, tree.ancestors[b, node]].tolist()[1:]
            alone = compute_path_log_q(drafter, begin_round(shallow, drafter, [prompt]), [path])[
                0, -1
            ]
            torch.testing.assert_close(
                tree.q[b, node], (alone / 0.25).softmax(-1), rtol=1e-3, atol=1e-4
            )


@pytest.mark.parametrize("offset", range(7))
def test_head_k_is_taught_token_t_plus_2_plus_k(shallow: Target, offset: int) -> None:
    """On a cycle of tokens, a head that predicts token t + offset is correct everywhere if
    offset is 2 + k, else nowhere.
    """
    period = 11
    base = 100
    drafter = Hydra(shallow, num_heads=HEADS, vocab_size=256, loss="cross_entropy")
    phase = torch.arange(30) % period
    final = torch.nn.functional.one_hot(phase, shallow.width).float()[None]
    tokens = (base + phase)[None]
    with torch.no_grad():
        for head in drafter.heads:
            head.lm_head.weight.zero_()
            head.lm_head.weight[
                base + (torch.arange(period) + offset) % period, torch.arange(period)
            ] = 30.0
    batch = Batch(
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        Features(tokens, ("final",), final[:, :, None]),
    )
    losses = drafter.loss(batch, shallow, TrainingState())
    for k in range(HEADS):
        assert losses.counts[k] == 28 - k
        is_correct = offset == 2 + k
        assert losses.hits[k] == (losses.counts[k] if is_correct else 0)
        assert (losses.terms[f"head{k}"] < 1e-6) if is_correct else (losses.terms[f"head{k}"] > 100)


@PREFIX
def test_heads_start_as_the_targets_own(shallow: Target, prefix: bool) -> None:
    """Before training every head gives the target's distribution over the draft vocabulary,
    whatever path it reads.
    """
    drafter = make_drafter(shallow, prefix, noise=0.0, num_layers=2)
    context = begin_round(shallow, drafter, [[5, 6, 7, 8]])
    expected = shallow.head.logits(context.new_features.at_layer("final")[:, -1])[
        :, drafter.draft_ids
    ].log_softmax(-1)
    log_q = compute_path_log_q(drafter, context, [[20, 30]])
    torch.testing.assert_close(log_q, expected[:, None].expand_as(log_q), rtol=1e-5, atol=1e-4)


def test_heads_share_no_parameter_and_grow_apart(shallow: Target, tmp_path: Path) -> None:
    """Every parameter has a storage of its own, also in stacked blocks, and one step makes heads
    differ.
    """
    drafter = make_drafter(shallow, True, noise=0.0, num_layers=3)
    pointers = [parameter.data_ptr() for parameter in drafter.parameters()]
    assert len(set(pointers)) == len(pointers) and len(drafter.heads[0].blocks) == 2
    assert torch.equal(drafter.heads[0].lm_head.weight, drafter.heads[1].lm_head.weight)
    data = Dataset(
        [Example(row, [True] * 20) for row in torch.randint(3, 2000, (4, 20)).tolist()], 4, 0, 0
    )
    Trainer(lr=1e-3, max_steps=1).fit(drafter, shallow, data, LiveSource(), tmp_path)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        for name in ("lm_head.weight", "blocks.0.linear.weight", "blocks.1.linear.weight"):
            left = drafter.heads[first].get_parameter(name)
            right = drafter.heads[second].get_parameter(name)
            assert not torch.equal(left, right), name


@pytest.fixture(scope="module")
def fitted_drafters(
    shallow: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[bool, Hydra], list[list[int]], list[list[int]]]:
    """Drafters fitted to the target's greedy answers, without and with prefix attention; the
    prompts; the answers.
    """
    torch.manual_seed(1)
    prompts = [torch.randint(3, 2000, (length,)).tolist() for length in (9, 4, 6)]
    answers = [
        decode(shallow, [prompt], Greedy(), 24, ignore_eos=True)[0].output for prompt in prompts
    ]
    rows = [Example(p + a, [False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers)]
    drafters = {}
    for prefix in (False, True):
        drafters[prefix] = make_drafter(shallow, prefix, noise=0.0, vocab_size=2048)
        run = tmp_path_factory.mktemp("fit")
        Trainer(lr=3e-3, max_steps=40, warmup=0.0).fit(
            drafters[prefix], shallow, Dataset(rows, 3, 0, 0), LiveSource(), run
        )
        drafters[prefix].eval()
    return drafters, prompts, answers


BUILDERS: list[TreeBuilder] = [
    Chain(7),
    Eagle2(6, 16, 4),
    OptTree(6, 12, 0.0),
    DySpec(6, 12, children="deterministic"),
    Static(paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 1]]),
]


@pytest.mark.sweep(1, free=("builder", "prefix"))
@PREFIX
@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.name)
def test_trees_end_at_the_last_head_and_stay_lossless(
    shallow: Target,
    fitted_drafters: tuple[dict[bool, Hydra], list[list[int]], list[list[int]]],
    prefix: bool,
    builder: TreeBuilder,
) -> None:
    """A builder that would go deeper stops at the number of heads; a batch that accepts unequal
    drafts decodes greedily.
    """
    drafters, prompts, answers = fitted_drafters
    generations = decode(shallow, prompts, Greedy(), 24, drafters[prefix], builder, ignore_eos=True)
    assert [generation.output for generation in generations] == answers
    assert max(depth for generation in generations for depth in generation.depths) == HEADS
    assert max(count for generation in generations for count in generation.round_lengths) > 2
    alone = [
        decode(shallow, [p], Greedy(), 24, drafters[prefix], builder, ignore_eos=True)[
            0
        ].round_lengths
        for p in prompts
    ]
    assert [generation.round_lengths for generation in generations] == alone
