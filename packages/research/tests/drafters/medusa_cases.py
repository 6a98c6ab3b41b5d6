"""Cases of the ideas for tests/drafters/test_medusa.py."""

from typing import Any

from spectrain_research.cartesian.builder import Cartesian
from spectrain_research.cast.builder import Cast
from spectrain_research.dyspec.builder import DySpec
from spectrain_research.entropy_tree.builder import Entropy
from spectrain_research.opt_tree.builder import OptTree
from tests.drafters.test_medusa import set_flat_costs

CASES: dict[str, Any] = {
    "DEEP": [
        Entropy(6, 16, 4),
        OptTree(6, 12, 0.0),
        DySpec(6, 12, children="deterministic"),
        Cartesian((2, 1, 1, 1, 1)),
        set_flat_costs(Cast(6, 16, 4)),
    ],
}
