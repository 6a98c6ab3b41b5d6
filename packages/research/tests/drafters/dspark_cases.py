"""Cases of the ideas for tests/drafters/test_dspark.py."""

from typing import Any

from spectrain_research.dyspec.builder import DySpec

CASES: dict[str, Any] = {
    "test_children_depend_on_their_parents": [DySpec(4, 7, children="deterministic")],
    "test_confidence_cuts": [DySpec(4, 9, children="deterministic")],
}
