"""The tests of tests/models/test_pretrained.py that are about ideas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from packages.research.tests.ideas.encoder_models import save_model
from spectrain.drafters.layers.small_models import load_matching_model
from spectrain.errors import UserError
from spectrain.eval.transformers_baselines import _load_assistant
from spectrain.models.loading import load_hf
from spectrain.models.pretrained import load_pretrained
from spectrain.models.target import Target
from spectrain_research.encoder_decoder.loading import load_encoder_decoder
from tests.models.test_pretrained import (
    NORM,
    UP,
    remove,
    saved,  # noqa: F401  (a fixture)
)


def test_every_other_model_is_checked_too(
    saved: Callable[..., Path], tiny: Target, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "small", remove(UP))
    with pytest.raises(UserError, match=f"^drafter.model={folder}: {UP} is not"):
        load_matching_model(str(folder), tiny)
    with pytest.raises(UserError, match=f"^eval.assistant={folder}: {UP} is not"):
        _load_assistant(tiny, str(folder))
    with pytest.raises(UserError, match="^target.parts=head: .* has no tensor model.norm.weight"):
        load_hf(str(saved(tmp_path / "head", remove(NORM))), parts="head", device="cpu")
    encoder_decoder = save_model("t5", tmp_path / "t5")
    weights = load_file(encoder_decoder / "model.safetensors")
    remove("encoder.block.0.layer.0.SelfAttention.q")(weights)
    save_file(weights, encoder_decoder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError,
        match=f"^target.model={encoder_decoder}: encoder.block.0.*SelfAttention.q.weight is not",
    ):
        load_encoder_decoder(str(encoder_decoder), device="cpu")
    with pytest.raises(UserError, match="^drafter.model="):
        load_pretrained(AutoModelForSeq2SeqLM, encoder_decoder, "drafter.model")
