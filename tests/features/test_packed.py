"""Packed equals padded: features, every family's loss and gradients, and documents that cannot see each other."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.drafters.base import TrainingState
from spectrain.experimental.on_policy.source import GeneratedSource
from spectrain.experimental.shared.draft_replay import NOT_PAST_ERROR, Replay, collate_replays
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch, collate
from spectrain.features.live_source import LiveSource
from spectrain.models.attention import causal_attention, unrolled_attention
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target
from spectrain.runs.drafters import is_trainable
from spectrain.training.run import select_trained_groups
from tests.drafters.test_contract import VARIANTS, each, make, stages
from tests.models.test_target import ARCHITECTURES, EVERY, LAYERS, VOCAB, build
from tests.targets import cut_tiny

LENGTHS = (11, 3, 24, 2, 17)


def examples(vocab: int = 60, lengths: tuple[int, ...] = LENGTHS) -> list[Example]:
    """Ragged documents, each with two stretches of the assistant's, one of them up to its end."""
    torch.manual_seed(3)
    found = []
    for length in lengths:
        tokens = torch.randint(3, vocab, (length,)).tolist()
        found.append(Example(tokens, [n in (length // 3, length // 3 + 1) or n >= length // 2 for n in range(length)]))
    return found


def unpacked(packed: Tensor, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return list(packed[0].split(lengths))


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal within 3e-5 of the larger of them: what is left in float32 of sums in another order (in float64 1e-14)."""
    scale = max(float(expected.detach().abs().max()), 1e-3) if expected.numel() else 1.0
    assert actual.shape == expected.shape
    assert float((actual - expected).detach().abs().max()) <= 3e-5 * scale if expected.numel() else True


def gradients(name: str, target: Target, stage: int, packed: bool, source: Any = None) -> tuple[Any, dict[str, Tensor]]:
    """Losses in a stage, and the gradient of everything that it trains."""
    drafter = make(name, target)
    drafter.prepare(target, torch.arange(target.head.vocab_size))
    with torch.no_grad():  # what starts at zero would hide what lies behind it
        for number, parameter in enumerate(drafter.parameters()):
            noise = torch.Generator().manual_seed(number)
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    select_trained_groups(drafter, target, stage)
    drafter.zero_grad()
    target.zero_grad()
    batch = (source or LiveSource()).make_batch(
        BatchRequest(examples(), target, drafter.stages[stage].layers, packed=packed, step=4, drafter=drafter)
    )
    assert (batch.lengths is not None) == packed
    losses = drafter.train()(batch, target, TrainingState(4, 0.6))
    losses.total.backward()
    named = [*drafter.named_parameters(), *((f"target.{n}", p) for n, p in target.named_parameters())]
    return losses, {n: p.grad for n, p in named if p.grad is not None}


@pytest.mark.sweep(6, free=("name",))
@pytest.mark.parametrize("name", [*each(0, toys=False), "early exit dropping"])
def test_loss_and_gradients_of_packed_documents_are_those_of_padded_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every stage of every family."""
    if name == "early exit dropping":
        monkeypatch.setitem(VARIANTS, name, ("early_exit", {"max_dropout": 0.8, "self_distillation": True}))
    probe = make(name, cut_tiny(3))
    if not is_trainable(probe):  # a family without training
        return
    for stage in sorted(set(stages(probe, 8))):
        padded, expected = gradients(name, cut_tiny(3), stage, packed=False)
        found, actual = gradients(name, cut_tiny(3), stage, packed=True)
        assert padded.counts.sum() > 0 and torch.equal(found.counts, padded.counts) and torch.equal(found.hits, padded.hits)
        for term, value in padded.terms.items():
            close(found.terms[term], value)
        assert actual.keys() == expected.keys() and len(actual)
        for key, gradient in expected.items():
            close(actual[key], gradient)


@pytest.mark.sweep(2, free=("name",))
@pytest.mark.parametrize("name", ["eagle3", "causal", "kangaroo", "hydra"])
def test_replays_packed_equal_replays_padded(name: str) -> None:
    """Documents whose tails are rejected drafts, too."""

    class Replays(LiveSource):
        def make_batch(self, request: BatchRequest) -> Batch:
            lengths = [len(example.tokens) for example in request.examples]
            distances = [[NOT_PAST_ERROR if n < length - 3 else n % 3 for n in range(length)] for length in lengths]
            batch = collate_replays(list(map(Replay, request.examples, distances)), request.packed)
            return replace(batch, features=request.target.features(batch.tokens, request.layers, batch.lengths))

    (padded, expected), (found, actual) = (gradients(name, cut_tiny(3), 0, packed, Replays()) for packed in (False, True))
    close(found.total, padded.total)
    assert torch.equal(found.counts, padded.counts)
    for key, gradient in expected.items():
        close(actual[key], gradient)


@pytest.mark.sweep(2, free=("by",))
@pytest.mark.parametrize("by", ["drafter", "target", "interleaved", "replay"])
def test_generated_sequences_are_packed_too(by: Any) -> None:
    """What is written while training does not depend on how it is laid out."""
    (padded, _), (found, _) = (
        gradients("causal", cut_tiny(3), 0, packed, GeneratedSource(fraction=0.6, by=by, max_new_tokens=6))
        for packed in (False, True)
    )
    assert padded.counts.sum() > 0
    close(found.total, padded.total)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_features_of_packed_documents_are_those_of_each_alone(architecture: str, shallow: Target) -> None:
    """At every layer of every architecture, windows and softcaps included, where positions start anew in each document."""
    target, _ = build(architecture, ARCHITECTURES[architecture], shallow)
    batch = collate(examples(VOCAB), packed=True)
    found = unpacked(target.features(batch.tokens, EVERY, batch.lengths).hidden)
    for document, (tokens, _) in zip(found, batch.split_documents()):
        close(document, target.features(tokens[None], EVERY).hidden[0])


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "phi"])
def test_documents_skip_layers_by_themselves(architecture: str, shallow: Target) -> None:
    """Layers dropped for a packed document are those dropped for its row of the padded batch."""
    target, _ = build(architecture, ARCHITECTURES[architecture], shallow)
    rows = examples(VOCAB)
    dropped = torch.rand(LAYERS, len(LENGTHS), generator=torch.Generator().manual_seed(1)) < 0.5
    dropped[1] = True
    packed, padded = collate(rows, packed=True), collate(rows)
    found = unpacked(
        target.run(packed.tokens, ForwardPlan(layers=EVERY, lengths=packed.lengths, span=LayerSpan(dropped=dropped))).hidden
    )
    expected = target.run(padded.tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=dropped))).hidden
    for document, row in zip(found, expected):
        close(document, row[: len(document)])


def test_documents_cannot_see_each_other(shallow: Target) -> None:
    """With one document's tokens changed, the features of all others are the same bits."""
    rows = examples()
    changed = [Example([token + 1 for token in row.tokens], row.mask) if n == 2 else row for n, row in enumerate(rows)]
    one, two = (collate(found, packed=True) for found in (rows, changed))
    before, after = (unpacked(shallow.features(batch.tokens, EVERY, LENGTHS).hidden) for batch in (one, two))
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [True, True, False, True, True]


def test_nothing_is_predicted_across_a_border() -> None:
    """The positions that carry loss are those of the padded batch, and a document's first token is nobody's answer."""
    rows = [Example(row.tokens, [True] * len(row.tokens)) for row in examples()]
    packed, padded = collate(rows, packed=True), collate(rows)
    for document, row in zip(unpacked(packed.next_is_supervised), padded.next_is_supervised):
        assert torch.equal(document, row[: len(document)]) and not document[-1]
    assert packed.positions[0].tolist() == [n for length in LENGTHS for n in range(length)]


def test_cached_features_are_per_document(shallow: Target) -> None:
    """Features kept from a padded batch serve a packed one, and the other way about."""
    rows = examples()
    for first in (False, True):
        source = LiveSource(keep_gb=1.0)
        source.make_batch(BatchRequest(rows, shallow, (1, "final"), packed=first))
        found = source.make_batch(BatchRequest(rows[::-1], shallow, (1, "final"), packed=not first))
        fresh = LiveSource().make_batch(BatchRequest(rows[::-1], shallow, (1, "final"), packed=not first))
        assert found.features is not None and fresh.features is not None
        mask = torch.ones_like(found.tokens) > 0 if not first else found.tokens > 0
        close(found.features.hidden[mask], fresh.features.hidden[mask])


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("lengths", [None, (23,), (5, 1, 17)])
def test_attention_by_document_is_attention_under_a_mask(steps: int, lengths: tuple[int, ...] | None) -> None:
    """Causal in each document over the first step's keys, and of later steps the own index's."""
    q, *parts = every = [torch.randn(1, heads, 23, 8, requires_grad=True) for heads in (4, *[2] * 2 * steps)]
    document = torch.repeat_interleave(torch.arange(len(lengths or (1,))), torch.tensor(lengths or (23,)))
    inside = (document[:, None] == document) & torch.ones(23, 23).tril().bool()
    mask = torch.cat([inside, *[torch.eye(23).bool()] * (steps - 1)], dim=1)
    k, v = torch.cat(parts[:steps], dim=2), torch.cat(parts[steps:], dim=2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    found = unrolled_attention(q, parts[:steps], parts[steps:], lengths)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    gradients = (torch.autograd.grad((output * weights).sum(), every) for output in (found, expected))
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_windows_and_softcaps_by_document(window: int | None, softcap: float | None) -> None:
    """The same as of every document alone."""
    q, k, v = (torch.randn(1, heads, 23, 8) for heads in (4, 2, 2))
    whole = causal_attention(q, k, v, (5, 1, 17), AttentionOptions(0.3, window, softcap))
    parts = zip(*(part.split((5, 1, 17), dim=2) for part in (q, k, v)))
    alone = [causal_attention(*part, None, AttentionOptions(0.3, window, softcap)) for part in parts]
    assert torch.equal(whole, torch.cat(alone, dim=2))
