"""Drafting with a part of the target: how often its layers run, where chains end, and what
Kangaroo's adapter computes.
"""

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.layers.self_speculation import SelfDrafter, SelfDraftingCost
from spectrain.features.batch import Batch
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Rollout, TreeBuilder
from spectrain.trees.base import Prefix
from spectrain.trees.token_tree import TokenTree
from spectrain_research.kangaroo.drafter import Kangaroo
from spectrain_research.layer_skip.drafter import LayerSkipping
from tests.targets import count_attention_nodes
from tests.trees.tables import Path, paths

LIMIT = 12
TEXTS = (
    "The bees find the hive. The bees",
    "one two three four one two three four one two",
    "What is it?",
)


@pytest.fixture(scope="module")
def prompts(tiny: Target) -> list[list[int]]:
    """Three prompts of different lengths."""
    return [tiny.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]


def test_every_draft_step_reads_the_layers_that_draft() -> None:
    """Whatever else a family declares, the lower bound of its time has the target's layers."""
    kinds = SelfDrafter.__subclasses__()
    assert {EarlyExit, Kangaroo, LayerSkipping} <= {*kinds}
    assert all(issubclass(kind.capabilities.cost, SelfDraftingCost) for kind in kinds)


class Recording(Rollout):
    """Records the paths of the first row that the drafter extended."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout, self.draft_ids, self.depth_limit = (
            rollout,
            rollout.draft_ids,
            rollout.depth_limit,
        )
        self.paths: list[Path] = [()]

    def start(self) -> Tensor:
        return self.rollout.start()

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.paths += [
            (*self.paths[parent], token)
            for token, parent in zip(tokens[0].tolist(), parents[0].tolist())
        ]
        return self.rollout.extend(tokens, parents)


class RecordingBuilder(TreeBuilder):
    """A builder that records its trees and the paths that they were drafted from."""

    def __init__(self, builder: TreeBuilder) -> None:
        self.builder = builder
        self.depth, self.budget, self.max_drafted = (
            builder.depth,
            builder.budget,
            builder.max_drafted,
        )
        self.rounds: list[tuple[set[Path], TokenTree]] = []

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        recorder = Recording(rollout)
        tree = self.builder.expand(prefix, recorder)
        assert len(set(recorder.paths)) == len(recorder.paths)
        self.rounds.append((set(recorder.paths), tree))
        return tree


def freeze_drafter(drafter: Drafter) -> Drafter:
    """Return the drafter without dropout and gradients."""
    return drafter.eval().requires_grad_(False)


# How often layers run


@pytest.mark.sweep(1)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("name", ["early_exit", "kangaroo"])
@pytest.mark.parametrize("exit_layer", [1, 5])
def test_an_exit_runs_every_node_once(
    tiny: Target, prompts: list[list[int]], name: str, exit_layer: int, depth: int, batch: int
) -> None:
    """In a round with d drafts, layers below the exit run d + 1 times with one node, later
    layers once with d + 1 nodes.
    """
    drafter: SelfDrafter = (
        EarlyExit(tiny, exit_layer) if name == "early_exit" else Kangaroo(tiny, exit_layer)
    )
    with count_attention_nodes(tiny) as calls:
        generations = decode(
            tiny,
            prompts[:batch],
            Greedy(),
            LIMIT,
            freeze_drafter(drafter),
            Chain(depth),
            ignore_eos=True,
        )
    rounds = max(len(generation.round_lengths) for generation in generations)
    longest = max(map(len, prompts[:batch]))
    assert calls[:exit_layer] == [[longest] + [1] * (depth + 1) * rounds] * exit_layer
    assert calls[exit_layer:] == [[longest] + [depth + 1] * rounds] * (tiny.num_layers - exit_layer)


@pytest.mark.sweep(2, free=("skipped",))
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("skipped", [(4,), (2, 5), (0,), (7,), (3, 4)])
def test_skipping_runs_the_first_layers_once(
    tiny: Target, prompts: list[list[int]], skipped: tuple[int, ...], depth: int, batch: int
) -> None:
    """Layers before the first skipped one run every node once. A later layer runs d nodes to draft,
    or none if it is skipped, and all d + 1 together to verify."""
    drafter = LayerSkipping(tiny, skipped=skipped)
    with count_attention_nodes(tiny) as calls:
        generations = decode(
            tiny, prompts[:batch], Greedy(), LIMIT, drafter, Chain(depth), ignore_eos=True
        )
    rounds = max(len(generation.round_lengths) for generation in generations)
    longest = max(map(len, prompts[:batch]))
    for layer, nodes in enumerate(calls):
        if layer < min(skipped):
            assert nodes == [longest] + [1] * (depth + 1) * rounds
        else:
            drafting = [] if layer in skipped else [1] * depth
            assert nodes == [longest] + [*drafting, depth + 1] * rounds


@pytest.mark.parametrize("drafter", ["early_exit", "layer_skip"])
def test_a_tree_runs_every_node_once(tiny: Target, prompts: list[list[int]], drafter: str) -> None:
    """Layers below the exit run every path that was drafted from or verified once, later layers
    every verified one.
    """
    builder = RecordingBuilder(Eagle2(depth=4, budget=9, top_k=3))
    drafting: Drafter = (
        EarlyExit(tiny, 3) if drafter == "early_exit" else LayerSkipping(tiny, skipped=[3, 5])
    )
    with count_attention_nodes(tiny) as calls:
        (generation,) = decode(
            tiny, prompts[:1], Greedy(), LIMIT, drafting, builder, ignore_eos=True
        )
    assert len(builder.rounds) == len(generation.round_lengths)
    prefill = len(prompts[0])
    verified = [set(paths(tree, 0)) for _, tree in builder.rounds]
    below = sum(
        len(drafted_from | nodes) for (drafted_from, _), nodes in zip(builder.rounds, verified)
    )
    assert (
        sum(len(drafted_from - nodes) for (drafted_from, _), nodes in zip(builder.rounds, verified))
        > 0
    )
    above = sum(map(len, verified))
    for layer, nodes in enumerate(calls):
        drafted = (
            0
            if drafter == "early_exit" or layer in (3, 5)
            else sum(len(drafted_from) for drafted_from, _ in builder.rounds)
        )
        assert sum(nodes) == prefill + (below if layer < 3 else above + drafted)
        if drafter == "early_exit" and layer >= 3:
            assert nodes == [prefill, *map(len, verified)]
    assert (
        max(map(len, verified)) == 9 and max(len(path) for nodes in verified for path in nodes) > 1
    )


# Where chains end


def next_probs(target: Target, drafter: SelfDrafter, text: list[int], path: list[int]) -> Tensor:
    """Return the probabilities [V] of a part of the target after a path; all layers have run the
    text before its last token.
    """
    cache = target.new_cache(1, len(text) + len(path))
    target.prefill(torch.tensor([text[:-1]]), torch.tensor([len(text) - 1]), cache, ())
    tokens = torch.tensor([[text[-1], *path]])
    output = target.run(
        tokens,
        ForwardPlan(
            logits=True,
            cache=cache,
            span=LayerSpan(last=drafter.exit_layer, skipped=drafter.skipped),
        ),
    )
    assert output.logits is not None
    return output.logits[0, -1].softmax(-1)


def expected_chain(
    target: Target, drafter: SelfDrafter, text: list[int], builder: Chain
) -> list[int]:
    """Return the likeliest tokens, up to the first before which the drafter's confidence is
    below `stop`.
    """
    path: list[int] = []
    confidence = 1.0
    while len(path) < builder.depth:
        likeliest = next_probs(target, drafter, text, path).max(-1)
        confidence *= float(likeliest.values)
        if (float(likeliest.values) if builder.stop_on == "token" else confidence) < builder.stop:
            break
        path.append(int(likeliest.indices))
    return path


def texts_before(generation: Generation) -> Iterator[list[int]]:
    """Yield the prompt and output at the beginning of each round."""
    for turn in range(len(generation.round_lengths)):
        yield generation.prompt + generation.output[: 1 + sum(generation.round_lengths[:turn])]


@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("stop_on", ["token", "path"])
@pytest.mark.parametrize("name", ["early_exit", "layer_skip"])
def test_chains_end_where_the_drafter_is_unsure(
    tiny: Target, prompts: list[list[int]], name: str, stop_on: Literal["token", "path"], batch: int
) -> None:
    """A row's chain ends before a token if its probability, or that of the path so far, is below
    `stop`.
    """
    drafter = EarlyExit(tiny, 6) if name == "early_exit" else LayerSkipping(tiny, skipped=[5])
    chains = Chain(4, stop=0.1, stop_on=stop_on)
    builder = RecordingBuilder(chains)
    generations = decode(tiny, prompts[:batch], Greedy(), LIMIT, drafter, builder, ignore_eos=True)
    chain_lengths = set()
    for row, generation in enumerate(generations):
        for turn, text in enumerate(texts_before(generation)):
            expected = expected_chain(tiny, drafter, text, chains)
            tree = builder.rounds[turn][1]
            assert tree.tokens[row, tree.valid[row]].tolist() == [text[-1], *expected]
            assert (
                generation.depths[turn] == len(expected)
                and generation.node_counts[turn] == len(expected) + 1
            )
            chain_lengths.add(len(expected))
    assert len(chain_lengths) > 1


# Kangaroo


class FixedTreeBuilder(Eagle2):
    """Drafts a fixed tree and records log q after every path, for every row and round."""

    def __init__(self) -> None:
        super().__init__(depth=2, budget=6, top_k=3)
        self.log_q_after: list[list[dict[Path, Tensor]]] = []

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        batch = len(prefix.root)
        first_level = torch.tensor([[20, 21]])
        second_level = torch.tensor([[30, 31, 32]])
        log_q = torch.cat(
            [
                rollout.start(),
                rollout.extend(
                    first_level.expand(batch, -1), torch.tensor([[0, 0]]).expand(batch, -1)
                ),
                rollout.extend(
                    second_level.expand(batch, -1), torch.tensor([[2, 1, 2]]).expand(batch, -1)
                ),
            ],
            dim=1,
        )
        paths: list[Path] = [(), (20,), (21,), (21, 30), (20, 31), (21, 32)]
        self.log_q_after.append([dict(zip(paths, row)) for row in log_q])
        likeliest = log_q[:, 0].topk(2).indices
        return TokenTree.from_parents(
            torch.cat([prefix.root[:, None], likeliest], dim=1),
            torch.tensor([[-1, 0, 0]]).expand(batch, -1),
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exit_layer", [1, 4])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_kangaroo_decodes_as_it_was_trained(
    tiny: Target, prompts: list[list[int]], exit_layer: int, batch: int
) -> None:
    """After every path, in every round, the cached adapter gives what it gives in the loss over
    the full sequence.
    """
    kangaroo = Kangaroo(tiny, exit_layer)
    builder = FixedTreeBuilder()
    kangaroo.norm.weight.uniform_(0.5, 1.5)
    generations = decode(
        tiny, prompts[:batch], Greedy(), 6, freeze_drafter(kangaroo), builder, ignore_eos=True
    )
    states: list[Tensor] = []
    handle = kangaroo.norm.register_forward_hook(lambda module, args, output: states.append(output))
    compared = 0
    for row, generation in enumerate(generations):
        for turn, text in enumerate(texts_before(generation)):
            for path, log_q in builder.log_q_after[turn][row].items():
                tokens = torch.tensor([[*text, *path]])
                single = Batch(
                    tokens,
                    torch.ones_like(tokens) > 0,
                    tiny.features(tokens, kangaroo.stages[0].layers),
                )
                states.clear()
                kangaroo.loss(single, tiny, TrainingState())
                expected = tiny.head.logits(states[0][0, -1]).log_softmax(-1)
                torch.testing.assert_close(log_q, expected, rtol=1e-4, atol=1e-4)
                compared += 1
    handle.remove()
    assert compared >= 6 * 2 * batch


def test_a_new_kangaroo_is_an_early_exit(tiny: Target, prompts: list[list[int]]) -> None:
    """Before training the adapter adds nothing, so the trees are those of the target's early
    exit, round by round.
    """
    kangaroo = Kangaroo(tiny, 5)
    kangaroo.prepare(tiny, torch.zeros(tiny.head.vocab_size))
    trees: list[list[list[Path]]] = []
    for drafter in (freeze_drafter(kangaroo), EarlyExit(tiny, 5)):
        builder = RecordingBuilder(Eagle2(depth=3, budget=7, top_k=3))
        decode(tiny, prompts, Greedy(), LIMIT, drafter, builder, ignore_eos=True)
        trees.append([paths(tree, row) for _, tree in builder.rounds for row in range(3)])
    assert trees[0] == trees[1]
