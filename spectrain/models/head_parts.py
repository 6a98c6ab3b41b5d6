"""Targets without their layers: only embedding, final norm and output layer are read from the
checkpoint.

The layers exist on torch's device "meta", with their shapes and without weights.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from spectrain.errors import UserError

from .architectures.quantized import Quantization
from .check import check_weights
from .checkpoint_files import CheckpointFiles
from .sharding import Sharding, select_auto_class
from .target import Target

Parts = Literal["all", "head"]
FULL_PRECISION = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
READ_OPTIONS = ("dtype", "attn_implementation", "trust_remote_code")


def build_empty_network(
    model: str, config: Any, device: str, sharding: Sharding, **options: Any
) -> Any:
    """Build the model of a configuration with its buffers and without weights."""
    kept = {name: value for name, value in options.items() if name in READ_OPTIONS}
    with init_empty_weights(include_buffers=False):
        network = select_auto_class(config).from_config(config, **kept)
    network.tie_weights()
    # Few checkpoints lack this file.
    with suppress(OSError):
        network.generation_config = GenerationConfig.from_pretrained(
            model, revision=options.get("revision", "main")
        )
    return network


def check_head_settings(sharding: Sharding, quantization: Quantization | None) -> None:
    """Raise UserError for settings of the layers, which target.parts=head leaves out."""
    for key, value in (
        ("sharding", None if sharding == "none" else sharding),
        ("quantization", quantization),
    ):
        if value is not None:
            raise UserError(
                f"target.{key}={value}: target.parts=head loads no layers that this applies to; "
                "leave it out"
            )


def load_head(target: Target, files: CheckpointFiles, device: str) -> None:
    """Read the tensors of a target's decoder that are outside of its layers, and its output
    layer, and no others.
    """
    decoder, head = target.decoder, target.head
    parts = [part for name, part in decoder.named_children() if name != target.layer_list_name]
    own = {
        id(decoder),
        *(id(module) for part in (*parts, head.output) for module in part.modules()),
    }
    is_tied = head.output.weight is head.embedding.weight
    stored_names = map_names(target.model, files)
    for module_name, module in target.model.named_modules():
        for name, empty in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            stored_name = stored_names.get(f"{module_name}.{name}")
            if id(module) in own and stored_name is not None:
                setattr(module, name, read_tensor(target.name, files, stored_name, empty))
    if is_tied and head.output.weight.is_meta:
        head.output.weight = head.embedding.weight  # type: ignore[assignment]
    full_names = {id(parameter): name for name, parameter in target.model.named_parameters()}
    for part in (head.embedding, head.output, *parts):
        missing = next((parameter for parameter in part.parameters() if parameter.is_meta), None)
        if missing is not None:
            raise UserError(
                f"target.parts=head: {target.name} has no tensor {full_names[id(missing)]} in its "
                "files, or it is quantized; use target.parts=all"
            )
        part.to(device)
    check_weights(target.model, f"target {target.name}")


def map_names(model: Any, files: CheckpointFiles) -> dict[str, str]:
    """Return the checkpoint's name of each tensor that has one in it, by its name in the model, as
    transformers renames them when it loads the model."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    shapes = model.state_dict()
    prefix = model.base_model_prefix
    names = {}
    for stored_name in files.tensor_files:
        name, pattern = rename_source_key(stored_name, renamings, converters, prefix, shapes)
        if name not in shapes and stored_name in shapes:
            name = stored_name
            pattern = None
        # A tensor with a pattern is one of several that make up the model's.
        if pattern is None:
            names[name] = stored_name
    return names


def read_tensor(target: str, files: CheckpointFiles, name: str, empty: Tensor) -> Tensor:
    """Read a tensor of the checkpoint in the type of the empty one that it replaces; UserError
    where it does not fit.
    """
    stored = files.read_tensor(name)
    if stored.shape != empty.shape or (
        empty.is_floating_point() and stored.dtype not in FULL_PRECISION
    ):
        kind = f"{str(stored.dtype).removeprefix('torch.')} {[*stored.shape]}"
        raise UserError(
            f"target.parts=head: {name} of {target} is {kind} and not {[*empty.shape]} in full "
            "precision; use another checkpoint, or target.parts=all"
        )
    weight = stored.to(empty.dtype)
    return nn.Parameter(weight, requires_grad=False) if isinstance(empty, nn.Parameter) else weight
