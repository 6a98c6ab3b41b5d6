"""The files of a drafter: written after training, and read from any layout."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.config.build import GroupSpec
from spectrain.config.choices import list_constructors
from spectrain.config.saved import parse_description, read_json, read_json_object
from spectrain.config.spec import RunSpec
from spectrain.drafters.base import Drafter
from spectrain.errors import RunError, UserError, first_line
from spectrain.export.converter import read_drafter
from spectrain.export.layout import DrafterCheckpoint
from spectrain.export.targets import TargetFiles
from spectrain.files import REPEAT_COMMAND, atomic_write
from spectrain.models.chat_template import ChatTemplate
from spectrain.models.target import Target
from spectrain.provenance import package_versions
from spectrain.training.checkpoints import collect_tensors, find_mismatches, load_tensors
from spectrain.training.state import TrainingResult

from .folder import find_trained_target
from .paths import find_drafter_directory


def save_drafter(
    directory: Path,
    drafter: Drafter,
    spec: RunSpec,
    result: TrainingResult | None = None,
    remedy: str = REPEAT_COMMAND,
    template: ChatTemplate | None = None,
) -> None:
    """Write config.json and model.safetensors, which are enough to load the drafter; `result` adds the cost of its
    training, and `template` the chat template that rendered its data."""
    description: dict[str, Any] = {
        group.group: group.save() or None for group in (spec.drafter, spec.target, spec.tree, spec.acceptance)
    }
    description["drafter"] = {**spec.drafter.save(), **drafter.saved.settings}
    description |= {"recipe": spec.name, "spectrain_version": package_versions().get("spectrain")}
    if template is not None:
        description["chat_template"] = template.facts()
    if result is not None:
        description["training"] = {"steps": result.num_steps, "tokens": result.num_tokens, "seconds": round(result.seconds, 2),
                                   "parameters": result.num_parameters, "taken": result.result_step}  # fmt: skip
    files: dict[str, dict[str, Tensor]] = {"model.safetensors": {}}
    layout = drafter.saved.layout
    for name, tensor in collect_tensors(drafter).items():
        file, there = layout.get(name, ("model.safetensors", name))
        files.setdefault(file, {})[there] = tensor
    with atomic_write(directory, folder=True, remedy=remedy) as scratch:
        for file, tensors in files.items():
            save_file(tensors, scratch / file, metadata={"format": "pt"})
        for file, text in drafter.saved.sidecars.items():
            (scratch / file).write_text(text)
        (scratch / "config.json").write_text(json.dumps(description, indent=2) + "\n")


def build_drafter(spec: GroupSpec, target: Target) -> Drafter:
    """Build the drafter that settings describe; inner drafters that are directories are loaded with their weights."""
    constructor: Any = spec.load_constructor()
    keys = constructor.saved.inner if hasattr(constructor, "saved") else ()
    # Inner drafters in directories: setting, index in its list, directory.
    directories: list[tuple[str, int | None, Path]] = []
    for key in keys:
        value = spec.get(key)
        for index, name in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(name, str) and name not in list_constructors("drafter"):
                directories.append((key, index, _find_inner_directory(key, name)))
    for key, index, directory in directories:
        description: Any = GroupSpec.from_node("drafter", load_description(directory, None)["drafter"]).save()
        if index is not None:
            description = [*spec.get(key)[:index], description, *spec.get(key)[index + 1 :]]
        spec = spec.with_settings(**{key: description})
    drafter: Drafter = spec.build(target=target)
    for key, index, directory in directories:
        inner = getattr(drafter, key)
        load_weights(inner if index is None else inner[index], directory, target)
    return drafter


def _find_inner_directory(key: str, value: str) -> Path:
    directory = find_drafter_directory(Path(value))
    if directory is None:
        raise UserError(f"drafter.{key}={value}: there is no drafter in it; give a run folder, a drafter directory or a choice")
    return directory


def load_drafter(spec: RunSpec, run: Path, target: Target) -> Drafter:
    """Build the drafter of `spec`, with the weights of `run` if it is a run folder or a drafter directory."""
    drafter = build_drafter(spec.drafter, target)
    directory = find_drafter_directory(run)
    if directory is not None:
        load_weights(drafter, directory, target)
        if drafter.capabilities.target_training and find_trained_target(run) is None:
            raise UserError(
                f"run={run}: the drafter belongs to the target that was trained with it; keep its folder target beside it"
            )
    return drafter


def load_weights(drafter: Drafter, directory: Path, target: Target | None = None) -> None:
    """Load weights that `save_drafter` or another project wrote.

    A tensor that is missing, unknown, of another shape or not finite raises an error with its name, and nothing is loaded
    then.
    """
    layout = drafter.saved.layout
    weights: dict[str, Tensor] = {}
    home = {name: file for name, (file, _) in layout.items()}
    if is_native(directory):
        names = {location: name for name, location in layout.items()}
        for file in dict.fromkeys(["model.safetensors", *(file for file, _ in names)]):
            tensors = {names.get((file, there), there): tensor for there, tensor in load_safetensors(directory / file).items()}
            weights, home = weights | tensors, home | dict.fromkeys(tensors, file)
    else:
        ours = {there: name for name, (_, there) in layout.items()}
        foreign = read_drafter(directory, None if target is None else TargetFiles(target.path)).tensors
        weights = {ours.get(there, there): tensor for there, tensor in foreign.items()}
    for name, fault in find_mismatches(drafter, weights):
        path = directory / home.get(name, "model.safetensors")
        raise UserError(f"{path}: it does not fit the drafter in config.json: {fault}")
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            path = directory / home.get(name, "model.safetensors")
            raise RunError(f"{path}: {name} holds NaN or infinity, so its training diverged; take an earlier checkpoint")
    load_tensors(drafter, weights)


def load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: the drafter's weights cannot be read ({first_line(error)}); copy the file again") from error
    return tensors


def is_native(directory: Path) -> bool:
    """Tell whether `save_drafter` wrote a directory; otherwise it is an export or belongs to another project."""
    if not (directory / "config.json").exists():  # peft has no such file
        return False
    config = read_json(directory / "config.json")
    return not isinstance(config, dict) or "drafter" in config


def load_description(directory: Path, target: GroupSpec | None) -> dict[str, Any]:
    """Return the settings of a drafter, its target, tree and acceptance rule from config.json.

    The config of another project is translated, with the `target` that the command names.
    """
    settings: Any = target.node if target else None
    if is_native(directory):
        path = directory / "config.json"
        return parse_description(read_json(path), path)
    foreign: DrafterCheckpoint = read_drafter(directory, TargetFiles.from_settings(settings) if settings else None)
    if settings is None and foreign.target is not None:
        settings = TargetFiles(foreign.target).settings
        foreign = read_drafter(directory, TargetFiles(foreign.target))
    if settings is None:
        raise UserError(f"target: the files in {directory} do not say which target they are for; say it, as in target=tiny")
    return {"drafter": foreign.drafter, "target": settings, **foreign.description}


def load_training_facts(run: Path) -> dict[str, Any] | None:
    """Return the cost of a drafter's training: steps, tokens, seconds and trained parameters; None if it is not recorded."""
    directory = find_drafter_directory(run)
    if directory is None or not is_native(directory):
        return None
    facts: dict[str, Any] | None = read_json_object(directory / "config.json").get("training")
    return facts
