"""P-EAGLE: masks have the same states in training and in decoding, and both equal the paper's
formulas.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.chains import Chains, ConditionalDrop, sample_chains
from spectrain.drafters.layers.chunked_attention import attend_chunks
from spectrain.drafters.peagle import PEagle
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch, collate
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from tests.decoding.rounds import Keeping

from .test_eagle3 import attended_plainly

DRAFTS = 4
LIMIT = 12
PROMPTS = [
    torch.randint(3, 2000, (length,), generator=torch.Generator().manual_seed(10)).tolist()
    for length in (9, 2, 12)
]
NORMED = {"qk_norm": True, "norm_before_residual": True, "norm_before_fc": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2, "architecture": NORMED},
    "window": {"window": 4, "num_layers": 2},
    "frozen embedding": {"own_embedding": False, "architecture": {"fc_norm": True}},
}
VARIANT = pytest.mark.parametrize("variant", list(VARIANTS))


def make_drafter(target: Target, **options: Any) -> PEagle:
    """Make a drafter with random weights, large enough that attention and norms matter."""
    torch.manual_seed(7)
    drafter = PEagle(
        target, **{"num_drafts": DRAFTS, "num_layers": 1, "vocab_size": 512, **options}
    )
    counts = torch.arange(target.head.vocab_size, 0, -1)
    counts[drafter.mask_token_id] = 0
    drafter.prepare(target, counts)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.add_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return drafter.eval()


def make_dataset() -> Dataset:
    """Sequences of unequal length, with assistant tokens in two spans."""
    torch.manual_seed(5)
    rows = torch.randint(3, 2000, (3, 26)).tolist()
    masks = [[i in (1, 4, 5, 6) or i >= 11 for i in range(26 - 3 * n)] for n in range(3)]
    return Dataset([Example(row[: len(mask)], mask) for row, mask in zip(rows, masks)], 3, 0, 0)


def batch_of(target: Target, drafter: PEagle, rows: list[int], packed: bool = False) -> Batch:
    return LiveSource().make_batch(
        BatchRequest(make_dataset()[rows], target, drafter.layers, packed=packed)
    )


@torch.no_grad()
def states_after(drafter: PEagle, target: Target, text: list[int]) -> Tensor:
    """Return the states [K, D] of the last token, which is not run, and of the masks behind it,
    every score written out.
    """
    fused = target.features(torch.tensor([text[:-1]]), drafter.layers).fuse_layers(
        drafter.fused_layers
    )[0]
    fused = torch.cat([fused, drafter.mask_hidden[0].expand(DRAFTS - 1, -1)])
    if drafter.input_norm is not None:
        fused = drafter.input_norm(fused)
    if drafter.fc_norm is not None:
        fused = torch.cat(
            [
                norm(part)
                for norm, part in zip(drafter.fc_norm, fused.chunk(len(drafter.fc_norm), -1))
            ],
            -1,
        )
    embed = drafter.head.embedding if drafter.embed_tokens is None else drafter.embed_tokens
    x = embed(torch.tensor([*text[1:], *[drafter.mask_token_id] * (DRAFTS - 1)]))
    state = drafter.fc(fused)
    layers: list[Any] = [drafter, *drafter.later]
    for number, layer in enumerate(layers):
        read = layer.input_layernorm(state if number else x)
        if number == 0:
            normed = drafter.hidden_norm(state)
            read = torch.cat([read, normed], dim=-1)
            state = normed if drafter.norm_before_residual else state
        state = state + attended_plainly(layer.self_attn, read, drafter)
        state = state + layer.mlp(layer.post_attention_layernorm(state))
    return state[-DRAFTS:]


@torch.no_grad()
def log_q(drafter: PEagle, target: Target, text: list[int]) -> Tensor:
    return drafter.lm_head(drafter.norm(states_after(drafter, target, text))).log_softmax(-1)


# Training


@VARIANT
def test_what_is_trained_is_what_decoding_says(tiny: Target, variant: str) -> None:
    """The state of every mask of a batch, and of its anchor, equals the one behind the same text
    alone.
    """
    drafter = make_drafter(tiny, **VARIANTS[variant])
    batch = batch_of(tiny, drafter, [0, 1, 2])
    chains = sample_chains(batch, ConditionalDrop(DRAFTS, 1.0, 0.0, 0), 0)
    states = drafter._trained_states(batch, chains, TrainingState())[0]
    length = batch.tokens.shape[1]
    count = batch.tokens.numel()
    for anchor in chains.anchors.unique().tolist()[::3]:
        row, position = divmod(anchor, length)
        expected = states_after(drafter, tiny, batch.tokens[row, : position + 2].tolist())
        torch.testing.assert_close(states[anchor], expected[0], rtol=1e-3, atol=1e-3)
        own = chains.anchors == anchor
        depths = chains.depths[own]
        assert depths.tolist() == list(range(1, len(depths) + 1))
        torch.testing.assert_close(states[count:][own], expected[depths], rtol=1e-3, atol=1e-3)


@VARIANT
def test_packed_equals_padded(tiny: Target, variant: str) -> None:
    """Documents packed in one row have the loss, hits and gradient of documents in a row each,
    and of each alone.
    """
    results = []
    for shares, packed in (([[0, 1, 2]], False), ([[2, 0, 1]], True), ([[0], [1], [2]], False)):
        drafter = make_drafter(tiny, **VARIANTS[variant])
        total = torch.zeros(())
        hits = torch.zeros(DRAFTS)
        counts = torch.zeros(DRAFTS)
        for share in shares:
            losses = drafter.loss(
                batch_of(tiny, drafter, share, packed), tiny, TrainingState(step=3)
            )
            losses.total.backward()
            total = total + losses.total.detach()
            hits = hits + losses.hits
            counts = counts + losses.counts
        gradients = torch.cat(
            [p.grad.flatten() for p in drafter.parameters() if p.grad is not None]
        )
        results.append((total, gradients, hits, counts))
    for other in results[1:]:
        for value, other_value in zip(results[0], other):
            torch.testing.assert_close(value, other_value, rtol=1e-4, atol=1e-4)


def test_loss_is_the_formula(tiny: Target) -> None:
    """Each judged position and each of its masks has the same weight: KL to the target's
    distribution before the predicted token; a document's terms add up to as many as it has tokens
    that carry loss."""
    drafter = make_drafter(tiny, vocab_size=tiny.head.vocab_size)
    batch = batch_of(tiny, drafter, [0, 1])
    expected = 0.0
    chains = sample_chains(batch, drafter.drop, 0)
    length = batch.tokens.shape[1]
    hits = [0] * DRAFTS
    counts = [0] * DRAFTS
    assert batch.features is not None
    for row in range(2):
        mask = batch.loss_mask[row].tolist()
        terms = []
        judged = [(t, 0) for t in range(length - 2) if mask[t + 2]]
        own = chains.anchors // length == row
        judged += zip((chains.anchors[own] % length).tolist(), chains.depths[own].tolist())
        for position, depth in judged:
            assert mask[position + 2 + depth]
            q = log_q(drafter, tiny, batch.tokens[row, : position + 2].tolist())[depth]
            logits = drafter.head.logits(
                batch.features.at_layer("final")[row, position + 1 + depth]
            )
            terms.append(F.kl_div(q, logits.log_softmax(-1), reduction="sum", log_target=True))
            counts[depth] += 1
            hits[depth] += int(q.argmax() == logits.argmax())
        expected += sum(mask[1:]) * torch.stack(terms).mean()
    losses = drafter.loss(batch, tiny, TrainingState())
    torch.testing.assert_close(losses.total, expected, rtol=1e-4, atol=1e-3)
    assert losses.hits.tolist() == hits and losses.counts.tolist() == counts


def test_recomputing_changes_nothing(tiny: Target) -> None:
    """Gradient checkpointing changes no gradient."""
    drafter = make_drafter(tiny, num_layers=2)
    gradients = []
    for recompute in (False, True):
        drafter.zero_grad()
        drafter.loss(
            batch_of(tiny, drafter, [0, 1]), tiny, TrainingState(recompute=recompute)
        ).total.backward()
        gradients.append([p.grad.clone() for p in drafter.parameters() if p.grad is not None])
    assert all(
        torch.allclose(first, second, atol=1e-6) for first, second in zip(*gradients, strict=True)
    )


def test_a_batch_without_answers_costs_nothing(tiny: Target) -> None:
    """Documents of one token, and documents without an assistant's token, have no loss and raise
    no error.
    """
    drafter = make_drafter(tiny)
    batch = collate([Example([5], [True]), Example(list(range(3, 12)), [False] * 9)], packed=True)
    batch = Batch(
        batch.tokens,
        batch.loss_mask,
        tiny.features(batch.tokens, drafter.layers),
        lengths=batch.lengths,
    )
    losses = drafter.loss(batch, tiny, TrainingState())
    losses.total.backward()
    assert float(losses.total.detach()) == 0 and not losses.counts.any()


# Conditional drop


def test_drop_keeps_the_shares_of_the_paper() -> None:
    """Depth d has int((m - d) max(keep^d, least)) masks while the chains before it suffice; a mask
    has all masks before it and a label from the assistant; draws are a document's own."""
    mask = [i >= 12 for i in range(100)]
    examples = [Example(torch.randint(3, 2000, (100,)).tolist(), mask) for _ in range(2)]
    drop = ConditionalDrop(8, 0.7, 0.2, 0)
    both, alone = (sample_chains(collate(rows), drop, 3) for rows in (examples, examples[1:]))
    later = both.anchors >= 100
    assert (both.anchors[later] - 100).tolist() == alone.anchors.tolist()
    assert both.depths[later].tolist() == alone.depths.tolist()
    pairs = set(zip(alone.anchors.tolist(), alone.depths.tolist()))
    assert len(pairs) == len(alone.depths)
    assert all(depth == 1 or (anchor, depth - 1) in pairs for anchor, depth in pairs)
    assert all(anchor >= 0 and mask[anchor + depth + 2] for anchor, depth in pairs)
    counts = torch.bincount(alone.depths, minlength=8)[1:].tolist()
    expected = []
    pool = 88
    for depth, count in enumerate(counts, 1):
        expected.append(min(pool, int((88 - depth) * max(0.7**depth, 0.2))))
        pool = count  # without those whose next token is beyond the document
    assert all(0 <= limit - count <= 1 for limit, count in zip(expected, counts))
    assert counts[0] == int(87 * 0.7) and min(counts) > 10
    assert sample_chains(collate(examples[1:]), drop, 4).anchors.tolist() != alone.anchors.tolist()


# Attention


@pytest.mark.parametrize("window", [None, 3])
def test_chunks_equal_the_dense_mask(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by chunks equals attention under the dense mask, values and gradients; no chunk
    is larger than its bound.
    """
    monkeypatch.setattr("spectrain.drafters.layers.chains.CHUNK_MASKS", 9)
    masks = [[i >= 2 for i in range(length)] for length in (14, 3, 30)]
    batch = collate(
        [Example(torch.randint(3, 2000, (len(mask),)).tolist(), mask) for mask in masks],
        packed=True,
    )
    chains = sample_chains(batch, ConditionalDrop(5, 0.9, 0.2, 0), 0)
    width = batch.tokens.shape[1]
    count = len(chains.depths)
    assert count > 30 and all(
        keys.stop - keys.start <= 30 and queries.stop - queries.start <= 9
        for queries, keys in chains.chunks
    )
    assert [i for queries, _ in chains.chunks for i in range(queries.start, queries.stop)] == list(
        range(count)
    )
    q, k, v = (torch.randn(1, heads, count, 8, requires_grad=True) for heads in (4, 2, 2))
    far_k, far_v = (torch.randn(1, 2, width, 8, requires_grad=True) for _ in range(2))
    positions = (chains.anchors, chains.depths)
    output = attend_chunks((q, k, v), (far_k, far_v), chains.chunks, positions, window=window)
    dense = F.scaled_dot_product_attention(
        q,
        torch.cat([far_k, k], 2),
        torch.cat([far_v, v], 2),
        attn_mask=make_dense_mask(batch, chains, window),
        enable_gqa=True,
    )
    torch.testing.assert_close(output, dense)
    gradients = [
        torch.autograd.grad(result.square().sum(), (q, k, v, far_k, far_v))
        for result in (output, dense)
    ]
    for actual, reference in zip(*gradients):
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-5)


def make_dense_mask(batch: Batch, chains: Chains, window: int | None) -> Tensor:
    """Return [C, N + C] whether every mask sees every key, pair by pair."""
    assert batch.lengths is not None
    starts = torch.tensor(batch.lengths).cumsum(0) - torch.tensor(batch.lengths)
    pairs = list(zip(chains.anchors.tolist(), chains.depths.tolist()))
    rows = []
    for anchor, depth in pairs:
        start = int(starts[starts <= anchor].max())
        far = anchor + depth - (window or 1000)
        visible = [
            start <= position <= anchor and position > far
            for position in range(batch.tokens.shape[1])
        ]
        rows.append(
            visible
            + [other == anchor and own <= depth and other + own > far for other, own in pairs]
        )
    return torch.tensor(rows)


# Decoding


@pytest.mark.sweep(1)
@VARIANT
@pytest.mark.parametrize("count", [1, 3])
def test_drafts_are_those_of_the_text_alone(tiny: Target, variant: str, count: int) -> None:
    """In every round of every row a chain's drafts are the likeliest tokens by the layers
    written out; the output is greedy.
    """
    drafter = make_drafter(tiny, **VARIANTS[variant])
    recorder = Keeping(Chain(9))
    plain = [
        decode(tiny, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output
        for prompt in PROMPTS[:count]
    ]
    generations = decode(tiny, PROMPTS[:count], Greedy(), LIMIT, drafter, recorder, ignore_eos=True)
    assert [row.output for row in generations] == plain and len(recorder.trees) > 3
    for texts, tree in list(zip(recorder.texts, recorder.trees))[::4]:
        assert tree.tokens.shape[1] == DRAFTS + 1
        for row, text in enumerate(texts):
            assert (
                tree.tokens[row, 1:].tolist()
                == drafter.draft_ids[log_q(drafter, tiny, text).argmax(-1)].tolist()
            )


def test_trees_are_products_of_marginals(tiny: Target) -> None:
    """A node's score is the sum of the log probabilities of the tokens on its path, each at its
    own position.
    """
    drafter = make_drafter(tiny, **VARIANTS["two layers"])
    recorder = Keeping(Eagle2(4, 9, 3))
    decode(tiny, PROMPTS[:1], Greedy(), LIMIT, drafter, recorder, ignore_eos=True)
    slot_of = {int(token): number for number, token in enumerate(drafter.draft_ids)}
    for texts, tree in list(zip(recorder.texts, recorder.trees))[::4]:
        log_probs = log_q(drafter, tiny, texts[0])
        scores = {0: 0.0}
        assert tree.scores is not None
        for node in range(1, tree.tokens.shape[1]):
            depth = int(tree.depths[0, node])
            token = int(tree.tokens[0, node])
            scores[node] = scores[int(tree.parents[0, node])] + float(
                log_probs[depth - 1, slot_of[token]]
            )
            assert float(tree.scores[0, node]) == pytest.approx(scores[node], abs=1e-3)


def test_drafted_equals_matched_sampling(tiny: Target) -> None:
    """With the same seed, drafted sampling draws the tokens of autoregressive sampling."""
    rule = Match(temperature=0.3, top_k=50, seed=5)
    plain = decode(tiny, PROMPTS, rule, LIMIT, ignore_eos=True)
    generations = decode(tiny, PROMPTS, rule, LIMIT, make_drafter(tiny), Chain(3), ignore_eos=True)
    assert [row.output for row in generations] == [row.output for row in plain]


# Settings


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_drafts": 1}, "num_drafts=1: use 2 or more"),
        ({"layers": []}, "layers="),
        ({"architecture": {"norm_output": True}}, "architecture.norm_output"),
        ({"mask_token_id": 1 << 20}, "mask_token_id="),
    ],
)
def test_bad_settings_are_refused(tiny: Target, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_drafter(tiny, **options)


def test_data_may_not_hold_the_mask(tiny: Target) -> None:
    with pytest.raises(UserError, match="mask_token_id=77: the data holds this token"):
        make_drafter(tiny, mask_token_id=77).prepare(tiny, torch.ones(tiny.head.vocab_size))
