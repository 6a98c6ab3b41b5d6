"""What a feature store holds of every sequence, and how states are encoded. Shapes: T tokens, L
layers, D width.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from torch import Tensor, nn

from spectrain.config.plain_files import read_json_object
from spectrain.data.chat import Example
from spectrain.errors import UserError, describe_violation
from spectrain.models.checked_tensors import CHECKSUM_KEY, hash_settings
from spectrain.models.features import Layer
from spectrain.models.target import Target

StoreDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
MAX_SCALED_VALUE = {"fp8": 448.0, "int8": 127.0}
"""The quantized value of a token's largest state, for types that have a scale per token."""
SCALED_DTYPES = tuple(TORCH_DTYPES[dtype] for dtype in MAX_SCALED_VALUE)
HEAD_SAMPLES = 1 << 16
"""Values of each weight in the hash of a head. Training leaves most embeddings unchanged, so few
values would not show it.
"""
FORMAT_VERSION = 1


def count_state_bytes(rows: float, width: int, dtype: str) -> float:
    """Return the bytes on disk of `rows` states of this width, with a scale each for fp8 and
    int8.
    """
    return rows * (width * TORCH_DTYPES[dtype].itemsize + (4 if dtype in MAX_SCALED_VALUE else 0))


def quantize(states: Tensor, dtype: StoreDtype) -> tuple[Tensor, Tensor | None]:
    """Quantize states [.., D]; for fp8 and int8, also return one float32 scale per token and layer
    [..].

    Values round to the nearest, ties to even, which gives the smallest error and no bias on average
    over many values. Stochastic rounding would be unbiased for each value, but a store is written
    once and read in every epoch, so its noise, twice as large, would never average out.
    """
    if dtype not in MAX_SCALED_VALUE:
        return states.to(TORCH_DTYPES[dtype]), None
    scale = (states.float().abs().amax(-1) / MAX_SCALED_VALUE[dtype]).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    scaled = (states.float() / scale[..., None]).clamp(
        -MAX_SCALED_VALUE[dtype], MAX_SCALED_VALUE[dtype]
    )
    return (scaled.round() if dtype == "int8" else scaled).to(TORCH_DTYPES[dtype]), scale


def dequantize(states: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Undo `quantize`, up to rounding, and return the states in `dtype`."""
    return states.to(dtype) if scale is None else (states.float() * scale[..., None]).to(dtype)


def select_final_positions(mask: list[bool], reach: int) -> Tensor:
    """Return the positions [n] whose next token carries loss, and up to `reach` positions before
    each of them.
    """
    carries = torch.tensor([*mask[1:], False])
    # A text ends the reach of every loss.
    for _ in range(min(reach, len(mask))):
        carries = carries | torch.cat([carries[1:], carries.new_zeros(1)])
    return carries.nonzero()[:, 0]


def hash_weights(model: nn.Module) -> str:
    """Hash some values of every weight. Neither sharding nor freshly added adapters change the
    result.
    """
    return hash_samples(dict(sorted(model.named_parameters())), 64)


def hash_head(target: Target) -> str:
    """Hash many values of the weights outside of the layers, which identify a target that was
    loaded without its layers.
    """
    outside = {
        name: weight
        for name, weight in sorted(target.decoder.named_parameters())
        if not name.startswith(f"{target.layer_list_name}.")
    }
    output = {f"output.{name}": weight for name, weight in target.head.output.named_parameters()}
    return hash_samples(outside | output, HEAD_SAMPLES)


def hash_samples(weights: dict[str, nn.Parameter], num_samples: int) -> str:
    """Hash names, shapes and about `num_samples` values of each weight."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        if ".lora_" not in name:
            tensor: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            flat = tensor.detach().flatten()
            sample = flat[:: max(1, len(flat) // num_samples)].float().cpu()
            digest.update(
                f"{name.replace('.base_layer', '')} {tuple(weight.shape)}".encode()
                + sample.numpy().tobytes()
            )
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class StoreContents:
    """Describes what a store holds of every sequence, and for which target."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    target: str
    path: str
    weights: str | None  # hash of all weights; None if a target without layers began the store
    template: str  # hash of the chat template
    layers: tuple[Layer, ...]
    width: PositiveInt
    dtype: StoreDtype
    # "final" is stored only at the positions of `select_final_positions`; None stores it at every
    # position.
    final_reach: NonNegativeInt | None
    # Hash of the weights outside of the layers; None in older stores.
    head: str | None = None
    # The server that captured the states; None for this project's own forward.
    engine: str | None = None

    @property
    def dense_layers(self) -> tuple[Layer, ...]:
        """The layers that are stored at every position."""
        if self.final_reach is None:
            return self.layers
        return tuple(layer for layer in self.layers if layer != "final")

    @property
    def tensor_names(self) -> list[str]:
        """The names of the tensors that are stored of every sequence."""
        parts = [
            *(["hidden"] if self.dense_layers else []),
            *([] if self.final_reach is None else ["final"]),
        ]
        suffixes = ("", ".scale") if self.dtype in MAX_SCALED_VALUE else ("",)
        return [part + suffix for part in parts for suffix in suffixes]

    def sequence_key(self, example: Example) -> str:
        """Return the key of a sequence: a hash of its tokens and, if the loss mask decides what
        is stored, of that mask.
        """
        if self.final_reach is None:
            return example.content_hash
        return f"{example.content_hash}-{zlib.crc32(bytes(example.mask)):08x}"

    def num_bytes(self, example: Example) -> int:
        """Return the bytes that a sequence takes on disk."""
        rows = len(example.tokens) * len(self.dense_layers)
        if self.final_reach is not None:
            rows += len(select_final_positions(example.mask, self.final_reach))
        return int(count_state_bytes(rows, self.width, self.dtype))

    def encode_states(self, example: Example, states: Tensor) -> dict[str, Tensor]:
        """Convert states [T, L, D] to the tensors that are stored, on the CPU.

        The last states may be missing where no later token carries loss: no loss reads them, as it
        reads no padding.
        """
        assert not any(example.mask[len(states) + 1 :]), "a loss reads states that are missing"
        parts = {}
        if self.dense_layers:
            parts["hidden"] = states[:, [self.layers.index(layer) for layer in self.dense_layers]]
        if self.final_reach is not None:
            rows = select_final_positions(example.mask, self.final_reach).to(states.device)
            parts["final"] = states[rows, self.layers.index("final")]
        stored = {}
        for name, part in parts.items():
            stored[name], scale = quantize(part, self.dtype)
            if scale is not None:
                stored[f"{name}.scale"] = scale
        return {name: tensor.to("cpu").contiguous() for name, tensor in stored.items()}

    def decode_states(
        self,
        example: Example,
        tensors: dict[str, Tensor],
        layers: tuple[Layer, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return states [T, L, D] of these layers. Where "final" is not stored they are NaN, so
        that reading them shows.
        """
        dense = self.dense_layers
        device = next(iter(tensors.values())).device
        if dense:
            hidden = dequantize(tensors["hidden"], tensors.get("hidden.scale"), dtype)
            # States that are missing at the end read as padding.
            hidden = torch.nn.functional.pad(
                hidden, (0, 0, 0, 0, 0, len(example.tokens) - len(hidden))
            )
            if layers == dense:
                return hidden
        states = torch.full(
            (len(example.tokens), len(layers), self.width), torch.nan, dtype=dtype, device=device
        )
        for number, layer in enumerate(layers):
            if layer in dense:
                states[:, number] = hidden[:, dense.index(layer)]
            else:
                rows = select_final_positions(example.mask, self.final_reach or 0).to(device)
                states[rows, number] = dequantize(
                    tensors["final"], tensors.get("final.scale"), dtype
                )
        return states

    def matches_tensors(self, example: Example, tensors: dict[str, Tensor]) -> bool:
        """Tell whether the stored tensors of a sequence have the types and sizes that this says."""
        for part in {name.partition(".")[0] for name in tensors}:
            if part == "hidden":
                inner = [len(self.dense_layers), self.width]
                # States that no loss reads may be missing at the end.
                length = len(tensors[part])
                fits = length <= len(example.tokens)
            else:
                inner = [self.width]
                length = len(select_final_positions(example.mask, self.final_reach or 0))
                fits = True
            states, scale = tensors[part], tensors.get(f"{part}.scale")
            fits &= [*states.shape] == [length, *inner]
            fits &= states.dtype == TORCH_DTYPES[self.dtype]
            if scale is not None:
                fits &= [*scale.shape] == [length, *inner[:-1]] and scale.dtype == torch.float32
            if not fits:
                return False
        return True

    def check_serves(self, requested: StoreContents, where: Path) -> None:
        """Raise `UserError` with the reason if the requested contents cannot be read from this
        store.
        """
        missing = [str(layer) for layer in requested.layers if layer not in self.layers]
        reason = None
        compares_all = self.weights is not None and requested.weights is not None
        if not compares_all and self.head is None:
            reason = (
                "it does not say which embedding, norm and output layer its target has, so "
                "only target.parts=all reads it"
            )
        elif (self.weights != requested.weights) if compares_all else (self.head != requested.head):
            reason = (
                f"it was captured from {self.target} ({self.path}), whose weights are not "
                f"those of {requested.target}"
            )
        elif self.width != requested.width:
            reason = f"it holds states of {self.width} numbers, and {requested.width} are read"
        elif self.template != requested.template:
            reason = (
                "it was captured with another chat template, so it would contain none of the "
                "sequences"
            )
        elif missing:
            reason = (
                f"it holds layers {format_layers(self.layers)}, and the drafter also reads "
                f"{', '.join(missing)}"
            )
        elif self.dtype != requested.dtype:
            reason = (
                f"it holds {self.dtype}, not {requested.dtype}; leave source.dtype out to read it"
            )
        elif self.final_reach is not None and "final" in requested.layers:
            reach = requested.final_reach
            if reach is None or reach > self.final_reach:
                reason = (
                    "it holds the last state only at supervised positions, and the drafter "
                    "reads more of them"
                )
        if reason is not None:
            raise UserError(
                f"source.path={where}: {reason}; choose another folder to capture the features "
                "again"
            )


def format_layers(layers: tuple[Layer, ...]) -> str:
    return ", ".join(map(str, layers))


def read_manifest(path: Path) -> StoreContents:
    """Read what a store holds from its manifest."""
    try:
        facts = read_json_object(path)
        # Manifests of earlier versions have no checksum.
        if facts.pop(CHECKSUM_KEY, hash_settings(facts)) != hash_settings(facts):
            raise ValueError("it does not have the checksum that it was saved with")
        if facts.pop("format", None) != FORMAT_VERSION:
            raise ValueError("it is of another version of spectrain")
        return CONTENTS.validate_json(json.dumps(facts), strict=True)
    except ValueError as error:
        reason = describe_violation(error) if isinstance(error, ValidationError) else error
        raise UserError(
            f"{path}: this manifest cannot be read ({reason}); put back a copy, or capture to "
            "another folder"
        ) from error


def format_manifest(contents: StoreContents) -> str:
    """Return the text of a store's manifest."""
    facts = {"format": FORMAT_VERSION, **asdict(contents)}
    return json.dumps({**facts, CHECKSUM_KEY: hash_settings(facts)}, indent=2) + "\n"


CONTENTS = TypeAdapter(StoreContents)
