"""Settings that `spectrain eval` and `chat` take from elsewhere: from the run, then from the defaults of training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf, open_dict

from spectrain.errors import UserError
from spectrain.runs.drafter_files import load_description
from spectrain.runs.folder import load_run_settings
from spectrain.runs.paths import find_drafter_directory, require_drafter_directory


def resolve_eval_config(config: DictConfig) -> tuple[DictConfig, Path]:
    """Return the complete configuration of an evaluation or a chat, and the folder that its results belong to.

    A group that the command chooses (tree=chain) replaces the run's group; a single key (tree.depth=4) changes it.
    """
    named = "_target_" in (config.get("drafter") or {})
    if config.run is None and not named:
        raise UserError(
            "run: say whose drafter, as in run=runs/NAME, or run=DIR of a drafter directory, or take one that needs no "
            "training, as in drafter=ngram"
        )
    defaults = compose("train", overrides=["drafter=ngram"])
    groups: dict[str, Any] = {key: defaults[key] for key in ("target", "drafter", "tree", "acceptance", "eval", "trainer")}
    folder = Path(config.run) if config.run is not None else Path("runs") / "eval"
    if config.run is not None:
        groups |= load_saved_settings(folder, named, config.get("target"))
    for group in ("target", "drafter", "tree", "acceptance", "eval"):
        settings = config.get(group)
        if settings is not None:
            keeps = "_target_" not in settings and groups.get(group)
            groups[group] = OmegaConf.merge(_to_container(groups[group]), _to_container(settings)) if keeps else settings
    completed = OmegaConf.create({**{k: _to_container(v) for k, v in groups.items()}, "run": str(folder)})
    prompts = completed.eval.get("prompts")
    settings = config.get("eval") or {}
    if settings.get("prompts") is not None and "limit" in completed.eval and "limit" not in settings:
        completed.eval.pop("limit")  # the run's limit was for the run's own prompts
    if prompts is not None and "name" not in completed.eval:
        with open_dict(completed):
            completed.eval.name = Path(prompts).stem
    if "_target_" in completed.eval and "measured" not in settings and (config.get("tree") or "measured" not in completed.eval):
        with open_dict(completed):
            completed.eval.measured = not config.get("tree")
    for key in config:
        if key not in completed:
            with open_dict(completed):
                completed[key] = config[key]  # unknown: the schema check will say so
    if "_target_" in (completed.get("chat") or {}) and "measured" not in completed.chat:
        with open_dict(completed):
            completed.chat.measured = not config.get("tree")
    return completed, folder


def default_tree(config: DictConfig, overrides: Sequence[str]) -> None:
    """Score the tree that is fastest on this machine first, unless the command's `overrides` name a tree."""
    groups = [word.lstrip("+~").partition("=")[0].split(".")[0] for word in overrides]
    if config.get("eval") and "_target_" in config.eval and "measured" not in config.eval:
        with open_dict(config):
            config.eval.measured = "tree" not in groups


def load_saved_settings(folder: Path, has_drafter_choice: bool, target: Any) -> dict[str, Any]:
    """Return the settings of a run folder or a drafter directory; `target` is the command's own target, if any."""
    if has_drafter_choice and find_drafter_directory(folder) is None:
        return {}
    directory = require_drafter_directory("run", folder)
    description = load_description(directory, target)
    if not description.get("target") and target is None:
        raise UserError(f"{directory / 'config.json'}: it does not say which target it is for; say it, as in target=tiny")
    saved = {key: description[key] for key in ("drafter", "target", "tree", "acceptance") if description.get(key)}
    saved["recipe_name"] = description.get("recipe")
    if (folder / "config.yaml").exists():
        config = load_run_settings(folder)
        saved |= {key: config[key] for key in ("data", "trainer", "eval") if config.get(key)}
    if not (saved.get("eval") or {}).get("_target_"):
        saved.pop("eval", None)
    return saved


def _to_container(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
