"""PARD: training and drafting at masks both equal the small model over the text and its masks
alone.
"""

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

from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import RecursiveRejection, SpeculativeSampling
from spectrain.decoding.calibration import calibrate_builders
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState, drafting_cost
from spectrain.drafters.layers.mask_blocks import add_blocks
from spectrain.drafters.pard import Pard
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.reference_model import reference_model
from spectrain.models.target import Target
from spectrain.runs.drafters import load_weights, save_drafter
from spectrain.trees import Auto, Chain, Eagle2, Rollout, Static, TreeBuilder
from spectrain.trees.base import Prefix
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import TokenTree
from tests.decoding.rounds import Keeping
from tests.factories import add_noise, dataset_with_spans
from tests.installed import load_cases
from tests.targets import cut_tiny

DRAFTS = 4
LIMIT = 14
ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
SOURCE = torch.Generator().manual_seed(10)  # prompts that finish after different numbers of rounds
PROMPTS = [torch.randint(3, 2000, (length,), generator=SOURCE).tolist() for length in (7, 2, 11)]


def make_drafter(target: Target, vocab_size: int = 2048, **options: Any) -> Pard:
    """Make a small model with random weights, large enough that attention and masks matter."""
    torch.manual_seed(7)
    size = (
        {}
        if "num_layers" in options
        else {"architecture": {**ARCHITECTURE, "vocab_size": vocab_size}}
    )
    drafter = Pard(target, **{"num_drafts": DRAFTS, **size, **options})
    drafter.prepare(target, torch.zeros(target.head.vocab_size))
    if "num_layers" not in options:
        add_noise(drafter.parameters())
    return drafter.eval()


def batch_of(target: Target, drafter: Pard, rows: list[int]) -> Batch:
    return LiveSource().make_batch(
        BatchRequest(dataset_with_spans(5)[rows], target, drafter.stages[0].layers)
    )


def logits_of(drafter: Pard, text: list[int], count: int) -> Tensor:
    """Return logits [T + M, V] of a text and M masks behind it, by transformers' own model and
    `inputs_embeds`.
    """
    with reference_model(drafter.model) as model:
        embedded = model.get_input_embeddings()(torch.tensor(text))
        states = torch.cat([embedded, drafter.mask.expand(count, -1)])
        logits: Tensor = model(inputs_embeds=states[None], use_cache=False).logits[0]
    return logits


# Conditional drop


@pytest.mark.parametrize(
    "num_drafts, keep, keep_least",
    [(4, 0.7, 0.2), (8, 0.7, 0.2), (6, 0.5, 0.5), (3, 1.0, 1.0), (5, 0.3, 0.05), (2, 0.7, 0.2)],
)
def test_masks_are_dropped_by_the_formula(
    shallow: Target, num_drafts: int, keep: float, keep_least: float
) -> None:
    """Of n prefixes with a label for some mask, max(keep^b, keep_least) n, rounded up, have b
    masks or more.
    """
    drafter = make_drafter(shallow, num_drafts=num_drafts, keep=keep, keep_least=keep_least)
    batch = batch_of(shallow, drafter, [0, 1, 2, 3, 4])
    for step in range(3):
        for mask, row in zip(batch.loss_mask, drafter.prefixes(batch, step)):
            possible = [
                end for end in range(len(mask) - 2) if mask[end + 2 : end + 1 + num_drafts].any()
            ]
            ends = [end for end, _ in row]
            sizes = [size for _, size in row]
            assert ends == sorted(set(ends)) and set(ends) <= set(possible)
            assert all(1 <= size <= num_drafts - 1 for size in sizes)
            for depth in range(1, num_drafts):
                share = max(keep**depth, keep_least)
                assert sum(size >= depth for size in sizes) == math.ceil(share * len(possible))


def test_corrections_teach_every_mask(shallow: Target) -> None:
    """If single tokens carry loss, each is a label at every depth, behind a prefix of its own."""
    drafter = make_drafter(shallow, keep=1.0)
    mask = torch.zeros(1, 26, dtype=torch.bool)
    mask[0, [8, 14, 23]] = True
    batch = Batch(torch.randint(3, 2000, (1, 26)), mask)
    batch = replace(batch, features=shallow.features(batch.tokens, drafter.stages[0].layers))
    assert drafter.loss(batch, shallow, TrainingState()).counts.tolist() == [3] * DRAFTS


def test_every_remaining_mask_sees_the_chain_before_it(shallow: Target) -> None:
    """A mask of depth b + 1 sees its prefix and the b masks of its block before it, all of which
    are in the forward.
    """
    drafter = make_drafter(shallow, num_drafts=6)
    batch = batch_of(shallow, drafter, [0, 1, 2])
    blocks = add_blocks(batch, drafter.prefixes(batch, 0))
    for row in range(3):
        for column in (blocks.mask_index[row] > 0).nonzero()[:, 0].tolist():
            visible_masks = blocks.visible[row, column] & (blocks.mask_index[row] >= 0)
            number = int(blocks.mask_index[row, column])
            assert sorted(blocks.mask_index[row, visible_masks].tolist()) == list(range(number + 1))
            first = int(blocks.positions[row, visible_masks].min())
            assert int((blocks.visible[row, column] & (blocks.mask_index[row] < 0)).sum()) == first


def test_the_drop_is_drawn_for_a_sequence_and_a_step(shallow: Target) -> None:
    """The draw doesn't depend on the rest of the batch, its order or padding; another step or
    seed draws another one.
    """
    drafter = make_drafter(shallow, keep=0.5)
    batch = batch_of(shallow, drafter, [0, 1, 2, 3, 4])
    drawn = []
    for step in range(8):
        batched = drafter.prefixes(batch, step)
        drawn.append(batched)
        assert drafter.prefixes(batch, step) == batched
        assert [
            drafter.prefixes(batch_of(shallow, drafter, [row]), step)[0] for row in range(5)
        ] == batched
        rows = [4, 1]
        padded = Batch(F.pad(batch.tokens[rows], (0, 7)), F.pad(batch.loss_mask[rows], (0, 7)))
        assert drafter.prefixes(padded, step) == [batched[row] for row in rows]
    assert all(len({tuple(rows[row]) for rows in drawn}) > 4 for row in range(5))
    other = make_drafter(shallow, keep=0.5, seed=1)
    assert other.prefixes(batch, 7) != drawn[-1]


# Training


def independent_loss(
    shallow: Target, drafter: Pard, batch: Batch
) -> tuple[Tensor, list[float], list[float]]:
    """Return loss, hits and counts from one forward for the text and one for every prefix and
    its masks.
    """
    losses = []
    hits = [0.0] * drafter.num_drafts
    counts = [0.0] * drafter.num_drafts
    size = min(drafter.model.head.output.weight.shape[0], shallow.head.output.weight.shape[0])
    for tokens, mask, prefixes in zip(
        batch.tokens.tolist(), batch.loss_mask.tolist(), drafter.prefixes(batch, 0)
    ):
        with reference_model(shallow) as model, torch.no_grad():
            target_log_probs = model(torch.tensor([tokens])).logits[0, :, :size].log_softmax(-1)
        judged = [(0, t + 1, row) for t, row in enumerate(logits_of(drafter, tokens, 0))]
        for end, count in prefixes:
            rows = logits_of(drafter, tokens[: end + 1], count)[end + 1 :]
            judged += [(1 + j, end + 2 + j, row) for j, row in enumerate(rows)]
        before = len(losses)
        for depth, position, row in judged:
            if position < len(tokens) and mask[position]:
                log_q = row[:size].log_softmax(-1)
                log_p = target_log_probs[position - 1]
                divergence = (log_p.exp() * (log_p - log_q)).sum()
                losses.append(
                    -log_q[tokens[position]]
                    if drafter.divergence == "cross_entropy"
                    else divergence
                )
                hits[depth] += float(log_q.argmax() == log_p.argmax())
                counts[depth] += 1
        # weighted by supervised tokens
        losses[before:] = [sum(mask) * torch.stack(losses[before:]).mean()]
    return torch.stack(losses).sum(), hits, counts


@pytest.mark.sweep(3, free=("options",))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "forward_kl"},
        {"num_drafts": 2},
        {"num_drafts": 6, "keep": 1.0, "loss": "forward_kl"},
        {"vocab_size": 2112, "loss": "forward_kl"},
        {"num_layers": 2, "keep_least": 0.6},
    ],
    ids=["default", "kl", "one mask", "nothing dropped", "padded", "cut"],
)
def test_loss_is_that_of_every_prefix_alone(shallow: Target, options: dict[str, Any]) -> None:
    """Loss, hits and counts, and the gradient of every weight, equal those of a sum over
    prefixes, one forward each.
    """
    drafter = make_drafter(shallow, **options)
    batch = batch_of(shallow, drafter, [0, 2, 4])
    losses = drafter.loss(batch, shallow, TrainingState())
    total, hits, counts = independent_loss(shallow, drafter, batch)
    assert list(losses.terms) == [drafter.divergence]
    torch.testing.assert_close(losses.total.detach(), total.detach(), rtol=1e-4, atol=1e-4)
    assert losses.hits.tolist() == hits and losses.counts.tolist() == counts and min(counts) > 0
    trained = list(drafter.parameters())
    actual, expected = (torch.autograd.grad(loss, trained) for loss in (losses.total, total))
    for gradient, reference in zip(actual, expected):
        torch.testing.assert_close(
            gradient, reference, rtol=1e-3, atol=1e-4 * float(reference.abs().max())
        )


def test_gradients_reach_the_drafter_only() -> None:
    """The small model and its mask have gradients that are not zero; the target has none."""
    target = cut_tiny(3)
    drafter = make_drafter(target, loss="forward_kl")
    drafter.loss(batch_of(target, drafter, [0, 1, 2]), target, TrainingState()).total.backward()
    named = dict(drafter.named_parameters())
    assert "mask" in named and len(named) > 10
    assert all(
        p.requires_grad and p.grad is not None and p.grad.abs().sum() > 0 for p in named.values()
    )
    assert all(parameter.grad is None for parameter in target.parameters())
    target_pointers = {parameter.data_ptr() for parameter in target.parameters()}
    assert target_pointers.isdisjoint(
        parameter.data_ptr() for parameter in make_drafter(target, num_layers=2).parameters()
    )


# Decoding


class RecordingRollout(Rollout):
    """A wrapped rollout that records the text up to the root, the depth, and log q at every node
    that was requested.
    """

    def __init__(
        self, inner: Rollout, prefix: Prefix, records: list[tuple[list[int], int, Tensor]]
    ) -> None:
        self.inner, self.records, self.depth_limit = inner, records, inner.depth_limit
        self.texts = [
            prefix.tokens[b, : n + 1].tolist() for b, n in enumerate(prefix.lengths.tolist())
        ]
        self.depths = [[0] for _ in self.texts]

    def start(self) -> Tensor:
        return self.record(self.inner.start(), 1)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        for b, depths in enumerate(self.depths):
            depths += [depths[parent] + 1 for parent in parents[b].tolist()]
        return self.record(self.inner.extend(tokens, parents), tokens.shape[1])

    def record(self, log_q: Tensor, count: int) -> Tensor:
        for b, text in enumerate(self.texts):
            self.records += [
                (text, depth, log_q[b, n]) for n, depth in enumerate(self.depths[b][-count:])
            ]
        return log_q


class RecordingBuilder(Keeping):
    """A builder that records its trees, finished rows included, and the log q of its rollouts."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(
            builder, lambda rollout, prefix: RecordingRollout(rollout, prefix, self.records)
        )
        self.records: list[tuple[list[int], int, Tensor]] = []

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        tree = super().grow(prefix, draft)
        assert tree.can_emit.all()
        return tree


@torch.no_grad()
def check_log_probs(drafter: Pard, records: list[tuple[list[int], int, Tensor]]) -> None:
    """Check that log q at a depth is that of the small model over the text and its masks."""
    reference: dict[tuple[int, ...], Tensor] = {}
    assert records
    for text, depth, log_q in records:
        if tuple(text) not in reference:
            logits = logits_of(drafter, text, drafter.num_drafts - 1)[
                len(text) - 1 :, : drafter.vocab_size
            ]
            reference[tuple(text)] = logits.log_softmax(-1)
        expected = reference[tuple(text)][min(depth, drafter.num_drafts - 1)]
        torch.testing.assert_close(log_q, expected, rtol=1e-4, atol=1e-3)


# Cases of installed packages.
CASES = load_cases(__name__)

BUILDERS: dict[str, TreeBuilder] = {
    "chain": Chain(3),
    "deep": Chain(9),
    "eagle2": Eagle2(4, 9, 3),
    "static": Static(paths=[[0], [1], [0, 0], [1, 0], [0, 0, 0], [0, 1]]),
    **CASES.get("BUILDERS", {}),
}
BUILDER = pytest.mark.parametrize("builder", list(BUILDERS.values()), ids=list(BUILDERS))
DRAFTERS: dict[str, dict[str, Any]] = {
    "cut": {"num_layers": 2},
    "small": {},
    "two": {"num_drafts": 2},
    "padded": {"vocab_size": 2112},
}


@pytest.fixture(scope="module")
def greedy_answers(shallow: Target) -> list[list[int]]:
    """The target's own answers."""
    return [
        decode(shallow, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output for prompt in PROMPTS
    ]


@pytest.mark.sweep(2, free=("builder",))
@BUILDER
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["cut", "small"])
def test_drafts_are_the_small_models(
    shallow: Target, greedy_answers: list[list[int]], kind: str, count: int, builder: TreeBuilder
) -> None:
    """In every round of every row, finished ones too, drafts are those of text and masks alone;
    the output is greedy.
    """
    drafter = make_drafter(shallow, **DRAFTERS[kind])
    recorder = RecordingBuilder(builder)
    generations = decode(
        shallow, PROMPTS[:count], Greedy(), LIMIT, drafter, recorder, ignore_eos=True
    )
    assert [row.output for row in generations] == greedy_answers[:count]
    check_log_probs(drafter, recorder.records)
    assert {depth for row in generations for depth in row.depths} <= set(
        range(1, min(builder.depth, DRAFTS) + 1)
    )
    if kind == "cut":
        assert max(length for row in generations for length in row.round_lengths) > 1
        assert count == 1 or len({len(row.round_lengths) for row in generations}) > 1, (
            "some rows must be done before others"
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", list(DRAFTERS))
@pytest.mark.parametrize("count", [1, 3])
def test_a_chain_holds_the_likeliest_token_of_every_position(
    shallow: Target, kind: str, count: int
) -> None:
    """Draft d is the argmax at position d of text and masks, one for each position, and the
    output is greedy.
    """
    drafter = make_drafter(shallow, **DRAFTERS[kind])
    recorder = RecordingBuilder(Chain(9))
    plain = [
        decode(shallow, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output
        for prompt in PROMPTS[:count]
    ]
    generations = decode(
        shallow, PROMPTS[:count], Greedy(), LIMIT, drafter, recorder, ignore_eos=True
    )
    assert [generation.output for generation in generations] == plain and len(recorder.trees) > 3
    for texts, tree in zip(recorder.texts, recorder.trees):
        assert tree.tokens.shape[1] == drafter.num_drafts + 1 and tree.valid.all()
        for row, text in enumerate(texts):
            with torch.no_grad():
                logits = logits_of(drafter, text, drafter.num_drafts - 1)[
                    len(text) - 1 :, : drafter.vocab_size
                ]
            assert tree.tokens[row, 1:].tolist() == logits.argmax(-1).tolist()


@pytest.mark.sweep(1)
@BUILDER
@pytest.mark.parametrize("count", [1, 3])
def test_drafted_equals_matched_sampling(shallow: Target, count: int, builder: TreeBuilder) -> None:
    """With the same seed, drafted sampling draws the tokens of autoregressive sampling."""
    drafter = make_drafter(shallow, num_layers=2)
    rule = Match(temperature=0.3, top_k=50, seed=5)
    plain = decode(shallow, PROMPTS[:count], rule, LIMIT, ignore_eos=True)
    generations = decode(shallow, PROMPTS[:count], rule, LIMIT, drafter, builder, ignore_eos=True)
    assert [row.output for row in generations] == [row.output for row in plain]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "drawn, rule",
    [
        (Chain(3, "sampled", 0.7), SpeculativeSampling),
        (Chain(3, "sampled", 0.7), RecursiveRejection),
        (
            Static(paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]], children="without_replacement"),
            RecursiveRejection,
        ),
    ],
    ids=["chain", "recursive chain", "tree"],
)
def test_drawn_children(
    shallow: Target, greedy_answers: list[list[int]], count: int, drawn: TreeBuilder, rule: Any
) -> None:
    """With p that allows one token only, rules that weigh p against q give the greedy output;
    drafts are the small model's.
    """
    drafter = make_drafter(shallow, num_layers=2)
    recorder = RecordingBuilder(drawn)
    generations = decode(
        shallow, PROMPTS[:count], rule(top_k=1), LIMIT, drafter, recorder, ignore_eos=True
    )
    assert [row.output for row in generations] == greedy_answers[:count]
    check_log_probs(drafter, recorder.records)


def test_a_round_is_a_single_forward(shallow: Target) -> None:
    """The small model runs once a round, however deep the drafts, and decoding a row alone gives
    the same rounds.
    """
    drafter = make_drafter(shallow, num_layers=2)
    calls = []
    drafter.model.layers[0].register_forward_hook(lambda module, args, output: calls.append(1))
    batched = decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, Chain(9), ignore_eos=True)
    assert len(calls) == max(len(generation.round_lengths) for generation in batched)
    assert drafting_cost(drafter).num_passes(3.0) == drafting_cost(drafter).num_passes(1.0) == 1
    for row, generation in enumerate(batched):
        (single,) = decode(
            shallow, [PROMPTS[row]], Greedy(), LIMIT, drafter, Chain(9), ignore_eos=True
        )
        assert (single.output, single.round_lengths, single.depths) == (
            generation.output,
            generation.round_lengths,
            generation.depths,
        )


@pytest.mark.parametrize(
    "builder",
    [Auto(6, 6, 2), *CASES.get("test_builders_that_need_calibration", ())],
    ids=lambda b: b.name,
)
def test_builders_that_need_calibration(
    shallow: Target, greedy_answers: list[list[int]], builder: TreeBuilder
) -> None:
    """After calibration every builder's output is greedy, and its trees are no deeper than the
    drafted positions.
    """
    drafter = make_drafter(shallow, num_layers=2)
    calibration = calibrate_builders(shallow, drafter, [builder], Greedy(), PROMPTS[:1], 12)
    assert calibration is not None and len(calibration.hits) <= DRAFTS
    generations = decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, builder, ignore_eos=True)
    assert [row.output for row in generations] == greedy_answers
    assert (
        ("latency" not in builder.requirements)
        <= max(depth for row in generations for depth in row.depths)
        <= DRAFTS
    )


# Settings


@pytest.mark.sweep(1, free=("options",))
@pytest.mark.parametrize(
    "options", [{"num_layers": 2}, {}, {"vocab_size": 2112}], ids=["cut", "architecture", "padded"]
)
def test_reloaded_equals_saved(shallow: Target, tmp_path: Path, options: dict[str, Any]) -> None:
    """A drafter loaded from the saved settings and tensors has the same weights, bit by bit, and
    the same drafts.
    """
    drafter = make_drafter(shallow, **options)
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("train", overrides=["drafter=pard", "target=tiny"])
    save_drafter(tmp_path, drafter, RunSpec.from_nodes(config))
    described = json.loads((tmp_path / "config.json").read_text())["drafter"]
    assert described.pop("choice") == "pard"
    torch.manual_seed(99)
    other = Pard(cut_tiny(3), **{**described, "num_drafts": DRAFTS}).eval()
    load_weights(other, tmp_path)
    first = drafter.state_dict()
    second = other.state_dict()
    assert first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
    trees = []
    for loaded in (drafter, other):
        recorder = RecordingBuilder(Chain(9))
        decode(shallow, PROMPTS, Greedy(), 12, loaded, recorder, ignore_eos=True)
        trees.append(recorder.trees)
    assert all(
        torch.equal(tree.tokens, reloaded.tokens) for tree, reloaded in zip(*trees, strict=True)
    )


def test_the_mask_starts_near_the_mean_embedding(shallow: Target) -> None:
    """The mask is zero until it is prepared, and then as far from the mean as noise of a tenth
    of the deviation.
    """
    drafter = Pard(shallow, num_layers=1)
    assert not drafter.mask.any()
    drafter.prepare(shallow, torch.zeros(2048))
    weight = cast(nn.Embedding, drafter.model.head.embedding).weight.detach()
    deviation = drafter.mask.detach() - weight.mean(0)
    assert 0.08 * weight.std() < deviation.square().mean().sqrt() < 0.12 * weight.std()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_drafts": 1}, r"drafter\.num_drafts=1: use 2 or more"),
        ({"keep": 0.0}, r"drafter\.keep=0\.0: use more than 0"),
        ({"keep": 1.5}, r"drafter\.keep=1\.5"),
        ({"keep": float("nan")}, r"drafter\.keep=nan"),
        ({"keep_least": 0.0}, r"drafter\.keep_least=0\.0: use more than 0"),
        ({"keep_least": 1.1}, r"drafter\.keep_least=1\.1"),
        (
            {"num_layers": 2, "architecture": ARCHITECTURE},
            r"drafter\.architecture: drafter\.num_layers already names",
        ),
        ({"num_layers": 3}, r"drafter\.num_layers=3: \S+ has 3 layers"),
        (
            {"architecture": {**ARCHITECTURE, "vocab_size": 2000}},
            r"drafter\.architecture: its vocab_size is 2000",
        ),
    ],
)
def test_wrong_settings_are_refused(
    shallow: Target, options: dict[str, Any], sentence: str
) -> None:
    """The message names the key, the value and what to use."""
    with pytest.raises(UserError, match=sentence):
        GroupSpec("drafter", "pard", options).build(target=shallow)
