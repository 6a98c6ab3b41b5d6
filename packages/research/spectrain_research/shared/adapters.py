"""What the layouts of drafters that adapt the target share: gated LoRA's and Uno's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spectrain.config.build import GroupSpec
from spectrain.errors import UserError
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.layout import DrafterCheckpoint
from spectrain.export.targets import TargetFiles


def adapter_shape(tensors: dict[str, Tensor], adapter: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that weights and peft's own settings determine."""
    shape = {
        "rank": adapter["r"],
        "alpha": adapter["lora_alpha"],
        "sampler": "sampler.first.weight" in tensors,
    }
    return {**shape, "num_masks": tensors["masks"].shape[0]} if "masks" in tensors else shape


def read_shape(spec: GroupSpec, files: DrafterFiles, target: TargetFiles | None) -> dict[str, Any]:
    """Return the settings that a description of our own files may omit."""
    adapter = files.read_sidecar("adapter_config.json")
    return adapter_shape(
        files.tensors, adapter or {"r": 0, "lora_alpha": spec.settings.get("alpha", 32.0)}
    )


def require_adapter(drafter: DrafterCheckpoint, reason: str) -> dict[str, Any]:
    """Return peft's settings of a drafter; raise a UserError, which ends with the reason, for a
    drafter without LoRA.
    """
    adapter: dict[str, Any] | None = drafter.description.get("adapter_config")
    if adapter is None:
        raise UserError(
            f"adapter_config.json: the drafter has none (as with drafter.rank=0), {reason}"
        )
    return adapter
