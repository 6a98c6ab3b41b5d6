"""The end of a captured round: kernel = reference = the parts that it is made of."""

from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.kernels import round_commit as module
from spectrain.kernels.kv_commit import kv_commit
from spectrain.kernels.round_commit import (
    LoggedTrees,
    RoundBuffers,
    Verdicts,
    round_commit,
    round_commit_reference,
)
from spectrain.kernels.round_log import round_log_reference
from spectrain.kernels.token_commit import token_commit_reference
from tests.kernels.test_kv_commit import make_round
from tests.kernels.test_token_commit import copy_case, round_of

pytest.importorskip("triton", reason="triton is not installed, so there is no kernel to interpret")

Arguments = tuple[Tensor, Verdicts, LoggedTrees, Any, RoundBuffers]


def make_arguments(counts: list[int], num_nodes: int, num_stops: int, drafts: bool) -> Arguments:
    """Make a verified batch with the second round of the log to come."""
    nodes, *verdict, texts = round_of(counts, num_nodes, num_stops)
    batch, steps = verdict[0].shape
    valid, can_emit = (torch.rand(batch, num_nodes) < share for share in (0.7, 0.6))
    trees = LoggedTrees(torch.randint(0, 9, (batch, num_nodes)), valid, can_emit)
    buffers = RoundBuffers(
        torch.full((3, batch, steps + 4), -1),
        torch.full((batch,), 4),
        torch.full((batch, steps), -1) if drafts else None,
        torch.full((batch,), -1) if drafts else None,
    )
    return nodes, Verdicts(*verdict), trees, texts, buffers


def copy_arguments(arguments: Arguments) -> Arguments:
    nodes, verdicts, trees, texts, buffers = arguments
    *_, texts = copy_case((nodes, *verdicts, texts))
    copies = RoundBuffers(*(x if x is None else x.clone() for x in buffers))
    return nodes, verdicts, trees, texts, copies


@pytest.mark.sweep(3, free=("drafts",))
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("counts", "num_nodes", "num_stops"),
    [([1], 1, 0), ([1, 4, 2, 3, 1, 4, 4], 9, 3), ([17, 3, 1, 16], 65, 1)],
)
def test_kernel_equals_reference_and_its_parts(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], num_nodes: int, num_stops: int, drafts: bool
) -> None:
    """Texts that are done, that end and that go on: tokens, lengths, the log and the buffers."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    torch.manual_seed(num_nodes)
    arguments = make_arguments(counts, num_nodes, num_stops, drafts)
    results = []
    for run in (round_commit, round_commit_reference):
        copied = copy_arguments(arguments)
        results.append([*run(*copied), *copied[3], *(x for x in copied[4] if x is not None)])
    nodes, verdicts, trees, texts, buffers = copy_arguments(arguments)
    emitted, number = token_commit_reference(nodes, *verdicts, texts)
    round_log_reference(buffers.lines, buffers.next_lines[:1], emitted, number, *trees)
    texts.lengths.add_(number)
    rest = [nodes.gather(1, verdicts.path), number] if drafts else []
    results.append([emitted, number, *texts, buffers.lines, buffers.next_lines + 1, *rest])
    for other in results[1:]:
        for item, another in zip(results[0], other, strict=True):
            assert torch.equal(item, another)


def test_operator_passes_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's schema says what it changes, and its fake stands in for it."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    nodes, verdicts, trees, texts, buffers = make_arguments([1, 3], 5, 2, True)
    torch.library.opcheck(module._launch_round_commit, (nodes, *verdicts, *trees, *texts, *buffers))


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_a_path_moves_after_its_lengths_have_grown(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The cache of a round is the same whether lengths grow before or after its path moves."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", mode)
    case = make_round(6, (2, 1, 0))
    grown = case.clone()
    kv_commit(*case)
    grown.lengths.add_(grown.counts)
    kv_commit(*grown, are_counted=True)
    for result, other in zip(case, grown):
        torch.testing.assert_close(result, other, rtol=0, atol=0, equal_nan=True)
