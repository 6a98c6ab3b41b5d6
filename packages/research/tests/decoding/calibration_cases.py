"""Cases of the ideas for tests/decoding/test_calibration.py."""

from typing import Any

from spectrain_research.traversal.rule import Traversal

CASES: dict[str, Any] = {
    "test_first_child_is_accepted_with_the_overlap": [Traversal()],
}
