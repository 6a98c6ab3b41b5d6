"""Where kernels run: on a GPU, or for tests in Triton's interpreter. SPECTRAIN_KERNELS=reference or =triton overrules it."""

import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

try:
    import triton
except ImportError:  # not on Linux: the references are all there is
    triton = None


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit, where there is one. Counts and random keys change from call to call, so none of them is compiled in."""
    changing = [name for name in inspect.signature(function).parameters if name == "key" or name.startswith("num_")]
    return function if triton is None else triton.jit(function, do_not_specialize=changing)


def kernels_enabled(device: torch.device) -> bool:
    """Whether kernels are to run on a device if they can: on a CPU only where they are asked for and interpreted."""
    asked = os.environ.get("SPECTRAIN_KERNELS")
    if triton is None or asked == "reference":
        return False
    return device.type != "cpu" or (asked == "triton" and os.environ.get("TRITON_INTERPRET") == "1")


def runs_on(device: torch.device) -> bool:
    """Whether they are, and the device is one that configurations were made for."""
    return kernels_enabled(device) and (device.type == "cpu" or _is_supported(device))


@cache
def _is_supported(device: torch.device) -> bool:
    """An NVIDIA GPU from Ampere on; "meta" stands for one where launches are counted. `plan` may ask where there is none."""
    if device.type == "meta":
        return True
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
