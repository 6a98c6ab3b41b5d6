"""The tests of tests/training/test_loop.py that are about ideas."""

from pathlib import Path

import pytest

from spectrain.errors import UserError
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain_research.gated_lora.drafter import GatedLora, GatedLoraConfig
from tests.training.test_loop import make_dataset, make_trainer


def test_gradient_checkpointing_is_refused_where_it_would_be_wrong(
    shallow: Target, tmp_path: Path
) -> None:
    """Mask tokens use hooks on the target's layers, which are removed before the backward pass."""
    with pytest.raises(UserError, match=r"trainer.gradient_checkpointing=true.*leave it out"):
        make_trainer(gradient_checkpointing=True).fit(
            GatedLora(shallow, GatedLoraConfig(num_masks=2)),
            shallow,
            make_dataset(),
            LiveSource(),
            tmp_path,
        )
