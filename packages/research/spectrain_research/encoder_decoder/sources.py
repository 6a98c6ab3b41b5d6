"""Sources: what the encoder reads of a text, and where the decoder's tokens begin in it.

A text is [source, end of text, decoder start, answer]: its first (end of text, decoder start) pair
divides it. For a model of speech the source is the name of a sound file. Shapes: B batch, T tokens
of a text, E source positions, N decoder tokens.
"""

from __future__ import annotations

import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spectrain.errors import UserError, first_line


@dataclass(frozen=True)
class Boundary:
    """The pair of tokens that ends the source and starts the decoder."""

    end: int
    start: int

    def find(self, tokens: Sequence[int]) -> int:
        """Return the index of the decoder's first token; the number of tokens where the text has
        no such pair.
        """
        for index in range(1, len(tokens)):
            if tokens[index] == self.start and tokens[index - 1] == self.end:
                return index
        return len(tokens)


class SourceReader(Protocol):
    """Turns the source's tokens into the arguments of the encoder."""

    # Whether the encoder has one position for each token of the source.
    reads_tokens: bool

    def encoder_inputs(
        self, sources: Sequence[Sequence[int]], device: torch.device
    ) -> dict[str, Tensor]:
        """Return the arguments of the encoder for sources of any lengths."""


class TokenReader:
    """The source is text: its tokens, the end of text included, padded on the right."""

    reads_tokens = True

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def encoder_inputs(
        self, sources: Sequence[Sequence[int]], device: torch.device
    ) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask` [B, E]."""
        longest = max(1, *map(len, sources))
        rows = [[*source, *[self.pad] * (longest - len(source))] for source in sources]
        mask = [[1] * len(source) + [0] * (longest - len(source)) for source in sources]
        return {
            "input_ids": torch.tensor(rows, device=device),
            "attention_mask": torch.tensor(mask, device=device),
        }


class SoundReader:
    """The source is the name of a sound file (WAV, 16 bits, one channel), relative to `folder`."""

    reads_tokens = False

    def __init__(self, tokenizer: Any, extractor: Any, folder: Path) -> None:
        self.tokenizer, self.extractor, self.folder = tokenizer, extractor, folder
        self._read: dict[str, Tensor] = {}

    def encoder_inputs(
        self, sources: Sequence[Sequence[int]], device: torch.device
    ) -> dict[str, Tensor]:
        """Return `input_features` [B, mel bands, frames]."""
        names = [
            self.tokenizer.decode(source, skip_special_tokens=True).strip() for source in sources
        ]
        return {
            "input_features": torch.cat([self._read_features(name) for name in names]).to(device)
        }

    def _read_features(self, name: str) -> Tensor:
        if name not in self._read:
            rate = self.extractor.sampling_rate
            features = self.extractor(
                read_sound(self.folder / name, rate), sampling_rate=rate, return_tensors="pt"
            )
            self._read[name] = features.input_features
        return self._read[name]


def read_sound(path: Path, rate: int) -> np.ndarray:
    """Return the samples of a WAV file as numbers from -1 to 1; raise UserError where its form
    is another.
    """
    try:
        with wave.open(str(path)) as file:
            form = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise UserError(
            f"{path}: it is no WAV file that can be read ({first_line(error)}); name one in the "
            "prompt"
        ) from error
    if form != (1, 2, rate):
        raise UserError(
            f"{path}: channels, bytes and rate are {form}, and the target reads (1, 2, {rate}); "
            "convert the file"
        )
    return np.frombuffer(frames, dtype="<i2").astype(np.float32) / 32768


def split_rows(
    rows: Sequence[Sequence[int]], boundary: Boundary
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sources and the decoder's tokens of texts."""
    starts = [boundary.find(row) for row in rows]
    return [list(row[:start]) for row, start in zip(rows, starts)], [
        list(row[start:]) for row, start in zip(rows, starts)
    ]


def shift_right(states: Tensor, starts: Tensor, length: int, dim: int = 1) -> Tensor:
    """Return [.., `length`, ..] with row b of `states` placed from `starts[b]` on along `dim`,
    and zeros elsewhere.
    """
    index = torch.arange(length, device=states.device) - starts[:, None]
    is_inside = (index >= 0) & (index < states.shape[dim])
    shape = [len(starts), *[1] * (states.dim() - 1)]
    shape[dim] = length
    index = index.clamp(0, states.shape[dim] - 1).view(shape)
    is_inside = is_inside.view(shape)
    expanded = list(states.shape)
    expanded[dim] = length
    return states.gather(dim, index.expand(expanded)) * is_inside
