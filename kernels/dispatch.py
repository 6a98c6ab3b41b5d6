"""Where kernels run: on a GPU, or for tests in Triton's interpreter. SPECTRAIN_KERNELS=reference
or =triton overrides it.
"""

import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

try:
    import triton
except ImportError:  # not on Linux: only the references exist
    triton = None


def jit(function: Callable[..., Any]) -> Any:
    """Apply triton.jit where Triton is installed. Counts and random keys vary by call and are
    not specialised.
    """
    changing = [
        name
        for name in inspect.signature(function).parameters
        if name == "key" or name.startswith("num_")
    ]
    return function if triton is None else triton.jit(function, do_not_specialize=changing)


def kernels_enabled(device: torch.device) -> bool:
    """Tell whether kernels are enabled on a device: on a CPU only where they are requested and
    interpreted.
    """
    mode = os.environ.get("SPECTRAIN_KERNELS")
    if triton is None or mode == "reference":
        return False
    return device.type != "cpu" or (mode == "triton" and os.environ.get("TRITON_INTERPRET") == "1")


def runs_on(device: torch.device) -> bool:
    """Tell whether kernels are enabled and the device is one that they were configured for."""
    return kernels_enabled(device) and (device.type == "cpu" or _is_supported(device))


@cache
def _is_supported(device: torch.device) -> bool:
    """Tell whether this is an NVIDIA GPU from Ampere on; "meta" counts as one. `plan` calls it
    on machines without a GPU.
    """
    if device.type == "meta":
        return True
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
