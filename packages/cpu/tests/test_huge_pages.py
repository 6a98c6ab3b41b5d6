"""Memory for weights: lines of the cache, and arrays that small weights share."""

import torch

from spectrain_cpu.huge_pages import LINE, SHARED_BYTES, allocate_lines, copy_to_lines


def test_weights_begin_at_lines_and_do_not_overlap() -> None:
    parts = [allocate_lines(size) for size in (100, 64, 0, 1, SHARED_BYTES // 2, 200)]
    for number, part in enumerate(parts):
        assert part.data_ptr() % LINE == 0
        part.fill_(number)
    for number, part in enumerate(parts):
        assert (part == number).all()


def test_large_weights_share_nothing() -> None:
    first = allocate_lines(SHARED_BYTES // 2 + 1)
    assert len(first) == first.untyped_storage().nbytes()


def test_copies_are_contiguous() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    copied = copy_to_lines(x.T)
    assert copied.is_contiguous()
    assert torch.equal(copied, x.T)
