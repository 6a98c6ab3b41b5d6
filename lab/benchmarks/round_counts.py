"""A round, counted: launches, bytes, operations and a floor of its time, for EAGLE-3 with chains
and trees at several batch sizes. Nothing here needs a GPU, and no number was measured on one.

    python -m lab.benchmarks.round_counts [out=lab/results/round-counts.json]

The round runs on the device "meta", by the kernels of a GPU, before anything is compiled. On a GPU
the target's layers are compiled: what lies between their products and kernels becomes four launches
a layer (norm; sum and norm; gated unit; sum), as Inductor compiled it for an H200 that was not
there. It made two more of the rotation, which is now in the launch that appends. Nodes of the
graphs, bytes and floors are those after that. Every operation reads what it is given and writes
what it makes, once; of a cache and of a table it reads or writes only the rows that it uses. A
tensor without values cannot be read by the host, so a round that is counted waits for nothing; the
host reads a log after every few rounds.

The floor takes, for every launch, its bytes at the rate of a large copy, its operations at the rate
of a large product, or the time of an empty launch in a graph, whichever is longest, and nothing
runs at the same time. `least_us` leaves the empty launches out.

Shapes: B texts, N nodes, P prefix, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner
from spectrain.files import write_text
from spectrain.kernels.tree_attention import choose_splits, choose_tiles
from spectrain.models.fast import fuse_text_layers, merge_linears
from spectrain.trees import Chain, Eagle2, TreeBuilder

from . import launches
from .command import run_benchmark
from .launches import LaunchCounter
from .models import MODELS, build_meta_target, random_drafter
from .step_model import GPUS, StepShape, between_products, count_bytes

ROUNDS: dict[str, TreeBuilder | None] = {
    "autoregressive": None,
    "chain of 3": Chain(3),
    "tree of 16": Eagle2(5, 16, 4),
    "tree of 60": Eagle2(5, 60),
}
BATCHES = (1, 8, 64)
PREFIX = 1024
LAUNCH_SECONDS = 1.7e-6
"""Seconds of a small kernel in a CUDA graph, an estimate between 1.5 and 2.2 microseconds."""
FUSED_LAUNCHES = 4
"""Launches of a compiled layer between its products, rotation and append, and attention."""
SELECTIONS = ("aten::embedding", "aten::gather", "aten::index", "aten::index_select")
"""Operations that read the rows that they return, and no others."""
ROWS_OF = {
    # Caches and tables, and the operands or results of which they take or give as many bytes.
    "spectrain::accepted_input": (("text", "embedding"), ("out0",)),
    "spectrain::node_input": (("states", "embedding"), ("out0",)),
    # Cosines and sines are as small as one head.
    "spectrain::rotate_append": (("store", "cos", "sin"), ("k", "v")),
    "spectrain::kv_append": (("store",), ("keys", "values")),
    "spectrain::round_commit": (("tokens", "lines"), ("path", "path")),
    "spectrain::store_states": (("states",), ("out0",)),
}


@dataclass
class Traffic:
    """What a part of a round does."""

    launches: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    # The least time of all operations on an H200, without and with empty launches.
    least_seconds: float = 0.0
    floor_seconds: float = 0.0

    def add(self, launches: int, bytes: float, flops: float = 0.0) -> None:
        """Add launches that share bytes and operations."""
        gpu = GPUS[1]
        least = max(bytes / gpu.bytes, flops / gpu.flops)
        self.launches += launches
        self.bytes += bytes
        self.flops += flops
        self.least_seconds += least
        self.floor_seconds += max(least, launches * LAUNCH_SECONDS)


class TrafficCounter(LaunchCounter):
    """Counts launches, bytes read and written, and operations, behind a prefix of P tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()
        self.bytes_by_name: Counter[str] = Counter()
        # Launches of the target's layers that compiled code fuses, and what they move.
        self.fused = Traffic()
        self.tracker = ModuleTracker()

    def __enter__(self) -> TrafficCounter:
        self.tracker.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.tracker.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.launches.total()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.name().split(".")[0]
        count = self.launches.total() - before
        if not count:
            return out
        operands = name_operands(func, args, kwargs or {})
        if name == "spectrain::tree_attention":
            work = attention_work(operands, out)
            # A single split is not averaged.
            count -= work.launches == 1
            self.launches[name] -= work.launches == 1
        else:
            work = Traffic(bytes=moved_bytes(name, func, operands, out))
            if func._overloadpacket in flop_registry:
                flops = flop_registry[func._overloadpacket]
                work.flops = flops(*args, **(kwargs or {}), out_val=out)
        is_pointwise = name.startswith("aten") and func._overloadpacket not in flop_registry
        in_layer = any(".layers." in module for module in self.tracker.parents)
        traffic = self.fused if is_pointwise and in_layer else self.traffic
        traffic.add(count, work.bytes, work.flops)
        self.bytes_by_name[name] += int(work.bytes)
        return out


def name_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the operands of an operation by their names."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args)), **kwargs}


def attention_work(operands: dict[str, Any], out: Tensor) -> Traffic:
    """Return the work of attention of N nodes to a prefix and to the nodes of their tree, with the
    partial sums of split keys in float32.
    """
    q, k = operands["q"], operands["k"]
    batch, heads, nodes, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    keys = PREFIX + operands["num_appended"]
    tiles = choose_tiles(nodes * group, size, q.dtype)
    splits = choose_splits(tiles, nodes * group, batch * kv_heads, operands["num_keys"])
    read = 2 * batch * kv_heads * keys * size * k.element_size()
    parts = 2 * 4 * splits * out.numel() if splits > 1 else 0
    return Traffic(
        launches=2 if splits > 1 else 1,
        bytes=count_bytes(q) + count_bytes(out) + read + parts,
        flops=4.0 * batch * heads * nodes * keys * size,
    )


def moved_bytes(name: str, func: Any, operands: dict[str, Any], out: Any) -> float:
    """Return the bytes that an operation reads and writes."""
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    inputs = {key: value for key, value in operands.items() if isinstance(value, Tensor)}
    if name in SELECTIONS:
        chosen = [value for key, value in inputs.items() if key not in ("self", "weight")]
        return 2 * sum(map(count_bytes, outputs)) + sum(map(count_bytes, chosen))
    if name == "aten::copy_":
        return 2.0 * count_bytes(outputs[0])
    if name == "spectrain::kv_commit":
        # Keys and values of the path move, in all layers of [L, 2, B, S, K, D], and its features.
        storage, path = inputs["storage"], inputs["path"]
        row_values = storage[:, :, 0, 0].numel()
        moved = path.numel() * row_values * storage.element_size()
        return 2.0 * (moved + (count_bytes(inputs["fresh"]) if "fresh" in inputs else 0))
    skipped, counterparts = ROWS_OF.get(name, ((), ()))
    parts = {**inputs, **{f"out{index}": output for index, output in enumerate(outputs)}}
    rows = sum(count_bytes(parts[key]) for key in counterparts)
    read = {
        value.untyped_storage()._cdata: value for key, value in inputs.items() if key not in skipped
    }
    written = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in read]
    if not written and not skipped and func._schema.is_mutable:
        written = outputs
    return float(sum(map(count_bytes, [*read.values(), *written])) + rows)


def count_row(model: str, name: str, batch: int) -> dict[str, Any]:
    """Count a round of a target's size: its parts, and all of them."""
    geometry = MODELS[model]
    target = build_meta_target(geometry, torch.bfloat16)
    merge_linears(target.model)
    fuse_text_layers(target.model)
    builder = ROUNDS[name]
    drafter = None
    if builder is not None:
        # The drafter's kernels already hold what lies between its products.
        drafter = random_drafter(target, geometry, torch.bfloat16).eval()
        merge_linears(drafter, trainable=True)
    engine = CapturedRunner(target, Greedy(), drafter, builder)
    counters = launches.count_parts(engine, batch, PREFIX, counter=TrafficCounter)
    rows = batch * engine.builder.budget
    launches_by_part = {part: counter.launches.total() for part, counter in counters.items()}
    verification = counters["verify"].traffic
    shape = StepShape(geometry, tokens=rows)
    fused = between_products(shape, training=False, norms=2, rotates=False).bytes
    for _ in range(geometry.layers):
        verification.add(FUSED_LAUNCHES, fused)
    total = Traffic(
        *(
            sum(getattr(counter.traffic, field) for counter in counters.values())
            for field in asdict(Traffic())
        )
    )
    return {
        "model": model,
        "round": name,
        "texts": batch,
        "launches": launches_by_part,
        "num_nodes": total.launches,
        "rounds_per_read": engine.rounds_per_read,
        "bytes": round(total.bytes),
        "flops": round(total.flops),
        "least_us": round(total.least_seconds * 1e6, 1),
        "floor_us": round(total.floor_seconds * 1e6, 1),
    }


class RoundCounts:
    """Count rounds of EAGLE-3 at two sizes of its target, and write them."""

    def __init__(self, out: str = "lab/results/round-counts.json") -> None:
        self.out = Path(out)

    def run(self) -> None:
        rows = [
            count_row(model, name, batch)
            for model in ("1.5b", "8b")
            for name in ROUNDS
            for batch in BATCHES
        ]
        setting = {"prefix": PREFIX, "launch_us": LAUNCH_SECONDS * 1e6, "rates_of": GPUS[1].name}
        write_text(self.out, json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run_benchmark(RoundCounts)
