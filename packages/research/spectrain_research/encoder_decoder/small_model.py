"""Smaller encoder-decoder models, with which `drafter=causal` drafts for a target that has an
encoder.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from spectrain.drafters.layers.small_models import check_tokenizer
from spectrain.errors import UserError, first_line
from spectrain.models.check import check_weights
from spectrain.models.pretrained import check_model_files, load_pretrained
from spectrain.models.target import SmallModelOrigin, Target

DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
"""The configuration's names for the number of decoder layers."""


def make_small_network(target: Target, origin: SmallModelOrigin) -> Any:
    """Make a smaller model with an encoder of its own: `num_layers` decoder layers of the target,
    evenly spaced, with a copy of its encoder; a directory or a name on the hub; or a transformers
    configuration with random weights."""
    if origin.model is not None:
        return load_network(origin.model, target)
    if origin.architecture is not None:
        return init_network(origin.architecture, type(target.model.model))
    return cut_network(
        target, max(1, target.num_layers // 4) if origin.num_layers is None else origin.num_layers
    )


def load_network(path: str, target: Target) -> Any:
    """Load a small model whose tokenizer is the target's."""
    try:
        check_model_files(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        kind: Any = type(target.model.model)
        network = load_pretrained(
            kind, path, "drafter.model", dtype=torch.float32, use_safetensors=True
        )
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"drafter.model={path}: it cannot be loaded ({first_line(error)}); use a directory"
        ) from error
    check_weights(network, f"drafter.model={path}")
    check_tokenizer(tokenizer, target.tokenizer, path)
    return network


def init_network(architecture: dict[str, Any], kind: Any) -> Any:
    """Make a model of a transformers configuration, of the target's class, with random weights."""
    settings = dict(architecture)
    try:
        config = AutoConfig.for_model(
            settings.pop("model_type", kind.config_class.model_type), **settings
        )
        return kind(config).float()
    # Arbitrary settings may raise any error.
    except Exception as error:
        raise UserError(
            f"drafter.architecture: transformers cannot build it ({first_line(error)}); correct "
            "its settings"
        ) from error


def cut_network(target: Target, num_layers: int) -> Any:
    """Copy the target with `num_layers` evenly spaced decoder layers, the first one among them."""
    if not 1 <= num_layers < target.num_layers:
        raise UserError(
            f"drafter.num_layers={num_layers}: {target.name} has {target.num_layers} layers; use "
            "fewer, at least 1"
        )
    network: Any = target.model.model
    config = copy.deepcopy(network.config)
    name = next(name for name in DECODER_LAYERS if hasattr(config, name))
    setattr(config, name, num_layers)
    copied = sorted(
        {
            round(index * (target.num_layers - 1) / max(num_layers - 1, 1))
            for index in range(num_layers)
        }
    )
    small = type(network)(config)
    prefix = (
        next(prefix for prefix, module in network.named_modules() if module is target.layers) + "."
    )
    small.load_state_dict(
        {
            _rename(name, prefix, copied): tensor
            for name, tensor in network.state_dict().items()
            if _is_copied(name, prefix, copied)
        }
    )
    return small.float()


def _is_copied(name: str, prefix: str, copied: list[int]) -> bool:
    return not name.startswith(prefix) or int(name.removeprefix(prefix).partition(".")[0]) in copied


def _rename(name: str, prefix: str, copied: list[int]) -> str:
    if not name.startswith(prefix):
        return name
    index, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{copied.index(int(index))}.{rest}"
