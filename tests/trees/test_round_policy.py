"""Decisions of a policy of rounds under stated times."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spectrain.trees import Auto
from spectrain.trees.base import PlanOptions, RoundResult, TreeBuilder
from spectrain.trees.measured_policy import MeasuredPolicy
from spectrain.trees.measurements import Calibration, Latency
from spectrain.trees.token_tree import TokenTree

NUM_ROUNDS = 600
NUM_ALONE = 160  # rounds of one text; those of three follow
DRAFTED_SIZE = 4  # nodes of a drafted chain, the root included


def run_rounds(policy: MeasuredPolicy, node: float, counts: list[int]) -> tuple[str, list[int]]:
    """Return which rounds were drafted (d) and before which verification was timed.

    A node costs `node` plain steps, a draft 0.3, and drafted rounds emit `counts` tokens in turn.
    """
    drafted = ""
    timed: list[int] = []

    def time_sizes(prefix: Any, sizes: list[int]) -> tuple[dict[int, float], float]:
        timed.append(len(drafted))
        return {n: len(prefix.lengths) * (1 + node * (n - 1)) for n in sizes}, 0.5

    length = 10
    for number in range(NUM_ROUNDS):
        batch = 1 if number < NUM_ALONE else 3
        lengths = torch.full((batch,), length)
        prefix: Any = SimpleNamespace(lengths=lengths, longest=length, begins=number == 0)
        plan = policy.plan(prefix, PlanOptions(time_sizes))
        size = DRAFTED_SIZE if plan.runs_drafter else 1
        count = counts[number % len(counts)] if plan.runs_drafter else 1
        seconds = {
            "draft": 0.3 * plan.runs_drafter,
            "verify": batch * (1 + node * (size - 1)),
            "accept": 0.0,
        }
        tree = TokenTree.from_chain(torch.ones(batch, size, dtype=torch.int64))
        emitted = torch.full((batch,), count)
        policy.record(plan, RoundResult(tree, torch.zeros(0), emitted, seconds))
        length += count
        drafted += "d" if plan.runs_drafter else "."
    return drafted, timed


# By cost of a node and tokens of drafted rounds: the rounds of the rarer kind, and those before
# which verification was timed. They were recorded before policies had a class of their own.
CASES: list[tuple[float, list[int], str, list[int], list[int]]] = [
    (0.05, [3, 2, 4], ".", [2, 4, 6, 8, 10, 162, 164, 166, 168, 170, 371, 546, 547], [546]),
    (0.4, [2, 1], "d", [0, 1, 3, 160, 161, 163, 181, 426, 427], []),
    (
        0.4,
        [3, 2, 4],
        ".",
        [2, 4, 6, 8, 59, 113, 162, 164, 166, 168, 170, 278, 362, 428, 503, 578],
        [373],
    ),
]


@pytest.mark.parametrize("node, counts, kind, rounds, timed", CASES)
def test_rounds_are_decided_as_recorded(
    node: float, counts: list[int], kind: str, rounds: list[int], timed: list[int]
) -> None:
    """The same times and tokens lead to the same drafts, plain steps and timings."""
    times = {size: 1 + 0.1 * (size - 1) for size in (1, 2, 4)}
    builder = Auto(depth=3, budget=4, top_k=1, memory=16)
    latency = Latency({0: times}, {0: dict.fromkeys(times, 0.1)}, 0.1)
    builder.prepare(Calibration(latency=latency))
    drafted, timed_before = run_rounds(builder.round_policy, node, counts)
    assert [number for number, drawn in enumerate(drafted) if drawn == kind] == rounds
    assert timed_before == timed


def test_a_tree_builder_stays_small() -> None:
    """Decisions about rounds belong to policies, so a builder has few members."""
    members = [name for name in vars(TreeBuilder) if not name.startswith("_")]
    assert len({*members, *TreeBuilder.__annotations__}) <= 17
