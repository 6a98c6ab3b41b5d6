"""The safetensors files of a checkpoint, read tensor by tensor from a directory or from the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor

from spectrain.errors import UserError, first_line

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
Files = TypeVar("Files", bound="CheckpointFiles")


def read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor from the index of a checkpoint in several files; raise UserError where it is none."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: it cannot be read ({first_line(error)}); copy the file again") from error
    weight_map: Any = index.get("weight_map") if isinstance(index, dict) else None
    files = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise UserError(f"{path}: weight_map names no file beside it for each tensor; copy the file again")
    return dict(weight_map)


class CheckpointFiles:
    """Reads the safetensors files of a model by tensor name. With `repository`, `directory` is the snapshot of that hub
    repository, and a file that it lacks is downloaded when a tensor of it is read first."""

    def __init__(self, directory: Path, repository: str | None = None) -> None:
        self.directory, self.repository = directory, repository
        index = directory / INDEX_FILE
        self.tensor_files: dict[str, str] = {}  # tensor name -> file name
        if index.exists():
            self.tensor_files = read_index(index)
        else:
            for path in sorted(directory.glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    self.tensor_files |= dict.fromkeys(file.keys(), path.name)

    @classmethod
    def open_model(cls: type[Files], model: str, revision: str | None = None) -> Files:
        """Open a model directory, or a name on the hub, of which the index is downloaded, or the weights where there is no
        index."""
        if Path(model).is_dir():
            return cls(Path(model))
        try:
            file = hf_hub_download(model, INDEX_FILE, revision=revision)
        except EntryNotFoundError:
            file = hf_hub_download(model, SINGLE_FILE, revision=revision)
        return cls(Path(file).parent, model)

    @classmethod
    def open_local(cls: type[Files], path: str) -> Files | None:
        """Open a model directory, or a hub name of which files lie in the hub's cache; None where it is neither."""
        if Path(path).is_dir():
            return cls(Path(path))
        try:
            return cls(Path(snapshot_download(path, local_files_only=True)), path)
        except (LocalEntryNotFoundError, ValueError, OSError):
            return None

    def read_tensor(self, name: str) -> Tensor:
        file = self.directory / self.tensor_files[name]
        if self.repository is not None and not file.exists():
            # The folder of a snapshot is named by its commit.
            file = Path(hf_hub_download(self.repository, file.name, revision=self.directory.name))
        with safe_open(file, "pt") as tensors:
            return tensors.get_tensor(name)
