"""Loss windows that tile a text add up to its full loss and gradients, in all families with a
loss per token.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.drafters.base import Drafter, Losses, TrainingState
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.medusa import Medusa
from spectrain.drafters.mtp import Mtp
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.features.loss_window import keep_loss_windows, sample_loss_windows, sample_window
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer
from tests.factories import dataset_with_spans, make_drafter

LENGTHS = (30, 41)
PARTS = 4


def make_batch(target: Target, drafter: Drafter, packed: bool) -> Batch:
    """Return two texts, the first tokens of which carry no loss."""
    torch.manual_seed(0)
    rows = [torch.randint(5, 500, (length,)) for length in LENGTHS]
    masks = [(torch.arange(len(row)) > 6) & (torch.arange(len(row)) % 13 != 0) for row in rows]
    if packed:
        batch = Batch(torch.cat(rows)[None], torch.cat(masks)[None], lengths=LENGTHS)
    else:
        pad = torch.nn.utils.rnn.pad_sequence
        batch = Batch(pad(rows, batch_first=True), pad(masks, batch_first=True))
    layers = drafter.stages[0].layers
    if not layers:
        return batch
    hidden = target.features(batch.tokens, layers, batch.lengths).hidden
    return replace(batch, features=Features(batch.tokens, layers, hidden))


def run_loss(
    drafter: Drafter, batch: Batch, target: Target, recompute: bool = False
) -> tuple[Losses, torch.Tensor]:
    """Return the losses of a batch, and all gradients of the drafter as one vector."""
    drafter.zero_grad()
    losses = drafter.loss(batch, target, TrainingState(recompute=recompute))
    losses.total.backward()
    gradients = [
        p.grad if p.grad is not None else torch.zeros_like(p)
        for p in drafter.parameters()
        if p.requires_grad
    ]
    return losses, torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "family, settings",
    [
        (Eagle3, {"ttt_steps": 4}),
        (Eagle3, {"ttt_steps": 3, "num_layers": 2, "window": 9}),
        (Medusa, {}),
        (Mtp, {}),
        (Causal, {"num_layers": 1}),
    ],
)
def test_windows_that_tile_a_text_add_up(
    shallow: Target, family: Any, settings: dict[str, Any], packed: bool
) -> None:
    """Losses, hits and gradients of all windows sum to those of the full texts, with each batch
    cut behind its window.
    """
    drafter = make_drafter(family, shallow, **settings)
    batch = make_batch(shallow, drafter, packed)
    full, gradients = run_loss(drafter, batch, shallow)
    total = 0.0
    summed = torch.zeros_like(gradients)
    hits = torch.zeros_like(full.hits)
    counts = torch.zeros_like(full.counts)
    for number in range(PARTS):
        windows = [(length * number // PARTS, length * (number + 1) // PARTS) for length in LENGTHS]
        losses, window_gradients = run_loss(
            drafter, keep_loss_windows(batch, windows), shallow, recompute=number == 0
        )
        total = total + losses.total.item()
        hits = hits + losses.hits
        counts = counts + losses.counts
        summed = summed + window_gradients
    assert total == pytest.approx(full.total.item(), rel=1e-6)
    assert torch.equal(hits, full.hits) and torch.equal(counts, full.counts)
    torch.testing.assert_close(
        summed, gradients, rtol=1e-4, atol=2e-6 * float(gradients.abs().max())
    )


def test_a_training_takes_windows(shallow: Target, tmp_path: Path) -> None:
    """Packed and padded trainings run on windows, and know the length of their longest text."""
    for packed in (False, True):
        drafter = make_drafter(Eagle3, shallow, ttt_steps=3, vocab_size=300)
        trainer = Trainer(max_steps=2, loss_tokens=4, packing=packed, batch_tokens=64)
        result = trainer.fit(
            drafter, shallow, dataset_with_spans(4), LiveSource(), tmp_path / str(packed)
        )
        assert result.num_steps == 2 and result.max_text_length == 26


def test_every_supervised_token_has_the_same_chance() -> None:
    """Each supervised token is in equally many of the possible windows, and every window has
    one.
    """
    mask = torch.zeros(40, dtype=torch.bool)
    mask[[5, 6, 7, 20, 21, 33]] = True
    generator = torch.Generator().manual_seed(0)
    drawn = [sample_window(mask, 4, generator) for _ in range(3000)]
    assert all(mask[begin:end].any() and end - begin <= 4 for begin, end in drawn)
    chances = torch.stack(
        [torch.tensor([begin <= t < end for t in mask.nonzero()[:, 0]]) for begin, end in drawn]
    )
    shares = chances.float().mean(0)
    assert (shares - 4 / 15).abs().max() < 0.03
    assert sample_window(mask, 50, generator) == (5, 34)


def test_draws_do_not_depend_on_the_batch(shallow: Target) -> None:
    """A text has the same window padded, packed and alone, and another one in another step."""
    drafter = make_drafter(Eagle3, shallow)
    windows = [
        sample_loss_windows(make_batch(shallow, drafter, packed), 5, 0, 3).loss_windows
        for packed in (False, True)
    ]
    assert windows[0] == windows[1]
    others = [
        sample_loss_windows(make_batch(shallow, drafter, True), 5, 0, step).loss_windows
        for step in range(4, 9)
    ]
    assert any(other != windows[0] for other in others)
