"""Cases of the ideas for tests/drafters/test_pard.py."""

from typing import Any

from spectrain_research.cast.builder import Cast
from spectrain_research.dyspec.builder import DySpec
from spectrain_research.sequoia.builder import Sequoia

CASES: dict[str, Any] = {
    "BUILDERS": {"dyspec": DySpec(4, 7, children="deterministic")},
    "test_builders_that_need_calibration": [Sequoia(depth=6, budget=6), Cast(6, 6, 2)],
}
