"""The peft layout of gated LoRA: peft's own adapter files, and further files for masks, sampler head and gate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.model_sizes import is_number

from .layout import DrafterCheckpoint, DrafterFiles, ExpectedTensors, Finding, Layout, write_json, write_tensors
from .targets import TargetFiles

PLAIN_LORA_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "task_type": ("CAUSAL_LM", None), "bias": ("none",), "use_rslora": (False, None),
    "use_dora": (False, None), "modules_to_save": (None, []), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "fan_in_fan_out": (False, None), "use_qalora": (False, None), "use_bdlora": (False, None), "lora_bias": (False, None),
    "exclude_modules": (None, []), "target_parameters": (None, []), "trainable_token_indices": (None, []),
    "layer_replication": (None, []), "alora_invocation_tokens": (None, []), "arrow_config": (None,), "kasa_config": (None,),
    "velora_config": (None,), "monteclora_config": (None,), "loftq_config": (None, {}), "eva_config": (None,),
    "corda_config": (None,), "lora_ga_config": (None,), "megatron_config": (None,),
}  # fmt: skip
"""peft's settings that must have their defaults, so that the update is alpha / r B A x and nothing else is trained."""
TEXT_SETTINGS = ("base_model_name_or_path", "revision", "peft_version")
MAX_RANK, MAX_ALPHA = 1 << 16, 1e6
GATED_LORA_CLASS = "spectrain.experimental.gated_lora.drafter.GatedLora"


def adapter_shape(tensors: dict[str, Tensor], adapter: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that weights and peft's own settings determine."""
    shape = {"rank": adapter["r"], "alpha": adapter["lora_alpha"], "sampler": "sampler.first.weight" in tensors}
    return {**shape, "num_masks": tensors["masks"].shape[0]} if "masks" in tensors else shape


def check_adapter(adapter: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Yield the settings of adapter_config.json that plain LoRA does not have, or that contradict the tensors."""
    problems = [
        f"{key} is {str(adapter[key])[:100]}, and plain LoRA has {allowed[0]}"
        for key, allowed in PLAIN_LORA_VALUES.items()
        if key in adapter and not any(type(value) is type(adapter[key]) and value == adapter[key] for value in allowed)
    ]
    problems += [
        f"{key} is {str(adapter[key])[:100]}, and it is a text"
        for key in TEXT_SETTINGS
        if not isinstance(adapter.get(key), str | None)
    ]
    # Names such as base_model.model.model.layers.3.mlp.up_proj.lora_A.weight.
    names = {name: name.split(".") for name in tensors if name.endswith(".lora_A.weight")}
    ranks = {tensors[name].shape[0] for name in names if tensors[name].dim() == 2}
    rank, alpha, modules = (adapter.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if not is_number(rank, MAX_RANK) or any(rank != size for size in ranks):
        problems.append(f"r is {str(rank)[:100]}, and the factors have rank {', '.join(map(str, sorted(ranks)))}")
    if not is_number(alpha, MAX_ALPHA):
        problems.append(f"lora_alpha is {str(alpha)[:100]}, and it is a number above 0 that is {MAX_ALPHA:.0f} or less")
    adapted = sorted({parts[-3] for parts in names.values()})
    if not isinstance(modules, list) or sorted(set(map(str, modules))) != adapted:
        problems.append(f"target_modules is {str(modules)[:100]}, and the factors are for {', '.join(adapted)}")
    layers = adapter.get("layers_to_transform")
    numbers = {int(part) for parts in names.values() for part in parts if part.isdecimal() and len(part) < 5}
    if layers is not None and layers != sorted(numbers):
        problems.append(f"layers_to_transform is {str(layers)[:100]}, and the factors are for {sorted(numbers)[:100]}")
    for problem in problems:
        yield Finding(
            "adapter-setting", "error", f"adapter_config.json: {problem}",
            "peft and engines compute another drafter, or stop", "write it as it was when the adapter was trained: plain LoRA",
        )  # fmt: skip


def require_plain_adapter(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Raise a UserError where the adapter_config.json of a directory, if there is one, is not plain LoRA's of these tensors."""
    adapter = DrafterFiles(directory, {}, tensors).read_sidecar("adapter_config.json")
    for finding in check_adapter(adapter, tensors) if adapter else ():
        raise UserError(f"{directory}: {finding.problem}; {finding.remedy}")


class PeftLayout(Layout):
    """The peft layout: adapter_config.json and adapter_model.safetensors are peft's; gated_lora.json and masks.safetensors
    spectrain's."""

    title = "gated LoRA, peft layout"

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
        adapter, settings = files.read_sidecar("adapter_config.json"), files.read_sidecar("gated_lora.json")
        yield from check_adapter(adapter, files.tensors)
        implied = {**adapter_shape(files.tensors, adapter), "width": files.tensors["masks"].shape[1]}
        for key, value in implied.items():
            current = settings.get(key)
            if isinstance(current, bool) != isinstance(value, bool) or current != value:
                yield Finding(
                    "gate-setting", "error",
                    f"gated_lora.json: {key} is {str(current)[:100]}, and the other files imply {value}",
                    "spectrain builds another drafter", f"write {value}",
                )  # fmt: skip
        if not isinstance(settings.get("gate"), str | None):
            yield Finding(
                "gate-setting", "error", f"gated_lora.json: gate is {str(settings['gate'])[:100]}, and it is a text",
                "no reader can mean it", "copy the file again",
            )  # fmt: skip

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        settings, metadata = files.read_sidecar("gated_lora.json"), files.read_metadata()
        shape = {key: settings[key] for key in ("num_masks", "rank", "alpha", "sampler")}
        drafter = {"_target_": GATED_LORA_CLASS, **metadata.drafter, **shape}
        description = {**metadata.description, "adapter_config": files.read_sidecar("adapter_config.json")}
        return DrafterCheckpoint(drafter, dict(files.tensors), metadata.target, description=description)

    def write(self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path) -> None:
        adapter = drafter.description.get("adapter_config")
        if adapter is None:
            raise UserError("adapter_config.json: the drafter has none (as with drafter.rank=0), so peft could not read it")
        tensors = drafter.tensors
        settings = {
            **adapter_shape(tensors, adapter),
            "width": tensors["masks"].shape[1],
            "gate": "the adapter acts on mask tokens only; elsewhere the target is unchanged, bit by bit",
        }
        write_json(directory / "gated_lora.json", settings)
        write_json(directory / "adapter_config.json", adapter)
        adapters = {name: tensor for name, tensor in tensors.items() if name.startswith("base_model.")}
        write_tensors(directory / "adapter_model.safetensors", adapters)
        write_tensors(directory / "masks.safetensors", {k: v for k, v in tensors.items() if k not in adapters})
