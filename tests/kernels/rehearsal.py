"""Launch every kernel as a GPU's process would, without one: bound, specialised and compiled for
sm_90 by Triton, for a driver that loads and runs nothing. A program of its own, for a process in
which triton interprets cannot compile; it prints what was launched as JSON.
"""

import json
import re
import subprocess
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
    append_children,
    kv_append,
    kv_commit,
    round_log,
    row_kl,
    token_commit,
    tree_attention,
    tree_recursive,
    tree_verify,
    tree_walks,
)
from spectrain.kernels.counter import host_key

CPU = torch.device("cpu")
launches: Counter[str] = Counter()
spilled: dict[str, int] = {}  # bytes of stack, of what has any


class Utils:
    """The part of the CUDA driver that a launch needs."""

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
        if stack:
            spilled[name] = max(stack, spilled.get(name, 0))
        return object(), 1, registers, stack, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class Stand:
    """Stands where a GPU's driver would."""

    utils = Utils()

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
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
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return CPU

    def is_active(self) -> bool:
        return True


def launch_attention(
    dtype: torch.dtype, batch: int, prefix: int, nodes: int, window: int | None = None
) -> None:
    tree = random_tree(batch, nodes, CPU)
    lengths = torch.full((batch,), prefix)
    indices = lengths[:, None] + tree.depths
    visibility = tree_attention.Visibility(
        lengths, prefix, tree.ancestors, indices, indices, is_exact=False
    )
    query = torch.zeros(batch, nodes, 32, 128, dtype=dtype).transpose(1, 2)
    keys, values = torch.zeros(2, batch, prefix + nodes, 8, 128, dtype=dtype).transpose(2, 3)
    tree_attention.tree_attention(query, keys, values, visibility, 128**-0.5, window)


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
    emitted, accepted = token_commit._launch_emit(
        tree.tokens,
        path,
        rows + 1,
        rows,
        torch.zeros(batch, 300).long(),
        rows,
        active,
        rows + 9,
        torch.arange(2),
    )
    lines = torch.zeros(4, batch, steps + 4).long()
    round_log._launch_log(
        lines, rows[:1], emitted, accepted, tree.depths, tree.valid, tree.can_emit
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
    )
    row_kl.row_argmax(product, 1.0, None)


def main() -> None:
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
    for sizes in ((1, 1, 1), (8, 64, 6), (1, 256, 256)):
        launch_emit(*sizes)
    print(json.dumps({"launches": launches, "spilled": spilled}))


if __name__ == "__main__":
    main()
