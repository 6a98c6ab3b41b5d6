"""PARD: what masks are taught, and what one forward drafts, is what the small model says over text and masks alone."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from torch import Tensor, nn

from spectrain.config.spec import RunSpec
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import RecursiveRejection, SpeculativeSampling
from spectrain.decoding.calibration import calibrate_builders
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.masks import add_blocks
from spectrain.drafters.pard import Pard
from spectrain.errors import UserError
from spectrain.experimental.cast.builder import Cast
from spectrain.experimental.dyspec.builder import DySpec
from spectrain.experimental.sequoia.builder import Sequoia
from spectrain.experimental.shared.guard import Guard
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.reference_model import reference_model
from spectrain.models.target import Target
from spectrain.runs.drafters import load_weights, save_drafter
from spectrain.trees import Auto, Chain, Eagle2, Rollout, Static, TreeBuilder
from spectrain.trees.base import Draft, Prefix
from spectrain.trees.token_tree import TokenTree
from tests.decoding.rounds import Keeping
from tests.decoding.test_guard import Switch
from tests.factories import add_noise, dataset_with_spans
from tests.targets import cut_tiny

DRAFTS, LIMIT = 4, 14
ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip
SOURCE = torch.Generator().manual_seed(10)  # prompts that are done after unlike numbers of rounds
PROMPTS = [torch.randint(3, 2000, (length,), generator=SOURCE).tolist() for length in (7, 2, 11)]


def make(target: Target, vocab_size: int = 2048, **options: Any) -> Pard:
    """A small model of its own with random weights, large enough that attention and masks matter."""
    torch.manual_seed(7)
    size = {} if "num_layers" in options else {"architecture": {**ARCHITECTURE, "vocab_size": vocab_size}}
    drafter = Pard(target, **{"num_drafts": DRAFTS, **size, **options})
    drafter.prepare(target, torch.zeros(target.head.vocab_size))
    if "num_layers" not in options:
        add_noise(drafter.parameters())
    return drafter.eval()


def batch_of(target: Target, drafter: Pard, rows: list[int]) -> Batch:
    return LiveSource().make_batch(BatchRequest(dataset_with_spans(5)[rows], target, drafter.stages[0].layers))


def logits_of(drafter: Pard, text: list[int], count: int) -> Tensor:
    """Logits [T + M, V] of a text and M masks behind it, by transformers' own model and `inputs_embeds`."""
    with reference_model(drafter.model) as model:
        embedded = model.get_input_embeddings()(torch.tensor(text))
        states = torch.cat([embedded, drafter.mask.expand(count, -1)])
        found: Tensor = model(inputs_embeds=states[None], use_cache=False).logits[0]
    return found


# Conditional drop


@pytest.mark.parametrize(
    "num_drafts, keep, keep_least", [(4, 0.7, 0.2), (8, 0.7, 0.2), (6, 0.5, 0.5), (3, 1.0, 1.0), (5, 0.3, 0.05), (2, 0.7, 0.2)]
)
def test_masks_are_dropped_by_the_formula(shallow: Target, num_drafts: int, keep: float, keep_least: float) -> None:
    """Of n prefixes with an answer for some mask, max(keep^b, keep_least) n have b masks or more, rounded up."""
    drafter = make(shallow, num_drafts=num_drafts, keep=keep, keep_least=keep_least)
    batch = batch_of(shallow, drafter, [0, 1, 2, 3, 4])
    for step in range(3):
        for mask, row in zip(batch.loss_mask, drafter.prefixes(batch, step)):
            possible = [end for end in range(len(mask) - 2) if mask[end + 2 : end + 1 + num_drafts].any()]
            ends, sizes = [end for end, _ in row], [size for _, size in row]
            assert ends == sorted(set(ends)) and set(ends) <= set(possible)
            assert all(1 <= size <= num_drafts - 1 for size in sizes)
            for depth in range(1, num_drafts):
                share = max(keep**depth, keep_least)
                assert sum(size >= depth for size in sizes) == math.ceil(share * len(possible))


def test_corrections_teach_every_mask(shallow: Target) -> None:
    """Where single tokens carry loss, each is an answer at every depth, from a prefix of its own."""
    drafter = make(shallow, keep=1.0)
    mask = torch.zeros(1, 26, dtype=torch.bool)
    mask[0, [8, 14, 23]] = True
    batch = Batch(torch.randint(3, 2000, (1, 26)), mask)
    batch = replace(batch, features=shallow.features(batch.tokens, drafter.stages[0].layers))
    assert drafter.loss(batch, shallow, TrainingState()).counts.tolist() == [3] * DRAFTS


def test_every_mask_that_is_kept_sees_the_chain_before_it(shallow: Target) -> None:
    """The masks of depth b + 1 stand behind some of the prefixes that have depth b: all of a block's are in the forward."""
    drafter = make(shallow, num_drafts=6)
    batch = batch_of(shallow, drafter, [0, 1, 2])
    blocks = add_blocks(batch, drafter.prefixes(batch, 0))
    for row in range(3):
        for place in (blocks.mask_index[row] > 0).nonzero()[:, 0].tolist():
            seen = blocks.visible[row, place] & (blocks.mask_index[row] >= 0)
            number = int(blocks.mask_index[row, place])
            assert sorted(blocks.mask_index[row, seen].tolist()) == list(range(number + 1))
            first = int(blocks.positions[row, seen].min())
            assert int((blocks.visible[row, place] & (blocks.mask_index[row] < 0)).sum()) == first


def test_the_drop_is_drawn_for_a_sequence_and_a_step(shallow: Target) -> None:
    """It doesn't depend on what else is in the batch, its order or padding; another step or seed draws another one."""
    drafter = make(shallow, keep=0.5)
    batch, drawn = batch_of(shallow, drafter, [0, 1, 2, 3, 4]), []
    for step in range(8):
        together = drafter.prefixes(batch, step)
        drawn.append(together)
        assert drafter.prefixes(batch, step) == together
        assert [drafter.prefixes(batch_of(shallow, drafter, [row]), step)[0] for row in range(5)] == together
        rows = [4, 1]
        padded = Batch(F.pad(batch.tokens[rows], (0, 7)), F.pad(batch.loss_mask[rows], (0, 7)))
        assert drafter.prefixes(padded, step) == [together[row] for row in rows]
    assert all(len({tuple(rows[row]) for rows in drawn}) > 4 for row in range(5))
    other = make(shallow, keep=0.5, seed=1)
    assert other.prefixes(batch, 7) != drawn[-1]


# Training


def independent_loss(shallow: Target, drafter: Pard, batch: Batch) -> tuple[Tensor, list[float], list[float]]:
    """The loss, hits and counts, from a forward for the text and one for every prefix and its masks."""
    losses, hits, counts = [], [0.0] * drafter.num_drafts, [0.0] * drafter.num_drafts
    size = min(drafter.model.head.output.weight.shape[0], shallow.head.output.weight.shape[0])
    for tokens, mask, prefixes in zip(batch.tokens.tolist(), batch.loss_mask.tolist(), drafter.prefixes(batch, 0)):
        with reference_model(shallow) as model, torch.no_grad():
            wanted = model(torch.tensor([tokens])).logits[0, :, :size].log_softmax(-1)
        said = [(0, t + 1, row) for t, row in enumerate(logits_of(drafter, tokens, 0))]
        for end, count in prefixes:
            rows = logits_of(drafter, tokens[: end + 1], count)[end + 1 :]
            said += [(1 + j, end + 2 + j, row) for j, row in enumerate(rows)]
        before = len(losses)
        for depth, place, row in said:
            if place < len(tokens) and mask[place]:
                log_q, log_p = row[:size].log_softmax(-1), wanted[place - 1]
                divergence = (log_p.exp() * (log_p - log_q)).sum()
                losses.append(-log_q[tokens[place]] if drafter.divergence == "cross_entropy" else divergence)
                hits[depth] += float(log_q.argmax() == log_p.argmax())
                counts[depth] += 1
        losses[before:] = [sum(mask) * torch.stack(losses[before:]).mean()]  # a sequence counts what it has supervised tokens
    return torch.stack(losses).sum(), hits, counts


@pytest.mark.sweep(3, free=("options",))
@pytest.mark.parametrize("options", [
    {}, {"loss": "forward_kl"}, {"num_drafts": 2}, {"num_drafts": 6, "keep": 1.0, "loss": "forward_kl"},
    {"vocab_size": 2112, "loss": "forward_kl"}, {"num_layers": 2, "keep_least": 0.6},
], ids=["default", "kl", "one mask", "nothing dropped", "padded", "cut"])  # fmt: skip
def test_loss_is_that_of_every_prefix_alone(shallow: Target, options: dict[str, Any]) -> None:
    """Loss, hits and counts, and the gradient of every weight, equal those of a sum over prefixes, one forward each."""
    drafter = make(shallow, **options)
    batch = batch_of(shallow, drafter, [0, 2, 4])
    losses = drafter.loss(batch, shallow, TrainingState())
    total, hits, counts = independent_loss(shallow, drafter, batch)
    assert list(losses.terms) == [drafter.divergence]
    torch.testing.assert_close(losses.total.detach(), total.detach(), rtol=1e-4, atol=1e-4)
    assert losses.hits.tolist() == hits and losses.counts.tolist() == counts and min(counts) > 0
    trained = list(drafter.parameters())
    found, wanted = (torch.autograd.grad(loss, trained) for loss in (losses.total, total))
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_gradients_reach_the_drafter_only() -> None:
    """The small model and its mask have gradients that are not zero; the target has none."""
    target = cut_tiny(3)
    drafter = make(target, loss="forward_kl")
    drafter.loss(batch_of(target, drafter, [0, 1, 2]), target, TrainingState()).total.backward()
    named = dict(drafter.named_parameters())
    assert "mask" in named and len(named) > 10
    assert all(p.requires_grad and p.grad is not None and p.grad.abs().sum() > 0 for p in named.values())
    assert all(parameter.grad is None for parameter in target.parameters())
    theirs = {parameter.data_ptr() for parameter in target.parameters()}
    assert theirs.isdisjoint(parameter.data_ptr() for parameter in make(target, num_layers=2).parameters())


# Decoding


class Asked(Rollout):
    """Another rollout; notes the text up to the root, the depth, and log q at every node that it was asked about."""

    def __init__(self, inner: Rollout, prefix: Prefix, seen: list[tuple[list[int], int, Tensor]]) -> None:
        self.inner, self.seen, self.depth_limit = inner, seen, inner.depth_limit
        self.texts = [prefix.tokens[b, : n + 1].tolist() for b, n in enumerate(prefix.lengths.tolist())]
        self.depths = [[0] for _ in self.texts]

    def start(self) -> Tensor:
        return self.note(self.inner.start(), 1)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        for b, depths in enumerate(self.depths):
            depths += [depths[parent] + 1 for parent in parents[b].tolist()]
        return self.note(self.inner.extend(tokens, parents), tokens.shape[1])

    def note(self, log_q: Tensor, count: int) -> Tensor:
        for b, text in enumerate(self.texts):
            self.seen += [(text, depth, log_q[b, n]) for n, depth in enumerate(self.depths[b][-count:])]
        return log_q


class Watching(Keeping):
    """A builder that keeps its trees, done rows included, and what its rollouts say."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder, lambda rollout, prefix: Asked(rollout, prefix, self.seen))
        self.seen: list[tuple[list[int], int, Tensor]] = []

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        tree = super().grow(prefix, draft)
        assert tree.can_emit.all()
        return tree


@torch.no_grad()
def check_said(drafter: Pard, seen: list[tuple[list[int], int, Tensor]]) -> None:
    """log q at a depth is that of the small model over the text and its masks."""
    known: dict[tuple[int, ...], Tensor] = {}
    assert seen
    for text, depth, log_q in seen:
        if tuple(text) not in known:
            said = logits_of(drafter, text, drafter.num_drafts - 1)[len(text) - 1 :, : drafter.vocab_size]
            known[tuple(text)] = said.log_softmax(-1)
        wanted = known[tuple(text)][min(depth, drafter.num_drafts - 1)]
        torch.testing.assert_close(log_q, wanted, rtol=1e-4, atol=1e-3)


BUILDERS: dict[str, TreeBuilder] = {
    "chain": Chain(3),
    "deep": Chain(9),
    "eagle2": Eagle2(4, 9, 3),
    "dyspec": DySpec(4, 7, children="deterministic"),
    "static": Static(paths=[[0], [1], [0, 0], [1, 0], [0, 0, 0], [0, 1]]),
}
BUILDER = pytest.mark.parametrize("builder", list(BUILDERS.values()), ids=list(BUILDERS))
DRAFTERS: dict[str, dict[str, Any]] = {
    "cut": {"num_layers": 2},
    "small": {},
    "two": {"num_drafts": 2},
    "padded": {"vocab_size": 2112},
}


@pytest.fixture(scope="module")
def greedy(shallow: Target) -> list[list[int]]:
    """The target's own answers."""
    return [decode(shallow, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output for prompt in PROMPTS]


@pytest.mark.sweep(2, free=("builder",))
@BUILDER
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["cut", "small"])
def test_drafts_are_the_small_models(
    shallow: Target, greedy: list[list[int]], kind: str, count: int, builder: TreeBuilder
) -> None:
    """In every round of every row, done ones too, drafts are those of text and masks alone; and the output is greedy."""
    drafter = make(shallow, **DRAFTERS[kind])
    watching = Watching(builder)
    found = decode(shallow, PROMPTS[:count], Greedy(), LIMIT, drafter, watching, ignore_eos=True)
    assert [one.output for one in found] == greedy[:count]
    check_said(drafter, watching.seen)
    assert {depth for one in found for depth in one.depths} <= set(range(1, min(builder.depth, DRAFTS) + 1))
    if kind == "cut":
        assert max(kept for one in found for kept in one.round_lengths) > 1
        assert count == 1 or len({len(one.round_lengths) for one in found}) > 1, "some rows must be done before others"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", list(DRAFTERS))
@pytest.mark.parametrize("count", [1, 3])
def test_a_chain_holds_the_likeliest_token_of_every_place(shallow: Target, kind: str, count: int) -> None:
    """Draft d is the argmax at place d of text and masks, as many as there are places, and the output is greedy."""
    drafter = make(shallow, **DRAFTERS[kind])
    watching = Watching(Chain(9))
    plain = [decode(shallow, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output for prompt in PROMPTS[:count]]
    found = decode(shallow, PROMPTS[:count], Greedy(), LIMIT, drafter, watching, ignore_eos=True)
    assert [one.output for one in found] == plain and len(watching.trees) > 3
    for texts, tree in zip(watching.texts, watching.trees):
        assert tree.tokens.shape[1] == drafter.num_drafts + 1 and tree.valid.all()
        for row, text in enumerate(texts):
            with torch.no_grad():
                said = logits_of(drafter, text, drafter.num_drafts - 1)[len(text) - 1 :, : drafter.vocab_size]
            assert tree.tokens[row, 1:].tolist() == said.argmax(-1).tolist()


@pytest.mark.sweep(1)
@BUILDER
@pytest.mark.parametrize("count", [1, 3])
def test_drafted_equals_matched_sampling(shallow: Target, count: int, builder: TreeBuilder) -> None:
    """With the same seed, drafted sampling draws the tokens of autoregressive sampling."""
    drafter, rule = make(shallow, num_layers=2), Match(temperature=0.3, top_k=50, seed=5)
    plain = decode(shallow, PROMPTS[:count], rule, LIMIT, ignore_eos=True)
    found = decode(shallow, PROMPTS[:count], rule, LIMIT, drafter, builder, ignore_eos=True)
    assert [one.output for one in found] == [one.output for one in plain]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("drawn, rule", [
    (Chain(3, "sampled", 0.7), SpeculativeSampling), (Chain(3, "sampled", 0.7), RecursiveRejection),
    (Static(paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]], children="without_replacement"), RecursiveRejection),
], ids=["chain", "recursive chain", "tree"])  # fmt: skip
def test_drawn_children(shallow: Target, greedy: list[list[int]], count: int, drawn: TreeBuilder, rule: Any) -> None:
    """Rules that weigh p against q: where p allows one token only the output is greedy; drafts are still the small model's."""
    drafter = make(shallow, num_layers=2)
    watching = Watching(drawn)
    found = decode(shallow, PROMPTS[:count], rule(top_k=1), LIMIT, drafter, watching, ignore_eos=True)
    assert [one.output for one in found] == greedy[:count]
    check_said(drafter, watching.seen)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("pattern", [".d", "d..", "....ddd"])
def test_rounds_without_a_draft(shallow: Target, greedy: list[list[int]], pattern: str, count: int) -> None:
    """Whichever rounds draft, the output is greedy, and what the rounds between them emitted has been read."""
    drafter, switch = make(shallow, num_layers=2), Switch(pattern)
    watching = Watching(Chain(3))
    session = Session(shallow, Greedy(), drafter, watching, guard=cast(Guard, switch))
    found = session.decode(PROMPTS[:count], LIMIT, ignore_eos=True)
    assert [one.output for one in found] == greedy[:count]
    assert all((depth > 0) == drafted for one in found for depth, (drafted, _) in zip(one.depths, switch.recorded))
    check_said(drafter, watching.seen)


def test_a_round_is_one_forward(shallow: Target) -> None:
    """However deep the drafts, the small model runs once a round, and a second decode starts afresh."""
    drafter, calls = make(shallow, num_layers=2), []
    drafter.model.layers[0].register_forward_hook(lambda module, args, output: calls.append(1))
    together = decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, Chain(9), ignore_eos=True)
    assert len(calls) == max(len(one.round_lengths) for one in together)
    assert drafter.cost.num_passes(3.0) == drafter.cost.num_passes(1.0) == 1
    for row, one in enumerate(together):
        (alone,) = decode(shallow, [PROMPTS[row]], Greedy(), LIMIT, drafter, Chain(9), ignore_eos=True)
        assert (alone.output, alone.round_lengths, alone.depths) == (one.output, one.round_lengths, one.depths)


@pytest.mark.parametrize("builder", [Sequoia(depth=6, budget=6), Auto(6, 6, 2), Cast(6, 6, 2)], ids=lambda b: b.name)
def test_builders_that_need_calibration(shallow: Target, greedy: list[list[int]], builder: TreeBuilder) -> None:
    """After calibration on this drafter every builder's output is greedy, from trees no deeper than its places."""
    drafter = make(shallow, num_layers=2)
    calibration = calibrate_builders(shallow, drafter, [builder], Greedy(), PROMPTS[:1], 12)
    assert calibration is not None and len(calibration.hits) <= DRAFTS
    found = decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, builder, ignore_eos=True)
    assert [one.output for one in found] == greedy
    assert ("latency" not in builder.requirements) <= max(depth for one in found for depth in one.depths) <= DRAFTS


# Settings


@pytest.mark.sweep(1, free=("options",))
@pytest.mark.parametrize("options", [{"num_layers": 2}, {}, {"vocab_size": 2112}], ids=["cut", "architecture", "padded"])
def test_reloaded_equals_saved(shallow: Target, tmp_path: Path, options: dict[str, Any]) -> None:
    """From the saved settings and tensors alone come the same weights, bit by bit, and the same drafts."""
    drafter = make(shallow, **options)
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("train", overrides=["drafter=pard", "target=tiny"])
    save_drafter(tmp_path, drafter, RunSpec.from_nodes(config))
    described = json.loads((tmp_path / "config.json").read_text())["drafter"]
    assert described.pop("choice") == "pard"
    torch.manual_seed(99)
    other = Pard(cut_tiny(3), **{**described, "num_drafts": DRAFTS}).eval()
    load_weights(other, tmp_path)
    first, second = drafter.state_dict(), other.state_dict()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    trees = []
    for loaded in (drafter, other):
        watching = Watching(Chain(9))
        decode(shallow, PROMPTS, Greedy(), 12, loaded, watching, ignore_eos=True)
        trees.append(watching.trees)
    assert all(torch.equal(one.tokens, same.tokens) for one, same in zip(*trees, strict=True))


def test_the_mask_starts_near_the_mean_embedding(shallow: Target) -> None:
    """Before it is prepared it is nothing; then it lies as far from the mean as noise of a tenth of the spread does."""
    drafter = Pard(shallow, num_layers=1)
    assert not drafter.mask.any()
    drafter.prepare(shallow, torch.zeros(2048))
    weight = cast(nn.Embedding, drafter.model.head.embedding).weight.detach()
    apart = drafter.mask.detach() - weight.mean(0)
    assert 0.08 * weight.std() < apart.square().mean().sqrt() < 0.12 * weight.std()


@pytest.mark.parametrize(("options", "sentence"), [
    ({"num_drafts": 1}, r"drafter\.num_drafts=1: use 2 or more"),
    ({"keep": 0.0}, r"drafter\.keep=0\.0: use more than 0 and at most 1"),
    ({"keep": 1.5}, r"drafter\.keep=1\.5"),
    ({"keep": float("nan")}, r"drafter\.keep=nan"),
    ({"keep_least": 0.0}, r"drafter\.keep_least=0\.0: use more than 0 and at most 1"),
    ({"keep_least": 1.1}, r"drafter\.keep_least=1\.1"),
    ({"num_layers": 2, "architecture": ARCHITECTURE}, r"drafter\.architecture: drafter\.num_layers already names"),
    ({"num_layers": 3}, r"drafter\.num_layers=3: \S+ has 3 layers"),
    ({"architecture": {**ARCHITECTURE, "vocab_size": 2000}}, r"drafter\.architecture: its vocab_size is 2000"),
])  # fmt: skip
def test_wrong_settings_are_refused(shallow: Target, options: dict[str, Any], sentence: str) -> None:
    """The key, the value and what to use."""
    with pytest.raises(UserError, match=sentence):
        Pard(shallow, **options)
