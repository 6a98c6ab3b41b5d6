"""The drafters of runs: built from settings, saved, and loaded from files of any layout."""

import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.config.build import GroupSpec
from spectrain.config.choices import list_constructors
from spectrain.config.plain_files import read_json, read_json_object
from spectrain.config.saved import parse_description
from spectrain.config.spec import RunSpec
from spectrain.data.chat_template import ChatTemplate
from spectrain.decoding.session import prepare_for_decoding
from spectrain.drafters.base import Drafter
from spectrain.drafters.layers.vocabulary import find_vocabulary_fault
from spectrain.errors import RunError, UserError, describe_error
from spectrain.export.adapters import require_plain_adapter
from spectrain.export.converter import read_drafter
from spectrain.export.drafter_files import read_config
from spectrain.export.layout import MALFORMED_ERRORS, DrafterCheckpoint
from spectrain.export.targets import TargetFiles
from spectrain.files import REPEAT_COMMAND, atomic_write
from spectrain.models.checked_tensors import (
    MAX_DRAFTER_TENSORS,
    has_finite_values,
    read_tensors,
    save_tensors,
)
from spectrain.models.loading import build_meta_network
from spectrain.models.target import Target
from spectrain.provenance import package_versions
from spectrain.training.checkpoints import (
    TrainingResult,
    collect_tensors,
    find_mismatches,
    load_tensors,
)

from .folder import (
    find_drafter_directory,
    find_shipped,
    find_trained_target,
    list_shipped,
)

DESCRIBED_GROUPS = ("drafter", "target", "tree", "acceptance")
"""Groups that a drafter's own description holds."""


def save_drafter(
    directory: Path,
    drafter: Drafter,
    spec: RunSpec,
    result: TrainingResult | None = None,
    remedy: str = REPEAT_COMMAND,
    template: ChatTemplate | None = None,
) -> None:
    """Write config.json and model.safetensors, which are enough to load the drafter; `result` adds
    the cost of its training, and `template` the chat template that rendered its data."""
    description: dict[str, Any] = {
        group.group: group.save() or None
        for group in (spec.drafter, spec.target, spec.tree, spec.acceptance)
    }
    description["drafter"] = {**spec.drafter.save(), **drafter.saved.settings}
    description |= {"recipe": spec.name, "spectrain_version": package_versions().get("spectrain")}
    if template is not None:
        description["chat_template"] = template.facts()
    if result is not None:
        description["training"] = {
            "steps": result.num_steps,
            "tokens": result.num_tokens,
            "seconds": round(result.seconds, 2),
            "parameters": result.num_parameters,
            "taken": result.result_step,
            "max_length": result.max_text_length,
        }
        gain = result.gain
        if gain is not None:
            description["training"] |= {
                "forecast_at_start": gain.start,
                "forecast": gain.end,
                "gain_interval": gain.interval,
                "places": gain.num_places,
            }
    files: dict[str, dict[str, Tensor]] = {"model.safetensors": {}}
    layout = drafter.saved.layout
    for name, tensor in collect_tensors(drafter).items():
        file, there = layout.get(name, ("model.safetensors", name))
        files.setdefault(file, {})[there] = tensor
    with atomic_write(directory, folder=True, remedy=remedy) as scratch:
        for file, tensors in files.items():
            save_tensors(tensors, scratch / file)
        for file, text in drafter.saved.sidecars.items():
            (scratch / file).write_text(text)
        (scratch / "config.json").write_text(json.dumps(description, indent=2) + "\n")


def build_drafter(spec: GroupSpec, target: Target) -> Drafter:
    """Build the drafter that settings describe; inner drafters that are directories are loaded
    with their weights.
    """
    directories = list_inner_directories(spec)
    settings = dict(spec.settings)
    for key, index, directory in directories:
        description = load_description(directory, None).drafter.save()
        if index is None:
            settings[key] = description
        else:
            settings[key] = [*settings[key][:index], description, *settings[key][index + 1 :]]
        spec = replace(spec, settings=settings).named_by(directory)
    drafter: Drafter = spec.build(target=target)
    for key, index, directory in directories:
        inner = getattr(drafter, key)
        load_weights(inner if index is None else inner[index], directory, target)
    drafter.saved = replace(
        drafter.saved,
        origins=tuple(directory for _, _, directory in directories),
        read=find_named_files(settings),
    )
    return drafter


def find_named_files(settings: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files that settings of a drafter name, by setting. A model is none of them: it is
    where a training starts, and its weights are in the checkpoints.
    """
    paths = {
        key: Path(value).expanduser()
        for key, value in settings.items()
        if isinstance(value, str) and key != "model"
    }
    return {key: path for key, path in paths.items() if path.is_file()}


def list_inner_directories(spec: GroupSpec) -> list[tuple[str, int | None, Path]]:
    """Return the inner drafters in directories: setting, index in its list, directory."""
    # What loads a shipped drafter is a function, which takes no other drafter.
    constructor: Any = spec.load_constructor()
    is_class = isinstance(constructor, type) and issubclass(constructor, Drafter)
    keys = constructor.saved.inner if is_class else ()
    directories: list[tuple[str, int | None, Path]] = []
    for key in keys:
        value = spec.settings.get(key)
        for index, name in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(name, str) and name not in list_constructors("drafter"):
                directories.append((key, index, _find_inner_directory(key, name)))
    return directories


def build_without_weights(
    spec: RunSpec, device: str = "cpu", target: Target | None = None
) -> tuple[Target, Drafter]:
    """Return target and drafter on torch's device "meta": only the target's configuration is read,
    unless `target` is given. `device` is where they are to run."""
    target = target or build_target_without_weights(spec, device)
    with on_meta_device():
        drafter: Drafter = spec.drafter.build(target=target)
    return target, drafter


def build_target_without_weights(spec: RunSpec, device: str = "cpu") -> Target:
    """Return the target on torch's device "meta", with its tokenizer; `device` is where it is to
    run.

    A UserError is raised for a kind of target that only exists with its weights.
    """
    if "network" not in inspect.signature(spec.target.load_constructor()).parameters:
        raise UserError(
            f"target={spec.target.choice}: it is built with its weights alone, and none are read "
            "here; name a target of transformers, as in target=hf target.model=DIR"
        )
    with on_meta_device():
        target: Target = spec.target.build(network=build_meta_network, device=device)
    return target


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Build without weights, and without the warnings that a training prints."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        yield


def _find_inner_directory(key: str, value: str) -> Path:
    directory = find_drafter_directory(Path(value))
    if directory is None:
        raise UserError(
            f"drafter.{key}={value}: there is no drafter in it; give a run folder, a drafter "
            "directory or a choice"
        )
    return directory


def load_drafter(spec: RunSpec, run: Path, target: Target) -> Drafter:
    """Build the drafter of `spec`, with the weights of `run` if it is a run folder or a drafter
    directory.
    """
    directory = find_drafter_directory(run)
    with nullcontext() if directory is None else explain_malformed(directory):
        drafter = build_drafter(spec.drafter, target)
    if directory is None:
        return drafter
    try:
        load_weights(drafter, directory, target)
    except UserError as error:
        refuse_other_target(run, directory, spec.target, target, error)
        raise
    if drafter.capabilities.target_training and find_trained_target(run) is None:
        raise UserError(
            f"run={run}: the drafter belongs to the target that was trained with it; keep its "
            "folder target beside it"
        )
    return drafter


def refuse_other_target(
    run: Path, directory: Path, requested: GroupSpec, target: Target, error: UserError
) -> None:
    """Raise a UserError where weights do not fit because the drafter was made for another target
    than the requested one.
    """
    made_for = load_description(directory, None).target
    if not made_for or not requested:
        return
    words, words_of_drafter = (name_choice(group) for group in (requested, made_for))
    if words != words_of_drafter:
        raise UserError(
            f"run={run}: its drafter is for {words_of_drafter}, and {target.name} is another "
            f"model; leave out {words}, or train a drafter for it"
        ) from error


def name_choice(target: GroupSpec) -> str:
    """Return the words that choose a target."""
    model = target.settings.get("model")
    return f"target={target.choice}" + ("" if model is None else f" target.model={model}")


@contextmanager
def explain_malformed(directory: Path) -> Iterator[None]:
    """Turn what a constructor raises for settings of a wrong type into a UserError that names
    the drafter's directory.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except (*MALFORMED_ERRORS, KeyError) as error:
        raise UserError(
            f"{directory}: no drafter can be built from its settings ({describe_error(error)}); "
            "copy its files again, or leave out what the command changes of drafter"
        ) from error


def load_for_decoding(directory: Path, target: Target) -> Drafter:
    """Return the drafter of a drafter directory, with its own settings, as it decodes."""
    spec = RunSpec(drafter=read_family(directory, target).named_by(directory))
    return prepare_for_decoding(load_drafter(spec, directory, target), target)


def read_family(directory: Path, target: Target) -> GroupSpec:
    """Return the settings of the drafter in a directory; those of another project are read for a
    target.
    """
    made_for = None if is_native(directory) else TargetFiles(target.path).spec
    return load_description(directory, made_for).drafter


def load_weights(drafter: Drafter, directory: Path, target: Target | None = None) -> None:
    """Load weights that `save_drafter` or another project wrote.

    A tensor that is missing, unknown, of another shape or not finite raises an error with its name,
    and nothing is loaded then.
    """
    layout = drafter.saved.layout
    weights: dict[str, Tensor] = {}
    home = {name: file for name, (file, _) in layout.items()}
    if is_native(directory):
        names = {location: name for name, location in layout.items()}
        for file in dict.fromkeys(["model.safetensors", *(file for file, _ in names)]):
            stored = read_tensors(directory / file, "copy the file again", MAX_DRAFTER_TENSORS)
            tensors = {names.get((file, there), there): tensor for there, tensor in stored.items()}
            weights = weights | tensors
            home = home | dict.fromkeys(tensors, file)
            if file == "adapter_model.safetensors":
                require_plain_adapter(directory, stored)
    else:
        ours = {there: name for name, (_, there) in layout.items()}
        foreign = read_drafter(
            directory, None if target is None else TargetFiles(target.path)
        ).tensors
        weights = {ours.get(there, there): tensor for there, tensor in foreign.items()}
    for name, fault in find_mismatches(drafter, weights):
        path = directory / home.get(name, "model.safetensors")
        raise UserError(f"{path}: it does not fit the drafter in config.json: {fault}")
    for name, tensor in weights.items():
        if not has_finite_values(tensor):
            path = directory / home.get(name, "model.safetensors")
            raise UserError(
                f"{path}: {name} holds NaN or infinity, so its training diverged; take an earlier "
                "checkpoint"
            )
    contradiction = find_vocabulary_fault(weights)
    if contradiction is not None:
        path = directory / "model.safetensors"
        raise UserError(f"{path}: {contradiction}; copy the drafter's files again")
    load_tensors(drafter, weights)


def is_native(directory: Path) -> bool:
    """Tell whether `save_drafter` wrote a directory; otherwise it is an export or belongs to
    another project.
    """
    if not (directory / "config.json").exists():  # peft has no such file
        return False
    config = read_json(directory / "config.json")
    return not isinstance(config, dict) or "drafter" in config


def load_description(directory: Path, target: GroupSpec | None) -> RunSpec:
    """Return the settings of a drafter, its target, tree and acceptance rule from config.json, and
    the name of its recipe.

    The config of another project is translated, with the `target` that the command names.
    """
    if is_native(directory):
        description = parse_description(read_config(directory), directory / "config.json")
    else:
        description = translate_description(directory, target.node if target else None)
    spec = RunSpec.from_nodes({key: description.get(key) for key in DESCRIBED_GROUPS})
    return replace(spec, recipe_name=description.get("recipe"))


def translate_description(directory: Path, target: Any) -> dict[str, Any]:
    """Return the description of another project's drafter, groups as nodes; `target` is the node
    of the target that the command names, or None.
    """
    foreign: DrafterCheckpoint = read_drafter(
        directory, None if target is None else TargetFiles.from_settings(target)
    )
    if target is None and foreign.target is not None:
        target = TargetFiles(foreign.target).settings
        foreign = read_drafter(directory, TargetFiles(foreign.target, may_download=False))
    if target is None:
        raise UserError(
            f"target: the files in {directory} do not say which target they are for; say it, as "
            "in target=tiny"
        )
    return {"drafter": foreign.spec.node, "target": target, **foreign.description}


def load_facts(run: Path, name: str) -> dict[str, Any] | None:
    """Return what a drafter's config.json records by a name: `training`, with its steps, tokens,
    seconds and trained parameters, or `chat_template`, with its hash and arguments; None if it is
    not recorded.
    """
    directory = find_drafter_directory(run)
    if directory is None or not is_native(directory):
        return None
    facts = read_json_object(directory / "config.json").get(name)
    return facts if isinstance(facts, dict) else None


# Shipped with a package, each for one target


def find_shipped_drafter(target: Target) -> str | None:
    """Return the name of the drafter that ships for a target, or None."""
    names = [drafter.name for drafter in list_shipped() if drafter.model == target.name]
    return names[0] if names else None


def smollm2_eagle3(target: Target) -> Drafter:
    """Load EAGLE-3 for SmolLM2-135M-Instruct; its config.json records its training."""
    return load_shipped_drafter("smollm2-eagle3", target)


def load_shipped_drafter(name: str, target: Target) -> Drafter:
    """Load a shipped drafter with its weights; raise a UserError if they do not fit the target."""
    shipped = find_shipped(name)
    assert shipped is not None, "its package names it"
    try:
        family = read_family(shipped.folder, target)
        drafter: Drafter = family.build(target=target)
        load_weights(drafter, shipped.folder, target)
    except UserError as error:
        raise UserError(
            f"drafter={name}: it is for target={shipped.target}, and {target.name} is another "
            f"model; train one for it, as in spectrain train recipe=eagle3 target={target.name}"
        ) from error
    return drafter
