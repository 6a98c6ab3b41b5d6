"""Measured limits of this machine: the lower bound of any decoding step."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn


def synchronize_device(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that a clock measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def available_bytes(device: torch.device) -> float:
    """Return how many bytes can be allocated on a device: what is free, and what torch keeps
    without using it; unlimited on a CPU.
    """
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def choose_work_clock(device: torch.device) -> Callable[[], float]:
    """Return the clock, in seconds, by which steps of different kinds are compared on a device.

    One thread that computes on a CPU is timed by its own processor time: beside busy processes the
    system interrupts steps for longer than they take, so that their wall times say little about
    their work. Otherwise it is the wall clock, because a thread also waits for other threads, or
    for a GPU. So it is on Windows, whose processor times have steps of 16 milliseconds.
    """
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1 and sys.platform != "win32"
    return time.thread_time if is_alone else time.perf_counter


def measure_work(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `work` by the clock that `choose_work_clock` gives."""
    clock = choose_work_clock(device)
    synchronize_device(device)
    start = clock()
    work()
    synchronize_device(device)
    return clock() - start


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
    """Return the bytes per second that can be read, the best of several passes over `size`
    bytes.
    """
    data = torch.ones(size // 4, device=device)
    return size / min(_time_call(data.sum, device) for _ in range(6))


@cache
def measure_flops(device: torch.device, dtype: torch.dtype, width: int = 1024) -> float:
    """Return the floating-point operations per second of a large matrix product, the best of
    several.
    """
    data = torch.ones(width, width, device=device, dtype=dtype)
    return 2 * width**3 / min(_time_call(lambda: data @ data, device) for _ in range(6))


def forward_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a forward reads completely, shared ones once. An embedding that is
    no output layer is excluded, because only rows of it are read."""
    looked_up = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    looked_up -= {id(child.weight) for child in module.modules() if isinstance(child, nn.Linear)}
    return [parameter for parameter in module.parameters() if id(parameter) not in looked_up]


@dataclass(frozen=True)
class DeviceLimits:
    """What a device can do at most."""

    # Bytes per second that it reads from memory.
    bandwidth: float
    # Floating-point operations per second.
    flops: float


def measure_limits(device: torch.device, dtype: torch.dtype) -> DeviceLimits:
    """Measure the limits of a device of this machine."""
    return DeviceLimits(measure_bandwidth(device), measure_flops(device, dtype))


def roofline_seconds(module: nn.Module, rows: float, limits: DeviceLimits) -> float:
    """Return the lower bound in seconds of a forward over so many rows: reading every weight once,
    or its arithmetic.

    A mixture of experts reads those of its E experts that some row chooses, E (1 - (1 - k / E) ^
    rows) of them on average if each row chooses k of them independently, and computes k for each
    row.
    """
    experts = {id(weight): share for weight, share in expert_weights(module)}
    size = products = 0.0
    for weight in forward_weights(module):
        share = experts.get(id(weight), 1.0)
        size += weight.nbytes * (1 - (1 - share) ** rows)
        products += 2 * rows * share * weight.numel()
    return max(size / limits.bandwidth, products / limits.flops)


def expert_weights(module: nn.Module) -> Iterator[tuple[nn.Parameter, float]]:
    """Yield the stacked weights of experts, and the share of the experts that a row chooses."""
    for parent in module.modules():
        for child in parent.children():
            if is_experts(child):
                parts: list[Any] = [child, parent, *parent.children()]
                chosen = next((part.top_k for part in parts if has_top_k(part)), 1)
                yield from (
                    (weight, chosen / len(weight))
                    for weight in child.parameters()
                    if weight.dim() == 3
                )


def has_top_k(module: Any) -> bool:
    """Tell whether a module says how many experts a row chooses."""
    return isinstance(getattr(module, "top_k", None), int)


def _time_call(work: Callable[[], object], device: torch.device) -> float:
    synchronize_device(device)
    began = time.perf_counter()
    work()
    synchronize_device(device)
    return time.perf_counter() - began


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds the stacked weights of experts."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.dim() == 3
