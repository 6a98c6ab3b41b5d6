"""Cached features of the `speculators` project, and of the connectors by which vLLM writes them.

Each sequence has a file hidden_states/hs_{i}.safetensors with token_ids [T] and hidden_states [T, A
+ 1, D]: the residual streams that enter A layers, then the un-normed output of the last layer. The
FP8HiddenStatesConnector of hs-connectors stores them as float8_e4m3fn, with one factor per token in
hidden_states_scales [T, 1, 1]. The cache runs the target to identify the layers, unless the files'
metadata names them all, as in layers=2,15,27,30. Shapes: T tokens, A captured layers, D width.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.errors import UserError
from spectrain.models.checked_tensors import DamagedFile, open_tensors
from spectrain.models.features import Layer
from spectrain.models.target import Target

from .base import FeatureCache
from .store_contents import dequantize, format_layers

MAX_STATE_ERROR = 0.1
"""Largest relative distance of stored states from the target's own at the median token. Measured on
tiny and SmolLM2: bfloat16 instead of float32 causes at most 0.02, float8 0.03, and neighbouring
layers differ by at least 0.19."""
SCALES = "hidden_states_scales"
STATE_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3")
"""The types of states that are read, as safetensors names them."""
TOKEN_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
SAMPLE_TOKENS = 256  # tokens by which layers and target are compared


def find_hidden_states(path: Path) -> Path | None:
    """Return the folder of hs_*.safetensors files, `path` itself or a folder in it; None if
    there is none.
    """
    folders = (
        folder for folder in (path / "hidden_states", path) if any(folder.glob("hs_*.safetensors"))
    )
    return next(folders, None)


@dataclass(frozen=True)
class FileContents:
    """What a file of the cache holds."""

    tokens: Tensor  # [T]
    num_states: int
    # The layers that its metadata names; None if it names none.
    layers: tuple[int, ...] | None


def read_contents(file: Path, width: int) -> FileContents:
    """Read all of a file but its states; raise UserError where its tensors or its layers do not
    fit each other.
    """
    with open_tensors(file, "capture it again") as tensors:
        tokens = tensors.get_tensor("token_ids")
        names = tensors.keys()
        states = tensors.get_slice("hidden_states")
        shape = states.get_shape()
        scales = tensors.get_slice(SCALES).get_shape() if SCALES in names else None
        named = (tensors.metadata() or {}).get("layers")
    if tokens.dim() != 1 or tokens.dtype not in TOKEN_DTYPES:
        raise UserError(f"{file}: token_ids is no list of whole numbers; capture it again")
    if len(shape) != 3 or shape[0] != len(tokens) or shape[2] != width or shape[1] < 1:
        raise UserError(
            f"{file}: hidden_states is {shape}; expected [{len(tokens)}, layers, {width}]"
        )
    dtype = states.get_dtype()
    if dtype == "F8_E4M3" and scales is None:
        raise UserError(f"{file}: its states are float8 and {SCALES} is missing; capture it again")
    if scales is not None and scales != [len(tokens), 1, 1]:
        raise UserError(f"{file}: {SCALES} is {scales}; expected [{len(tokens)}, 1, 1]")
    if dtype not in STATE_DTYPES:
        raise UserError(f"{file}: no states of type {dtype} are read; capture it again")
    # No model has layers with more digits.
    layers = tuple(map(int, re.findall(r"\d{1,6}", named))) if named else None
    if layers is not None and len(layers) != shape[1]:
        raise UserError(
            f"{file}: its metadata names {len(layers)} layers, and it holds {shape[1]}; capture "
            "it again"
        )
    return FileContents(tokens, shape[1], layers)


def read_states_file(file: Path, count: int | None = None) -> Tensor:
    """Return the states [T, L, D] of a file or of its first `count` tokens, dequantized to
    float32 where they are float8.
    """
    with open_tensors(file, "capture it again") as tensors:
        states: Tensor = tensors.get_slice("hidden_states")[:count]
        if states.dtype != torch.float8_e4m3fn:
            return states
        return dequantize(states, tensors.get_tensor(SCALES)[:count, :, 0], torch.float32)


class SpeculatorsCache(FeatureCache):
    """Reads a folder of cached features. Missing sequences run live each time, because the
    folder is another project's.
    """

    def __init__(self, path: Path, target: Target) -> None:
        folder = find_hidden_states(path)
        assert folder is not None, "the caller has checked that the folder exists"
        self.path, self.folder, self.target = path, folder, target
        self.files: dict[str, Path] = {}
        self.damaged_files: dict[str, str] = {}  # name -> reason
        first: FileContents | None = None
        for file in sorted(folder.glob("hs_*.safetensors")):
            try:
                contents = read_contents(file, target.width)
            except DamagedFile as error:
                self.damaged_files[file.name] = str(error.__cause__ or error)
                continue
            if first is not None and (contents.num_states, contents.layers) != (
                first.num_states,
                first.layers,
            ):
                raise UserError(
                    f"{file}: it holds other layers than the files before it; recreate it"
                )
            if first is None or len(first.tokens) < 32 < len(contents.tokens):
                first = contents
                first_file = file
            self.files[Example(contents.tokens.tolist(), []).content_hash] = file
        if first is None:
            raise UserError(
                f"{folder}: none of its hs_*.safetensors can be read; capture them again"
            )
        tokens = first.tokens[:SAMPLE_TOKENS]
        states = read_states_file(first_file, SAMPLE_TOKENS)
        self.stored_layers = first.layers or self._identify_layers(tokens, states)
        if not {*self.stored_layers} <= {*range(target.num_layers + 1)}:
            raise UserError(
                f"{first_file}: it names layers {format_layers(self.stored_layers)}, and "
                f"{target.name} has {target.num_layers}; use the target it was made with"
            )
        self.next_token_rate = (
            self._measure_next_token_rate(tokens, states) if first.layers is not None else None
        )

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that can be read: the stored ones, and "final" by the target's final norm,
        if the last one is stored.
        """
        final: tuple[Layer, ...] = (
            ("final",) if self.target.num_layers in self.stored_layers else ()
        )
        return (*dict.fromkeys(self.stored_layers), *final)

    def _measure_next_token_rate(self, tokens: Tensor, stored: Tensor) -> float | None:
        """Return how often the last layer's states [T, L, D] predict the next token [T] through the
        target's norm and output layer, which is next to never for another target. None if that
        layer is not stored."""
        if self.target.num_layers not in self.stored_layers:
            return None
        last = stored[:-1, self.stored_layers.index(self.target.num_layers)].to(
            self.target.device, self.target.dtype
        )
        predictions = self.target.head.logits(self.target.apply_final_norm(last[None])).argmax(-1)[
            0
        ]
        return float((predictions.cpu() == tokens[1:]).float().mean())

    def _identify_layers(self, tokens: Tensor, stored: Tensor) -> tuple[int, ...]:
        """Return the layers whose states of one sequence match the stored ones, the last of
        which must be the last layer's.
        """
        target = self.target
        target.require_layers(f"{self.folder}, whose files do not name their layers,")
        every = (*range(target.num_layers + 1),)
        target_states = (
            target.features(tokens[None].to(target.device), every).hidden[0].float().cpu()
        )
        layers = []
        for number, states in enumerate(stored.float().unbind(1)):
            errors = (target_states - states[:, None]).norm(dim=-1) / target_states.norm(dim=-1)
            errors = errors.nanmedian(0).values  # [layers]
            layer = int(errors.argmin()) if number + 1 < stored.shape[1] else target.num_layers
            if not errors[layer] < MAX_STATE_ERROR:
                state = f"state {number + 1} of {stored.shape[1]}"
                raise UserError(
                    f"{self.folder}: {state} is not that of {target.name} (nearest, layer "
                    f"{int(errors.argmin())}, differs by {float(errors.min()):.0%}; the last must "
                    "be the last layer's, un-normed); use the target it was made with"
                )
            layers.append(layer)
        return tuple(layers)

    def describe_capture(self, distinct: list[Example], missing: list[Example]) -> str:
        """Describe how many of these sequences are cached; raise `UserError` if none is."""
        if len(missing) == len(distinct):
            raise UserError(
                f"source.path={self.path}: it holds none of the {len(distinct)} sequences, so it "
                "was made from other data or with another chat template; train on the data it "
                "was made from"
            )
        description = (
            f"{self.path}: layers {format_layers(self.layers)}, "
            f"{len(distinct) - len(missing)} of {len(distinct)} sequences"
        )
        if self.next_token_rate is not None:
            description += (
                f", whose last states predict {self.next_token_rate:.0%} of the next tokens"
            )
        for name, reason in self.damaged_files.items():
            description += f"; {name} cannot be read ({reason})"
        return description + (f"; the target runs for the other {len(missing)}" if missing else "")

    def __contains__(self, example: Example) -> bool:
        return example.content_hash in self.files

    def read_states(
        self, example: Example, layers: tuple[Layer, ...], like: Target
    ) -> Tensor | None:
        file = self.files.get(example.content_hash)
        if file is None:
            return None
        try:
            states = read_states_file(file).to(like.device, like.dtype)
        except DamagedFile as error:
            reason = error.__cause__ or error
            raise UserError(
                f"{file}: it cannot be read ({reason}); delete it, and the target runs instead"
            ) from error
        if not states.isfinite().all():
            raise UserError(
                f"{file}: its states hold NaN or infinity; delete it, and the target runs instead"
            )
        numbers = [
            self.stored_layers.index(self.target.num_layers if layer == "final" else layer)
            for layer in layers
        ]
        selected = [states[:, number] for number in numbers]
        if "final" in layers:
            at = layers.index("final")
            selected[at] = self.target.apply_final_norm(selected[at][None])[0]
        return torch.stack(selected, dim=1)

    def put_states(self, example: Example, states: Tensor, layers: tuple[Layer, ...]) -> Tensor:
        """Select `layers` of live states [T, L, D] of all cached layers; the cache stores
        nothing.
        """
        return states[:, [self.layers.index(layer) for layer in layers]]
