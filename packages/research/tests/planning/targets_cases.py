"""Cases of the ideas for packages/studies/tests/planning/test_targets.py."""

from typing import Any

CASES: dict[str, Any] = {
    "test_targets_that_need_their_weights_have_no_plan": ["int4", "codes target.model=x"]
}
