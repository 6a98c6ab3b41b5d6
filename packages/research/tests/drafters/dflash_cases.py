"""Cases of the ideas for tests/drafters/test_dflash.py."""

from typing import Any

from spectrain_research.dyspec.builder import DySpec

CASES: dict[str, Any] = {
    "test_trees_are_products_of_marginals": [DySpec(4, 7, children="deterministic")],
}
