"""Where kernels run: on a GPU, or for tests in Triton's interpreter. SPECTRAIN_KERNELS=reference
or =triton overrides it. On a CPU an installed package may bring kernels of its own.
"""

import inspect
import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # not on Linux: only the references exist
    triton = None
    tl = None

__all__ = [
    "FindKernel",
    "cpu_kernel_sources",
    "jit",
    "kernels_enabled",
    "run_on_cpu",
    "runs_on",
    "takes_gradients",
    "tl",
    "triton",
]


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


def takes_gradients(x: torch.Tensor) -> bool:
    """Tell whether the kernels that have gradients take a tensor: where kernels run, outside of
    compiled code, which fuses the modules' own operations. The interpreter computes bfloat16
    wrongly.
    """
    types = (torch.float32, torch.float16, torch.bfloat16)
    return (
        not torch.compiler.is_compiling()
        and runs_on(x.device)
        and x.dtype in (types[:2] if x.device.type == "cpu" else types)
    )


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


FindKernel = Callable[[str], Callable[..., Any] | None]


@cache
def cpu_kernel_sources() -> tuple[FindKernel, ...]:
    """Return the functions by which installed packages find their kernels of a CPU by the names of
    operations: their entry points in the group spectrain.kernels.
    """
    entries = {entry.value: entry for entry in entry_points(group="spectrain.kernels")}
    return tuple(entries[value].load() for value in sorted(entries))


def run_on_cpu(operation: str, *operands: Any) -> Any:
    """Return what an installed package's kernel of an operation computes for operands on a CPU;
    None where there is no kernel or it does not serve these operands, so that the reference runs.
    The first operand tells the device, unless it is no tensor.
    """
    # torch.compile fuses the operations of the reference, and cannot look for packages.
    if torch.compiler.is_compiling():
        return None
    if isinstance(operands[0], torch.Tensor) and operands[0].device.type != "cpu":
        return None
    for find_kernel in cpu_kernel_sources():
        kernel = find_kernel(operation)
        result = None if kernel is None else kernel(*operands)
        if result is not None:
            return result
    return None
