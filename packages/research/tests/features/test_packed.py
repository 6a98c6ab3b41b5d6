"""The tests of tests/features/test_packed.py that are about ideas."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain_research.on_policy.source import GeneratedSource
from spectrain_research.shared.draft_replay import NOT_PAST_ERROR, Replay, collate_replays
from tests.features.test_packed import assert_near, compute_gradients
from tests.targets import cut_tiny


@pytest.mark.sweep(2, free=("name",))
@pytest.mark.parametrize("name", ["eagle3", "causal", "kangaroo", "hydra"])
def test_replays_packed_equal_replays_padded(name: str) -> None:
    """Documents whose tails are rejected drafts have the same loss and gradients packed and
    padded.
    """

    class Replays(LiveSource):
        def make_batch(self, request: BatchRequest) -> Batch:
            lengths = [len(example.tokens) for example in request.examples]
            distances = [
                [NOT_PAST_ERROR if n < length - 3 else n % 3 for n in range(length)]
                for length in lengths
            ]
            batch = collate_replays(list(map(Replay, request.examples, distances)), request.packed)
            return replace(
                batch, features=request.target.features(batch.tokens, request.layers, batch.lengths)
            )

    (padded, expected), (packed_losses, actual) = (
        compute_gradients(name, cut_tiny(3), 0, packed, Replays()) for packed in (False, True)
    )
    assert_near(packed_losses.total, padded.total)
    assert torch.equal(packed_losses.counts, padded.counts)
    for key, gradient in expected.items():
        assert_near(actual[key], gradient)


@pytest.mark.sweep(2, free=("by",))
@pytest.mark.parametrize("by", ["drafter", "target", "interleaved", "replay"])
def test_generated_sequences_are_packed_too(by: Any) -> None:
    """What is generated during training does not depend on packing."""
    (padded, _), (packed_losses, _) = (
        compute_gradients(
            "causal", cut_tiny(3), 0, packed, GeneratedSource(fraction=0.6, by=by, max_new_tokens=6)
        )
        for packed in (False, True)
    )
    assert padded.counts.sum() > 0
    assert_near(packed_losses.total, padded.total)
