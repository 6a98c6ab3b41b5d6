"""Cases of the ideas for tests/eval/test_run.py."""

from typing import Any

from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.trees import Static
from spectrain_research.dyspec.builder import DySpec
from spectrain_research.traversal.rule import Traversal

CASES: dict[str, Any] = {
    "test_every_rule_is_scored": [
        (RecursiveRejection(0.7), DySpec(3, 6)),
        (Traversal(top_p=0.9), Static(2, 4, [[0], [1], [0, 0]], "without_replacement")),
    ],
    "test_bad_settings_are_refused": [
        ({"prune_layer": 0}, "eval.prune_layer=0"),
        ({"prune_top": 0}, "eval.prune_top=0"),
        ({"prune_layer": 2, "sweep": "prune"}, "eval.sweep=prune"),
        ({"exits": ()}, "eval.exits"),
        ({"depths": (0, 2)}, "eval.depths"),
        ({"tops": (0,)}, "eval.tops"),
        ({"budgets": (8, 0)}, "eval.budgets"),
    ],
}
