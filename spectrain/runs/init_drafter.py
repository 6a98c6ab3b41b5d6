"""A drafter at the start of training: new, or with drafter.init the drafter of another directory."""

from pathlib import Path

import torch
from omegaconf import DictConfig

from spectrain.config.build import import_constructor
from spectrain.config.choices import choice_name
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, has_weights
from spectrain.drafters.capabilities import adapts_layers
from spectrain.errors import UserError
from spectrain.models.target import Target

from .drafter_files import build_drafter, load_description, load_weights
from .paths import require_drafter_directory
from .shipped_drafters import is_shipped


def init_drafter(config: DictConfig, target: Target, dataset: Dataset) -> Drafter:
    """Return a drafter at the start of training: prepared on the data, or with drafter.init the weights of another drafter."""
    if is_shipped(config.drafter):
        name = choice_name("drafter", config.drafter)
        raise UserError(f"drafter={name}: it is trained; go on with its family's recipe and drafter.init={name}")
    torch.manual_seed(config.trainer.get("seed", 0))
    drafter = build_drafter(config.drafter, target)
    if config.drafter.get("init") and not has_weights(drafter):
        raise UserError(
            f"drafter.init={config.drafter.init}: this family has no weights beside the target's; go on from a trained target, "
            "as in target=hf target.model=RUN/target"
        )
    adapts = adapts_layers(drafter) and target.sharding == "tensor"
    if target.sharding != "none" and (drafter.capabilities.target_training or adapts):
        raise UserError(
            f"target.sharding={target.sharding}: this family changes what the target's layers compute, so each process needs "
            "them whole; leave it out, or use trainer.sharding=zero3 where the target trains"
        )
    if not is_trainable(drafter):
        name = choice_name("drafter", config.drafter)
        raise UserError(f"drafter={name}: it has nothing to train; score it with spectrain eval drafter={name}")
    drafter.prepare(target, dataset.token_counts(target.head.vocab_size))
    if config.drafter.get("init"):
        load_weights(drafter, find_init_directory(config), target)
    return drafter


def is_trainable(drafter: Drafter) -> bool:
    """Tell whether training changes any parameter, the drafter's or the target's."""
    return bool(drafter.capabilities.target_training) or any(
        parameter.requires_grad for stage in drafter.stages for group in stage.groups for parameter in group["params"]
    )


def find_init_directory(config: DictConfig) -> Path:
    """Return the drafter directory that drafter.init names."""
    return require_drafter_directory("drafter.init", config.drafter.init)


def apply_init_shape(config: DictConfig, overrides: list[str]) -> None:
    """With drafter.init, copy the settings that its weights determine; `overrides` are the command's own settings."""
    if not config.drafter.get("init"):
        return
    directory = find_init_directory(config)
    saved = load_description(directory, config.target)["drafter"]
    if saved["_target_"] != config.drafter["_target_"]:
        family = choice_name("drafter", saved)
        raise UserError(f"drafter.init={directory}: it holds drafter={family}; choose the recipe of that family")
    for key in import_constructor(saved).saved.shape:
        given = any(override.lstrip("+").startswith(f"drafter.{key}=") for override in overrides)
        if given and config.drafter.get(key) != saved.get(key):
            raise UserError(
                f"drafter.{key}={config.drafter.get(key)}: the drafter in {directory} has {saved.get(key)}; leave it out"
            )
        if key in saved:
            config.drafter[key] = saved[key]
        else:
            config.drafter.pop(key, None)
