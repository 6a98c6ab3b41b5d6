"""The contract of an export layout: the files of a directory, a drafter between two layouts, and
the `Layout` class.

A layout is one class in one file. `read` returns a drafter in spectrain's own terms and `write`
takes one, so a conversion is one `read` and one `write`. A new layout is one file and one line in
layouts.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor

from spectrain.config.choices import choice_name
from spectrain.config.plain_files import read_json_object
from spectrain.config.saved import check_choices, check_no_directives, parse_groups
from spectrain.errors import UserError
from spectrain.files import PICKLE_SUFFIXES
from spectrain.models.checked_tensors import MAX_DRAFTER_TENSORS, read_tensors
from spectrain.models.model_sizes import DRAFTER_SIZES, check_sizes, refuse_odd_files
from spectrain.servers.commands import DrafterLaunch

from .config_types import check_types
from .targets import TargetFiles

DESCRIPTION_KEYS = ("tree", "acceptance", "recipe")
"""Groups of a saved description that every layout keeps."""
METADATA_FILE = "spectrain.json"
"""File beside an export with all that its layout has no key for."""
MALFORMED_ERRORS = (
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    RuntimeError,
    ArithmeticError,
    StrictDataclassError,
)
"""Exceptions that settings of a wrong type raise."""


@dataclass
class DrafterFiles:
    """The contents of a drafter's directory: config.json and every tensor of its safetensors
    files.
    """

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @staticmethod
    def from_directory(directory: Path) -> DrafterFiles:
        """Read a directory without unpickling; raise UserError where config.json or the weights
        are missing.
        """
        config: dict[str, Any] = {}
        if directory.is_dir():
            refuse_odd_files(directory)
        if (directory / "config.json").exists():
            config = read_config(directory)
        # a peft directory has no config.json
        elif not (directory / "adapter_config.json").exists():
            raise UserError(
                f"{directory}: there is no config.json in it; give the directory of a drafter"
            )
        weight_files = sorted(directory.glob("*.safetensors"))
        pickled = sorted(
            path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES
        )
        if not weight_files and pickled:
            raise UserError(
                f"{directory / pickled[0]}: a pickled file can run any code, so it is not read; "
                "where you trust it, make it "
                f'safetensors: python -c "import torch; from safetensors.torch import save_file; '
                f"save_file({{k: v.contiguous().clone() for k, v in torch.load('{pickled[0]}', "
                f"weights_only=True).items()}}, "
                f"'{Path(pickled[0]).stem}.safetensors')\""
            )
        if not weight_files:
            raise UserError(
                f"{directory}: there are no weights (*.safetensors) in it; give the directory of "
                "a drafter"
            )
        tensors: dict[str, Tensor] = {}
        for path in weight_files:
            tensors |= read_tensors(path, "copy the file again", MAX_DRAFTER_TENSORS)
        return DrafterFiles(directory, config, tensors)

    def read_sidecar(self, name: str) -> dict[str, Any]:
        """Read another JSON file of the directory and refuse directives in it; return {} where
        it does not exist.
        """
        path = self.directory / name
        return check_no_directives(read_json_object(path), path) if path.exists() else {}

    def read_metadata(self) -> ExportMetadata:
        """Read spectrain.json; every field is empty where the file does not exist."""
        path = self.directory / METADATA_FILE
        content = read_json_object(path) if path.exists() else {}
        description = parse_groups(content.pop("description", {}), path)
        check_choices(description, path, "description.")
        check_no_directives(content, path)
        drafter = content.get("drafter", {})
        target = content.get("target", {})
        if not isinstance(drafter, dict) or not isinstance(target, dict) or "choice" in drafter:
            raise UserError(f"{path}: drafter and target hold no settings; copy the file again")
        for key in ("said", "name", "tokenizer"):
            if not isinstance(target.get(key), str | None):
                raise UserError(
                    f"{path}: target.{key}={str(target[key])[:100]}: use a text; copy the file "
                    "again"
                )
        names = {key: target[key] for key in ("said", "tokenizer") if target.get(key)}
        return ExportMetadata(
            drafter,
            description,
            names.get("said"),
            names.get("tokenizer"),
            content.get("exits"),
            content.get("mask_row"),
        )

    def read_group(self, group: str) -> dict[str, Any] | None:
        """Return a group of spectrain's own config.json as a node to construct, or None."""
        path = self.directory / "config.json"
        node: dict[str, Any] | None = parse_groups({group: self.config.get(group)}, path)[group]
        if node is not None and (not isinstance(node, dict) or "_target_" not in node):
            raise UserError(f"{path}: {group} is not a choice; copy the file again")
        return node


def read_config(directory: Path) -> dict[str, Any]:
    """Read a drafter's config.json; raise UserError for sizes that no model has, and for known
    keys of a wrong type.
    """
    path = directory / "config.json"
    config = read_json_object(path)
    check_sizes(config, path, DRAFTER_SIZES)
    check_types(config, path)
    return config


@dataclass(frozen=True)
class ExportMetadata:
    """What spectrain.json holds of an export: all that its layout has no key for."""

    drafter: dict[str, Any]  # settings without a key in the layout
    description: dict[str, Any]  # tree, acceptance and recipe of a saved description
    target: str | None  # name or directory
    tokenizer_hash: str | None
    early_exits: Any = None  # of a target that was trained to exit early
    mask_row: Any = None  # embedding row that PARD's mask token replaces


@dataclass
class DrafterCheckpoint:
    """A drafter between two layouts: complete settings in spectrain's terms, and tensors under
    spectrain's names.
    """

    drafter: dict[str, Any]  # the group `drafter` of a saved description, `_target_` included
    tensors: dict[str, Tensor]
    target: str | None = None  # hub name or directory, None where the files name no target
    trained_target: Path | None = None  # directory of the target that was trained with it
    description: dict[str, Any] = field(default_factory=dict)  # tree, acceptance, recipe

    @property
    def family(self) -> str:
        """The choice of `drafter` that constructs it."""
        return choice_name("drafter", self.drafter)

    @property
    def is_target(self) -> bool:
        """Whether it has no weights of its own because its target was trained to draft with its
        own layers.
        """
        return not self.tensors

    def expand_heads(self) -> DrafterCheckpoint:
        """Multiply low-rank output layers out, for layouts that have full ones only; logits are
        equal up to rounding.
        """
        tensors = dict(self.tensors)
        for name in [name for name in tensors if name.endswith("lm_down.weight")]:
            down = tensors.pop(name)
            head = name.replace("lm_down", "lm_head")
            tensors[head] = (tensors[head].float() @ down.float()).to(down.dtype)
        return replace(
            self,
            drafter={k: v for k, v in self.drafter.items() if k != "head_rank"},
            tensors=tensors,
        )

    @property
    def dtype(self) -> str:
        """The dtype of most of its weights, as configurations name it."""
        dtypes = [
            str(tensor.dtype) for tensor in self.tensors.values() if tensor.is_floating_point()
        ]
        return max(set(dtypes), key=dtypes.count).removeprefix("torch.") if dtypes else "float32"


@dataclass(frozen=True)
class Interpretation:
    """Another way to interpret a drafter's tensors, which a mistake in porting code makes."""

    finding_name: str
    description: str  # completes "with .. it would accept"
    remedy: str
    drafter: DrafterCheckpoint


@dataclass(frozen=True)
class Finding:
    """A fault in a drafter's files."""

    name: str  # stable identifier
    level: Literal["error", "warning"]
    problem: str
    consequence: str
    remedy: str
    is_repairable: bool = False  # reading the files and writing them again mends it


# Tokens that a drafter of chains drafts in an engine, unless the user chooses another number.
CHAIN_TOKENS = 3
Shape = tuple[int | None, ...]
"""A tensor's shape, where None stands for any size."""


@dataclass(frozen=True)
class ExpectedTensors:
    """The tensors that readers of a layout look for, with their shapes by name."""

    required: dict[str, Shape]
    optional: dict[str, Shape] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # every engine ignores these without harm


class Layout(ABC):
    """The way in which one project writes a drafter to files."""

    title: ClassVar[str]
    # Whether config.json holds every setting of the drafter and its description, so that no
    # spectrain.json is written.
    covers_all: ClassVar[bool] = False
    # Its own files of settings, which the linter reads.
    sidecars: ClassVar[tuple[str, ...]] = ()
    holds_target: ClassVar[bool] = False  # its directory is a target that contains the drafter
    needs_engine: ClassVar[bool] = False  # its files are written in the environment of its engine
    # pickled copies of its weights for readers that know no other files
    pickled_names: ClassVar[tuple[str, ...]] = ()
    # Whether `expected_tensors` builds spectrain's drafter from config.json, so that no other check
    # need build it.
    builds_drafter: ClassVar[bool] = False
    # its readers expect some tensors in float32, whatever type the others have
    mixes_dtypes: ClassVar[bool] = False

    @property
    def covers(self) -> tuple[str, ...]:
        """The drafter's settings that this layout's own files hold; `read` takes them from there.

        An export also holds spectrain.json: the settings in neither `LAYOUT_SETTINGS` nor `covers`,
        and the run's tree, rule and recipe. `DrafterFiles.read_metadata` reads it.
        """
        return ()

    def read_files(self, directory: Path) -> DrafterFiles:
        """Read a directory whose weights have this layout's suffix."""
        return DrafterFiles.from_directory(directory)

    @abstractmethod
    def matches_files(self, files: DrafterFiles) -> bool:
        """Tell whether a directory has this layout, whatever its faults."""

    @abstractmethod
    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        """Return the tensors that config.json implies."""

    def check_data(self, files: DrafterFiles) -> None:
        """Raise UserError where config.json holds a directive that would run or construct
        something.
        """
        check_no_directives(files.config, files.directory / "config.json")

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        """Yield the faults of the files that only this layout can recognize."""
        return iter(())

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        """Yield the faults that only a comparison with the target's files shows."""
        return iter(())

    @abstractmethod
    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        """Return the drafter in spectrain's terms; raise UserError naming what spectrain's
        classes cannot represent.
        """

    def interpretations(self, drafter: DrafterCheckpoint) -> Iterator[Interpretation]:
        """Yield other ways to interpret the tensors, which only files of this layout suggest."""
        return iter(())

    def with_dtype(self, dtype: str) -> Layout:
        """Return this layout with another type for the matrices that it writes; raise UserError
        where it has only their own.
        """
        raise UserError(
            f"dtype={dtype}: in this format, {self.title}, weights keep the drafter's type; leave "
            "it out, or use format=gguf or openvino"
        )

    def with_engine(self, python: str) -> Layout:
        """Return this layout with another environment for the engine's own converter; raise
        UserError where it needs none.
        """
        raise UserError(
            f"engine_python={python}: this format, {self.title}, is written without an engine; "
            "leave it out"
        )

    @abstractmethod
    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        """Write the drafter into an existing folder; raise UserError naming what the layout
        cannot hold.
        """

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        """Return, by engine, how it is started with this drafter; `path` is the drafter's
        folder.
        """
        return {}

    def python_snippets(self, drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
        """Return, by library, the lines of Python that decode with it; `target` is the path of
        the target.
        """
        return {}


class RefusedSettings(ValueError):
    """Settings of spectrain's own that its constructors refuse; the message is that of the
    refusal.
    """


class MissingTarget(UserError):
    """A drafter's files can only be read with those of its target."""


def require_target(target: TargetFiles | None, purpose: str) -> TargetFiles:
    """Return the target's files, or raise MissingTarget saying what they are needed for."""
    if target is None:
        raise MissingTarget(
            f"--target: {purpose}; say which target the drafter is for, a directory or a name on "
            "the hub"
        )
    return target


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors sorted by name, so that equal drafters give equal files."""
    # Readers of other projects want this entry.
    save_file(
        {name: tensors[name].contiguous() for name in sorted(tensors)},
        path,
        metadata={"format": "pt"},
    )
