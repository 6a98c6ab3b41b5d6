"""A round's line in the log: kernel = reference = a loop over texts, and the kernel compiles for
sm_90.
"""

import pytest
import torch

from spectrain.kernels import round_log as module
from spectrain.kernels.round_log import round_log, round_log_reference
from tests.kernels import aot

pytest.importorskip("triton", reason="triton is not installed, so there is no kernel to interpret")


def make_rounds(batch: int, num_steps: int, num_nodes: int) -> list[torch.Tensor]:
    """Make emitted tokens, and trees with padding and with nodes that only draft."""
    tokens = torch.randint(0, 99, (batch, num_steps))
    counts = torch.randint(0, num_steps + 1, (batch,))
    valid, emitted = (torch.rand(batch, num_nodes) < share for share in (0.7, 0.6))
    return [tokens, counts, torch.randint(0, 9, (batch, num_nodes)), valid, emitted]


@pytest.mark.parametrize(("batch", "num_steps", "num_nodes"), [(1, 1, 1), (3, 5, 20)])
def test_kernel_equals_reference_and_loop(
    monkeypatch: pytest.MonkeyPatch, batch: int, num_steps: int, num_nodes: int
) -> None:
    """Lines follow one another, and after the last one the first is overwritten; the other lines
    stay as they are.
    """
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    torch.manual_seed(num_nodes)
    logs = [torch.full((3, batch, num_steps + 4), -1) for _ in range(3)]
    for slot in range(4):
        tokens, counts, depths, valid, emitted = case = make_rounds(batch, num_steps, num_nodes)
        round_log(logs[0], torch.tensor([slot]), *case)
        round_log_reference(logs[1], torch.tensor([slot]), *case)
        for row in range(batch):
            real = [
                (int(d), bool(e)) for d, v, e in zip(depths[row], valid[row], emitted[row]) if v
            ]
            depth = max([d for d, e in real if e], default=0)
            idle = sum(not e for _, e in real)
            logs[2][slot % 3, row] = torch.tensor(
                [*tokens[row].tolist(), int(counts[row]), depth, len(real), idle]
            )
        assert torch.equal(logs[0], logs[1]) and torch.equal(logs[0], logs[2])
        assert (logs[0] == -1).any() == (slot < 2)


def test_operator_passes_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's schema says what it changes, and its fake stands in for it."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    lines = torch.zeros(3, 2, 9, dtype=torch.int64)
    slot = torch.tensor([1])
    torch.library.opcheck(module._launch_log, (lines, slot, *make_rounds(2, 5, 4)))


def test_kernel_compiles_for_sm_90() -> None:
    """No stack, up to the largest tree and the longest path."""
    long = ("lines_ptr", "slot_ptr", "tokens_ptr", "counts_ptr", "depths_ptr")
    types = dict.fromkeys(long, "*i64") | {"valid_ptr": "*i1", "emitted_ptr": "*i1"}
    constants = {"BLOCK_P": 256, "BLOCK_N": 256}
    usage = aot.compile_for(
        aot.Request("spectrain.kernels.round_log", "_log_kernel", types, constants, 1, 3)
    )
    assert usage.stack == 0, usage
