"""The interface to sampling by compiled kernels on a CPU. Shapes: V vocabulary."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .counter import gumbel_noise
from .cpu_kernels import are_kernels_loaded, working_memory

MIN_VOCABULARY = 8192
"""Vocabulary from which on a kernel is worth its compilation."""


def can_choose_by_noise(logits: Tensor) -> bool:
    """Return whether a compiled kernel draws from these logits [..., V]."""
    if logits.device.type != "cpu" or logits.shape[-1] < MIN_VOCABULARY or not logits.numel():
        return False
    return os.environ.get("SPECTRAIN_KERNELS") != "reference" and are_kernels_loaded()


def choose_by_noise(logits: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """Return the tokens [...] with the largest sums of logits [..., V] over the temperature and the
    Gumbel noise of keys [...]: those that torch finds in all sums."""
    from .cpu_sampling import BLOCK, UNDECIDED
    from .cpu_sampling import choose_by_noise as run_kernel

    size = logits.shape[-1]
    rows = logits.reshape(-1, size).float().contiguous()
    flat_keys = keys.reshape(-1).contiguous()
    assert len(rows) == len(flat_keys)
    chosen = torch.empty(len(rows), dtype=torch.int64)
    memory = working_memory((size + BLOCK) // 2 + 1)
    addresses = rows.data_ptr(), flat_keys.data_ptr(), chosen.data_ptr()
    run_kernel(*addresses, len(rows), size, temperature, memory.data_ptr())
    for row in (chosen == UNDECIDED).nonzero()[:, 0].tolist():
        chosen[row] = (rows[row] / temperature + gumbel_noise(flat_keys[row], size)).argmax()
    return chosen.view(logits.shape[:-1])
