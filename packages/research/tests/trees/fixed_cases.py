"""Cases of the ideas for tests/trees/test_fixed.py."""

from typing import Any

from spectrain_research.sequoia.builder import Sequoia

CASES: dict[str, Any] = {
    "test_unprepared_trees_are_refused": [Sequoia()],
}
