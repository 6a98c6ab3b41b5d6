"""How a project's files hold a drafter: the contract of a container, and the plain one, which is
config.json and model.safetensors.

A container knows files and no family; a layout gives it the settings and the names of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from spectrain.config.saved import check_no_directives

from .drafter_files import DrafterFiles, write_json, write_tensors
from .targets import TargetFiles

Rename = Callable[[str], str]
"""A function from one name of a tensor to another."""


@dataclass(frozen=True)
class Finding:
    """A fault in a drafter's files."""

    name: str  # stable identifier
    level: Literal["error", "warning"]
    problem: str
    consequence: str
    remedy: str
    is_repairable: bool = False  # reading the files and writing them again mends it


class Container:
    """Settings in config.json and tensors in model.safetensors."""

    mixes_dtypes = False  # its readers expect some tensors in float32, whatever the others have
    needs_engine = False  # its files are written in the environment of its engine
    ignored_tensors: tuple[str, ...] = ()  # tensors that settings determine, too

    def read_files(self, directory: Path) -> DrafterFiles:
        """Read a directory whose weights have this container's suffix."""
        return DrafterFiles.from_directory(directory)

    def holds(self, files: DrafterFiles) -> bool:
        """Tell whether a directory has this container's files."""
        return True

    def check_data(self, files: DrafterFiles) -> None:
        """Raise UserError where the settings hold a directive."""
        check_no_directives(files.config, files.directory / "config.json")

    def target_name(self, files: DrafterFiles) -> str | None:
        """Return the target that the container's own settings name, or None."""
        return None

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        """Yield what the container holds of another target than this one."""
        return iter(())

    def read_tensors(self, files: DrafterFiles, to_native: Rename) -> dict[str, Tensor]:
        """Return the tensors under spectrain's names."""
        return {to_native(name): tensor for name, tensor in files.tensors.items()}

    def write(
        self,
        directory: Path,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        to_file: Rename,
        target: TargetFiles | None,
    ) -> None:
        """Write the settings and the tensors, which have spectrain's names."""
        write_json(directory / "config.json", config)
        renamed = {to_file(name): tensor for name, tensor in tensors.items()}
        write_tensors(directory / "model.safetensors", renamed)

    def with_dtype(self, dtype: str) -> Container | None:
        """Return the container with another type for the matrices, or None where it has only
        their own.
        """
        return None

    def with_engine(self, python: str) -> Container | None:
        """Return the container with another environment for its engine, or None where it needs
        none.
        """
        return None
