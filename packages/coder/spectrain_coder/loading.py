"""The constructor of drafter=qwen2.5-coder-1.5b."""

from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.runs.drafters import load_shipped_drafter

from . import DRAFTER


def load_coder_drafter(target: Target) -> Drafter:
    """Load EAGLE-3 for Qwen2.5-Coder-1.5B-Instruct; README.md beside its weights describes it."""
    return load_shipped_drafter(DRAFTER.name, target)
