"""The interface to the compiled kernels of a CPU: whether they can run, and calls that take
tensors.

Shapes: B batch, N query nodes, M appended nodes (the N new ones last), T key slots, H query heads,
K key-value heads, d head size, D width, I inner width. Numba is imported at the first use.
SPECTRAIN_KERNELS=reference switches the kernels off, as do a missing Numba and a machine where its
code cannot be stored.
"""

from __future__ import annotations

import os
import threading
import weakref
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_trees import prepare_tree_kernels
from .onednn import onednn_linear
from .tree_attention import Visibility

HEAD_STEP = 16
"""Divisor of the head sizes that attention takes."""
MAX_WIDTH = 2048
"""Widest row that norms sum in torch's order."""
LANE_COUNTS = (8, 16, 4)
"""Numbers in the vectors of float32 that torch may sum with."""
PROBE_ROWS = 64

_working_memory = threading.local()


class CompiledKernels(NamedTuple):
    """The modules with the compiled kernels."""

    attention: Any
    rows: Any
    helpers: Any


class TypedKernels(NamedTuple):
    """The kernels for numbers of one type. Each is compiled, or loaded, at its first call."""

    attend_texts: Any
    add_norm: Any
    norm_heads: Any
    gate: Any


def load_kernels() -> CompiledKernels:
    """Return the compiled kernels where `has_cpu_kernels` is true."""
    kernels = _import_kernels()
    assert kernels is not None
    return kernels


@cache
def select_kernels(dtype: torch.dtype) -> TypedKernels:
    """Return the kernels for tensors of this type where `has_cpu_kernels` is true."""
    attention, rows, _ = load_kernels()
    if dtype == torch.bfloat16:
        parts = attention.append_part_half().address, attention.attend_part_half().address
        attend = partial(attention.attend_texts, *parts)
        return TypedKernels(attend, rows.add_norm_half, rows.norm_heads_half, rows.gate_half)
    parts = attention.append_part_float().address, attention.attend_part_float().address
    attend = partial(attention.attend_texts, *parts)
    return TypedKernels(attend, rows.add_norm_float, rows.norm_heads_float, rows.gate_float)


def current_team() -> Any:
    """Return the threads that share the work of kernels in this process."""
    return load_kernels().helpers.current_team()


@cache
def _import_kernels() -> CompiledKernels | None:
    """Import the compiled kernels; return None where they cannot run."""
    try:
        from . import cpu_attention, cpu_helpers, cpu_rows
    # Numba raises RuntimeError where it can write to no cache folder.
    except (ImportError, RuntimeError):
        return None
    return CompiledKernels(cpu_attention, cpu_rows, cpu_helpers)


def has_cpu_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether compiled kernels serve tensors of this type."""
    if device.type != "cpu" or os.environ.get("SPECTRAIN_KERNELS") in ("reference", "triton"):
        return False
    # Other processors have too few registers for the tiles of float32.
    is_served = dtype == torch.bfloat16 or (
        dtype == torch.float32 and torch.cpu._is_avx512_supported()
    )
    return is_served and _import_kernels() is not None


def are_kernels_loaded() -> bool:
    """Return whether the compiled kernels can run, of whatever type the numbers are."""
    return _import_kernels() is not None


def working_memory(size: int) -> Tensor:
    """Return memory for at least `size` float64 numbers, which the next call in this thread may
    overwrite.
    """
    memory: Tensor | None = getattr(_working_memory, "memory", None)
    if memory is None or len(memory) < size:
        memory = _working_memory.memory = torch.empty(max(size, 1 << 16), dtype=torch.float64)
    return memory


def attention_size(num_rows: int, length: int, head_size: int) -> int:
    """Return the float64 numbers of working memory of attention with so many queries of a
    key-value head to so many slots.
    """
    from .cpu_vectors import LANES

    # Queries, scores and totals of padded rows, and the sums of the rows.
    padded = num_rows + LANES - 1
    return (padded * (head_size + length + 1) + num_rows * head_size) // 2 + 1


def attention_memory(
    visibility: Visibility, num_heads: int, num_key_heads: int, head_size: int
) -> Tensor:
    """Return the working memory [threads, size] of attention with this visibility, which
    suffices for norms too.
    """
    _, num_nodes, num_appended = visibility.tree.shape
    num_rows = num_nodes * (num_heads // num_key_heads)
    length = visibility.longest + num_appended
    size = attention_size(num_rows, length, head_size)
    members = count_members()
    return working_memory(members * size)[: members * size].view(members, size)


def count_members() -> int:
    """Return how many threads share the work of a kernel, as torch's number says; helpers are
    started where they miss.
    """
    return current_team().grow(torch.get_num_threads())


def can_attend(
    queries: Tensor, keys: Tensor, values: Tensor, softcap: float | None, sinks: Tensor | None
) -> bool:
    """Return whether `attend_cached` computes this attention with keys [B, T, K, d]. This depends
    on the layer alone: all its forwards sum in one way."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (queries, keys, values))
    if softcap is not None or sinks is not None or learns:
        return False
    return (
        queries.dtype == keys.dtype
        and keys.shape[-1] % HEAD_STEP == 0
        and values.shape == keys.shape
    )


def attend_cached(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale) v over the slots that each node sees, [B, H, N, d], laid out
    as [B, N, H, d]. Queries are [B, H, N, d]; keys and values are [B, T, K, d] with the newest
    nodes in them."""
    attend_texts = select_kernels(queries.dtype).attend_texts
    batch, num_heads, num_nodes, head_size = queries.shape
    out = queries.new_empty(batch, num_nodes, num_heads, head_size)
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    memory = attention_memory(visibility, num_heads, keys.shape[2], head_size)
    team = (current_team().address, len(memory))
    scratch = (memory.data_ptr(), memory.stride(0) * memory.itemsize)
    for row, (slots, mask, hidden) in enumerate(visibility.row_limits(window)):
        first = slots.data_ptr()
        attend_texts(
            queries[row].data_ptr(),
            queries.stride(2),
            queries.stride(1),
            0,
            0,
            keys[row].data_ptr(),
            values[row].data_ptr(),
            keys.stride(1),
            first,
            first + slots.itemsize,
            1,
            visibility.tree.shape[2],
            mask.data_ptr(),
            num_nodes,
            num_heads,
            keys.shape[2],
            head_size,
            out[row].data_ptr(),
            scale,
            *scratch,
            0 if hidden is None else hidden.data_ptr(),
            *team,
        )
    return out.transpose(1, 2)


def attend_token(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Compute the same attention with one query of each text, [B, H, 1, d], to keys and values [B,
    K, T, d], of which `mask` [B, 1, 1, T] marks the visible ones."""
    rows = []
    for row in range(len(queries)):
        slots = [x[row : row + 1].transpose(1, 2) for x in (keys, values)]
        if mask is not None:
            slots = [x[:, mask[row, 0, 0]] for x in slots]
        length = torch.tensor([slots[0].shape[1] - 1])
        visibility = Visibility(
            length, int(length), torch.ones(1, 1, 1, dtype=torch.bool), length[:, None], None
        )
        key_slots, value_slots = (x.contiguous() for x in slots)
        rows.append(
            attend_cached(queries[row : row + 1], key_slots, value_slots, visibility, scale)
        )
    return torch.cat(rows)


@cache
def norm_lanes() -> int | None:
    """Return the numbers per vector with which torch sums a row of float32 here, or None where
    no count gives its bits.
    """
    rows = load_kernels().rows
    source = torch.Generator().manual_seed(0)
    for lanes in LANE_COUNTS:
        if all(
            _sums_as_torch(rows, torch.randn(PROBE_ROWS, width, generator=source), lanes)
            for width in (576, 1000, 2048)
        ):
            return lanes
    return None


def _sums_as_torch(rows: Any, x: Tensor, lanes: int) -> bool:
    """Return whether the kernel's mean squares of x [N, D] have the bits of torch's."""
    width = x.shape[1]
    memory = working_memory(1 << 12).data_ptr()
    means = [rows.mean_squares(row.data_ptr(), width, lanes, memory) for row in x]
    return torch.tensor(means).equal(x.pow(2).mean(-1))


@cache
def silu_table() -> Tensor:
    """Return torch's SiLU of every bfloat16, [65536], by its bits."""
    with torch.inference_mode():
        return F.silu(
            torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
        )


PANEL_COLUMNS = 32
"""Outputs of a panel of weights (`cpu_linear`)."""
MAX_PANEL_BYTES = 1 << 31
"""Bytes that all panels of a process may take: they are copies, and larger models have little
memory to spare.
"""
CHUNKS = (512, 1024)
"""Inputs whose products oneDNN may add before it adds the sums."""
PROBED_COUNTS = (2, 3, 5, 8, 13, 17, 32)
"""Numbers of rows for which panels must have the bits of oneDNN."""


def has_panel_kernels(dtype: torch.dtype) -> bool:
    """Return whether linears of a few rows can run on panels of weights."""
    is_supported = (
        torch.cpu._is_avx512_bf16_supported()
        if dtype == torch.bfloat16
        else torch.cpu._is_avx512_supported()
    )
    return is_supported and has_cpu_kernels(dtype, torch.device("cpu"))


class WeightPanels:
    """The weights [O, K] of a linear in panels, for products whose rows depend neither on each
    other nor on the number of threads. Those in bfloat16 are added in chunks of the inputs."""

    stored_bytes = 0  # of all panels

    def __init__(self, weight: Tensor, chunk: int | None = None) -> None:
        from . import cpu_linear

        is_half, (outputs, width) = weight.dtype == torch.bfloat16, weight.shape
        self.function = (
            cpu_linear.multiply_part_half if is_half else cpu_linear.multiply_part_float
        )().address
        self.multiply = cpu_linear.multiply_panels
        per_word = 2 if is_half else 1
        self.shape = weight.shape
        self.words = width // per_word
        self.chunk = (chunk or width) // per_word
        blocks = weight.view(outputs // PANEL_COLUMNS, 2, PANEL_COLUMNS // 2, self.words, per_word)
        self.panels = blocks.permute(0, 3, 1, 2, 4).contiguous()
        self.sums = working_sums()
        WeightPanels.stored_bytes += self.panels.nbytes
        weakref.finalize(self, _release_panels, self.panels.nbytes)

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Return whether weights can be stored in panels, and there is still room for them."""
        has_room = WeightPanels.stored_bytes + weight.nbytes <= MAX_PANEL_BYTES
        step = 2 if weight.dtype == torch.bfloat16 else 1
        return has_room and weight.shape[0] % PANEL_COLUMNS == weight.shape[1] % step == 0

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [.., N, K] times the weights plus the bias, [.., N, O]."""
        x = x if x.is_contiguous() else x.contiguous()
        outputs, width = self.shape
        out = x.new_empty((*x.shape[:-1], outputs))
        offset = 0 if bias is None else bias.data_ptr()
        # A call holds Python's lock, so no other one uses the team and this memory at the same
        # time.
        team = current_team()
        self.multiply(
            self.function,
            x.data_ptr(),
            self.panels.data_ptr(),
            offset,
            out.data_ptr(),
            x.numel() // width,
            self.words,
            outputs,
            self.chunk,
            self.sums.data_ptr(),
            team.address,
            team.grow(torch.get_num_threads()),
        )
        return out


@cache
def working_sums() -> Tensor:
    """Return the working memory of all products, for every thread of a team."""
    from . import cpu_linear, cpu_team

    return torch.empty(cpu_team.MAX_MEMBERS, cpu_linear.MAX_TILE_ROWS, PANEL_COLUMNS)


def _release_panels(num_bytes: int) -> None:
    WeightPanels.stored_bytes -= num_bytes


@cache
def find_chunk(outputs: int, width: int) -> int | None:
    """Return the chunk of inputs by which panels of a weight [O, K] have the bits of oneDNN for
    several rows, or None; tried on sums that cancel, so that only rounding errors remain."""
    source = torch.Generator().manual_seed(0)
    order = torch.randperm(width, generator=source)
    signs = torch.ones(2, width // 2)
    signs[1] = -1
    weight, rows = (
        torch.randn(count, width // 2, generator=source).repeat(1, 2)
        for count in (256, max(PROBED_COUNTS))
    )
    weight = weight[:, order].bfloat16().repeat(-(-outputs // len(weight)), 1)[:outputs]
    rows = (rows * signs.flatten())[:, order].bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    for chunk in CHUNKS:
        panels = WeightPanels(weight, chunk)
        if all(
            torch.equal(panels.product(rows[:count]), onednn_linear(rows[:count], packed))
            for count in PROBED_COUNTS
        ):
            return chunk
    return None


@cache
def prepare_kernels(dtype: torch.dtype) -> None:
    """Load every kernel of a type, or compile it where this machine has not, so that no step
    that is timed does.
    """
    kernels = select_kernels(dtype)
    lanes = norm_lanes() or LANE_COUNTS[0]
    memory = working_memory(1 << 12).data_ptr()
    visibility = Visibility(
        torch.zeros(1, dtype=torch.int64), 0, torch.ones(1, 1, 1).bool(), torch.zeros(1, 1), None
    )
    x = torch.zeros(1, 3, 1, HEAD_STEP, dtype=dtype)
    attend_cached(x[:, :1], x[:, :1], x[:, :1], visibility, 1.0)
    result = torch.zeros_like(x)
    first = x.data_ptr()
    out = result.data_ptr()
    kernels.add_norm(first, 0, first, 0, out, 1, HEAD_STEP, 1.0, lanes, memory)
    kernels.norm_heads(out, first, first, 1, 1, 1, HEAD_STEP, 1.0, lanes, memory)
    if dtype == torch.bfloat16:
        kernels.gate(first, silu_table().data_ptr(), out, 1, HEAD_STEP, 1)
        prepare_tree_kernels()
        if has_panel_kernels(dtype):
            find_chunk(PANEL_COLUMNS, 2)
    else:
        kernels.gate(first, out, 1, HEAD_STEP)
