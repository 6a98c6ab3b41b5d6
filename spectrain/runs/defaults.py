"""Settings that `spectrain eval` and `chat` take from elsewhere: from the run, then from the
defaults of training.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import OmegaConf

from spectrain.config.build import GroupSpec, to_containers
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError

from .drafters import load_description
from .folder import find_drafter_directory, require_drafter_directory

SCORED_GROUPS = ("target", "drafter", "tree", "acceptance", "eval")


def resolve_eval_spec(config: Mapping[str, Any]) -> tuple[RunSpec, Path]:
    """Return the complete settings of an evaluation or a chat, and the folder that its results
    belong to.

    A group that the command chooses (tree=chain) replaces the run's group; a single key
    (tree.depth=4) changes it.
    """
    requested = to_containers(config)
    requested.pop("serve", None)
    template_arguments = read_template_arguments(requested.pop("data", None) or {})
    has_choice = "_target_" in (requested.get("drafter") or {})
    if requested["run"] is None and not has_choice:
        raise UserError(
            "run: say whose drafter, as in run=runs/NAME, or run=DIR of a drafter directory, or "
            "take one that needs no training, as in drafter=ngram"
        )
    defaults = to_containers(compose("train", overrides=["drafter=ngram"]))
    groups = {key: defaults[key] for key in (*SCORED_GROUPS, "trainer")}
    folder = Path("runs") / "eval" if requested["run"] is None else Path(requested["run"])
    if requested["run"] is not None:
        groups |= load_saved_settings(
            folder, has_choice, GroupSpec.from_node("target", requested.get("target"))
        )
    for group in SCORED_GROUPS:
        settings = requested.get(group)
        if settings is not None:
            is_change = "_target_" not in settings and groups.get(group)
            groups[group] = (
                to_containers(OmegaConf.merge(groups[group], settings)) if is_change else settings
            )
    for group in ("target", "data") if template_arguments else ():
        if groups.get(group):
            groups[group]["template_kwargs"] = {
                **(groups[group].get("template_kwargs") or {}),
                **template_arguments,
            }
    complete_evaluation(
        groups["eval"], requested.get("eval") or {}, has_tree=bool(requested.get("tree"))
    )
    # The check reports any key that is left and unknown.
    others = {key: value for key, value in requested.items() if key not in groups}
    spec = RunSpec.from_config({**groups, **others, "run": str(folder)})
    return spec if requested["run"] is None else spec.named_by(folder, requested), folder


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


def complete_evaluation(
    evaluation: dict[str, Any], requested: Mapping[str, Any], has_tree: bool
) -> None:
    """Add to the merged settings of an evaluation what follows from those that the command
    itself names.
    """
    if requested.get("prompts") is not None and "limit" not in requested:
        # The run's limit was for the run's own prompts.
        evaluation.pop("limit", None)
    if evaluation.get("prompts") is not None and "name" not in evaluation:
        evaluation["name"] = Path(evaluation["prompts"]).stem
    if (
        "_target_" in evaluation
        and "measured" not in requested
        and (has_tree or "measured" not in evaluation)
    ):
        evaluation["measured"] = not has_tree


def load_saved_settings(folder: Path, has_choice: bool, target: GroupSpec) -> dict[str, Any]:
    """Return the settings of a run folder or a drafter directory; `target` is the command's own
    target, if any.
    """
    if has_choice and find_drafter_directory(folder) is None:
        return {}
    directory = require_drafter_directory("run", folder)
    description = load_description(directory, target)
    if not description.get("target") and not target:
        raise UserError(
            f"{directory / 'config.json'}: it does not say which target it is for; say it, as in "
            "target=tiny"
        )
    saved = {
        key: description[key]
        for key in ("drafter", "target", "tree", "acceptance")
        if description.get(key)
    }
    saved["recipe_name"] = description.get("recipe")
    if (folder / "config.yaml").exists():
        spec = RunSpec.load(folder / "config.yaml")
        saved |= {
            group.group: group.node for group in (spec.data, spec.trainer, spec.eval) if group
        }
    return saved
