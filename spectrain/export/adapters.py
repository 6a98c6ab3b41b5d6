"""What the layouts of LoRA adapters share: peft's own files of settings and weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.model_sizes import is_number

from .container import Finding
from .drafter_files import DrafterFiles

PLAIN_LORA_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "task_type": ("CAUSAL_LM", None), "bias": ("none",),
    "use_rslora": (False, None),
    "use_dora": (False, None), "modules_to_save": (None, []), "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (False, None), "use_qalora": (False, None), "use_bdlora": (False, None),
    "lora_bias": (False, None),
    "exclude_modules": (None, []), "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []), "alora_invocation_tokens": (None, []), "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,), "monteclora_config": (None,), "loftq_config": (None, {}),
    "eva_config": (None,),
    "corda_config": (None,), "lora_ga_config": (None,), "megatron_config": (None,),
}  # fmt: skip
"""peft's settings that must have their defaults, so that the update is alpha / r B A x and
nothing else is trained.
"""
TEXT_SETTINGS = ("base_model_name_or_path", "revision", "peft_version")
MAX_RANK = 1 << 16
MAX_ALPHA = 1e6


def check_adapter(adapter: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Yield the settings of adapter_config.json that plain LoRA does not have, or that
    contradict the tensors.
    """
    problems = [
        f"{key} is {str(adapter[key])[:100]}, and plain LoRA has {allowed[0]}"
        for key, allowed in PLAIN_LORA_VALUES.items()
        if key in adapter
        and not any(
            type(value) is type(adapter[key]) and value == adapter[key] for value in allowed
        )
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
        problems.append(
            f"r is {str(rank)[:100]}, and the factors have rank "
            f"{', '.join(map(str, sorted(ranks)))}"
        )
    if not is_number(alpha, MAX_ALPHA):
        problems.append(
            f"lora_alpha is {str(alpha)[:100]}, and it is a number above 0 that is "
            f"{MAX_ALPHA:.0f} or less"
        )
    adapted = sorted({parts[-3] for parts in names.values()})
    if not isinstance(modules, list) or sorted(set(map(str, modules))) != adapted:
        problems.append(
            f"target_modules is {str(modules)[:100]}, and the factors are for {', '.join(adapted)}"
        )
    layers = adapter.get("layers_to_transform")
    numbers = {
        int(part)
        for parts in names.values()
        for part in parts
        if part.isdecimal() and len(part) < 5
    }
    if layers is not None and layers != sorted(numbers):
        problems.append(
            f"layers_to_transform is {str(layers)[:100]}, and the factors are for "
            f"{sorted(numbers)[:100]}"
        )
    for problem in problems:
        yield Finding(
            "adapter-setting",
            "error",
            f"adapter_config.json: {problem}",
            "peft and engines compute another drafter, or stop",
            "write it as it was when the adapter was trained: plain LoRA",
        )


def require_plain_adapter(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Raise a UserError where the adapter_config.json of a directory, if there is one, is not
    plain LoRA's of these tensors.
    """
    adapter = DrafterFiles(directory, {}, tensors).read_sidecar("adapter_config.json")
    for finding in check_adapter(adapter, tensors) if adapter else ():
        raise UserError(f"{directory}: {finding.problem}; {finding.remedy}")
