"""Settings that commands take from the run that they name: its files are a layer between conf/ and
the command.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectrain.config.build import GroupSpec, to_containers
from spectrain.config.resolve import LowerLayers, default_group
from spectrain.config.spec import RunSpec, read_run
from spectrain.errors import UserError

from .drafters import DESCRIBED_GROUPS, load_description
from .folder import find_drafter_directory, require_drafter_directory

SCORED_GROUPS = ("target", "drafter", "tree", "acceptance", "eval")


def resolve_eval_spec(config: Mapping[str, Any]) -> tuple[RunSpec, Path]:
    """Return the complete settings of an evaluation or a chat, and the folder that its results
    belong to.

    Its groups are null in conf/, so the command sets all that is composed.
    """
    requested = to_containers(config)
    requested.pop("serve", None)
    template_arguments = read_template_arguments(requested.pop("data", None) or {})
    run = requested.get("run")
    has_choice = "_target_" in (requested.get("drafter") or {})
    if run is None and not has_choice:
        raise UserError(
            "run: say whose drafter, as in run=runs/NAME, or run=DIR of a drafter directory, or "
            "take one that needs no training, as in drafter=ngram"
        )
    folder = Path("runs") / "eval" if run is None else Path(run)
    defaults = {group: default_group(group).node for group in (*SCORED_GROUPS, "trainer")}
    saved: dict[str, Any] = {}
    if run is not None and not (has_choice and find_drafter_directory(folder) is None):
        target = GroupSpec.from_node("target", requested.get("target"))
        saved = load_saved_settings(folder, target, ("data", "trainer", "eval"))
    lower = LowerLayers(defaults, saved, None if run is None else folder)
    spec, _ = read_run({**requested, "run": str(folder)}, overrides=None, lower=lower)
    for group in ("target", "data") if template_arguments else ():
        if getattr(spec, group):
            arguments = getattr(spec, group).settings.get("template_kwargs") or {}
            spec = spec.with_settings(group, template_kwargs={**arguments, **template_arguments})
    return complete_evaluation(spec), folder


def read_template_arguments(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data.template_kwargs, the only setting of data that a score or a chat takes from
    its command.
    """
    for key in data:
        if key not in ("template_kwargs", "_target_"):
            raise UserError(
                f"data.{key}: a score and a chat read no data; of this group they take "
                "data.template_kwargs alone"
            )
    return dict(data.get("template_kwargs") or {})


def complete_evaluation(spec: RunSpec) -> RunSpec:
    """Return the spec with what follows from the settings of the evaluation that the command
    names: its limit, its name, and whether it measures trees.
    """
    evaluation = spec.eval
    has_prompts = evaluation.settings.get("prompts") is not None
    has_own_prompts = has_prompts and evaluation.find_layer("prompts") == "command"
    if has_own_prompts and evaluation.find_layer("limit") != "command":
        # The run's limit was for the run's own prompts.
        evaluation = evaluation.drop_setting("limit")
    if has_prompts and "name" not in evaluation.settings:
        evaluation = evaluation.with_settings(
            name=Path(str(evaluation.settings.get("prompts"))).stem
        )
    return replace(spec, eval=evaluation).with_default_tree()


def load_saved_settings(
    folder: Path, target: GroupSpec, groups: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the settings of a run folder or a drafter directory as nodes: those of the drafter's
    description and, of the run, those of `groups`. `target` is the command's own target, if any.
    """
    directory = require_drafter_directory("run", folder)
    description = load_description(directory, target)
    if not description.target and not target:
        raise UserError(
            f"{directory / 'config.json'}: it does not say which target it is for; say it, as in "
            "target=tiny"
        )
    saved = [getattr(description, group) for group in DESCRIBED_GROUPS]
    if (folder / "config.yaml").exists():
        spec = RunSpec.load(folder / "config.yaml")
        saved += [getattr(spec, group) for group in groups]
    nodes: dict[str, Any] = {group.group: group.node for group in saved if group}
    return {**nodes, "recipe_name": description.recipe_name}
