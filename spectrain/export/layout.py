"""What every layout shares: the files of a directory, a drafter on its way between two of them, and the contract.

A layout is one class in one file. `read` gives a drafter in our own terms and `write` takes one, so that converting is the two
of them, and a new layout is one file and one line in layouts.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.config.choices import choice_name
from spectrain.config.saved import check_no_directives, parse_groups, read_json_object
from spectrain.errors import UserError, first_line
from spectrain.files import PICKLE_SUFFIXES

from .fused_settings import FusedConfig
from .targets import TargetFiles

DESCRIPTION_KEYS = ("tree", "acceptance", "recipe")  # of a saved description, whatever the layout
MALFORMED_ERRORS = (
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    RuntimeError,
    ArithmeticError,
)  # of settings of wrong kinds


@dataclass
class DrafterFiles:
    """A directory as it lies on disk: its config.json and every tensor of its safetensors files."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @staticmethod
    def from_directory(directory: Path) -> DrafterFiles:
        """Stops at a directory without config.json or safetensors; nothing is unpickled."""
        config: dict[str, Any] = {}
        if (directory / "config.json").exists():
            config = read_json_object(directory / "config.json")
        elif not (directory / "adapter_config.json").exists():  # peft has no other
            raise UserError(f"{directory}: there is no config.json in it; give the directory of a drafter")
        found = sorted(directory.glob("*.safetensors"))
        pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
        if not found and pickled:
            raise UserError(
                f"{directory / pickled[0]}: a pickled file can run any code, so it is not read; where you trust it, make it "
                f'safetensors: python -c "import torch; from safetensors.torch import save_file; '
                f"save_file({{k: v.contiguous().clone() for k, v in torch.load('{pickled[0]}', weights_only=True).items()}}, "
                f"'{Path(pickled[0]).stem}.safetensors')\""
            )
        if not found:
            raise UserError(f"{directory}: there are no weights (*.safetensors) in it; give the directory of a drafter")
        tensors: dict[str, Tensor] = {}
        for path in found:
            try:
                tensors |= load_file(path)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: it cannot be read ({first_line(error)}); copy the file again") from error
        return DrafterFiles(directory, config, tensors)

    def read_sidecar(self, name: str) -> dict[str, Any]:
        """A JSON file beside config.json, in which nothing is an order; empty where there is none."""
        path = self.directory / name
        return check_no_directives(read_json_object(path), path) if path.exists() else {}

    def read_metadata(self) -> ExportMetadata:
        """What spectrain.json keeps, where there is one."""
        path = self.directory / "spectrain.json"
        content = read_json_object(path) if path.exists() else {}
        description = parse_groups(content.pop("description", {}), path)
        check_no_directives(content, path)
        drafter, target = content.get("drafter", {}), content.get("target", {})
        if not isinstance(drafter, dict) or not isinstance(target, dict) or "choice" in drafter:
            raise UserError(f"{path}: drafter and target hold no settings; copy the file again")
        said = {key: str(target[key]) for key in ("said", "tokenizer") if target.get(key)}
        return ExportMetadata(
            drafter, description, said.get("said"), said.get("tokenizer"), content.get("exits"), content.get("mask_row")
        )

    def read_group(self, group: str) -> dict[str, Any] | None:
        """A group of our own config.json, as a node to construct."""
        path = self.directory / "config.json"
        found: dict[str, Any] | None = parse_groups({group: self.config.get(group)}, path)[group]
        if found is not None and (not isinstance(found, dict) or "_target_" not in found):
            raise UserError(f"{path}: {group} names no choice; copy the file again")
        return found


@dataclass(frozen=True)
class ExportMetadata:
    """What an export says beside its layout, in spectrain.json."""

    drafter: dict[str, Any]  # settings that the layout has no words for
    description: dict[str, Any]  # tree, acceptance and recipe, as a saved description has them
    target: str | None  # the target
    tokenizer_hash: str | None  # its hash
    early_exits: Any = None  # of a target that was trained to exit early
    mask_row: Any = None  # what PARD's mask stands in for


@dataclass
class DrafterCheckpoint:
    """A drafter between two layouts: our settings, everything that shapes its weights said, and tensors under our names."""

    drafter: dict[str, Any]  # as `drafter` in a saved description, `_target_` included
    tensors: dict[str, Tensor]
    target: str | None = None  # a name on the hub or a directory, where the files say which target it is for
    trained_target: Path | None = None  # the directory of the target that was trained with it
    description: dict[str, Any] = field(default_factory=dict)  # what else a saved description holds: tree, acceptance, recipe

    @property
    def family(self) -> str:
        """The choice that drafts with it."""
        return choice_name("drafter", self.drafter)

    @property
    def is_target(self) -> bool:
        """Whether it has no weights beside its target's, which was trained to draft with its own layers."""
        return not self.tensors

    def expand_heads(self) -> DrafterCheckpoint:
        """With output layers of low rank multiplied out: the same logits, to rounding, where only plain ones are known."""
        tensors = dict(self.tensors)
        for name in [name for name in tensors if name.endswith("lm_down.weight")]:
            down, head = tensors.pop(name), name.replace("lm_down", "lm_head")
            tensors[head] = (tensors[head].float() @ down.float()).to(down.dtype)
        return replace(self, drafter={k: v for k, v in self.drafter.items() if k != "head_rank"}, tensors=tensors)

    @property
    def dtype(self) -> str:
        """The type of most of its weights, as configurations name it."""
        kinds = [str(tensor.dtype) for tensor in self.tensors.values() if tensor.is_floating_point()]
        return max(set(kinds), key=kinds.count).removeprefix("torch.") if kinds else "float32"


@dataclass(frozen=True)
class Finding:
    """Something wrong with a drafter's files."""

    name: str  # stable
    level: Literal["error", "warning"]
    problem: str
    consequence: str
    remedy: str


@dataclass(frozen=True)
class ExpectedTensors:
    """The tensors that a layout's readers look for: shapes by name, where None stands for any size."""

    required: dict[str, tuple[int | None, ...]]
    optional: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # read past by every engine without harm


class Layout(ABC):
    """One project's way to lay a drafter down in files."""

    name: ClassVar[str]  # as --to says it
    title: ClassVar[str]
    families: ClassVar[tuple[str, ...]]  # which of our drafters it can hold
    covers_all: ClassVar[bool] = False  # there is nothing to keep beside it
    holds_target: ClassVar[bool] = False  # its directory is a whole target, which holds the drafter

    @property
    def covers(self) -> tuple[str, ...]:
        """Settings that its files say, of those that not every layout does."""
        return ()

    @abstractmethod
    def matches_files(self, files: DrafterFiles) -> bool:
        """Whether a directory is laid out so, whatever may be wrong with it otherwise."""

    @abstractmethod
    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        """Which tensors there should be, by what config.json says."""

    def check_data(self, files: DrafterFiles) -> None:
        """Stop at a config.json in which something is an order."""
        check_no_directives(files.config, files.directory / "config.json")

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        """What is wrong with the files in ways that only this layout knows."""
        return iter(())

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        """What of it shows only beside the target's files."""
        return iter(())

    def as_fused(self, files: DrafterFiles) -> tuple[FusedConfig, dict[str, Tensor]] | None:
        """The settings and tensors of the files in our terms, where they hold a drafter that fuses layers of the target."""
        return None

    @abstractmethod
    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        """The drafter in our terms; refuses by name what our classes cannot represent."""

    @abstractmethod
    def write(self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path) -> None:
        """Lay it down in an existing folder; refuses by name what the layout cannot hold."""

    def serve_commands(self, drafter: DrafterCheckpoint, files: TargetFiles, target: str, drafter_path: str) -> dict[str, str]:
        """The command of every engine that reads it, by engine; `target` is what the engine loads, `place` the drafter."""
        return {}


def require_target(target: TargetFiles | None, purpose: str) -> TargetFiles:
    """The target's files, or one sentence on what they are needed for."""
    if target is None:
        raise UserError(f"--target: {purpose}; say which target the drafter is for, a directory or a name on the hub")
    return target


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Tensors in the order of their names, so that equal drafters are equal files."""
    save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, path, metadata={"format": "pt"})
