"""The safetensors files of a checkpoint, read tensor by tensor from a directory or from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import Tensor

from spectrain.config.plain_files import read_json_object
from spectrain.errors import UserError

from .checked_tensors import open_tensors

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# The index of a model with tens of thousands of experts takes a few megabytes.
MAX_INDEX_BYTES = 200_000_000
Files = TypeVar("Files", bound="CheckpointFiles")


def read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor from the index of a checkpoint in several files; raise
    UserError where it is none.
    """
    weight_map: Any = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
    files = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise UserError(
            f"{path}: weight_map names no file beside it for each tensor; copy the file again"
        )
    return dict(weight_map)


def list_weight_files(directory: Path) -> list[Path]:
    """Return the files of a model's weights, in the order of their names: those of its index,
    or model.safetensors, which loading takes, or where there is neither all safetensors.
    """
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    indexed = {*read_index(index).values()} if index.exists() else set()
    if single.exists():
        return [single]
    if indexed:
        return [directory / name for name in sorted(indexed)]
    return sorted(directory.glob("*.safetensors"))


def check_index(directory: Path) -> None:
    """Raise UserError where a checkpoint's index and its files contradict each other, because then
    each reader could take other values.

    Tensors that the index leaves out are allowed; a file that is missing is left to who loads it.
    """
    index = directory / INDEX_FILE
    if not index.exists() or (directory / SINGLE_FILE).exists():
        return
    weight_map = read_index(index)
    holders: dict[str, str] = {}  # tensor name -> file name
    for name in sorted({*weight_map.values()}):
        if not (directory / name).exists():
            return
        with open_tensors(directory / name) as file:
            for tensor in file.keys():  # noqa: SIM118  (not a dict)
                if tensor in holders:
                    raise UserError(
                        f"{directory / name}: {holders[tensor]} holds {tensor} too; copy the files "
                        "again"
                    )
                holders[tensor] = name
    for tensor, name in weight_map.items():
        if holders.get(tensor) != name:
            raise UserError(
                f"{index}: it says that {name} holds {tensor}, and it does not; copy the files "
                "again"
            )


class CheckpointFiles:
    """Reads the safetensors files of a model by tensor name. With `repository`, `directory` is the
    snapshot of that hub repository, and a file that it lacks is downloaded when a tensor of it is
    read first."""

    def __init__(self, directory: Path, repository: str | None = None) -> None:
        self.directory, self.repository = directory, repository
        index = directory / INDEX_FILE
        self.tensor_files: dict[str, str] = {}  # tensor name -> file name
        if index.exists() and not (directory / SINGLE_FILE).exists():
            self.tensor_files = read_index(index)
        else:
            for path in list_weight_files(directory):
                with open_tensors(path) as file:
                    self.tensor_files |= dict.fromkeys(file.keys(), path.name)

    @classmethod
    def open_model(cls: type[Files], model: str, revision: str | None = None) -> Files:
        """Open a model directory, or a name on the hub, of which the index is downloaded, or the
        weights where there is no index."""
        if Path(model).is_dir():
            return cls(Path(model))
        try:
            file = hf_hub_download(model, INDEX_FILE, revision=revision)
        except EntryNotFoundError:
            file = hf_hub_download(model, SINGLE_FILE, revision=revision)
        return cls(Path(file).parent, model)

    @classmethod
    def open_local(cls: type[Files], path: str) -> Files | None:
        """Open a model directory, or a hub name of which files lie in the hub's cache; None
        where it is neither.
        """
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
        with open_tensors(file) as tensors:
            return tensors.get_tensor(name)
