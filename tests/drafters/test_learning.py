"""Training with `trainer.lr=auto` only improves the initial weights: the loss of text that it does
not read falls from the first step on.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle1 import Eagle1
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.medusa import Medusa
from spectrain.drafters.mtp import Mtp
from spectrain.drafters.pard import Pard
from spectrain.drafters.peagle import PEagle
from spectrain.features.base import BatchRequest
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.training.report import TrainingReport
from spectrain.training.trainer import Trainer
from tests.targets import make_random_target

VOCABULARY = 64
MASK_TOKEN = VOCABULARY - 1  # no text holds it
FITTED: dict[str, Any] = {
    "start": "fitted",
    "ttt_steps": 2,
    "vocab_size": 48,
    "fit_tokens": 600,
}
STARTS: dict[str, Callable[[Target], Drafter]] = {
    "eagle1": Eagle1,
    "eagle3 fitted": lambda target: Eagle3(target, **FITTED),
    "eagle3 fitted with norms": lambda target: Eagle3(
        target, **FITTED, architecture={"norm_before_fc": True}
    ),
    "eagle3 fitted, two layers": lambda target: Eagle3(target, **FITTED, num_layers=2),
    "eagle3 fitted, slim head": lambda target: Eagle3(target, **FITTED, head_rank=8),
    "eagle3 from the target": lambda target: Eagle3(target, **{**FITTED, "start": "target"}),
    "peagle": lambda target: PEagle(
        target, num_layers=1, num_drafts=2, vocab_size=48, mask_token_id=MASK_TOKEN
    ),
    "mtp": Mtp,
    "causal": lambda target: Causal(target, num_layers=2),
    "pard": lambda target: Pard(target, num_layers=2, num_drafts=2),
    "medusa": lambda target: Medusa(target, num_heads=2, vocab_size=48, loss="forward_kl"),
}


def write_texts(target: Target, count: int, length: int) -> list[Example]:
    """Sample texts of the target, each after four random tokens, without the mask token."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(MASK_TOKEN, (count, 4), generator=generator)
    with torch.no_grad():
        while tokens.shape[1] < length:
            probabilities = target.model(tokens).logits[:, -1, :MASK_TOKEN].softmax(-1)
            tokens = torch.cat([tokens, probabilities.multinomial(1, generator=generator)], 1)
    return [Example(row, [index >= 4 for index in range(length)]) for row in tokens.tolist()]


@torch.no_grad()
def measure_loss(drafter: Drafter, target: Target, examples: list[Example]) -> float:
    """Return the loss per supervised token."""
    request = BatchRequest(examples, target, drafter.stages[0].layers, False, 0, drafter)
    batch = LiveSource().make_batch(request)
    return float(drafter.loss(batch, target, TrainingState()).total) / batch.num_supervised


@pytest.mark.sweep(4, free=("start",))
@pytest.mark.parametrize("start", STARTS)
def test_the_loss_of_other_text_falls_from_the_first_step(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each of twelve steps it is below that of the initial weights, and at last by a
    tenth."""
    target = make_random_target(VOCABULARY, num_layers=4, sharpness=3.0)
    texts = write_texts(target, 80, 32)
    other_texts = texts[:16]
    dataset = Dataset(texts[16:], 64, 0, 0)
    torch.manual_seed(0)
    drafter = STARTS[start](target)
    drafter.prepare(target, dataset.token_counts(VOCABULARY))
    losses = []

    def record(*_: Any) -> None:
        losses.append(measure_loss(drafter, target, other_texts))

    # The initial weights are fitted by now.
    monkeypatch.setattr(TrainingReport, "measure_start", record)
    Trainer(lr="auto", max_steps=12, batch_tokens=128).fit(
        drafter, target, dataset, LiveSource(), tmp_path, on_step=record
    )
    at_start, *after_steps = losses
    assert len(after_steps) == 12 and max(after_steps) < at_start
    assert after_steps[-1] < 0.9 * at_start
