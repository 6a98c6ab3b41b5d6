"""Measured limits of this machine: the lower bound of any decoding step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn


def synchronize_device(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that a clock measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def capture_graph(graph: Any, pool: Any = None) -> Iterator[None]:
    """Capture with `torch.cuda.graph`, and restore the current stream where the capture fails."""
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        torch.cuda.set_stream(stream)


@cache
def measure_bandwidth(device: torch.device, size: int = 1 << 28) -> float:
    """Return the bytes per second that can be read, the best of several passes over `size` bytes."""
    data = torch.ones(size // 4, device=device)
    return size / min(_time_call(data.sum, device) for _ in range(6))


@cache
def measure_flops(device: torch.device, dtype: torch.dtype, width: int = 1024) -> float:
    """Return the floating-point operations per second of a large matrix product, the best of several."""
    data = torch.ones(width, width, device=device, dtype=dtype)
    return 2 * width**3 / min(_time_call(lambda: data @ data, device) for _ in range(6))


def forward_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a forward reads completely, shared ones once. An embedding that is no output layer is
    excluded, because only rows of it are read."""
    looked_up = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    looked_up -= {id(child.weight) for child in module.modules() if isinstance(child, nn.Linear)}
    return [parameter for parameter in module.parameters() if id(parameter) not in looked_up]


def roofline_seconds(module: nn.Module, rows: float, device: torch.device, dtype: torch.dtype) -> float:
    """Return the lower bound in seconds of a forward over so many rows: reading every weight once, or its arithmetic."""
    weights = forward_weights(module)
    if not weights:
        return 0.0
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    products = 2 * rows * sum(weight.numel() for weight in weights)
    return max(size / measure_bandwidth(device), products / measure_flops(device, dtype))


def _time_call(work: Callable[[], object], device: torch.device) -> float:
    synchronize_device(device)
    began = time.perf_counter()
    work()
    synchronize_device(device)
    return time.perf_counter() - began
