"""DFlash: blocks give the same distributions in training and in decoding, and these are the
formulas of the paper.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import RecursiveRejection, SpeculativeSampling
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.dflash import DFlash, DFlashConfig
from spectrain.drafters.layers.anchors import (
    Anchors,
    block_attention,
    iterate_chunks,
    make_flex_mask,
    mean_chunk_keys,
    sample_anchors,
)
from spectrain.drafters.layers.block_drafter import default_layers
from spectrain.drafters.layers.mask_token import find_unused_token
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Static, TreeBuilder
from spectrain.trees.base import Prefix
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import TokenTree
from tests.decoding.rounds import Keeping
from tests.factories import add_noise
from tests.installed import load_cases

from .blocks import block_states, dataset

SLOTS = 5
LIMIT = 12
SOURCE = torch.Generator().manual_seed(10)
PROMPTS = [torch.randint(3, 2000, (length,), generator=SOURCE).tolist() for length in (7, 2, 11)]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shifted": {"sample_from_anchor": True},
    "causal": {"causal": True},
    "window": {"window": 4},
    "cropped": {"vocab_size": 512},
    "own embedding": {"own_embedding": True},
}
VARIANT = pytest.mark.parametrize("variant", list(VARIANTS))


def make_drafter(target: Target, **options: Any) -> DFlash:
    """Make a drafter of two layers with random weights, large enough that attention matters."""
    torch.manual_seed(7)
    drafter = DFlash(
        target,
        DFlashConfig(
            **{
                "block_size": SLOTS,
                "num_layers": 2,
                "num_anchors": 6,
                "loss": "forward_kl",
                **options,
            }
        ),
    )
    counts = torch.arange(target.head.vocab_size, 0, -1)
    counts[drafter.mask_token_id] = 0
    drafter.prepare(target, counts)
    add_noise(
        parameter
        for parameter in drafter.parameters()
        if parameter.requires_grad and parameter.dim() > 1
    )
    return drafter.eval()


def make_batch(target: Target, drafter: DFlash, rows: list[int], packed: bool = False) -> Batch:
    return LiveSource().make_batch(
        BatchRequest(dataset()[rows], target, drafter.layers, packed=packed)
    )


def compute_block_log_q(drafter: DFlash, target: Target, text: list[int]) -> Tensor:
    """Compute log q [K, V] of the drafts after a text whose last token is not run."""
    return drafter.head.logits(block_states(drafter, target, text))[
        :, drafter.draft_ids
    ].log_softmax(-1)


# Training


@VARIANT
def test_what_is_trained_is_what_decoding_says(shallow: Target, variant: str) -> None:
    """The states of every block of a batch are those after the same text, alone."""
    drafter = make_drafter(shallow, **VARIANTS[variant])
    batch = make_batch(shallow, drafter, [0, 1, 2])
    anchors = sample_anchors(batch, drafter.num_anchors, drafter.seed, 0)
    states = drafter._training_states(batch, anchors, TrainingState())[
        :, drafter.first_draft_slot :
    ]
    log_q = drafter.log_q(drafter.compute_products(states))
    rows = (anchors.token_indices // batch.tokens.shape[1]).tolist()
    for row, position, actual in list(zip(rows, anchors.positions.tolist(), log_q))[::3]:
        text = batch.tokens[row, : position + 1].tolist()
        torch.testing.assert_close(
            actual, compute_block_log_q(drafter, shallow, text), rtol=1e-4, atol=1e-4
        )


def test_loss_is_the_weighted_divergence_of_every_judged_draft(shallow: Target) -> None:
    """The loss is the divergence of draft d after the anchor at p from the target at p + d,
    weighted exp(-d / decay), while every token up to the judged one carries loss; a document counts
    as many terms as it has such tokens."""
    drafter = make_drafter(shallow, decay=3.0)
    batch = make_batch(shallow, drafter, [0, 1])
    losses = drafter.loss(batch, shallow, TrainingState())
    anchors = sample_anchors(batch, drafter.num_anchors, drafter.seed, 0)
    logits = shallow.head.logits(
        shallow.features(batch.tokens, ("final",)).at_layer("final")
    ).log_softmax(-1)
    total = 0.0
    length = batch.tokens.shape[1]
    hits = [0] * drafter.num_drafts
    for row in range(2):
        weighed = 0.0
        weights = 0.0
        for index, position in zip(anchors.token_indices.tolist(), anchors.positions.tolist()):
            if index // length != row:
                continue
            log_q = compute_block_log_q(
                drafter, shallow, batch.tokens[row, : position + 1].tolist()
            )
            for d in range(drafter.num_drafts):
                if position + d + 1 >= length or not batch.loss_mask[row, position + d + 1]:
                    break
                log_p = logits[row, position + d]
                weights += math.exp(-d / 3.0)
                weighed += math.exp(-d / 3.0) * float((log_p.exp() * (log_p - log_q[d])).sum())
                hits[d] += int(log_p.argmax() == log_q[d].argmax())
        total += weighed / weights * int(batch.loss_mask[row, 1:].sum())
    assert float(losses.total.detach()) == pytest.approx(total, rel=1e-4)
    assert losses.hits.tolist() == hits


@pytest.mark.parametrize("count, slots", [(5, 7), (64, 7), (100, 16)])
def test_planned_keys_are_those_of_the_chunks(count: int, slots: int) -> None:
    """The plan counts the keys that slots of evenly spaced anchors attend to in their chunks."""
    length = 10 * count
    positions = torch.arange(10, length + 1, 10)
    anchors = Anchors(positions, positions, ((count, length),))
    chunks = [
        (rows.stop - rows.start, tokens.stop - tokens.start)
        for rows, tokens in iterate_chunks(anchors, slots)
    ]
    keys = sum(rows * (tokens + rows) for rows, tokens in chunks) / (count * slots)
    assert mean_chunk_keys(count, slots, length) == pytest.approx(keys)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "cross_entropy", "slot_weights": "dpace"},
        {"loss": "cross_entropy", "labels": "target"},
        {"loss": "lk_hybrid"},
        {"loss": "total_variation", "vocab_size": 512},
        {"loss": "jensen_shannon", "window": 5, "causal": True},
    ],
    ids=["kl", "dpace", "hard", "lk", "tv", "jsd"],
)
def test_packed_equals_padded(shallow: Target, options: dict[str, Any]) -> None:
    """Loss, hits and gradients of packed documents are those of padded documents, and of one
    document after another.
    """
    drafter = make_drafter(shallow, **options)
    results = []
    for batches in (
        [make_batch(shallow, drafter, [0, 1, 2])],
        [make_batch(shallow, drafter, [0, 1, 2], packed=True)],
        [make_batch(shallow, drafter, [row]) for row in range(3)],
    ):
        drafter.zero_grad()
        losses = [drafter.loss(batch, shallow, TrainingState()) for batch in batches]
        torch.stack([part.total for part in losses]).sum().backward()
        grads = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
        results.append(
            (sum(part.total.detach() for part in losses), sum(part.hits for part in losses), grads)
        )
    for total, hits, grads in results[1:]:
        torch.testing.assert_close(total, results[0][0], rtol=1e-4, atol=1e-4)
        assert torch.equal(hits, results[0][1])
        for grad, expected in zip(grads, results[0][2], strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-4)


def test_recomputation_changes_no_gradient(shallow: Target) -> None:
    """Gradient checkpointing changes no gradient."""
    drafter = make_drafter(shallow)
    gradients = []
    for recompute in (False, True):
        drafter.zero_grad()
        drafter.loss(
            make_batch(shallow, drafter, [0, 1]), shallow, TrainingState(recompute=recompute)
        ).total.backward()
        gradients.append([p.grad.clone() for p in drafter.parameters() if p.grad is not None])
    assert all(
        torch.allclose(grad, other, atol=1e-6) for grad, other in zip(*gradients, strict=True)
    )


def test_dpace_weights_are_the_formulas(shallow: Target) -> None:
    """Weights are w_k = sum over j >= k of s_1 .. s_j, s = (1 - alpha) q + alpha where judged
    and 1 elsewhere (2605.18810).
    """
    drafter = make_drafter(shallow, loss="cross_entropy", slot_weights="dpace", dpace_alpha=0.3)
    captured: dict[str, Any] = {}
    judge = drafter.judge_drafts
    drafter.judge_drafts = lambda drafts: judge(captured.setdefault("drafts", drafts))  # type: ignore[method-assign]
    batch = make_batch(shallow, drafter, [0, 2])
    drafter.loss(batch, shallow, TrainingState())
    drafts = captured["drafts"]
    weights = drafter._dpace_weights(drafts)
    length = batch.tokens.shape[1]
    for block, (index, position) in enumerate(
        zip(drafts.anchors.token_indices.tolist(), drafts.anchors.positions.tolist())
    ):
        row = index // length
        log_q = compute_block_log_q(drafter, shallow, batch.tokens[row, : position + 1].tolist())
        s = [
            0.7 * math.exp(log_q[d, batch.tokens[row, position + d + 1]]) + 0.3
            if drafts.is_judged[block, d]
            else 1.0
            for d in range(drafter.num_drafts)
        ]
        products = [math.prod(s[: k + 1]) for k in range(len(s))]
        expected = [sum(products[k:]) for k in range(len(s))]
        assert weights[block].tolist() == pytest.approx(expected, rel=1e-4)


def test_a_single_slot_equals_a_plain_head(shallow: Target) -> None:
    """A block of one drafting slot is a next-token head: its loss over every position is that of
    one attention over the text in which each token sees the context before it and itself."""
    drafter = make_drafter(
        shallow, block_size=1, sample_from_anchor=True, num_anchors=1000, num_layers=1, decay=0.0
    )
    batch = make_batch(shallow, drafter, [0])
    losses = drafter.loss(batch, shallow, TrainingState())
    layer = drafter.blocks[0]
    features = batch.features
    assert features is not None
    context = drafter.fuse_features(features)
    x = drafter.head.embed(batch.tokens)
    rope = drafter.rotary(x, batch.positions)
    q, k, v = layer.self_attn.project_qkv(layer.input_layernorm(x), rope)
    context_keys, context_values = layer.self_attn.project_kv(context, rope)
    length = batch.tokens.shape[1]
    mask = torch.cat([torch.ones(length, length).tril(-1), torch.eye(length)], dim=1).bool()
    attended = F.scaled_dot_product_attention(
        q,
        torch.cat([context_keys, k], 2),
        torch.cat([context_values, v], 2),
        attn_mask=mask,
        enable_gqa=True,
    )
    x = x + layer.self_attn.project_output(attended)
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    log_q = drafter.head.logits(drafter.norm(x)).log_softmax(-1)[0]
    log_p = drafter.head.logits(features.at_layer("final")).log_softmax(-1)[0]
    predicts = batch.next_is_supervised[0] & (torch.arange(length) > 0)
    expected = F.kl_div(log_q[predicts], log_p[predicts], reduction="sum", log_target=True)
    torch.testing.assert_close(losses.total, expected, rtol=1e-4, atol=1e-3)


def test_causal_blocks_equal_their_unrolled_selves(shallow: Target) -> None:
    """With causal blocks and an anchor at every position, slots equal those of shorter blocks:
    no slot reads a later one.
    """
    drafter = make_drafter(shallow, causal=True, num_anchors=1000)
    batch = make_batch(shallow, drafter, [0, 1])
    anchors = sample_anchors(batch, 1000, 0, 0)
    full = drafter._training_states(batch, anchors, TrainingState())
    for slots in range(2, SLOTS):
        drafter.block_size = slots
        states = drafter._training_states(batch, anchors, TrainingState())
        torch.testing.assert_close(states, full[:, :slots], rtol=1e-4, atol=1e-5)


# Attention


def make_attention_inputs(documents: list[tuple[int, list[int]]], slots: int) -> tuple[Tensor, ...]:
    """Make queries, keys and values of the blocks of anchors, given per document with its
    length, and keys of the context.
    """
    total = sum(length for length, _ in documents)
    count = sum(len(anchors) for _, anchors in documents)
    torch.manual_seed(3)
    parts = [torch.randn(count, heads, slots, 8, requires_grad=True) for heads in (4, 2, 2)]
    return *parts, *(torch.randn(1, 2, total, 8, requires_grad=True) for _ in range(2))


DOCUMENTS = [(9, [1, 4, 8]), (3, []), (40, list(range(1, 40)))]


@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (False, 3), (True, 6)])
def test_chunks_equal_the_dense_mask(
    causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention by chunks equals attention under the full mask, values and gradients, and
    FlexAttention's mask is the same.
    """
    slots = 3
    starts = [0, 9, 12]
    monkeypatch.setattr("spectrain.drafters.layers.anchors.CHUNK_SLOTS", 12)
    q, k, v, far_k, far_v = make_attention_inputs(DOCUMENTS, slots)
    positions = torch.tensor(
        [position for _, document_anchors in DOCUMENTS for position in document_anchors]
    )
    token_indices = torch.tensor(
        [
            start + index
            for start, (_, document_anchors) in zip(starts, DOCUMENTS)
            for index in document_anchors
        ]
    )
    anchors = Anchors(
        token_indices,
        positions,
        tuple((len(document_anchors), 1) for _, document_anchors in DOCUMENTS),
    )
    attended = block_attention(q, k, v, (far_k, far_v), anchors, causal, window)
    length = far_k.shape[2]
    count = len(token_indices)
    mask = torch.zeros(count * slots, length + count * slots, dtype=torch.bool)
    for a, (index, position) in enumerate(zip(token_indices.tolist(), positions.tolist())):
        for s in range(slots):
            for token in range(index - position, index):
                mask[a * slots + s, token] = window is None or token > index + s - window
            for other in range(slots):
                is_visible = (not causal or other <= s) and (window is None or other > s - window)
                mask[a * slots + s, length + a * slots + other] = is_visible
    queries, keys, values = (part.transpose(0, 1).flatten(1, 2)[None] for part in (q, k, v))
    dense = F.scaled_dot_product_attention(
        queries,
        torch.cat([far_k, keys], 2),
        torch.cat([far_v, values], 2),
        attn_mask=mask,
        enable_gqa=True,
    )
    expected = dense[0].unflatten(1, (count, slots)).transpose(0, 1)
    torch.testing.assert_close(attended, expected)
    grads = [
        torch.autograd.grad(out.square().sum(), (q, k, v, far_k, far_v))
        for out in (attended, expected)
    ]
    for grad, expected_grad in zip(*grads):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
    mask_function = make_flex_mask(anchors, slots, length, causal, window)
    query = torch.arange(count * slots)[:, None]
    key = torch.arange(length + count * slots)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(
        mask_function(zero, zero, query.expand(-1, len(key)), key.expand(len(query), -1)), mask
    )


def test_no_mask_is_larger_than_a_chunk(shallow: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many anchors there are, attention runs at most CHUNK_SLOTS slots at once."""
    mask_shapes: list[tuple[int, ...]] = []
    attend = F.scaled_dot_product_attention

    def record_mask(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        mask_shapes.append(() if attn_mask is None else tuple(attn_mask.shape))
        return attend(q, k, v, attn_mask=attn_mask, **more)

    drafter = make_drafter(shallow, num_anchors=1000)
    batch = make_batch(shallow, drafter, [0, 1, 2, 3])
    monkeypatch.setattr("spectrain.drafters.layers.anchors.CHUNK_SLOTS", 20)
    monkeypatch.setattr(F, "scaled_dot_product_attention", record_mask)
    drafter.loss(batch, shallow, TrainingState()).total.backward()
    masks = [shape for shape in mask_shapes if shape]
    assert masks and all(rows <= 20 and keys <= 26 + 20 for rows, keys in masks)


# Anchors


def test_anchors_are_the_documents_own(shallow: Target) -> None:
    """Anchors precede a token that carries loss, ascend, are as many as requested, and change
    with the step, not the batch.
    """
    drafter = make_drafter(shallow)
    padded, packed = (
        make_batch(shallow, drafter, [0, 1, 2], packed=packed) for packed in (False, True)
    )
    first, second = (
        sample_anchors(batch, 4, 0, 3).positions.tolist() for batch in (padded, packed)
    )
    assert first == second != sample_anchors(padded, 4, 0, 4).positions.tolist()
    for row in range(3):
        row_anchors = first[4 * row : 4 * row + 4]
        assert row_anchors == sorted(set(row_anchors)) and all(
            anchor >= 1 and padded.loss_mask[row, anchor + 1] for anchor in row_anchors
        )
    few = sample_anchors(make_batch(shallow, drafter, [0]), 1000, 0, 0)
    assert few.positions.tolist() == [3, 4, 5, *range(10, 25)]


def test_a_batch_without_anchors_costs_nothing(shallow: Target) -> None:
    drafter = make_drafter(shallow)
    tokens = torch.randint(3, 2000, (2, 9))
    batch = Batch(tokens, torch.zeros_like(tokens, dtype=torch.bool))
    batch = replace(batch, features=shallow.features(tokens, drafter.layers))
    losses = drafter.loss(batch, shallow, TrainingState())
    losses.total.backward()
    assert float(losses.total.detach()) == 0 and not losses.counts.any()
    assert all(weight.grad is not None and not weight.grad.any() for weight in drafter.parameters())


# Decoding


class RoundRecorder(Keeping):
    """A builder that records the texts and trees of every round."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder)
        self.rounds: list[tuple[list[list[int]], TokenTree]] = []

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        texts = [
            row[: length + 1]
            for row, length in zip(prefix.tokens.tolist(), prefix.lengths.tolist())
        ]
        tree = super().grow(prefix, draft)
        self.rounds.append((texts, tree))
        return tree


@VARIANT
@pytest.mark.sweep(2, free=("count", "variant"))
@pytest.mark.parametrize("count", [1, 3])
def test_drafts_are_the_block_of_the_text_alone(shallow: Target, variant: str, count: int) -> None:
    """In every round and row, a chain's drafts are the block's most likely tokens, and the
    output is greedy.
    """
    drafter = make_drafter(shallow, **VARIANTS[variant])
    plain = [
        decode(shallow, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output
        for prompt in PROMPTS[:count]
    ]
    recorder = RoundRecorder(Chain(9))
    generations = decode(
        shallow, PROMPTS[:count], Greedy(), LIMIT, drafter, recorder, ignore_eos=True
    )
    assert [generation.output for generation in generations] == plain and len(recorder.rounds) > 3
    for texts, tree in recorder.rounds[::4]:
        assert tree.tokens.shape[1] == drafter.num_drafts + 1
        for row, text in enumerate(texts):
            best = drafter.draft_ids[compute_block_log_q(drafter, shallow, text).argmax(-1)]
            assert tree.tokens[row, 1:].tolist() == best.tolist()


# Cases of installed packages.
CASES = load_cases(__name__)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "builder",
    [
        Eagle2(4, 9, 3),
        Static(paths=[[0], [1], [0, 0], [1, 0], [0, 0, 0], [0, 1]]),
        *CASES.get("test_trees_are_products_of_marginals", ()),
    ],
    ids=lambda builder: builder.name,
)
@pytest.mark.parametrize("variant", ["plain", "shifted", "cropped"])
def test_trees_are_products_of_marginals(
    shallow: Target, variant: str, builder: TreeBuilder
) -> None:
    """A node's score is the sum of the slots' log q of the tokens on its path, and the output is
    greedy.
    """
    drafter = make_drafter(shallow, **VARIANTS[variant])
    plain = decode(shallow, PROMPTS[:1], Greedy(), LIMIT, ignore_eos=True)[0].output
    recorder = RoundRecorder(builder)
    assert (
        decode(shallow, PROMPTS[:1], Greedy(), LIMIT, drafter, recorder, ignore_eos=True)[0].output
        == plain
    )
    slot_of = {int(token): number for number, token in enumerate(drafter.draft_ids)}
    for texts, tree in recorder.rounds[::5]:
        log_q = compute_block_log_q(drafter, shallow, texts[0])
        scores = {0: 0.0}
        assert tree.scores is not None
        for node in range(1, tree.tokens.shape[1]):
            parent = int(tree.parents[0, node])
            depth = int(tree.depths[0, node])
            scores[node] = scores[parent] + float(
                log_q[depth - 1, slot_of[int(tree.tokens[0, node])]]
            )
            assert float(tree.scores[0, node]) == pytest.approx(scores[node], abs=1e-3)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "builder, rule",
    [
        (Chain(3), Match(temperature=0.3, top_k=50, seed=5)),
        (Eagle2(3, 8, 3), Match(temperature=0.3, top_k=50, seed=5)),
    ],
    ids=["chain", "tree"],
)
def test_drafted_equals_matched_sampling(
    shallow: Target, builder: TreeBuilder, rule: Match
) -> None:
    """With the same seed, drafted sampling draws the tokens of autoregressive sampling."""
    plain = decode(shallow, PROMPTS, rule, LIMIT, ignore_eos=True)
    generations = decode(
        shallow, PROMPTS, rule, LIMIT, make_drafter(shallow), builder, ignore_eos=True
    )
    assert [generation.output for generation in generations] == [
        generation.output for generation in plain
    ]


@pytest.mark.parametrize(
    "builder, rule",
    [
        (Chain(3, "sampled", 0.7), SpeculativeSampling),
        (
            Static(paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]], children="without_replacement"),
            RecursiveRejection,
        ),
    ],
    ids=["chain", "tree"],
)
def test_drawn_children(shallow: Target, builder: TreeBuilder, rule: Any) -> None:
    """Under rules that weigh p against q, the output is greedy where p allows one token only."""
    plain = [
        decode(shallow, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output for prompt in PROMPTS
    ]
    generations = decode(
        shallow,
        PROMPTS,
        rule(temperature=0.7, top_k=1, seed=3),
        LIMIT,
        make_drafter(shallow),
        builder,
        ignore_eos=True,
    )
    assert [generation.output for generation in generations] == plain


# Settings


@pytest.mark.parametrize("count, chosen", [(1, [18 + 1]), (5, [2, 10, 18, 26, 34])])
def test_fused_layers_are_those_of_the_paper(count: int, chosen: list[int]) -> None:
    """Qwen3-8B has 36 layers, and the streams after layers 1, 9, 17, 25 and 33 enter 2, 10, 18,
    26 and 34.
    """
    assert default_layers(36, count) == chosen


def test_mask_token_is_in_no_text(shallow: Target) -> None:
    assert find_unused_token(
        shallow.tokenizer, shallow.head.vocab_size
    ) == shallow.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert find_unused_token(shallow.tokenizer, shallow.head.vocab_size + 64) == len(
        shallow.tokenizer
    )
    drafter = make_drafter(shallow, mask_token_id=77)
    with pytest.raises(UserError, match="mask_token_id=77: the data holds this token"):
        drafter.prepare(shallow, torch.ones(shallow.head.vocab_size))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block_size": 1}, "block_size=1: use 2 or more"),
        ({"layers": []}, "layers="),
        ({"architecture": {"depth": 3}}, "architecture.depth"),
        ({"mask_token_id": 1 << 20}, "mask_token_id="),
        ({"slot_weights": "dpace"}, "slot_weights=dpace"),
    ],
)
def test_bad_settings_are_refused(shallow: Target, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_drafter(shallow, **options)


def test_linears_have_no_bias_and_heads_their_norms(shallow: Target) -> None:
    """The tensors are those that engines look for, under their names."""
    drafter = make_drafter(shallow)
    assert not any(
        isinstance(module, nn.Linear) and module.bias is not None for module in drafter.modules()
    )
    names = {
        name.split(".", 2)[-1] for name in drafter.state_dict() if name.startswith("blocks.0.")
    }
    assert {"self_attn.q_norm.weight", "self_attn.k_norm.weight"} <= names
