"""One step, 4 and 8 rows of a GGUF target on a CPU: its 4-bit blocks, the same weights in
bfloat16, and llama.cpp with the same file, in turns.

    make models llama-cpp
    OMP_NUM_THREADS=1 python -m lab.benchmarks.block_steps threads=1
    OMP_NUM_THREADS=2 python -m lab.benchmarks.block_steps threads=2

A turn times every system for every number of rows; the least and the median of all turns are
printed, with the ratios that have goals: one step at most 1.1 times llama.cpp's, 4 rows at most
1.15 and 8 rows at most 1.35 of our own steps of one row. Run it on a machine that does nothing
else.
`lab.benchmarks.block_rounds` times more numbers of rows, and the parts of a round.
With `dense=false` the bfloat16 weights, which take 7 GB, are left out; without llama.cpp's server
the other columns are printed.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Literal

import torch
from rich.table import Table

from spectrain.models.loading import load_hf
from spectrain.models.published import locate_model
from spectrain.models.target import Target
from spectrain.output.console import make_console
from spectrain.servers.commands import EngineLaunch
from spectrain.trees.token_tree import TokenTree
from spectrain_cpu.block_weights import BlockWeight
from spectrain_serve.engines.llamacpp import find_program
from spectrain_studies.machine.throughput import time_call

from .command import run_benchmark
from .llama_cpp import LlamaCppProcess

ROWS = (1, 4, 8)
GOALS = {4: 1.15, 8: 1.35}
"""What so many rows may cost at most, in steps of one row."""
STEPS = 6
"""Tokens that llama.cpp generates for a step of one row."""

TimeRows = Callable[[int], float]
"""Returns the seconds of a forward over so many rows after a prefix."""


@dataclass
class System:
    """What is timed, and its times by number of rows."""

    name: str
    time_rows: TimeRows
    seconds: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in ROWS})

    def least(self, rows: int) -> float:
        return min(self.seconds[rows])


class OwnSteps:
    """Times forwards of a target after a prefix."""

    def __init__(
        self,
        target: Target,
        prefix: list[int],
        most_rows: int = max(ROWS),
        # Returns the seconds of a call; by default those of the wall.
        measure: Callable[[Callable[[], object]], float] | None = None,
    ) -> None:
        target.pack_weights()
        self.target = target
        self.measure = partial(time_call, target) if measure is None else measure
        self.cache = target.new_cache(1, len(prefix) + most_rows)
        tokens = torch.tensor([prefix])
        with torch.inference_mode():
            target.prefill(tokens, torch.tensor([len(prefix)]), self.cache, ())

    @torch.inference_mode()
    def time_rows(self, rows: int) -> float:
        """Return the seconds of a forward over a chain of new tokens."""
        chain = TokenTree.from_chain(torch.randint(0, self.target.head.vocab_size, (1, rows)))
        seconds = self.measure(partial(self.target.verify, chain, self.cache))
        self.cache.roll_back()
        return seconds


def make_prefix(target: Target, length: int) -> list[int]:
    """Return tokens of code, behind which steps are timed."""
    return target.tokenizer.encode("def merge(left, right):\n    result = []\n" * 100)[:length]


class LlamaCppSteps:
    """Times llama.cpp's server on the same file: generated tokens, and prompts that are its
    cached prefix and some new tokens.
    """

    def __init__(self, server: LlamaCppProcess, prefix: list[int]) -> None:
        self.server = server
        self.prefix = prefix

    def time_rows(self, rows: int) -> float:
        new = [random.randrange(1000, 30_000) for _ in range(rows)]
        body = {"prompt": [*self.prefix, *new], "cache_prompt": True, "temperature": 0.0}
        body |= {"n_predict": STEPS if rows == 1 else 1, "ignore_eos": True}
        timings = self.server.request("/completion", body)["timings"]
        if rows == 1:
            return float(timings["predicted_ms"]) / timings["predicted_n"] / 1e3
        if timings["prompt_n"] == rows:
            return float(timings["prompt_ms"]) / 1e3
        # The prefix was not cached yet.
        return self.time_rows(rows)


class BlockSteps:
    """Time one step, 4 and 8 rows of a target in 4-bit blocks, in bfloat16 and in llama.cpp, in
    turns.
    """

    def __init__(
        self,
        model: str = "qwen2.5-coder-1.5b",
        threads: int = 1,
        turns: int = 15,
        prefix: int = 150,
        dense: bool = True,
        server: str | None = None,
        # llama.cpp rounds the inputs of products to 8 bits too.
        quantization: Literal["gguf", "gguf_int8"] = "gguf_int8",
    ) -> None:
        self.model = model
        self.threads = threads
        self.turns = turns
        self.prefix_length = prefix
        self.has_dense = dense
        self.server = server
        self.quantization = quantization

    def run(self) -> None:
        console = make_console()
        torch.set_num_threads(self.threads)
        target = load_hf(self.model, quantization=self.quantization)
        prefix = make_prefix(target, self.prefix_length)
        blocks = System("4-bit blocks", OwnSteps(target, prefix).time_rows)
        sizes = [w.nbytes for w in target.model.parameters() if isinstance(w, BlockWeight)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        console.print(
            f"{sum(sizes) / 1e9:.2f} GB of weights in blocks; the process has taken "
            f"{peak / 1e9:.2f} GB at most"
        )
        systems = [blocks]
        if self.has_dense:
            dense = load_hf(self.model, dtype="bfloat16")
            systems.append(System("bfloat16", OwnSteps(dense, prefix).time_rows))
        with ExitStack() as stack:
            program = find_program(self.server)
            if program is not None:
                launch = EngineLaunch(locate_model(self.model, "model"))
                process = LlamaCppProcess(program, launch, self.threads, context=1024)
                server = stack.enter_context(process)
                systems.append(System("llama.cpp", LlamaCppSteps(server, prefix).time_rows))
            self.take_turns(systems)
        console.print(self.make_table(systems))
        console.print(describe_goals(systems))

    def take_turns(self, systems: list[System]) -> None:
        """Time every system once a turn, in alternating order; the first turn warms up."""
        for turn in range(self.turns + 1):
            for system in systems if turn % 2 else reversed(systems):
                for rows in ROWS:
                    seconds = system.time_rows(rows)
                    if turn:
                        system.seconds[rows].append(seconds)

    def make_table(self, systems: list[System]) -> Table:
        table = Table(
            title=f"{self.model}, {self.threads} threads, after {self.prefix_length} tokens: ms, "
            f"the least and the median of {self.turns} turns, and the least over that of one row"
        )
        table.add_column("rows", justify="right")
        for system in systems:
            table.add_column(system.name, justify="right")
        for rows in ROWS:
            cells = [
                f"{system.least(rows) * 1e3:.1f}, {median(system.seconds[rows]) * 1e3:.1f}, "
                f"{system.least(rows) / system.least(1):.2f}"
                for system in systems
            ]
            table.add_row(str(rows), *cells)
        return table


def describe_goals(systems: list[System]) -> str:
    """Return the ratios that have goals, by the least times."""
    blocks = systems[0]
    parts = [
        f"{rows} rows over one row: {blocks.least(rows) / blocks.least(1):.2f} (goal {goal})"
        for rows, goal in GOALS.items()
    ]
    for system in systems[1:]:
        goal = " (goal 1.1)" if system.name == "llama.cpp" else ""
        ratios = [f"{blocks.least(rows) / system.least(rows):.2f}" for rows in ROWS]
        parts.append(f"blocks over {system.name} for 1, 4, 8 rows: {', '.join(ratios)}{goal}")
    return "; ".join(parts)


if __name__ == "__main__":
    run_benchmark(BlockSteps)
