"""The safetensors files of a checkpoint, read tensor by tensor from a directory or from the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor

from spectrain.errors import UserError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
Files = TypeVar("Files", bound="CheckpointFiles")


class CheckpointFiles:
    """Reads the safetensors files of a model by tensor name. With `repository`, `directory` is the snapshot of that hub
    repository, and a file that it lacks is downloaded when a tensor of it is read first."""

    def __init__(self, directory: Path, repository: str | None = None) -> None:
        self.directory, self.repository = directory, repository
        index = directory / INDEX_FILE
        self.tensor_files: dict[str, str] = {}  # tensor name -> file name
        if index.exists():
            self.tensor_files = dict(json.loads(index.read_text())["weight_map"])
            for name in set(self.tensor_files.values()):
                if not isinstance(name, str) or Path(name).name != name:
                    raise UserError(f"{index}: it names a file outside of its folder ({name}); download the model again")
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
