"""Cases of the ideas for tests/drafters/test_causal.py."""

from typing import Any

from spectrain_research.dyspec.builder import DySpec

CASES: dict[str, Any] = {
    "test_what_is_drafted_is_what_is_trained": [DySpec(3, 6)],
}
