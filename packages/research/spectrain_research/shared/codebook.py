"""Codebooks: the vectors of codes, which say which of them are alike. Shapes: C codes, d numbers
of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.checked_tensors import DamagedFile, read_tensors

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "model.decoder.embed_tokens.weight",
)
"""Names of the input embedding in the files of models."""


@dataclass(frozen=True)
class Codebook:
    """The token ids of codes [C] and their vectors [C, d]."""

    tokens: Tensor
    vectors: Tensor

    @classmethod
    def read(cls, path: str, key: str) -> Codebook:
        """Read a file with `tokens` and `vectors`, or a model's directory, whose input embedding
        makes every token a code.
        """
        source = Path(path).expanduser()
        file = source if source.is_file() else source / "codebook.safetensors"
        file = file if file.is_file() else source / "model.safetensors"
        try:
            tensors = read_tensors(file, "name a file or a model")
        except DamagedFile as error:
            raise UserError(f"{key}={path}: no codebook can be read: {error}") from error
        if "tokens" in tensors and "vectors" in tensors:
            return cls(tensors["tokens"], tensors["vectors"].float())
        name = next((name for name in EMBEDDING_NAMES if name in tensors), None)
        if name is None:
            raise UserError(
                f"{key}={path}: it holds neither tokens and vectors nor an input embedding; name "
                "another file"
            )
        return cls(torch.arange(len(tensors[name])), tensors[name].float())

    def nearest_tokens(self, count: int) -> dict[int, list[int]]:
        """Return for each code its `count` nearest others, the nearest first."""
        order: dict[int, list[int]] = {}
        for begin in range(0, len(self.tokens), 512):
            distance = torch.cdist(self.vectors[begin : begin + 512], self.vectors)
            rows = torch.arange(len(distance))
            distance[rows, begin + rows] = torch.inf
            near = distance.topk(min(count, len(self.tokens) - 1), largest=False).indices
            for token, others in zip(
                self.tokens[begin : begin + 512].tolist(), self.tokens[near].tolist()
            ):
                order[token] = others
        return order
