"""The files of a drafter's directory: config.json, tensors, and spectrain.json beside an export."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from spectrain.config.build import GroupSpec
from spectrain.config.plain_files import read_json_object
from spectrain.config.saved import (
    check_choices,
    check_no_directives,
    parse_groups,
)
from spectrain.errors import UserError
from spectrain.files import PICKLE_SUFFIXES
from spectrain.models.checked_tensors import MAX_DRAFTER_TENSORS, read_tensors
from spectrain.models.model_sizes import (
    DRAFTER_SIZES,
    check_embeddings,
    check_sizes,
    refuse_odd_files,
)

from .compressed_tensors import CONFIG_KEY, read_quantized
from .config_types import check_types

METADATA_FILE = "spectrain.json"
"""File beside an export with all that its layout has no key for."""


@dataclass
class DrafterFiles:
    """The contents of a drafter's directory: config.json and every tensor of its safetensors
    files, quantized weights as the ordinary ones that they stand for.
    """

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    # What config.json says of quantized weights, which `config` does not hold; None where it says
    # nothing.
    quantization: dict[str, Any] | None = None
    # Names of the tensors that are quantized.
    quantized: list[str] = field(default_factory=list)

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
        settings = config.pop(CONFIG_KEY, None)
        if settings is None:
            return DrafterFiles(directory, config, tensors)
        tensors, names = read_quantized(tensors, settings, directory / "config.json")
        return DrafterFiles(directory, config, tensors, settings, names)

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

    def read_group(self, group: str) -> GroupSpec:
        """Return a group of spectrain's own config.json; it is empty where the file has none."""
        path = self.directory / "config.json"
        node = parse_groups({group: self.config.get(group)}, path)[group]
        spec = GroupSpec.from_node(group, node) if isinstance(node, dict) else GroupSpec(group)
        if node is not None and not spec:
            raise UserError(f"{path}: {group} is not a choice; copy the file again")
        return spec


def read_config(directory: Path) -> dict[str, Any]:
    """Read a drafter's config.json; raise UserError for sizes that no model has, and for known
    keys of a wrong type.
    """
    path = directory / "config.json"
    config = read_json_object(path)
    check_sizes(config, path, DRAFTER_SIZES)
    check_embeddings(config, path)
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
