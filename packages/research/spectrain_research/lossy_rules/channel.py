"""The radio channel between a drafter on a device and a target on a server, as a judge of drafts
reads it (after WISV, Liu et al., 2026, arXiv 2604.17701).

A rejected draft costs a further exchange. Its time is in inverse proportion to the channel's
capacity, log(1 + SNR). Shapes: B batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spectrain.kernels.counter import make_key, uniform_noise
from spectrain.randomness import sequence_generator
from spectrain_research.shared.purposes import CHANNEL

REFERENCE_SNR = 10.0
"""The signal-to-noise ratio, 10 dB, at which an exchange costs as much as accepting a wrong token
with wrong_weight=1."""
TRAINED_SNR_DB = (-10.0, 30.0)


def log_exchange_cost(snr: Tensor) -> Tensor:
    """Return the logarithm of an exchange's time at a signal-to-noise ratio (no decibels),
    relative to that at the reference.
    """
    return math.log(math.log1p(REFERENCE_SNR)) - snr.log1p().log()


def from_decibels(snr_db: Tensor) -> Tensor:
    """Return the signal-to-noise ratio of decibels."""
    return 10 ** (snr_db / 10)


def draw_training_cost(seed: int, tokens: Tensor, step: int) -> float:
    """Draw the channel of a training text at a step, its decibels uniformly, and return the
    logarithm of its exchange's time.
    """
    low, high = TRAINED_SNR_DB
    share = torch.rand((), generator=sequence_generator(CHANNEL, seed, tokens, step))
    return float(log_exchange_cost(from_decibels(low + (high - low) * share)))


def draw_round_costs(snr_db: float, seed: int, sequence_ids: Tensor, positions: Tensor) -> Tensor:
    """Draw the channel of a round for each text with Rayleigh fading around a mean ratio, and
    return the logarithms [B] of the exchange's time.

    The draws are keyed by the seed, the text and the position [B] after the root.
    """
    keys = make_key(CHANNEL, seed, sequence_ids, positions)
    # The power of a Rayleigh channel is exponentially distributed.
    power = -uniform_noise(keys, torch.zeros_like(keys)).log()
    return log_exchange_cost(10 ** (snr_db / 10) * power)
