"""Held bytes of tensors."""

import torch

from spectrain.eval.memory import MemoryCounter


def test_held_bytes_are_the_peak() -> None:
    """Of three tensors two are alive at a time: the peak is the largest pair's; views and writes
    in place add nothing.
    """
    with MemoryCounter() as counter:
        first = torch.zeros(1000)
        view = first.view(10, 100)
        view.add_(1)
        second = torch.zeros(3000)
        del first, view
        third = torch.zeros(500)
    assert counter.peak == 4 * 4000
    assert second.numel() + third.numel() == 3500
