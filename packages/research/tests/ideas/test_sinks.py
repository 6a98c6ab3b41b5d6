"""Windows with attention sinks: what is hidden, in training as in decoding."""

from typing import Any

import pytest
import torch

from packages.research.tests.ideas.trained_steps import training_log_q
from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.models.target import Target
from spectrain_research.sinks.drafter import Sinks
from tests.drafters.forced import shaken, walk
from tests.factories import random_batch

OPTIONS: dict[str, Any] = {"vocab_size": 512, "ttt_steps": 3}


@pytest.mark.parametrize(("window", "sinks"), [(3, 2), (1, 1), (4, 6)])
def test_the_mask_of_training_is_that_of_a_text(shallow: Target, window: int, sinks: int) -> None:
    """A token of draft step s at index t stands at position t + s. It sees the positions up to t of
    the first step, and its own index of each later one, where they are near or sinks."""
    drafter = Sinks(shallow, window, sinks, **OPTIONS)
    length, steps = 9, 3
    mask = drafter._training_mask(length, steps, torch.device("cpu"))
    for index in range(length):
        here = index + steps - 1
        for step in range(steps):
            for other in range(length):
                there = other + step
                is_earlier = other <= index if step == 0 else other == index
                expected = is_earlier and (here - there < window or there < sinks)
                assert bool(mask[index, step * length + other]) == expected


def test_a_window_beyond_the_text_is_no_window(shallow: Target) -> None:
    """Loss, gradients and drafts are EAGLE-3's with the same weights."""
    drafter = shaken(Sinks(shallow, 64, 4, **OPTIONS), shallow)
    eagle3 = Eagle3(shallow, **OPTIONS).eval()
    eagle3.load_state_dict(drafter.state_dict(), strict=True)
    batch = random_batch(shallow, drafter.layers)
    gradients = []
    losses = []
    for candidate in (drafter, eagle3):
        loss = candidate.loss(batch, shallow, TrainingState()).total
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in candidate.named_parameters()})
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-4)
    drafts = [[*walk(candidate, shallow, batch.tokens, 3)] for candidate in (drafter, eagle3)]
    for (row, index, log_q), (other_row, other_index, expected) in zip(*drafts, strict=True):
        assert (row, index) == (other_row, other_index)
        torch.testing.assert_close(log_q, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("window", "sinks"), [(4, 2), (2, 7)])
def test_training_equals_decoding(
    shallow: Target, window: int, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along true paths log q is the same in training and in decoding, over texts longer than the
    window, and differs from that of the window alone."""
    drafter = shaken(Sinks(shallow, window, sinks, num_layers=2, **OPTIONS), shallow)
    batch = random_batch(shallow, drafter.layers)
    trained = training_log_q(drafter, shallow, batch, monkeypatch)
    drafter.sinks = 1
    others = training_log_q(drafter, shallow, batch, monkeypatch)
    drafter.sinks = sinks
    differs = False
    for row, index, log_q in walk(drafter, shallow, batch.tokens, 3):
        for step in range(3):
            expected = trained[step][row, index]
            torch.testing.assert_close(log_q[step], expected, rtol=1e-3, atol=1e-3)
            differs |= not torch.allclose(log_q[step], others[step][row, index], atol=1e-2)
    assert differs


def test_packed_texts_have_their_own_sinks(shallow: Target) -> None:
    drafter = shaken(Sinks(shallow, 3, 2, **OPTIONS), shallow)
    torch.manual_seed(4)
    texts = [torch.randn(1, 4, length, 8) for length in (7, 5)]
    keys = [torch.randn(1, 2, length, 8) for length in (7, 5)]
    options: Any = None
    apart = [
        drafter.attend_steps(q, [k, k + 1], [k, k - 1], None, options) for q, k in zip(texts, keys)
    ]
    q, k = torch.cat(texts, 2), torch.cat(keys, 2)
    together = drafter.attend_steps(q, [k, k + 1], [k, k - 1], (7, 5), options)
    torch.testing.assert_close(together, torch.cat(apart, 2))
