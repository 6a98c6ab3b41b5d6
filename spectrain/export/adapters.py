"""What the layouts of LoRA adapters share: peft's own files of settings and weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def adapter_shape(tensors: dict[str, Tensor], adapter: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that weights and peft's own settings determine."""
    shape = {"rank": adapter["r"], "alpha": adapter["lora_alpha"], "sampler": "sampler.first.weight" in tensors}
    return {**shape, "num_masks": tensors["masks"].shape[0]} if "masks" in tensors else shape
