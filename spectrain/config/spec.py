"""The typed settings of a run, built once from the composed configuration. No hydra object is
passed on from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from spectrain.errors import UserError

from .build import GroupSpec, to_containers
from .plain_files import read_yaml
from .resolve import LowerLayers, resolve
from .saved import parse_groups
from .settings_file import SettingsFile


@dataclass(frozen=True)
class RunSpec:
    """What a run trains, on what, and how it is scored: one entry per group, in the order of
    config.yaml.
    """

    target: GroupSpec = GroupSpec("target")
    drafter: GroupSpec = GroupSpec("drafter")
    source: GroupSpec = GroupSpec("source")
    server: GroupSpec = GroupSpec("server")
    data: GroupSpec = GroupSpec("data")
    trainer: GroupSpec = GroupSpec("trainer")
    optimizer: GroupSpec = GroupSpec("optimizer")
    schedule: GroupSpec = GroupSpec("schedule")
    adapter: GroupSpec = GroupSpec("adapter")
    tree: GroupSpec = GroupSpec("tree")
    acceptance: GroupSpec = GroupSpec("acceptance")
    eval: GroupSpec = GroupSpec("eval")
    tracker: GroupSpec = GroupSpec("tracker")
    # The run folder that the command names.
    run: str | None = None
    recipe_name: str | None = None
    # The words of the command, for messages and further runs that repeat them; they are not saved.
    # Which layer sets a value is known by the groups.
    overrides: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], overrides: Iterable[str] = ()) -> RunSpec:
        """Check a composed configuration and return it as a spec; a UserError names the key that
        is wrong.
        """
        return read_run(config, overrides=overrides)[0]

    @classmethod
    def from_nodes(cls, nodes: Mapping[str, Any]) -> RunSpec:
        """Return a spec of nodes that a file or a test holds; they are checked when they are
        built.
        """
        selected = {key: value for key, value in to_containers(nodes).items() if key in RUN_KEYS}
        settings: dict[str, Any] = {
            key: GroupSpec.from_node(key, value) if key in GROUPS else value
            for key, value in selected.items()
        }
        return cls(**settings)

    @classmethod
    def load(cls, path: Path) -> RunSpec:
        """Load config.yaml of a run folder. The name of the run in it is a record that nothing
        takes over.
        """
        groups = {
            key: value for key, value in parse_groups(read_yaml(path), path).items() if key != "run"
        }
        for group in GROUPS:
            if not isinstance(groups.get(group), dict | None):
                raise UserError(
                    f"{path}: {group} is no group of settings, as when the file is cut short; "
                    "copy the file again"
                )
        spec = cls.from_nodes(groups)
        return replace(spec, **{group: getattr(spec, group).named_by(path) for group in GROUPS})

    def to_yaml(self) -> str:
        """Return the text of config.yaml."""
        text: str = yaml.dump(self.save(), sort_keys=False, allow_unicode=True)
        return text

    def save(self) -> dict[str, Any]:
        """Return all settings in their saved form: groups by choice, without a recipe's name
        where none was named.
        """
        return {group: getattr(self, group).save() for group in GROUPS} | self._names

    def to_nodes(self) -> dict[str, Any]:
        """Return all settings as plain containers, groups as nodes of hydra."""
        return {group: getattr(self, group).node for group in GROUPS} | self._names

    @property
    def _names(self) -> dict[str, str | None]:
        recipe = {} if self.recipe_name is None else {"recipe_name": self.recipe_name}
        return {"run": self.run, **recipe}

    def build(self, *groups: str) -> tuple[Any, ...]:
        """Construct what these groups choose, in their order; None for an empty group."""
        return tuple(getattr(self, group).build() for group in groups)

    def with_settings(self, group: str, **changes: Any) -> RunSpec:
        """Return the spec with other settings of one group."""
        return replace(self, **{group: getattr(self, group).with_settings(**changes)})

    def with_default_tree(self) -> RunSpec:
        """Return the spec with the fastest tree of this machine scored first, unless the command
        itself names a tree.
        """
        has_tree = self.tree.layer in ("file", "command")
        # The run's own setting was for the tree that the run names.
        is_open = has_tree and self.eval.find_layer("measured") == "run"
        if not self.eval or ("measured" in self.eval.settings and not is_open):
            return self
        return self.with_settings("eval", measured=not has_tree)

    @property
    def name(self) -> str:
        """Return the recipe that the command named, or else the choice of the drafter."""
        return str(self.recipe_name or self.drafter.choice)

    @property
    def target_name(self) -> str:
        """Return the target's choice or, of a model on the hub or on disk, the last part of its
        name.
        """
        choice = str(self.target.choice)
        return (
            Path(str(self.target.settings.get("model", choice))).name if choice == "hf" else choice
        )

    @property
    def init(self) -> str | None:
        """Return where the drafter is whose weights the training begins with, if anywhere."""
        init: str | None = self.drafter.settings.get("init")
        return init

    @property
    def resume(self) -> str | None:
        """Return how a training goes on in a folder that holds a run: "auto" or "changed"; None
        where it begins a new one.
        """
        resume: str | None = self.trainer.settings.get("resume")
        return resume

    @property
    def evaluation_name(self) -> str:
        """Return the folder's name below eval/."""
        return str(self.eval.settings.get("name", "heldout"))


def read_run(
    config: Mapping[str, Any],
    keys: Iterable[str] = (),
    overrides: Iterable[str] | None = (),
    recipe: str | None = None,
    lower: LowerLayers | None = None,
    file: SettingsFile | None = None,
) -> tuple[RunSpec, dict[str, Any]]:
    """Return the checked settings of a run, and those of a command's own `keys`; `resolve` says
    what the layers are.
    """
    words = None if overrides is None else tuple(overrides)
    recipe = recipe or config.get("recipe_name")
    settings = resolve(config, (*RUN_KEYS, *keys), words, recipe, lower, file)
    own = {key: settings.pop(key, None) for key in keys}
    if recipe is not None:
        settings["recipe_name"] = recipe
    return share_template_arguments(RunSpec(**settings, overrides=words or ())), own


def share_template_arguments(spec: RunSpec) -> RunSpec:
    """Return the spec with the arguments of data.template_kwargs in the target's, where scoring
    and chat find them.
    """
    arguments = spec.data.settings.get("template_kwargs") if spec.data else None
    if not arguments or not spec.target:
        return spec
    return spec.with_settings(
        "target",
        template_kwargs={**(spec.target.settings.get("template_kwargs") or {}), **arguments},
    )


RUN_KEYS = tuple(entry.name for entry in fields(RunSpec) if entry.name != "overrides")
GROUPS = tuple(key for key in RUN_KEYS if key not in ("run", "recipe_name"))
