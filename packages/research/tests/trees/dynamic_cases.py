"""Cases of the ideas for tests/trees/test_dynamic.py."""

from typing import Any

from spectrain_research.dyspec.builder import DySpec
from spectrain_research.entropy_tree.builder import Entropy
from spectrain_research.opt_tree.builder import OptTree
from spectrain_research.redrafter.beam import Beam

CASES: dict[str, Any] = {
    "test_certain_drafter_becomes_a_chain": [
        lambda: Entropy(depth=4, budget=5, top_k=3),
        lambda: OptTree(depth=4, budget=5),
        lambda: DySpec(depth=4, budget=5),
    ],
    "test_builders_refuse_empty_trees": [
        (lambda: Entropy(top_k=0), "tree.top_k=0"),
        (lambda: Beam(depth=4, budget=4), "tree.budget=4"),
        (lambda: OptTree(threshold=-0.5), "tree.threshold=-0.5"),
        (lambda: DySpec(budget=1), "tree.budget=1"),
        (lambda: DySpec(temperature=0.0), "tree.temperature=0.0"),
    ],
}
