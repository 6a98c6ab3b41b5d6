"""Packed equals padded: features, every family's loss and gradients, and documents that do not
see each other.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.unrolled_attention import unrolled_attention
from spectrain.features.base import BatchRequest
from spectrain.features.batch import collate
from spectrain.features.live_source import LiveSource
from spectrain.models.attention import causal_attention
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target
from spectrain.runs.init_drafter import is_trainable
from spectrain.training.run import select_trained_groups
from tests.drafters.test_contract import VARIANTS, each, make, stages
from tests.models.test_target import ARCHITECTURES, EVERY, LAYERS, VOCAB, build
from tests.targets import cut_tiny

LENGTHS = (11, 3, 24, 2, 17)


def make_examples(vocab: int = 60, lengths: tuple[int, ...] = LENGTHS) -> list[Example]:
    """Make ragged documents with two spans of the assistant's, one of which reaches the end."""
    torch.manual_seed(3)
    documents = []
    for length in lengths:
        tokens = torch.randint(3, vocab, (length,)).tolist()
        documents.append(
            Example(
                tokens,
                [n in (length // 3, length // 3 + 1) or n >= length // 2 for n in range(length)],
            )
        )
    return documents


def split_documents(packed: Tensor, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return list(packed[0].split(lengths))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Check equality within 3e-5 of the larger, the float32 error of sums in another order
    (1e-14 in float64).
    """
    scale = max(float(expected.detach().abs().max()), 1e-3) if expected.numel() else 1.0
    assert actual.shape == expected.shape
    assert (
        float((actual - expected).detach().abs().max()) <= 3e-5 * scale
        if expected.numel()
        else True
    )


def compute_gradients(
    name: str, target: Target, stage: int, packed: bool, source: Any = None
) -> tuple[Any, dict[str, Tensor]]:
    """Return the losses of a stage, and the gradient of everything that it trains."""
    drafter = make(name, target)
    drafter.prepare(target, torch.arange(target.head.vocab_size))
    with torch.no_grad():  # parameters that start at zero would hide others
        for number, parameter in enumerate(drafter.parameters()):
            noise = torch.Generator().manual_seed(number)
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    select_trained_groups(drafter, target, stage)
    drafter.zero_grad()
    target.zero_grad()
    batch = (source or LiveSource()).make_batch(
        BatchRequest(
            make_examples(),
            target,
            drafter.stages[stage].layers,
            packed=packed,
            step=4,
            drafter=drafter,
        )
    )
    assert (batch.lengths is not None) == packed
    losses = drafter.train()(batch, target, TrainingState(4, 0.6))
    losses.total.backward()
    named = [
        *drafter.named_parameters(),
        *((f"target.{n}", p) for n, p in target.named_parameters()),
    ]
    return losses, {n: p.grad for n, p in named if p.grad is not None}


@pytest.mark.sweep(6, free=("name",))
@pytest.mark.parametrize("name", [*each(0, toys=False), "early exit dropping"])
def test_loss_and_gradients_of_packed_documents_are_those_of_padded_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed loss, hits, counts and gradients equal padded ones, in every stage of every family."""
    if name == "early exit dropping":
        monkeypatch.setitem(
            VARIANTS, name, ("early_exit", {"max_dropout": 0.8, "self_distillation": True})
        )
    probe = make(name, cut_tiny(3))
    if not is_trainable(probe):  # a family without training
        return
    for stage in sorted(set(stages(probe, 8))):
        padded, expected = compute_gradients(name, cut_tiny(3), stage, packed=False)
        packed, actual = compute_gradients(name, cut_tiny(3), stage, packed=True)
        assert (
            padded.counts.sum() > 0
            and torch.equal(packed.counts, padded.counts)
            and torch.equal(packed.hits, padded.hits)
        )
        for term, value in padded.terms.items():
            assert_near(packed.terms[term], value)
        assert actual.keys() == expected.keys() and len(actual)
        for key, gradient in expected.items():
            assert_near(actual[key], gradient)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_features_of_packed_documents_are_those_of_each_alone(
    architecture: str, shallow: Target
) -> None:
    """Features equal those of each document alone, at every layer of every architecture, windows
    and softcaps included.
    """
    target, _ = build(architecture, ARCHITECTURES[architecture], shallow)
    batch = collate(make_examples(VOCAB), packed=True)
    documents = split_documents(target.features(batch.tokens, EVERY, batch.lengths).hidden)
    for document, (tokens, _) in zip(documents, batch.split_documents()):
        assert_near(document, target.features(tokens[None], EVERY).hidden[0])


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "phi"])
def test_documents_skip_layers_by_themselves(architecture: str, shallow: Target) -> None:
    """Layers dropped for a packed document are those dropped for its row of the padded batch."""
    target, _ = build(architecture, ARCHITECTURES[architecture], shallow)
    rows = make_examples(VOCAB)
    dropped = torch.rand(LAYERS, len(LENGTHS), generator=torch.Generator().manual_seed(1)) < 0.5
    dropped[1] = True
    packed = collate(rows, packed=True)
    padded = collate(rows)
    documents = split_documents(
        target.run(
            packed.tokens,
            ForwardPlan(layers=EVERY, lengths=packed.lengths, span=LayerSpan(dropped=dropped)),
        ).hidden
    )
    expected = target.run(
        padded.tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=dropped))
    ).hidden
    for document, row in zip(documents, expected):
        assert_near(document, row[: len(document)])


def test_documents_cannot_see_each_other(shallow: Target) -> None:
    """If one document's tokens change, the features of all others stay the same, bit for bit."""
    rows = make_examples()
    changed = [
        Example([token + 1 for token in row.tokens], row.mask) if n == 2 else row
        for n, row in enumerate(rows)
    ]
    first, second = (collate(documents, packed=True) for documents in (rows, changed))
    before, after = (
        split_documents(shallow.features(batch.tokens, EVERY, LENGTHS).hidden)
        for batch in (first, second)
    )
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [True, True, False, True, True]


def test_nothing_is_predicted_across_a_border() -> None:
    """The positions that carry loss are those of the padded batch, and a document's first token
    is never a label.
    """
    rows = [Example(row.tokens, [True] * len(row.tokens)) for row in make_examples()]
    packed = collate(rows, packed=True)
    padded = collate(rows)
    for document, row in zip(split_documents(packed.next_is_supervised), padded.next_is_supervised):
        assert torch.equal(document, row[: len(document)]) and not document[-1]
    assert packed.positions[0].tolist() == [n for length in LENGTHS for n in range(length)]


def test_cached_features_are_per_document(shallow: Target) -> None:
    """Features cached from a padded batch serve a packed one, and the other way round."""
    rows = make_examples()
    for first in (False, True):
        source = LiveSource(keep_gb=1.0)
        source.make_batch(BatchRequest(rows, shallow, (1, "final"), packed=first))
        cached = source.make_batch(
            BatchRequest(rows[::-1], shallow, (1, "final"), packed=not first)
        )
        live = LiveSource().make_batch(
            BatchRequest(rows[::-1], shallow, (1, "final"), packed=not first)
        )
        assert cached.features is not None and live.features is not None
        mask = torch.ones_like(cached.tokens) > 0 if not first else cached.tokens > 0
        assert_near(cached.features.hidden[mask], live.features.hidden[mask])


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("lengths", [None, (23,), (5, 1, 17)])
def test_attention_by_document_is_attention_under_a_mask(
    steps: int, lengths: tuple[int, ...] | None
) -> None:
    """Attention is causal in each document over the first step's keys, and sees its own index's
    keys of later steps.
    """
    q, *parts = inputs = [
        torch.randn(1, heads, 23, 8, requires_grad=True) for heads in (4, *[2] * 2 * steps)
    ]
    document = torch.repeat_interleave(
        torch.arange(len(lengths or (1,))), torch.tensor(lengths or (23,))
    )
    inside = (document[:, None] == document) & torch.ones(23, 23).tril().bool()
    mask = torch.cat([inside, *[torch.eye(23).bool()] * (steps - 1)], dim=1)
    k = torch.cat(parts[:steps], dim=2)
    v = torch.cat(parts[steps:], dim=2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True
    )
    actual = unrolled_attention(q, parts[:steps], parts[steps:], lengths)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(actual)
    gradients = (
        torch.autograd.grad((output * weights).sum(), inputs) for output in (actual, expected)
    )
    for gradient, reference in zip(*gradients):
        torch.testing.assert_close(gradient, reference)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_windows_and_softcaps_by_document(window: int | None, softcap: float | None) -> None:
    """Attention over packed documents with window and softcap equals that of every document
    alone.
    """
    q, k, v = (torch.randn(1, heads, 23, 8) for heads in (4, 2, 2))
    packed = causal_attention(q, k, v, (5, 1, 17), AttentionOptions(0.3, window, softcap))
    parts = zip(*(part.split((5, 1, 17), dim=2) for part in (q, k, v)))
    single = [
        causal_attention(*part, None, AttentionOptions(0.3, window, softcap)) for part in parts
    ]
    assert torch.equal(packed, torch.cat(single, dim=2))
