"""vLLM's own reading of the schedules that we write."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from spectrain_serve.times.schedule import list_ranges


@pytest.mark.parametrize("lengths", [[3], [3, 3, 1, 1, 0], [0, 2, 2, 0]])
def test_vllm_reads_every_length(lengths: list[int]) -> None:
    """Every number of requests has its length, and larger ones have the last one."""
    table = build_dynamic_sd_schedule_lookup(list_ranges(lengths), len(lengths) + 2, 3)
    assert table[1:] == [*lengths, lengths[-1], lengths[-1]]
