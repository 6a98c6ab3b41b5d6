"""Resumable checkpoints: safetensors and JSON only, written to a scratch folder and renamed, so a kill loses nothing."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spectrain.errors import UserError
from spectrain.files import atomic_write


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name.split("-")[1])


def latest_checkpoint(run: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    checkpoints = _list_checkpoints(run / "checkpoints")
    return checkpoints[-1] if checkpoints else None


def _list_checkpoints(folder: Path) -> list[Path]:
    """List complete checkpoints, oldest first."""
    return sorted(folder.glob("step-*[0-9]"), key=checkpoint_step)


def save_checkpoint(
    path: Path,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    progress: dict[str, Any],
    keep: int,
) -> None:
    """Write weights, optimiser state and `progress`, then drop all but the newest `keep` checkpoints."""
    with atomic_write(path, folder=True, remedy=resume_advice(path.parent.parent)) as scratch:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, scratch / "model.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in optimizer.items()}, scratch / "optimizer.safetensors")
        (scratch / "progress.json").write_text(json.dumps(progress))
    for old in _list_checkpoints(path.parent)[:-keep]:
        shutil.rmtree(old.rename(old.with_name(old.name + ".part")))  # renamed first: what is half deleted is no checkpoint
    for rest in path.parent.glob("*.part"):
        shutil.rmtree(rest)  # of a save or a deletion that was killed


def resume_advice(run: Path) -> str:
    """Return the advice on how to continue a run that could not be saved."""
    return f"{'start anew' if latest_checkpoint(run) is None else 'go on'} with trainer.resume=auto"


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Load weights, optimizer state and progress of a checkpoint."""
    try:
        progress = json.loads((path / "progress.json").read_text())
        weights = load_file(path / "model.safetensors")
        return weights, load_file(path / "optimizer.safetensors"), progress
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path}: this checkpoint cannot be read ({error}); delete it to go on from the one before") from error


def collect_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Collect parameters and buffers by name, on the CPU; of tied ones, which share their memory, only the first."""
    tensors: dict[str, Tensor] = {}
    storages: set[tuple[int, torch.Size]] = set()
    for name, tensor in module.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in storages or not tensor.numel():
            storages.add(key)
            tensors[name] = tensor.detach().cpu().contiguous()
    return tensors


def load_tensors(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Undo `collect_tensors`; a missing, unknown or misshapen tensor is a RuntimeError with its name."""
    state = module.state_dict()
    loaded = {state[name].data_ptr() for name in weights if name in state}
    tied = {name: tensor for name, tensor in state.items() if name not in weights and tensor.data_ptr() in loaded}
    module.load_state_dict({**tied, **weights})


def find_mismatches(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield tensors that do not match between a drafter and its files: the first of each kind, and its fault."""
    expected, state = collect_tensors(module), module.state_dict()
    kinds = {
        "has another shape": [name for name in weights if name in state and weights[name].shape != state[name].shape],
        "holds fractions": [
            name for name in weights if name in state and weights[name].is_floating_point() > state[name].is_floating_point()
        ],
        "is missing": [name for name in expected if name not in weights],
        "is unknown": [name for name in weights if name not in state],
    }
    for what, names in kinds.items():
        for name in names[:1]:
            shapes = [list(of[name].shape) for of in (weights, state) if name in of]
            differ = len(shapes) > 1 and shapes[0] != shapes[1]
            message = f"{name} {what}" + (f", {shapes[0]} in place of {shapes[1]}" if differ else "")
            yield name, message + (f", and {len(names) - 1} more" if len(names) > 1 else "")


def gather_tensor(tensor: Any) -> Tensor:
    """Return a tensor on the CPU, gathered if it is sharded. Every process must call this."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().contiguous()


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Optimiser state as tensors and numbers, named by a parameter's place in the groups: unlike the names of
    `torch.distributed.checkpoint.state_dict`, which are those of one module, places reach into a target that is trained too."""
    tensors, numbers = {}, {}
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = gather_tensor(value)
            else:
                numbers[f"{index}.{key}"] = value
    return tensors, numbers


def unflatten_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
    """Undo `flatten_optimizer` on an optimiser with the same parameters."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **numbers}.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
