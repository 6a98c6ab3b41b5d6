"""Layouts of drafters that fuse layers of their target: EAGLE-3, P-EAGLE and the block drafters;
EAGLE reads one.

A layout is a family, a container and what one project does otherwise, as data: it translates
config.json and the names of tensors; shapes come from the drafter's class, and all else is shared
here.
Sizes: H width of the drafter, V vocabulary of the target, Vd of the drafter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.config.build import GroupSpec
from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .container import Container, Finding, Rename
from .drafter_files import DrafterFiles
from .fused_config import (
    EMBEDDING,
    HEAD,
    FusedConfig,
    equal_when_rounded,
    fused_shapes,
)
from .layout import (
    CHAIN_TOKENS,
    DrafterCheckpoint,
    ExpectedTensors,
    Interpretation,
    Layout,
    make_checkpoint,
)
from .targets import TargetFiles
from .vocabulary import add_maps, drop_full_maps

IGNORED_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that every reader ignores without harm."""
FOREIGN_PARTS = {".bias": "a bias, which our linears lack"}
FIXED_VALUES = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


class FusedFamily(ABC):
    """A family of drafters that fuse layers of their target: what its class takes from files."""

    choice: str  # of `drafter`
    covers: tuple[str, ...] = ()  # its own settings that every layout of it holds
    # Part of a tensor's name -> what the tensor is: tensors that the family's class lacks, unless
    # `own_parts` is in the name.
    foreign_parts: Mapping[str, str] = FOREIGN_PARTS
    own_parts: tuple[str, ...] = ()
    # Key of config.json -> the only value that the family's class can represent.
    fixed_values: Mapping[str, Any] = FIXED_VALUES

    @abstractmethod
    def read_settings(self, source: FusedFiles, own_embedding: bool) -> dict[str, Any]:
        """Return the constructor's settings that the files determine."""

    @abstractmethod
    def read_head(
        self, source: FusedFiles, tensors: dict[str, Tensor], target: TargetFiles | None
    ) -> None:
        """Add or drop an output layer that is the target's; raise UserError where the class
        cannot hold the file's.
        """

    def complete(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> DrafterCheckpoint:
        """Return the drafter with what only its class or its target determines."""
        return drafter

    def adjust_expected(self, source: FusedFiles, expected: ExpectedTensors) -> ExpectedTensors:
        """Return the expected tensors with what files of this family have otherwise than its
        class.
        """
        return expected


@dataclass(frozen=True)
class TensorNames:
    """Names of tensors in spectrain and in a layout."""

    to_native: Rename
    to_file: Rename


def rename_prefixes(prefixes: Mapping[str, str]) -> TensorNames:
    """Return names that differ in their first part, given by spectrain's; files may have `model.`
    before it.
    """

    def rename(name: str, pairs: Iterable[tuple[str, str]]) -> str:
        for old, new in pairs:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    inverse = [(theirs, ours) for ours, theirs in prefixes.items()]
    return TensorNames(
        lambda name: rename(name.removeprefix("model."), inverse),
        lambda name: rename(name, prefixes.items()),
    )


@dataclass(frozen=True)
class FusedFiles:
    """A drafter's files as a layout reads them."""

    layout: FusedLayout
    files: DrafterFiles

    @cached_property
    def config(self) -> FusedConfig:
        """The settings in spectrain's terms; raises KeyError naming the keys that are missing."""
        return self.layout.parse(self)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors under spectrain's names."""
        return self.layout.container.read_tensors(self.files, self.layout.names.to_native)

    @property
    def has_architecture(self) -> bool:
        """Whether config.json names a class by which engines recognize the layout."""
        prefix = self.layout.architecture_prefix
        return any(
            name in self.layout.architectures or (prefix is not None and name.startswith(prefix))
            for name in self.files.config.get("architectures") or []
        )

    @property
    def foreign_tensors(self) -> dict[str, str]:
        """The tensors that the family's class cannot hold, each with a description."""
        family = self.layout.family
        parts = (
            family.foreign_parts if self.layout.foreign_parts is None else self.layout.foreign_parts
        )
        matches = {
            name: next((what for part, what in parts.items() if part in name), None)
            for name in self.files.tensors
            if not any(part in name for part in family.own_parts)
            and not name.endswith(IGNORED_TENSORS)
        }
        return {name: what for name, what in matches.items() if what is not None}

    @cached_property
    def obstacle(self) -> str | None:
        """The first tensor, key or file that the family's class cannot represent, as part of a
        sentence; None where there is none.
        """
        problems = (find(self) for find in self.layout.obstacles)
        return next((problem for problem in problems if problem is not None), None)


def matches_any(source: FusedFiles) -> bool:
    """Leave the decision to the container."""
    return True


@dataclass(frozen=True)
class Export:
    """A drafter that is written in a layout."""

    layout: FusedLayout
    drafter: DrafterCheckpoint
    target: TargetFiles | None

    @property
    def settings(self) -> dict[str, Any]:
        return self.drafter.drafter

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.drafter.tensors

    @property
    def known_target(self) -> TargetFiles:
        """The target, after a check that it is given."""
        assert self.target is not None
        return self.target

    @property
    def has_own_embedding(self) -> bool:
        """Whether its embedding is not the target's, as far as is known."""
        embedding = self.tensors.get(EMBEDDING)
        return embedding is not None and (
            self.target is None or not equal_when_rounded(embedding, self.target.load_embedding())
        )


def select_all(export: Export) -> dict[str, Tensor]:
    """Return all tensors, without maps of the full vocabulary."""
    return drop_full_maps(export.tensors)


Obstacle = Callable[[FusedFiles], str | None]
FileCheck = Callable[[FusedFiles], Iterator[Finding]]
TargetCheck = Callable[[FusedFiles, TargetFiles], Iterator[Finding]]
WriteCheck = Callable[[Export], None]
Launches = Callable[[DrafterCheckpoint, TargetFiles, str], dict[str, DrafterLaunch]]
"""How engines are started with a drafter, for its target's files, from the drafter's folder."""


def launch_with(
    methods: Mapping[str, str],
    count_tokens: Callable[[DrafterCheckpoint], int] = lambda drafter: CHAIN_TOKENS,
    is_parallel: bool = False,
) -> Launches:
    """Return launches of engines, each given with its name of the method."""
    return lambda drafter, files, path: {
        engine: DrafterLaunch(method, path, count_tokens(drafter), is_parallel=is_parallel)
        for engine, method in methods.items()
    }


no_launches = launch_with({})


@dataclass(eq=False, kw_only=True)
class FusedLayout(Layout):
    """The layout of one family in one container: all that is special about it is data.

    Another layout that differs in a few of them is `replace` of this one.
    """

    title: str
    family: FusedFamily
    names: TensorNames
    # Translates config.json into spectrain's terms; raises KeyError naming the keys that are
    # missing.
    parse: Callable[[FusedFiles], FusedConfig]
    # The settings for the container to write.
    make_config: Callable[[Export], dict[str, Any]]
    container: Container = field(default_factory=Container)
    # Tells the layout from others in the same container.
    matches: Callable[[FusedFiles], bool] = matches_any
    # The tensors that the files hold, under spectrain's names.
    select_tensors: Callable[[Export], dict[str, Tensor]] = select_all
    # Classes that `architectures` in config.json may name; the first is written.
    architectures: tuple[str, ...] = ()
    architecture_prefix: str | None = None  # of other names that engines accept
    # Spectrain's ids of fused layers minus the layout's.
    layer_id_offset: int = 0
    engine: str = "SGLang"  # that refusals name
    # Format that holds what this layout cannot, which refusals name; None where there is none.
    other_format: str | None = "vllm"
    # Parts of the target's kind that its drafters may have.
    target_kinds: tuple[str, ...] = ()
    # Tensors in place of which engines use the target's, whatever the files hold.
    replaced_tensors: tuple[str, ...] = ()
    foreign_parts: Mapping[str, str] | None = None  # in place of the family's
    # Checks in their order: what the family's class cannot represent, faults of the files, faults
    # that the target shows, and what cannot be written.
    obstacles: tuple[Obstacle, ...]
    file_checks: tuple[FileCheck, ...]
    target_checks: tuple[TargetCheck, ...]
    write_checks: tuple[WriteCheck, ...] = ()
    # Other ways to interpret the tensors, which a mistake in writing such files makes.
    misreadings: tuple[Callable[[DrafterCheckpoint], Interpretation], ...] = ()
    launches: Launches = no_launches
    snippets: Callable[[DrafterCheckpoint, str, str], dict[str, str]] = (
        lambda drafter, target, path: {}
    )

    @property
    def other_remedy(self) -> str:
        """The beginning of a refusal's remedy: the other format, where there is one."""
        return "" if self.other_format is None else f"use --to {self.other_format}, or "

    @property
    def choice(self) -> str:
        """The choice of `drafter`, as messages name it."""
        return f"drafter={self.family.choice}"

    @property
    def covers(self) -> tuple[str, ...]:
        return self.family.covers

    def matches_files(self, files: DrafterFiles) -> bool:
        return self.container.holds(files) and self.matches(FusedFiles(self, files))

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        source = FusedFiles(self, files)
        config = source.config
        settings = self.family.read_settings(source, own_embedding=False)
        shapes = fused_shapes(config, GroupSpec("drafter", self.family.choice, settings))
        optional = {
            EMBEDDING: (config.vocab_size, config.width),
            "t2d": shapes.pop("t2d", (config.vocab_size,)),
        }
        if not config.has_draft_vocabulary:
            optional |= {
                HEAD: (config.vocab_size, config.width),
                "d2t": shapes.pop("d2t", (config.vocab_size,)),
            }
            shapes.pop(HEAD, None)
        names = {self.names.to_native(name): name for name in files.tensors}
        required, optional = (
            {names.get(name, self.names.to_file(name)): shape for name, shape in group.items()}
            for group in (shapes, optional)
        )
        foreign = {name: (None,) * files.tensors[name].dim() for name in source.foreign_tensors}
        ignored = (*IGNORED_TENSORS, *self.container.ignored_tensors)
        expected = ExpectedTensors(required, optional | foreign, ignored)
        return self.family.adjust_expected(source, expected)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        source = FusedFiles(self, files)
        for check in self.file_checks:
            yield from check(source)

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        source = FusedFiles(self, files)
        for check in self.target_checks:
            yield from check(source, target)
        yield from self.container.findings_with_target(files, target)

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        source = FusedFiles(self, files)
        config = source.config
        tensors = {
            name: tensor
            for name, tensor in source.tensors.items()
            if not name.endswith(IGNORED_TENSORS)
        }
        if source.obstacle is not None:
            raise UserError(f"{files.directory}: {source.obstacle}")
        if (
            target is not None
            and EMBEDDING in tensors
            and equal_when_rounded(tensors[EMBEDDING], target.load_embedding())
        ):
            del tensors[EMBEDDING]
        self.family.read_head(source, tensors, target)
        add_maps(tensors, config.draft_rows, config.vocab_size)
        settings = self.family.read_settings(source, own_embedding=EMBEDDING in tensors)
        named = self.container.target_name(files)
        drafter = make_checkpoint(files, self.family.choice, settings, tensors, named)
        return self.family.complete(drafter, target)

    def interpretations(self, drafter: DrafterCheckpoint) -> Iterator[Interpretation]:
        return (interpret(drafter) for interpret in self.misreadings)

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        export = Export(self, drafter, target)
        for check in self.write_checks:
            check(export)
        config = self.make_config(export)
        tensors = self.select_tensors(export)
        self.container.write(directory, config, tensors, self.names.to_file, target)

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return self.launches(drafter, files, path)

    def python_snippets(self, drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
        return self.snippets(drafter, target, path)
