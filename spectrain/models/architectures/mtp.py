"""MTP layers of checkpoints: found by name, read into our names, and written back.

Shapes: E experts, D width, I width of an expert. transformers drops these tensors silently when it
loads a model. Our names: `fc.weight` [D, 2 D] reads [embedding, state], `enorm.weight` and
`hnorm.weight` norm the two, `layer.*` is the decoder layer as its class names it, and `norm.weight`
comes last. Norm weights have the meaning of their class: for Qwen3-Next and Qwen3.5 w, where the
norm scales by 1 + w.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.checkpoint_files import CheckpointFiles

MTP_HINT = "use drafter.start=new, or recipe=eagle3"
TARGET_TENSORS = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's embedding and head that checkpoints store with a layer."""
FUSED_EXPERTS = "mlp.experts.gate_up_proj"
EXPERT_PATTERN = re.compile(r"(.*mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class MtpLayout:
    """How one kind of checkpoint names its MTP layers. Every layer has a tensor that matches
    `marker`, whose first group is the prefix of the layer."""

    title: str
    marker: re.Pattern[str]
    # Our name of a tensor -> the checkpoint's name after the prefix.
    tensor_names: dict[str, str]
    # What comes between the prefix and the decoder layer's own names.
    layer_prefix: str
    # The prefix of a new layer; {layer} counts on after the target's layers.
    prefix: str
    # Whether the projection reads [state, embedding].
    hidden_first: bool = False

    def to_internal(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a layer, named without the prefix, under our names."""
        names = {stored: name for name, stored in self.tensor_names.items()}
        internal = {
            names.get(name) or f"layer.{name.removeprefix(self.layer_prefix)}": tensor
            for name, tensor in tensors.items()
        }
        if self.hidden_first and "fc.weight" in internal:
            internal["fc.weight"] = swap_halves(internal["fc.weight"])
        return fuse_experts(internal)

    def to_checkpoint(self, tensors: dict[str, Tensor], by_expert: bool) -> dict[str, Tensor]:
        """Return tensors under the checkpoint's names without the prefix; `by_expert` gives
        every expert tensors of its own.
        """
        tensors = split_experts(tensors) if by_expert else dict(tensors)
        if self.hidden_first:
            tensors["fc.weight"] = swap_halves(tensors["fc.weight"])
        return {
            self.tensor_names.get(name) or self.layer_prefix + name.removeprefix("layer."): tensor
            for name, tensor in tensors.items()
        }


def _name_tensors(fc: str, enorm: str, hnorm: str, norm: str) -> dict[str, str]:
    names = {"fc": fc, "enorm": enorm, "hnorm": hnorm, "norm": norm}
    return {f"{name}.weight": f"{stored}.weight" for name, stored in names.items()}


MTP_LAYOUTS = (
    MtpLayout(
        "Qwen3-Next",
        re.compile(r"^(mtp\.)fc\.weight$"),
        _name_tensors("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        "layers.0.",
        "mtp.",
    ),
    MtpLayout(
        "DeepSeek-V3",
        re.compile(r"^(.*layers\.\d+\.)eh_proj\.weight$"),
        _name_tensors("eh_proj", "enorm", "hnorm", "shared_head.norm"),
        "",
        "model.layers.{layer}.",
    ),
    MtpLayout(
        "MiMo",
        re.compile(r"^(.*mtp_layers\.\d+\.)input_proj\.weight$"),
        _name_tensors("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
        "",
        "model.mtp_layers.{index}.",
        hidden_first=True,
    ),
)
ENGINE_LAYOUTS = {
    "qwen3_next": "Qwen3-Next",
    "qwen3_5": "Qwen3-Next",
    "qwen3_5_text": "Qwen3-Next",
    "qwen3_5_moe": "Qwen3-Next",
    "qwen3_5_moe_text": "Qwen3-Next",
    "mellum": "Qwen3-Next",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v32": "DeepSeek-V3",
    "glm4_moe": "DeepSeek-V3",
    "glm4_moe_lite": "DeepSeek-V3",
    "mimo": "MiMo",
}
"""Model types that engines draft for with MTP layers -> the layout that they read."""


def find_layout(names: Collection[str]) -> MtpLayout | None:
    """Return the layout of the MTP layers among tensors of these names; None where there are
    none.
    """
    return next(
        (layout for layout in MTP_LAYOUTS if any(layout.marker.match(name) for name in names)), None
    )


def mtp_layer_types(config: dict[str, Any]) -> dict[str, list[str]]:
    """Return the type of an MTP layer, where the layers of a model have several: as the
    configuration says, else full attention where it exists, else that of the last layer."""
    layer_types = {}
    for key in ("layer_types", "mlp_layer_types"):
        kinds = config.get(key)
        mtp_kinds = config.get(f"mtp_{key}")
        if kinds:
            default = "full_attention" if "full_attention" in kinds else kinds[-1]
            layer_types[f"mtp_{key}"] = [mtp_kinds[0] if mtp_kinds else default]
    return layer_types


class CheckpointReader(CheckpointFiles):
    """Reads a checkpoint and finds its MTP layers."""

    @property
    def mtp_layout(self) -> MtpLayout | None:
        """Return the layout of the MTP layers in the files; None where there are none."""
        return find_layout(self.tensor_files)

    def layer_prefixes(self, layout: MtpLayout) -> list[str]:
        """Return the prefixes of all MTP layers, in order."""
        prefixes = {match[1] for name in self.tensor_files if (match := layout.marker.match(name))}
        return sorted(
            prefixes, key=lambda prefix: [int(number) for number in re.findall(r"\d+", prefix)]
        )

    def layer_tensor_names(self, layout: MtpLayout, prefix: str) -> list[str]:
        """Return the tensors of the MTP layer of a prefix, without copies of the target's
        embedding and head.
        """
        names = [
            name
            for name in self.tensor_files
            if name.startswith(prefix) and name.removeprefix(prefix) not in TARGET_TENSORS
        ]
        # Of several layers under the prefix mtp., only the first is read.
        return [name for name in names if not re.match(r"mtp\.layers\.[1-9]", name)]


def has_mtp_layer(path: str) -> bool:
    """Return whether the checkpoint of a target holds an MTP layer of a known layout."""
    checkpoint = CheckpointReader.open_local(path)
    return checkpoint is not None and checkpoint.mtp_layout is not None


def load_mtp_layer(path: str) -> dict[str, Tensor]:
    """Load the first MTP layer of a target's checkpoint, under our names, in float32."""
    checkpoint = CheckpointReader.open_local(path)
    layout = None if checkpoint is None else checkpoint.mtp_layout
    if checkpoint is None or layout is None:
        raise UserError(
            f"drafter.start=shipped: {path} holds no MTP layer of a known layout; use "
            "drafter.start=new"
        )
    prefix = checkpoint.layer_prefixes(layout)[0]
    tensors = {
        name.removeprefix(prefix): checkpoint.read_tensor(name)
        for name in checkpoint.layer_tensor_names(layout, prefix)
    }
    quantized = sorted(
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.element_size() < 2
    )
    if quantized:
        raise UserError(
            f"{path}: its MTP layer is quantized ({prefix}{quantized[0]}); give the unquantized "
            "checkpoint"
        )
    return {name: tensor.float() for name, tensor in layout.to_internal(tensors).items()}


def swap_halves(weight: Tensor) -> Tensor:
    """Swap the two halves of a weight [D, 2 D]."""
    return torch.cat([*reversed(weight.chunk(2, dim=1))], dim=1)


def fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack separate experts as the classes of transformers hold them: gate_up_proj [E, 2 I, D]
    and down_proj [E, D, I].
    """
    stacked = {
        name: tensor for name, tensor in tensors.items() if not EXPERT_PATTERN.fullmatch(name)
    }
    experts = {
        match.groups(): tensor
        for name, tensor in tensors.items()
        if (match := EXPERT_PATTERN.fullmatch(name))
    }
    for stem in {stem for stem, _, _ in experts}:
        numbers = sorted({int(number) for other, number, _ in experts if other == stem})
        gates, ups, downs = (
            [experts[stem, str(number), part] for number in numbers]
            for part in ("gate", "up", "down")
        )
        stacked[f"{stem}gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        )
        stacked[f"{stem}down_proj"] = torch.stack(downs)
    return stacked


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split stacked experts into separate tensors."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if not stem.endswith("mlp.experts."):
            split[name] = tensor
            continue
        for number, weight in enumerate(tensor):
            parts = (
                {"down": weight}
                if name.endswith("down_proj")
                else dict(zip(("gate", "up"), weight.chunk(2)))
            )
            split |= {f"{stem}{number}.{part}_proj.weight": piece for part, piece in parts.items()}
    return split
