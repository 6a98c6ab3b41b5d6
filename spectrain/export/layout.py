"""The contract of an export layout: a drafter between two layouts, findings, and the `Layout`
class.

A layout says how one project writes one family, in a container (container.py). `read` returns a
drafter in spectrain's own terms and `write` takes one, so a conversion is one `read` and one
`write`. A new layout is one object in one file and one line in layouts.py.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from spectrain.config.build import GroupSpec
from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .container import Container, Finding
from .drafter_files import DrafterFiles
from .targets import TargetFiles

DESCRIPTION_KEYS = ("tree", "acceptance", "recipe")
"""Groups of a saved description that every layout keeps."""
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
class DrafterCheckpoint:
    """A drafter between two layouts: complete settings in spectrain's terms, and tensors under
    spectrain's names.
    """

    family: str  # the choice of `drafter` that constructs it
    drafter: dict[str, Any]  # its settings
    tensors: dict[str, Tensor]
    target: str | None = None  # hub name or directory, None where the files name no target
    trained_target: Path | None = None  # directory of the target that was trained with it
    description: dict[str, Any] = field(default_factory=dict)  # tree, acceptance, recipe

    @property
    def spec(self) -> GroupSpec:
        """Its choice with its settings, as a configuration holds them."""
        return GroupSpec("drafter", self.family, self.drafter)

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


def make_checkpoint(
    files: DrafterFiles,
    family: str,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
    target: str | None = None,
) -> DrafterCheckpoint:
    """Return a drafter whose files determine these settings and name this `target`; spectrain.json
    has the others.
    """
    metadata = files.read_metadata()
    return DrafterCheckpoint(
        family,
        {**metadata.drafter, **settings},
        tensors,
        target or metadata.target,
        description=metadata.description,
    )


@dataclass(frozen=True)
class Interpretation:
    """Another way to interpret a drafter's tensors, which a mistake in porting code makes."""

    finding_name: str
    description: str  # completes "with .. it would accept"
    remedy: str
    drafter: DrafterCheckpoint


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
    types: dict[str, torch.dtype] = field(default_factory=dict)  # where they are known


class Layout(ABC):
    """The way in which one project writes a family's drafters to files."""

    title: str
    # How the files hold settings and tensors.
    container: Container = Container()
    # Whether config.json holds every setting of the drafter and its description, so that no
    # spectrain.json is written.
    covers_all: bool = False
    # Parts of the target's kind, as keys of an architecture, that drafters in it may have.
    target_kinds: tuple[str, ...] = ()
    # Its own files of settings, which the linter reads.
    sidecars: tuple[str, ...] = ()
    holds_target: bool = False  # its directory is a target that contains the drafter
    # pickled copies of its weights for readers that know no other files
    pickled_names: tuple[str, ...] = ()
    # Whether `expected_tensors` builds spectrain's drafter from config.json, so that no other check
    # need build it.
    builds_drafter: bool = False

    @property
    def covers(self) -> tuple[str, ...]:
        """The drafter's settings that this layout's own files hold; `read` takes them from there.

        An export also holds spectrain.json: the settings in neither `LAYOUT_SETTINGS` nor `covers`,
        and the run's tree, rule and recipe. `DrafterFiles.read_metadata` reads it.
        """
        return ()

    @abstractmethod
    def matches_files(self, files: DrafterFiles) -> bool:
        """Tell whether a directory has this layout, whatever its faults."""

    @abstractmethod
    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        """Return the tensors that config.json implies."""

    def check_data(self, files: DrafterFiles) -> None:
        """Raise UserError where the settings hold a directive that would run or construct
        something.
        """
        self.container.check_data(files)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        """Yield the faults of the files that only this layout can recognize."""
        return iter(())

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        """Yield the faults that only a comparison with the target's files shows."""
        return self.container.findings_with_target(files, target)

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
        return self._with_container(
            self.container.with_dtype(dtype),
            f"dtype={dtype}: in this format, {self.title}, weights keep the drafter's type; leave "
            "it out, or use format=gguf or openvino",
        )

    def with_engine(self, python: str) -> Layout:
        """Return this layout with another environment for the engine's own converter; raise
        UserError where it needs none.
        """
        return self._with_container(
            self.container.with_engine(python),
            f"engine_python={python}: this format, {self.title}, is written without an engine; "
            "leave it out",
        )

    def _with_container(self, container: Container | None, refusal: str) -> Layout:
        if container is None:
            raise UserError(refusal)
        layout = copy.copy(self)
        layout.container = container
        return layout

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
