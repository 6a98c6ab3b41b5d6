"""The peft layout of gated LoRA: peft's own adapter files, and further files for masks, sampler
head and gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spectrain.export.adapters import check_adapter
from spectrain.export.container import Finding
from spectrain.export.drafter_files import DrafterFiles, write_json, write_tensors
from spectrain.export.layout import DrafterCheckpoint, ExpectedTensors, Layout, make_checkpoint
from spectrain.export.targets import TargetFiles
from spectrain_research.shared.adapters import adapter_shape, require_adapter


class PeftLayout(Layout):
    """The peft layout: adapter_config.json and adapter_model.safetensors are peft's;
    gated_lora.json and masks.safetensors spectrain's."""

    title = "gated LoRA, peft layout"
    sidecars = ("gated_lora.json",)

    def matches_files(self, files: DrafterFiles) -> bool:
        return (files.directory / "gated_lora.json").exists()

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        settings = files.read_sidecar("gated_lora.json")
        # Another check compares their ranks with the settings.
        shapes: dict[str, tuple[int | None, ...]] = dict.fromkeys(
            (name for name in files.tensors if name.startswith("base_model.")), (None, None)
        )
        shapes["masks"] = (settings["num_masks"], None)
        if settings["sampler"]:
            for part in ("first", "first_norm", "second"):
                kind = (None,) if part.endswith("norm") else (None, None)
                shapes |= {f"sampler.{part}.weight": kind, f"sampler.{part}.bias": (None,)}
        return ExpectedTensors(shapes)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        adapter = files.read_sidecar("adapter_config.json")
        settings = files.read_sidecar("gated_lora.json")
        yield from check_adapter(adapter, files.tensors)
        implied = {
            **adapter_shape(files.tensors, adapter),
            "width": files.tensors["masks"].shape[1],
        }
        for key, value in implied.items():
            current = settings.get(key)
            if isinstance(current, bool) != isinstance(value, bool) or current != value:
                yield Finding(
                    "gate-setting",
                    "error",
                    f"gated_lora.json: {key} is {str(current)[:100]}, and the other files imply "
                    f"{value}",
                    "spectrain builds another drafter",
                    f"write {value}",
                )
        if not isinstance(settings.get("gate"), str | None):
            yield Finding(
                "gate-setting",
                "error",
                f"gated_lora.json: gate is {str(settings['gate'])[:100]}, and it is a text",
                "no reader can mean it",
                "copy the file again",
            )

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        settings = files.read_sidecar("gated_lora.json")
        shape = {key: settings[key] for key in ("num_masks", "rank", "alpha", "sampler")}
        drafter = make_checkpoint(files, "gated_lora", shape, dict(files.tensors))
        drafter.description["adapter_config"] = files.read_sidecar("adapter_config.json")
        return drafter

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        adapter = require_adapter(drafter, "so peft could not read it")
        tensors = drafter.tensors
        settings = {
            **adapter_shape(tensors, adapter),
            "width": tensors["masks"].shape[1],
            "gate": (
                "the adapter acts on mask tokens only; elsewhere the target is unchanged, bit "
                "by bit"
            ),
        }
        write_json(directory / "gated_lora.json", settings)
        write_json(directory / "adapter_config.json", adapter)
        adapters = {
            name: tensor for name, tensor in tensors.items() if name.startswith("base_model.")
        }
        write_tensors(directory / "adapter_model.safetensors", adapters)
        write_tensors(
            directory / "masks.safetensors", {k: v for k, v in tensors.items() if k not in adapters}
        )


PEFT = PeftLayout()
