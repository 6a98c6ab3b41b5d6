"""The start of a training: its drafter, new or with the weights of another one, and the settings
that those weights determine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, adapts_layers, has_weights
from spectrain.errors import UserError
from spectrain.models.target import Target

from .drafters import build_drafter, load_description, load_weights
from .folder import find_shipped, require_drafter_directory


def init_drafter(spec: RunSpec, target: Target, dataset: Dataset) -> Drafter:
    """Return a drafter at the start of training: prepared on the data, or with drafter.init the
    weights of another drafter.
    """
    name = spec.drafter.choice
    init = spec.init
    if find_shipped(str(name)) is not None:
        raise UserError(
            f"drafter={name}: it is trained; go on with its family's recipe and drafter.init={name}"
        )
    torch.manual_seed(spec.trainer.settings.get("seed", 0))
    drafter = build_drafter(spec.drafter, target)
    if init and not has_weights(drafter):
        raise UserError(
            f"drafter.init={init}: this family has no weights beside the target's; go on from a "
            "trained target, as in target=hf target.model=RUN/target"
        )
    adapts = adapts_layers(drafter) and target.sharding == "tensor"
    if target.sharding != "none" and (drafter.capabilities.target_training or adapts):
        raise UserError(
            f"target.sharding={target.sharding}: this family changes what the target's layers "
            "compute, so each process needs them whole; leave it out, or use "
            "trainer.sharding=zero3 where the target trains"
        )
    if not is_trainable(drafter):
        raise UserError(
            f"drafter={name}: it has nothing to train; score it with spectrain eval drafter={name}"
        )
    drafter.prepare(target, dataset.token_counts(target.head.vocab_size))
    if init:
        directory = require_drafter_directory("drafter.init", init)
        load_weights(drafter, directory, target)
        drafter.saved = replace(drafter.saved, origins=(directory, *drafter.saved.origins))
        drafter.starts_trained = True
        drafter.capabilities = replace(drafter.capabilities, initial_fit=None)
    adapt_drafter(spec, drafter, target)
    return drafter


def adapt_drafter(spec: RunSpec, drafter: Drafter, target: Target) -> None:
    """Add the adapters of `adapter=`, if it is set, to a drafter that continues its training."""
    adapter = spec.adapter.build()
    if adapter is None:
        return
    if not spec.init:
        raise UserError(
            f"adapter={spec.adapter.choice}: it continues the training of a drafter; name one, as "
            "in drafter.init=runs/NAME"
        )
    adapter.adapt_drafter(drafter, target.head.vocab_size)


def is_trainable(drafter: Drafter) -> bool:
    """Tell whether training changes any parameter, the drafter's or the target's."""
    return bool(drafter.capabilities.target_training) or any(
        parameter.requires_grad
        for stage in drafter.stages
        for group in stage.groups
        for parameter in group["params"]
    )


def apply_init_shape(spec: RunSpec) -> RunSpec:
    """With drafter.init, return the spec with the settings that its weights determine; a
    conflicting override raises a UserError."""
    if not spec.init:
        return spec
    drafter = spec.drafter
    directory = require_drafter_directory("drafter.init", spec.init)
    saved = load_description(directory, spec.target).drafter
    if saved.choice != drafter.choice:
        raise UserError(
            f"drafter.init={directory}: it holds drafter={saved.choice}; choose the recipe of "
            "that family"
        )
    files = saved.load_constructor().saved
    settings = dict(drafter.settings)
    for key in files.shape:
        value = saved.settings.get(key)
        requested = settings.get(key)
        if drafter.find_layer(key) == "command" and requested != value:
            settings[key] = adjust_setting(key, requested, value, files.adjustable, directory)
        elif key in saved.settings:
            settings[key] = value
        else:
            # The weights are for the constructor's default.
            settings.pop(key, None)
    return replace(spec, drafter=replace(drafter, settings=settings))


def adjust_setting(
    key: str, value: Any, saved: Any, adjustable: Sequence[str], directory: Path
) -> Any:
    """Return a setting of a drafter that continues, from the command's value and the saved one;
    raise a UserError where the weights are for the saved value. Keys of a mapping that the command
    leaves out keep their saved values."""
    if key in adjustable:
        return value
    if isinstance(value, Mapping) and isinstance(saved, Mapping | None):
        merged = dict(saved or {})
        for name, entry in value.items():
            if f"{key}.{name}" not in adjustable and entry != merged.get(name):
                raise make_conflict(f"{key}.{name}", entry, merged.get(name), directory)
            merged[name] = entry
        return merged
    raise make_conflict(key, value, saved, directory)


def make_conflict(key: str, value: Any, saved: Any, directory: Path) -> UserError:
    """Return the error for a setting that differs from the one that the weights in a directory
    are for.
    """
    return UserError(f"drafter.{key}={value}: the drafter in {directory} has {saved}; leave it out")
