"""Cases of the ideas for tests/drafters/test_retrieval.py."""

from typing import Any

from spectrain_research.dyspec.builder import DySpec

CASES: dict[str, Any] = {
    "test_drafted_equals_plain": [DySpec(4, 10, children="deterministic")],
}
