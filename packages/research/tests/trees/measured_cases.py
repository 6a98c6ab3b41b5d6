"""Cases of the ideas for tests/trees/test_measured.py."""

from typing import Any

from spectrain_research.cast.builder import Cast

CASES: dict[str, Any] = {
    "test_measured_trees_have_a_valid_structure": [Cast],
    "test_untimed_builders_are_refused": [Cast],
    "test_level_costs_make_measured_trees_shallower": [Cast],
    "test_copies_are_verified_while_they_gain": [Cast],
}
