"""What a step over 1 to 16 rows of a GGUF target costs on a CPU, with one thread and with two, and
the parts of a plain token and of a drafted round.

    make models
    OMP_NUM_THREADS=1 python -m lab.benchmarks.block_rounds
    OMP_NUM_THREADS=1 python -m lab.benchmarks.block_rounds threads=1 turns=4 prompts=2

It prints three tables for each number of threads, in milliseconds:
1. A forward by rows after a prefix: the least and the median of all turns, and the least over that
   of one row. All numbers of rows take turns. The goals are 1.15 for 4 rows and 1.35 for 8.
2. The products of a forward, each kind by itself over all layers. Calls from Python, of which a
   forward has fewer, add some microseconds for each layer.
3. The parts of a plain token, and of a round of the drafter that ships for the target. Prefill is
   divided by the tokens and rounds of an answer.

Steps of one thread are timed by the processor's clock, everything else by that of the wall. Run it
on a machine that does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import ROUND_PARTS, Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.models.device import measure_work
from spectrain.models.fast.packed_linears import packed_weights
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain.models.threads import format_threads
from spectrain.output.console import make_console
from spectrain.runs.drafters import load_for_decoding
from spectrain.runs.folder import require_drafter_directory
from spectrain.trees import Chain

from .block_steps import GOALS, OwnSteps, make_prefix
from .coding_questions import read_questions
from .command import run_benchmark

MODEL = "qwen2.5-coder-1.5b"
ROWS = (1, 2, 3, 4, 8, 16)
PART_ROWS = (1, 3, 4, 8)
"""Rows whose parts are timed."""
FORWARD = "forward"


@dataclass
class Times:
    """Seconds of each turn by what was timed."""

    seconds: dict[Any, list[float]] = field(default_factory=dict)

    def add(self, key: Any, seconds: float) -> None:
        self.seconds.setdefault(key, []).append(seconds)

    def least(self, key: Any) -> float:
        """Return milliseconds."""
        return 1e3 * min(self.seconds[key])

    def median(self, key: Any) -> float:
        """Return milliseconds."""
        return 1e3 * median(self.seconds[key])


class Forwards(OwnSteps):
    """Forwards of a target after a prefix, and their products by themselves, by the clock of the
    work.
    """

    def __init__(self, target: Target, prefix: list[int]) -> None:
        super().__init__(target, prefix, max(ROWS), partial(measure_work, device=target.device))
        layers: list[Any] = list(target.layers)
        self.products = {
            "queries, keys, values": [layer.self_attn.q_proj for layer in layers],
            "output projection": [layer.self_attn.o_proj for layer in layers],
            "gate and up": [layer.mlp.gate_proj for layer in layers],
            "down": [layer.mlp.down_proj for layer in layers],
            f"output layer over {target.head.vocab_size:,} tokens": [target.head.output],
        }

    @torch.inference_mode()
    def time_product(self, name: str, rows: int) -> float:
        """Return the seconds of the products of a name with all their weights."""
        every = [packed_weights(linear).find_panels() for linear in self.products[name]]
        panels = [weights for weights in every if weights is not None]
        x = torch.randn(1, rows, self.products[name][0].in_features).bfloat16()
        return self.measure(lambda: [one.product(x) for one in panels])


class BlockRounds:
    """Time steps by rows, the parts of a step, and the parts of tokens and rounds."""

    def __init__(
        self,
        # Numbers of threads, separated by commas.
        threads: str = "1,2",
        turns: int = 15,
        # Tokens before a step.
        prefix: int = 150,
        prompts: int = 4,
        tokens: int = 64,
        # Draft tokens of a chain.
        depth: int = 2,
        quantization: Literal["gguf", "gguf_int8"] = "gguf_int8",
    ) -> None:
        self.threads = [int(number) for number in threads.split(",")]
        self.turns = turns
        self.prefix = prefix
        self.num_prompts = prompts
        self.tokens = tokens
        self.depth = depth
        self.quantization = quantization

    def run(self) -> None:
        console = make_console()
        target = load_hf(MODEL, quantization=self.quantization)
        drafter = load_for_decoding(require_drafter_directory("drafter", MODEL), target)
        forwards = Forwards(target, make_prefix(target, self.prefix))
        prompts = read_questions(target, self.num_prompts)
        for threads in self.threads:
            torch.set_num_threads(threads)
            self.print_tables(forwards, drafter, prompts, console)

    def print_tables(
        self, forwards: Forwards, drafter: Drafter, prompts: list[list[int]], console: Console
    ) -> None:
        setting = f"{MODEL}, {self.quantization}, {format_threads(torch.get_num_threads())}"
        times = self.take_turns(forwards)
        console.print(make_row_table(times, f"{setting}, after {self.prefix} tokens: ms"))
        console.print(
            make_part_table(times, list(forwards.products), f"{setting}: products, least ms")
        )
        plain = self.decode_all(forwards.target, prompts, None)
        drafted = self.decode_all(forwards.target, prompts, drafter)
        title = f"{setting}: ms of a round, medians; prefill of all prompts by rounds"
        console.print(make_round_table({"plain": plain, f"chain of {self.depth}": drafted}, title))

    def take_turns(self, forwards: Forwards) -> Times:
        """Time every number of rows and every product once a turn; the first turn warms up."""
        times = Times()
        for turn in range(self.turns + 1):
            turn_times = times if turn else Times()
            for rows in ROWS if turn % 2 else reversed(ROWS):
                turn_times.add((FORWARD, rows), forwards.time_rows(rows))
            for rows in PART_ROWS:
                for name in forwards.products:
                    turn_times.add((name, rows), forwards.time_product(name, rows))
        return times

    def decode_all(
        self, target: Target, prompts: list[list[int]], drafter: Drafter | None
    ) -> list[Generation]:
        """Decode the prompts one after the other."""
        builder = None if drafter is None else Chain(self.depth)
        decode(target, [prompts[0]], Greedy(), 4, drafter, builder)
        answers = []
        for prompt in prompts:
            answers += decode(target, [prompt], Greedy(), self.tokens, drafter, builder)
        return answers


def make_row_table(times: Times, title: str) -> Table:
    table = make_table(title, ["rows", "least", "median", "least over that of 1 row", "goal"])
    for rows in ROWS:
        key = FORWARD, rows
        table.add_row(
            str(rows),
            f"{times.least(key):.1f}",
            f"{times.median(key):.1f}",
            f"{times.least(key) / times.least((FORWARD, 1)):.2f}",
            str(GOALS.get(rows, "")),
        )
    return table


def make_part_table(times: Times, products: list[str], title: str) -> Table:
    table = make_table(title, ["part", *(f"rows {rows}" for rows in PART_ROWS)])
    for name in products:
        table.add_row(name, *(f"{times.least((name, rows)):.1f}" for rows in PART_ROWS))
    table.add_row(FORWARD, *(f"{times.least((FORWARD, rows)):.1f}" for rows in PART_ROWS))
    return table


def make_round_table(ways: dict[str, list[Generation]], title: str) -> Table:
    table = make_table(title, ["part", *ways])
    rows: list[tuple[str, Callable[[list[Generation]], float]]] = [
        (part, partial(measure_part, part=part)) for part in ROUND_PARTS
    ]
    rows += [
        ("prefill", lambda answers: 1e3 * sum_seconds(answers, "prefill") / count_rounds(answers)),
        ("tokens per round", lambda answers: count_tokens(answers) / count_rounds(answers)),
        ("tokens per second", lambda answers: count_tokens(answers) / sum_seconds(answers)),
    ]
    for name, measure in rows:
        table.add_row(name, *(f"{measure(answers):.2f}" for answers in ways.values()))
    return table


def measure_part(answers: list[Generation], part: str) -> float:
    """Return the median milliseconds of a part of a round."""
    return 1e3 * median(seconds[part] for answer in answers for seconds in answer.round_seconds)


def sum_seconds(answers: list[Generation], part: str | None = None) -> float:
    """Return the seconds of a part of all answers, or of all parts."""
    return sum(answer.seconds[part] if part else sum(answer.seconds.values()) for answer in answers)


def count_rounds(answers: list[Generation]) -> int:
    return sum(len(answer.round_seconds) for answer in answers)


def count_tokens(answers: list[Generation]) -> int:
    return sum(len(answer.output) for answer in answers)


def make_table(title: str, columns: list[str]) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


if __name__ == "__main__":
    run_benchmark(BlockRounds)
