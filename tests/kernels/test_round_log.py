"""A round's line in the log: reference = a loop over texts."""

import pytest
import torch

from spectrain.kernels.round_log import round_log_reference


def make_rounds(batch: int, num_steps: int, num_nodes: int) -> list[torch.Tensor]:
    """Make emitted tokens, and trees with padding and with nodes that only draft."""
    tokens = torch.randint(0, 99, (batch, num_steps))
    counts = torch.randint(0, num_steps + 1, (batch,))
    valid, emitted = (torch.rand(batch, num_nodes) < share for share in (0.7, 0.6))
    return [tokens, counts, torch.randint(0, 9, (batch, num_nodes)), valid, emitted]


@pytest.mark.parametrize(("batch", "num_steps", "num_nodes"), [(1, 1, 1), (3, 5, 20)])
def test_reference_equals_the_loop(batch: int, num_steps: int, num_nodes: int) -> None:
    """Lines follow one another, and after the last one the first is overwritten; the other lines
    stay as they are.
    """
    torch.manual_seed(num_nodes)
    logs = [torch.full((3, batch, num_steps + 4), -1) for _ in range(2)]
    for slot in range(4):
        tokens, counts, depths, valid, emitted = case = make_rounds(batch, num_steps, num_nodes)
        round_log_reference(logs[0], torch.tensor([slot]), *case)
        for row in range(batch):
            real = [
                (int(d), bool(e)) for d, v, e in zip(depths[row], valid[row], emitted[row]) if v
            ]
            depth = max([d for d, e in real if e], default=0)
            idle = sum(not e for _, e in real)
            logs[1][slot % 3, row] = torch.tensor(
                [*tokens[row].tolist(), int(counts[row]), depth, len(real), idle]
            )
        assert torch.equal(logs[0], logs[1])
        assert (logs[0] == -1).any() == (slot < 2)
