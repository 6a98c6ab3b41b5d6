"""A trained EAGLE-3 drafter of Qwen2.5-Coder-1.5B-Instruct."""

from pathlib import Path

from spectrain.runs.folder import ShippedDrafter

TARGET = "qwen2.5-coder-1.5b"
DRAFTER = ShippedDrafter(
    name=TARGET, target=TARGET, model=TARGET, folder=Path(__file__).parent / "drafter"
)
