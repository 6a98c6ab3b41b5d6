"""Launch every kernel as a GPU's process would, without one: bound, specialised and compiled by
Triton for sm_90, or the architecture of the first argument, for a driver that loads and runs
nothing. A program of its own, for a process in which triton interprets cannot compile; it prints
what was launched, and the resources of every compiled variant, as JSON.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from lab.benchmarks.attention import random_tree
from spectrain.kernels import (
    add_norm,
    append_children,
    draft_input,
    gated_unit,
    kv_append,
    kv_commit,
    later_keys,
    norm_gradients,
    rotate_append,
    rotate_heads,
    round_commit,
    row_kl,
    token_commit,
    tree_attention,
    tree_masks,
    tree_recursive,
    tree_selection,
    tree_verify,
    tree_walks,
)
from spectrain.kernels.counter import host_key

CPU = torch.device("cpu")
launches: Counter[str] = Counter()
architecture = 90
# Registers of a thread, bytes of stack, bytes of shared memory, and warps, of every variant.
resources: dict[str, dict[str, int]] = {}
# What one multiprocessor of an H100, H200 or B200 has.
REGISTERS = 65536
SHARED_MEMORY = 228 * 1024
WARPS = 64
PROGRAMS = 32
# Sizes of heads of published models beside 128, with which everything else is launched.
HEAD_SIZES = (64, 80, 96, 256)


def count_programs(registers: int, shared: int, warps: int) -> int:
    """Return the programs that one multiprocessor holds at a time, by its registers, which a warp
    takes in units of 256, its shared memory, of which a program takes one KB more, and its warps.
    """
    warp_registers = -(-32 * registers // 256) * 256
    by_registers = REGISTERS // (warp_registers * warps)
    return min(by_registers, SHARED_MEMORY // (shared + 1024), WARPS // warps, PROGRAMS)


def name_variant(source: Any) -> str:
    """Return a kernel's name, its floating-point types, and its constants."""
    names = source.fn.arg_names
    constants = {
        names[index[0]]: value for index, value in source.constants.items() if len(index) == 1
    }
    floats = {kind.strip("*") for kind in source.signature.values() if "f" in str(kind)}
    types = sorted(kind for kind in floats if kind[:2] in ("bf", "fp"))
    parts = [
        f"{name}={int(value) if isinstance(value, bool) else value}"
        for name, value in sorted(constants.items())
        if name.isupper()
    ]
    absent = [f"no {name}" for name, value in sorted(constants.items()) if value is None]
    return " ".join([source.fn.__name__, *types, *parts, *absent])


class Utils:
    """The part of the CUDA driver that a launch needs."""

    variant = ""  # the one that is loaded next
    num_warps = 0

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[object, int, int, int, int]:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel)
            file.flush()
            output = subprocess.run(
                [str(tool), "--dump-resource-usage", file.name],
                capture_output=True,
                text=True,
                check=True,
            )
        registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", output.stdout)[0])
        resources[self.variant] = {
            "registers": registers,
            "stack": stack,
            "shared": shared,
            "warps": self.num_warps,
            "programs": count_programs(registers, shared, self.num_warps),
        }
        return object(), 1, registers, stack, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class Stand:
    """Stands where a GPU's driver would."""

    utils = Utils()

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        self.utils.variant, self.utils.num_warps = name_variant(source), metadata.num_warps

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            assert x > 0 and 0 < y <= 65535 and 0 < z <= 65535, (metadata.name, x, y, z)
            launches[metadata.name] += 1

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", architecture, 32)

    def get_active_torch_device(self) -> torch.device:
        return CPU

    def is_active(self) -> bool:
        return True


def launch_attention(
    dtype: torch.dtype,
    batch: int,
    prefix: int,
    nodes: int,
    window: int | None = None,
    head_size: int = 128,
) -> None:
    tree = random_tree(batch, nodes, CPU)
    lengths = torch.full((batch,), prefix)
    indices = lengths[:, None] + tree.depths
    visibility = tree_attention.Visibility(
        lengths, prefix, tree.ancestors, indices, indices, is_exact=False
    )
    query = torch.zeros(batch, nodes, 32, head_size, dtype=dtype).transpose(1, 2)
    keys, values = torch.zeros(2, batch, prefix + nodes, 8, head_size, dtype=dtype).transpose(2, 3)
    tree_attention.tree_attention(query, keys, values, visibility, head_size**-0.5, window)


def launch_head_size(dtype: torch.dtype, head_size: int) -> None:
    """Launch attention of one token, of trees and in a window, and both appends of keys."""
    for nodes in (1, 16, 64):
        launch_attention(dtype, 1, 1024, nodes, head_size=head_size)
    launch_attention(dtype, 8, 1024, 64, 200, head_size)
    store = torch.zeros(2, 1, 300, 8, head_size, dtype=dtype)
    new = torch.zeros(1, 10, 8, head_size, dtype=dtype)
    lengths = torch.zeros(1, dtype=torch.int64)
    kv_append._launch_append(store, new.transpose(1, 2), new.transpose(1, 2), lengths, 10)
    queries = torch.zeros(1, 10, 32 * head_size, dtype=dtype)
    angles = torch.zeros(1, 10, head_size, dtype=dtype)
    keys = new.flatten(2)
    rotate_append._launch_rotate_append(
        store, queries, keys, keys, angles, angles, None, lengths, 3
    )


def launch_verify(dtype: torch.dtype, vocab: int) -> None:
    tree = random_tree(1, 64, CPU)
    nodes = tree_walks.TreeNodes(
        tree.tokens, tree.parents, torch.ones_like(tree.tokens, dtype=torch.bool), 5, 64
    )
    logits = torch.zeros(1, 64, vocab, dtype=dtype)
    tree_verify.tree_greedy(nodes, logits)
    for cut in ((0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9)):
        draws = tree_walks.SamplingSpec(
            host_key(9, 1), torch.zeros(1, dtype=torch.int64), tree.depths + 5, 0.8, *cut
        )
        tree_verify.tree_match(nodes, logits, draws)
        tree_recursive.tree_recursive(
            nodes, logits, torch.zeros(1, 64, 32000), torch.arange(32000), True, draws
        )


def launch_commits(dtype: torch.dtype) -> None:
    lengths = torch.zeros(1, dtype=torch.int64)
    path = torch.zeros(1, 6, dtype=torch.int64)
    counts = torch.ones(1).long()
    new = torch.zeros(1, 64, 8, 128, dtype=dtype).transpose(1, 2)
    kv_append._launch_append(torch.zeros(2, 1, 300, 8, 128, dtype=dtype), new, new, lengths, 10)
    hidden = torch.zeros(1, 64, 3, 4096, dtype=dtype)
    path_features = torch.zeros(1, 6, 3, 4096, dtype=dtype)
    storage = torch.zeros(4, 2, 1, 300, 8, 128, dtype=dtype)
    for features in ((None, None), (hidden, path_features)):
        kv_commit._launch_commit(storage, lengths, path, counts, *features)


def launch_emit(batch: int, nodes: int, steps: int) -> None:
    tree = random_tree(batch, nodes, CPU)
    rows = torch.zeros(batch, dtype=torch.int64)
    path = torch.zeros(batch, steps, dtype=torch.int64)
    active = torch.ones(batch, dtype=torch.bool)
    verdicts = path, rows + 1, rows
    tokens = torch.zeros(batch, 300).long()
    texts = tokens, rows, active, rows + 9, torch.arange(2)
    token_commit._launch_emit(tree.tokens, *verdicts, *texts)
    lines = torch.zeros(4, batch, steps + 4).long()
    trees = tree.depths, tree.valid, tree.can_emit
    for buffers in ((path.clone(), rows.clone()), (None, None)):
        round_commit._launch_round_commit(
            tree.tokens, *verdicts, *trees, *texts, lines, rows, *buffers
        )
    tree_masks._launch_ancestors(tree.parents)
    tree_masks._launch_pack(tree.ancestors)


def launch_steps(dtype: torch.dtype, width: int) -> None:
    """Launch what lies between the products of an EAGLE-3 step, over a head size of 128."""
    layers = draft_input.InputLayers(
        torch.zeros(32, width, dtype=dtype), *torch.zeros(2, width, dtype=dtype), 1e-5, False
    )
    rows = draft_input.DraftedRows(
        torch.zeros(1, 41, width, dtype=dtype),
        torch.zeros(1, 41, 1).long(),
        torch.zeros(1, 41).long(),
    )
    tokens = torch.zeros(1, 10).long()
    lengths = torch.zeros(1).long()
    draft_input._launch_node_input(tokens, tokens, lengths, *rows, 1, *layers)
    x = torch.zeros(1, 10, width, dtype=dtype)
    draft_input._launch_accepted_input(tokens, lengths, lengths, lengths, x, *layers)
    add_norm._launch_add_norm(x, x, x[0, 0], 1e-5)
    for counts in (None, lengths):
        add_norm._launch_store(rows.states, x, x, x[0, 0], 1e-5, 1, counts, False)
    gated_unit._launch_gated_unit(x[0], x[0])
    store = torch.zeros(2, 1, 300, 8, 128, dtype=dtype)
    table = torch.zeros(300, 2, 64, dtype=dtype)
    queries = torch.zeros(1, 10, 4096, dtype=dtype)
    keys = queries[..., :1024].contiguous()
    states = store, queries, keys, keys
    rotate_append._launch_rotate_append(*states, *table.unbind(1), tokens, lengths, 3)
    angles = torch.zeros(1, 10, 128, dtype=dtype)
    rotate_append._launch_rotate_append(*states, angles, angles, None, lengths, 3)
    for count in (61, 711):
        nodes = torch.zeros(1, count).long()
        tree_selection._launch_frontier(nodes, nodes.float(), 1, 4, 0, 4)
        tree_selection._launch_select(nodes, nodes, nodes.float(), 16)


def launch_training(dtype: torch.dtype, width: int, head_size: int) -> None:
    """Launch what lies between the products of a training, each way, with weights in float32."""
    x = torch.zeros(6, width, dtype=dtype)
    joined = torch.zeros(6, 2 * width, dtype=dtype)
    weight = torch.zeros(width)
    norm_gradients._launch_norm(x, weight, joined[:, width:], 1e-5)
    for stream, x_grad in ((x, x), (None, x), (None, None)):
        norm_gradients._launch_norm_gradient(joined[:, width:], stream, x, weight, x_grad, 1e-5)
    gated_unit._launch_gated_gradient(x, joined[:, :width], joined[:, width:])
    heads = [torch.zeros(2, 9, count, head_size, dtype=dtype).transpose(1, 2) for count in (32, 8)]
    queries, keys = heads
    angles = torch.zeros(2, 9, head_size, dtype=dtype)
    rows = [part.transpose(1, 2).reshape(18, -1) for part in (queries, keys, keys)]
    for values, back in ((None, False), (keys, True)):
        outputs = rows[0], rows[1], rows[2] if back else None
        rotate_heads._launch_rotate_heads(queries, keys, values, angles, angles, *outputs, back)
    later = torch.zeros(2, 8, 6, 9, head_size, dtype=dtype)
    lse = torch.zeros(2, 32, 9)
    later_keys._launch_add_later_keys(queries, queries, lse, later, later, 0.1)
    later_keys._launch_later_gradients(
        queries, queries, queries, lse, later, later, queries.clone(), 0.1
    )


def launch_children(dtype: torch.dtype, vocab: int) -> None:
    for width, ids in ((1, None), (10, torch.arange(vocab))):
        nodes = torch.zeros(2, 11, dtype=torch.int64)
        append_children._launch_append_children(
            torch.zeros(2, 10, vocab, dtype=dtype),
            width,
            ids,
            nodes[:, :10].contiguous(),
            nodes,
            nodes,
            torch.zeros(2, 11),
        )


def launch_loss(dtype: torch.dtype, vocab: int) -> None:
    product = torch.zeros(4, vocab, dtype=dtype)
    weight = torch.ones(4)
    run_row_kl = partial(row_kl.row_kl, row_weight=weight, scale=1.0, softcap=None, with_grad=True)
    run_row_kl(product, torch.zeros(4, vocab), None)
    run_row_kl(product, None, torch.zeros(4, dtype=torch.int64))
    run_row_kl(product, product.clone(), None, target_scale=1.0)
    run_row_kl(
        product,
        product.clone(),
        None,
        target_scale=0.5,
        target_softcap=30.0,
        target_log_z=weight,
        target_rows=torch.zeros(4, dtype=torch.int64),
    )
    row_kl.row_argmax(product, 1.0, None)


def main() -> None:
    global architecture
    architecture = int(sys.argv[1]) if len(sys.argv) > 1 else architecture
    driver.set_active(Stand())
    tree_attention._can_run_kernel = lambda *tensors: True  # type: ignore[assignment]
    tree_verify.can_run_kernel = tree_recursive.can_run_kernel = lambda logits: True  # type: ignore[assignment]
    for dtype in (torch.bfloat16, torch.float32):
        for nodes in (1, 16, 64):
            launch_attention(dtype, 1, 1024, nodes)
        launch_attention(dtype, 8, 1024, 64, window=200)
        launch_verify(dtype, 128256)
        launch_commits(dtype)
        launch_loss(dtype, 128256)
        launch_children(dtype, 32000)
        launch_steps(dtype, 4096)
        launch_training(dtype, 4096, 128)
    launch_training(torch.bfloat16, 8192, 64)
    launch_training(torch.bfloat16, 1536, 256)
    for head_size in HEAD_SIZES:
        launch_head_size(torch.bfloat16, head_size)
    for sizes in ((1, 1, 1), (8, 64, 6), (1, 256, 256)):
        launch_emit(*sizes)
    print(json.dumps({"launches": launches, "resources": resources}))


if __name__ == "__main__":
    main()
