"""Random numbers that depend only on their keys, so that a run repeats whatever the batches are."""

import zlib

import torch
from torch import Tensor

KEY_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
# What a number is for: the same keys never serve two purposes. Packages have further numbers.
DRAFT = 1
ACCEPT = 2
SAMPLE = 3
LAYER_DROPOUT = 4
MASKED_PREFIXES = 5
ANCHORS = 6
CHAINS = 7
NOISE = 12
WITHOUT_FEATURES = 13
FEATURE_NOISE = 21
LOSS_WINDOW = 23


def keyed_generator(purpose: int, seed: int, row: int, position: int) -> torch.Generator:
    """Return a generator for one purpose at one position of one sequence."""
    key = sum(
        part * factor for part, factor in zip((seed, row, position, purpose), KEY_MULTIPLIERS)
    ) % (1 << 63)
    return torch.Generator().manual_seed(key)


def sequence_generator(purpose: int, seed: int, tokens: Tensor, step: int) -> torch.Generator:
    """Return a generator for a training sequence [T] at a step, keyed by its tokens without
    padding.

    The draws are the same however sequences are batched, and on any process.
    """
    text = tokens[: unpadded_length(tokens)]
    return keyed_generator(purpose, seed, zlib.crc32(text.cpu().numpy().tobytes()), step)


def unpadded_length(tokens: Tensor) -> int:
    """Return the number of tokens [T] of a text before its padding."""
    return int(tokens.nonzero()[-1]) + 1 if tokens.any() else 0


def gumbel_noise(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Return standard Gumbel noise. The argmax of log-probabilities plus noise is a sample; the k
    largest are k samples without replacement."""
    return -torch.empty(shape).exponential_(generator=source).log()
