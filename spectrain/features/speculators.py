"""Cached features of the `speculators` project.

Each sequence has a file hidden_states/hs_{i}.safetensors with token_ids [T] and hidden_states [T, A + 1, D]: the residual
streams that enter A layers, then the un-normed output of the last layer. No file names these layers, so the cache runs the
target to identify them. Shapes: T tokens, A captured layers, D width.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.errors import UserError
from spectrain.models.features import Layer
from spectrain.models.target import Target

from .base import FeatureCache
from .store_contents import format_layers

MAX_STATE_ERROR = 0.1
"""Largest relative distance of stored states from the target's own at the median token. Measured on tiny and SmolLM2: bfloat16
instead of float32 causes at most 0.02, and neighbouring layers differ by at least 0.2."""


def find_hidden_states(path: Path) -> Path | None:
    """Return the folder of hs_*.safetensors files, `path` itself or a folder in it; None if there is none."""
    folders = (folder for folder in (path / "hidden_states", path) if any(folder.glob("hs_*.safetensors")))
    return next(folders, None)


class SpeculatorsCache(FeatureCache):
    """Reads a folder of cached features. Missing sequences run live each time, because the folder is another project's."""

    def __init__(self, path: Path, target: Target) -> None:
        folder = find_hidden_states(path)
        assert folder is not None, "the caller has checked that the folder exists"
        self.path, self.folder, self.target = path, folder, target
        self.files: dict[str, Path] = {}
        self.damaged_files: dict[str, str] = {}  # name -> reason
        first: tuple[int, Tensor, Tensor] | None = None
        for file in sorted(folder.glob("hs_*.safetensors")):
            try:
                with safe_open(file, "pt") as tensors:
                    tokens = tensors.get_tensor("token_ids")
                    shape = tensors.get_slice("hidden_states").get_shape()
                    if len(shape) != 3 or shape[0] != len(tokens) or shape[2] != target.width or shape[1] < 1:
                        raise UserError(f"{file}: hidden_states is {shape}; expected [{len(tokens)}, layers, {target.width}]")
                    if first is None or len(first[1]) < 32 < len(tokens):
                        first = (shape[1], tokens, tensors.get_slice("hidden_states")[:256])
                    elif shape[1] != first[0]:
                        raise UserError(f"{file}: it holds {shape[1]} layers, the files before it {first[0]}; recreate it")
            except (OSError, SafetensorError) as error:
                self.damaged_files[file.name] = str(error)
                continue
            self.files[Example(tokens.tolist(), []).content_hash] = file
        if first is None:
            raise UserError(f"{folder}: none of its hs_*.safetensors can be read; capture them again")
        self.stored_layers: tuple[Layer, ...] = (*self._identify_layers(first[1][:256], first[2]), target.num_layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that can be read: the stored ones, and "final" by the target's final norm."""
        return (*dict.fromkeys(self.stored_layers), "final")

    def _identify_layers(self, tokens: Tensor, stored: Tensor) -> list[int]:
        """Return the layers whose states of one sequence match the stored ones, the last stored state left out."""
        target = self.target
        every = (*range(target.num_layers + 1),)
        target_states = target.features(tokens[None].to(target.device), every).hidden[0].float().cpu()
        layers = []
        for number, states in enumerate(stored.float().unbind(1)):
            errors = (target_states - states[:, None]).norm(dim=-1) / target_states.norm(dim=-1)
            errors = errors.nanmedian(0).values  # [layers]
            layer = int(errors.argmin()) if number + 1 < stored.shape[1] else target.num_layers
            if not errors[layer] < MAX_STATE_ERROR:
                state = f"state {number + 1} of {stored.shape[1]}"
                raise UserError(
                    f"{self.folder}: {state} is not that of {target.name} (nearest, layer {int(errors.argmin())}, differs by "
                    f"{float(errors.min()):.0%}; the last must be the last layer's, un-normed); use the target it was made with"
                )
            layers.append(layer)
        return layers[:-1]

    def describe_capture(self, distinct: list[Example], missing: list[Example]) -> str:
        """Describe how many of these sequences are cached; raise `UserError` if none is."""
        if len(missing) == len(distinct):
            raise UserError(
                f"source.path={self.path}: it holds none of the {len(distinct)} sequences, so it was made from other data or "
                "with another chat template; train on the data it was made from"
            )
        description = (
            f"{self.path}: layers {format_layers(self.layers)}, {len(distinct) - len(missing)} of {len(distinct)} sequences"
        )
        for name, reason in self.damaged_files.items():
            description += f"; {name} cannot be read ({reason})"
        return description + (f"; the target runs for the other {len(missing)}" if missing else "")

    def __contains__(self, example: Example) -> bool:
        return example.content_hash in self.files

    def read_states(self, example: Example, layers: tuple[Layer, ...], like: Target) -> Tensor | None:
        file = self.files.get(example.content_hash)
        if file is None:
            return None
        try:
            with safe_open(file, "pt") as tensors:
                states = tensors.get_tensor("hidden_states").to(like.device, like.dtype)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: it cannot be read ({error}); delete it, and the target runs instead") from error
        final = self.target.apply_final_norm(states[None, :, -1])[0] if "final" in layers else None
        selected = [states[:, self.stored_layers.index(layer)] if layer != "final" else final for layer in layers]
        return torch.stack([part for part in selected if part is not None], dim=1)

    def put_states(self, example: Example, states: Tensor, layers: tuple[Layer, ...]) -> Tensor:
        """Select `layers` of live states [T, L, D] of all cached layers; the cache stores nothing."""
        return states[:, [self.layers.index(layer) for layer in layers]]
