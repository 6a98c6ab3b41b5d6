"""Whether the compiled kernels of this package can run here, and the working memory of their calls.

SPECTRAIN_KERNELS=reference switches the kernels off, as do a missing Numba and a machine where its
code cannot be stored. Numba is imported at the first question about tensors on a CPU.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

HEAD_STEP = 16
"""Divisor of the head sizes that attention takes."""
MAX_WIDTH = 2048
"""Widest row that norms sum in torch's order."""

_working_memory = threading.local()


@cache
def are_kernels_loaded() -> bool:
    """Return whether the compiled kernels can run, of whatever type the numbers are."""
    try:
        import_module("spectrain_cpu.team")
    # Numba raises RuntimeError where it can write to no cache folder.
    except (ImportError, RuntimeError):
        return False
    return True


def has_cpu_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether compiled kernels serve tensors of this type."""
    if device.type != "cpu" or os.environ.get("SPECTRAIN_KERNELS") in ("reference", "triton"):
        return False
    # Other processors have too few registers for the tiles of float32.
    is_served = dtype == torch.bfloat16 or (
        dtype == torch.float32 and torch.cpu._is_avx512_supported()
    )
    return is_served and are_kernels_loaded()


def has_panel_kernels(dtype: torch.dtype) -> bool:
    """Return whether linears of a few rows can run on panels of weights."""
    is_supported = (
        torch.cpu._is_avx512_bf16_supported()
        if dtype == torch.bfloat16
        else torch.cpu._is_avx512_supported()
    )
    return is_supported and has_cpu_kernels(dtype, torch.device("cpu"))


def has_block_kernels() -> bool:
    """Return whether products with the quantised blocks of GGUF files can run."""
    return torch.cpu._is_avx2_supported() and has_cpu_kernels(torch.bfloat16, torch.device("cpu"))


def has_drafting_kernels() -> bool:
    """Return whether drafters with 8-bit weights can run by compiled kernels."""
    return torch.cpu._is_vnni_supported() and has_cpu_kernels(torch.bfloat16, torch.device("cpu"))


def working_memory(size: int) -> Tensor:
    """Return memory for at least `size` float64 numbers, which the next call in this thread may
    overwrite.
    """
    memory: Tensor | None = getattr(_working_memory, "memory", None)
    if memory is None or len(memory) < size:
        memory = _working_memory.memory = torch.empty(max(size, 1 << 16), dtype=torch.float64)
    return memory
