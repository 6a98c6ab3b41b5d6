"""Tree attention against its floor and against other implementations, on the same tensors.

Shapes: B batch, N tree nodes, P prefix, T = P + N slots, H query heads, K key-value heads, D head
size. A system turns a problem into work. A system that needs a mask gets the tree's, dense or in
its own form.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from spectrain.errors import describe_error
from spectrain.kernels.tree_attention import Visibility, tree_attention
from spectrain.models.device import synchronize_device
from spectrain.trees.token_tree import TokenTree

from .measure import (
    ResultFile,
    TimedWork,
    Work,
    check_alive,
    paired_ratio,
    relative_error,
    summarize_times,
    time_interleaved,
)

MIN_ROTATION_BYTES = 120_000_000
"""Bytes of keys and values in rotation: twice the L2 cache of an H200."""
H200_CEILINGS = {"bytes_per_second": 4.3e12, "flops_per_second": 790e12}
"""Rates of an H200: copying, and bf16 products of random data."""
REACHABLE_PRODUCT_SHARE = 0.60
"""Share of a large product's rate: Triton's flash attention reaches 477 of 790 TFLOP/s (H100,
head size 128, 16k).
"""
FIXED_SECONDS = 5e-6
"""Seconds of any shape: two launches, the first loads, and the merge of the splits."""
MAX_DIFFERENCE = 0.05
"""Relative difference to tree attention's output above which a system computes something else."""


@dataclass(frozen=True)
class Geometry:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class AttentionCell:
    """A row of the table."""

    batch: int
    prefix: int
    nodes: int
    # query heads, key-value heads, head size; None for the table's
    heads: tuple[int, int, int] | None = None

    @property
    def name(self) -> str:
        """The name of its row in the results."""
        heads = "" if self.heads is None else " heads={}:{}x{}".format(*self.heads)
        return f"table/B={self.batch} prefix={self.prefix} N={self.nodes}{heads}"

    @property
    def title(self) -> str:
        heads = "" if self.heads is None else ", {} to {} heads of {}".format(*self.heads)
        return f"{self.batch} / {self.prefix} / {self.nodes}{heads}"


def random_tree(batch: int, num_nodes: int, device: torch.device, seed: int = 0) -> TokenTree:
    """Return trees in which the parent of a node is any of the nodes before it."""
    generator = torch.Generator().manual_seed(seed)
    parents = (torch.rand(batch, num_nodes, generator=generator) * torch.arange(num_nodes)).long()
    parents[:, 0] = -1
    parents = parents.to(device)
    return TokenTree.from_parents(torch.zeros_like(parents), parents)


class AttentionProblem:
    """Queries, keys and values in so many buffers that no launch finds its own in the cache,
    laid out as in a TreeCache.
    """

    def __init__(
        self, cell: AttentionCell, geometry: Geometry, num_buffers: int | None = None
    ) -> None:
        self.cell, self.geometry = cell, geometry
        slots = cell.prefix + cell.nodes
        heads = geometry.num_kv_heads
        width = geometry.head_size
        size = 2 * cell.batch * slots * heads * width * geometry.dtype.itemsize
        self.num_buffers = num_buffers or min(32, max(4, -(-MIN_ROTATION_BYTES // size)))
        like: dict[str, Any] = {"dtype": geometry.dtype, "device": geometry.device}
        self.storage = torch.randn(self.num_buffers, 2, cell.batch, slots, heads, width, **like)
        queries = torch.randn(
            self.num_buffers, cell.batch, cell.nodes, geometry.num_heads, width, **like
        )
        self.queries = queries.transpose(2, 3)  # [buffers, B, H, N, D]
        self.scale = width**-0.5
        tree = random_tree(cell.batch, cell.nodes, geometry.device)
        lengths = torch.full((cell.batch,), cell.prefix, device=geometry.device)
        self.visibility = Visibility(
            lengths, cell.prefix, tree.ancestors, lengths[:, None] + tree.depths, None
        )
        self.visibility.packed_words()

    def launch_inputs(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H, N, D], keys and values [B, K, T, D] of one launch."""
        i %= self.num_buffers
        keys, values = self.storage[i].transpose(2, 3)
        return self.queries[i], keys, values

    @cached_property
    def candidate_output(self) -> Tensor:
        """The output of tree attention for the first launch."""
        return tree_attention(*self.launch_inputs(0), self.visibility, self.scale)

    @cached_property
    def dense_mask(self) -> Tensor | None:
        """The mask [B, 1, N, T] bool, or None for a single node, which attends to every slot."""
        tree = self.visibility.tree
        if tree.shape[1] == 1:
            return None
        return torch.cat([tree.new_ones(*tree.shape[:2], self.cell.prefix), tree], 2)[:, None]


def count_cost(cell: AttentionCell, geometry: Geometry) -> tuple[int, int]:
    """Return the bytes that must move (keys, values, queries, output, once each) and the
    operations of both products.
    """
    batch = cell.batch
    nodes = cell.nodes
    slots = cell.prefix + cell.nodes
    heads = geometry.num_heads
    width = geometry.head_size
    elements = 2 * batch * (slots * geometry.num_kv_heads + nodes * heads) * width
    return elements * geometry.dtype.itemsize, 4 * batch * nodes * slots * heads * width


class TimeBounds(NamedTuple):
    """Microseconds of a cell."""

    floor: float  # all bytes at the rate of a copy, or all products at that of a large product
    goal: float  # upper limit for tree attention


def time_bounds(
    cell: AttentionCell, geometry: Geometry, ceilings: dict[str, float] = H200_CEILINGS
) -> TimeBounds:
    """Return the floor of a cell, and its goal: 5 us plus the longer of its bytes and its products.

    The goal allows products 0.60 of a large product's rate, and bytes the full rate of a copy, as
    measured. With four query heads a key-value head and a prefix of 32k tokens, products bind from
    28 nodes on (H200), and bytes below.
    """
    size, operations = count_cost(cell, geometry)
    by_bytes = size / ceilings["bytes_per_second"]
    by_products = operations / ceilings["flops_per_second"]
    reachable = max(by_bytes, by_products / REACHABLE_PRODUCT_SHARE)
    return TimeBounds(1e6 * max(by_bytes, by_products), 1e6 * (reachable + FIXED_SECONDS))


def candidate_work(problem: AttentionProblem, notes: dict[str, Any]) -> Work:
    return lambda i: tree_attention(*problem.launch_inputs(i), problem.visibility, problem.scale)


def sdpa_work(problem: AttentionProblem, notes: dict[str, Any]) -> Work:
    """Return torch's attention with a dense mask and its own treatment of grouped heads."""
    options: dict[str, Any] = {
        "attn_mask": problem.dense_mask,
        "scale": problem.scale,
        "enable_gqa": True,
    }
    return lambda i: F.scaled_dot_product_attention(*problem.launch_inputs(i), **options)


def repeated_sdpa_work(problem: AttentionProblem, notes: dict[str, Any]) -> Work:
    """Return torch's attention with keys and values repeated for every query head, as
    transformers does under a mask.
    """
    group = problem.geometry.num_heads // problem.geometry.num_kv_heads

    def attend(i: int) -> Tensor:
        q, k, v = problem.launch_inputs(i)
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=problem.dense_mask, scale=problem.scale
        )

    return attend


def flex_work(problem: AttentionProblem, notes: dict[str, Any]) -> Work:
    """Return FlexAttention, compiled on a GPU, which reads the tree from its words; its block
    mask is built beforehand.
    """
    words = problem.visibility.packed_words()
    prefix = problem.cell.prefix
    nodes = problem.cell.nodes

    def is_visible(b: Tensor, h: Tensor, q: Tensor, slot: Tensor) -> Tensor:
        node = (slot - prefix).clamp(0, nodes - 1)
        return (slot < prefix) | ((words[b, q, node // 64] >> (node % 64)) & 1 != 0)

    def build_mask() -> Any:
        return create_block_mask(
            is_visible,
            problem.cell.batch,
            None,
            nodes,
            prefix + nodes,
            device=str(problem.geometry.device),
        )

    build_mask()
    began = time.perf_counter()
    mask = build_mask()
    synchronize_device(problem.geometry.device)
    notes["mask_build_us"] = (time.perf_counter() - began) * 1e6
    attend: Any = flex_attention
    if problem.geometry.device.type == "cuda":
        torch.compiler.reset()  # otherwise the ninth shape would run uncompiled
        attend = torch.compile(flex_attention, dynamic=False)
    return lambda i: attend(
        *problem.launch_inputs(i), block_mask=mask, scale=problem.scale, enable_gqa=True
    )


def flashinfer_work(problem: AttentionProblem, notes: dict[str, Any]) -> Work:
    """Return FlashInfer's prefill kernel for ragged batches with a custom mask, planned
    beforehand.
    """
    library = importlib.import_module("flashinfer")
    notes["version"] = getattr(library, "__version__", None)
    geometry = problem.geometry
    cell = problem.cell
    mask = problem.dense_mask
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=geometry.device)
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    rows = torch.arange(cell.batch + 1, dtype=torch.int32, device=geometry.device)
    wrapper.plan(
        rows * cell.nodes,
        rows * (cell.prefix + cell.nodes),
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_size,
        custom_mask=None if mask is None else mask.flatten(),
        sm_scale=problem.scale,
        q_data_type=geometry.dtype,
    )

    def attend(i: int) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in problem.launch_inputs(i))
        out: Tensor = wrapper.run(q, k, v)
        return out.unflatten(0, (cell.batch, cell.nodes)).transpose(1, 2)

    return attend


def unmasked_work(problem: AttentionProblem, notes: dict[str, Any]) -> Work:
    """Return FlashAttention over every slot: a wrong output from the same bytes, which a masked
    kernel can hardly beat.
    """

    def attend(i: int) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(
                *problem.launch_inputs(i), scale=problem.scale, enable_gqa=True
            )

    return attend


System = Callable[[AttentionProblem, dict[str, Any]], Work]
SYSTEMS: dict[str, System] = {
    "ours": candidate_work,
    "sdpa": sdpa_work,
    "sdpa_repeated": repeated_sdpa_work,
    "flex": flex_work,
    "flashinfer": flashinfer_work,
    "unmasked": unmasked_work,
}
"""The systems that are timed; each receives the problem and a dictionary for its notes."""


def prepare_system(
    name: str, problem: AttentionProblem, launches: int, notes: dict[str, Any]
) -> TimedWork:
    """Return a system ready to be timed; raise where it cannot run here or computes something
    else.
    """
    work = SYSTEMS[name](problem, notes)
    if name not in ("ours", "unmasked"):
        error = relative_error(work(0), problem.candidate_output)
        if error > MAX_DIFFERENCE:
            raise ValueError(f"its output differs from tree attention's by {error:.2g} of its size")
    return TimedWork(work, problem.geometry.device, launches)


def prepare_systems(
    problem: AttentionProblem,
    results: ResultFile,
    launches: int,
    notes: dict[str, dict[str, Any]],
    failed: dict[str, str],
) -> dict[str, TimedWork]:
    """Return every system that runs here, ready to be timed; `failed` receives why another does not
    run.

    A system that leaves the device unusable ends the process and is skipped in every later cell; so
    is one that was running when a process ended twice otherwise. Only tree attention is tried in
    every cell.
    """
    replays: dict[str, TimedWork] = {}
    for name in SYSTEMS:
        attempt = f"{problem.cell.name}/{name}"
        if name != "ours" and results.count_crashes(name) > 1:
            failed[name] = (
                "RuntimeError: it left the device unusable, or the process ended twice while it ran"
            )
            continue
        results.begin_attempt(attempt)
        try:
            replays[name] = prepare_system(name, problem, launches, notes[name])
        except Exception as error:
            failed[name] = describe_error(error)
            # Counted twice, so that the file shows what ended the process if the next line raises.
            results.begin_attempt(attempt)
            check_alive(problem.geometry.device)
        results.end_attempt(attempt)
    return replays


@torch.no_grad()
def table_row(
    cell: AttentionCell,
    geometry: Geometry,
    results: ResultFile,
    ceilings: dict[str, float],
    launches: int,
    repeats: int,
) -> dict[str, Any]:
    """Measure every system, interleaved; return the times, the share of the floor, and the
    ratios to tree attention.
    """
    problem = AttentionProblem(cell, geometry)
    failed: dict[str, str] = {}
    notes: dict[str, dict[str, Any]] = {name: {} for name in SYSTEMS}
    replays = prepare_systems(problem, results, launches, notes, failed)
    samples = time_interleaved(replays, repeats)
    systems = {
        name: {**summarize_times(seconds), "launches": replays[name].launches, **notes[name]}
        for name, seconds in samples.items()
    }
    row: dict[str, Any] = {
        "batch": cell.batch,
        "prefix": cell.prefix,
        "nodes": cell.nodes,
        "heads": geometry.num_heads,
        "kv_heads": geometry.num_kv_heads,
        "head_size": geometry.head_size,
        "repeats": repeats,
        "buffers": problem.num_buffers,
        "us": systems,
        "not_run": failed,
    }
    row["bytes"], row["flops"] = count_cost(cell, geometry)
    row["floor_us"], row["goal_us"] = time_bounds(cell, geometry, ceilings)
    row["constant_floor_us"] = time_bounds(cell, geometry).floor
    if "ours" not in samples:
        return {**row, "failed": failed["ours"]}
    median = systems["ours"]["median"]
    row |= {
        "share_of_floor": row["floor_us"] / median,
        "share_of_constant_floor": row["constant_floor_us"] / median,
    }
    row["times_ours"] = {
        name: paired_ratio(samples["ours"], baseline)
        for name, baseline in samples.items()
        if name != "ours"
    }
    return row
