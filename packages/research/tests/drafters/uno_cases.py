"""Cases of the ideas for tests/drafters/test_uno.py."""

from typing import Any

from spectrain.models.target import Target
from spectrain_research.gated_lora.drafter import GatedLora, GatedLoraConfig


def make_gated(target: Target, **settings: Any) -> GatedLora:
    """Make a drafter of gated LoRA."""
    return GatedLora(target, GatedLoraConfig(**settings))


CASES: dict[str, Any] = {
    "make_gated": make_gated,
    "noises": ["masks"],
    "test_captured_rounds_are_the_loops": [{"noise": "mean", "rank": 0}],
}
