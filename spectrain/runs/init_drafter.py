"""A drafter at the start of training: new, or with drafter.init the drafter of another directory."""

from dataclasses import replace

import torch

from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, has_weights
from spectrain.drafters.capabilities import adapts_layers
from spectrain.errors import UserError
from spectrain.models.target import Target

from .drafter_files import build_drafter, load_description, load_weights
from .paths import require_drafter_directory
from .shipped_drafters import is_shipped


def init_drafter(spec: RunSpec, target: Target, dataset: Dataset) -> Drafter:
    """Return a drafter at the start of training: prepared on the data, or with drafter.init the weights of another drafter."""
    name, init = spec.drafter.choice, spec.drafter.get("init")
    if is_shipped(spec.drafter):
        raise UserError(f"drafter={name}: it is trained; go on with its family's recipe and drafter.init={name}")
    torch.manual_seed(spec.trainer.get("seed", 0))
    drafter = build_drafter(spec.drafter, target)
    if init and not has_weights(drafter):
        raise UserError(
            f"drafter.init={init}: this family has no weights beside the target's; go on from a trained target, "
            "as in target=hf target.model=RUN/target"
        )
    adapts = adapts_layers(drafter) and target.sharding == "tensor"
    if target.sharding != "none" and (drafter.capabilities.target_training or adapts):
        raise UserError(
            f"target.sharding={target.sharding}: this family changes what the target's layers compute, so each process needs "
            "them whole; leave it out, or use trainer.sharding=zero3 where the target trains"
        )
    if not is_trainable(drafter):
        raise UserError(f"drafter={name}: it has nothing to train; score it with spectrain eval drafter={name}")
    drafter.prepare(target, dataset.token_counts(target.head.vocab_size))
    if init:
        load_weights(drafter, require_drafter_directory("drafter.init", init), target)
    return drafter


def is_trainable(drafter: Drafter) -> bool:
    """Tell whether training changes any parameter, the drafter's or the target's."""
    return bool(drafter.capabilities.target_training) or any(
        parameter.requires_grad for stage in drafter.stages for group in stage.groups for parameter in group["params"]
    )


def apply_init_shape(spec: RunSpec) -> RunSpec:
    """With drafter.init, return the spec with the settings that its weights determine; a conflicting override raises a
    UserError."""
    if not spec.drafter.get("init"):
        return spec
    directory = require_drafter_directory("drafter.init", spec.drafter.get("init"))
    saved = GroupSpec.from_node("drafter", load_description(directory, spec.target)["drafter"])
    if saved.choice != spec.drafter.choice:
        raise UserError(f"drafter.init={directory}: it holds drafter={saved.choice}; choose the recipe of that family")
    drafter = spec.drafter
    for key in saved.load_constructor().saved.shape:
        if spec.overrides_key(f"drafter.{key}") and drafter.get(key) != saved.get(key):
            raise UserError(f"drafter.{key}={drafter.get(key)}: the drafter in {directory} has {saved.get(key)}; leave it out")
        drafter = drafter.with_settings(**{key: saved.get(key)}) if key in saved.settings else drafter.drop_setting(key)
    return replace(spec, drafter=drafter)
