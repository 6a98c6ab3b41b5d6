"""Cases of the ideas for tests/runs/test_run.py."""

from typing import Any

CASES: dict[str, Any] = {
    "test_what_has_nothing_to_train_leaves_nothing": ["self", "universal", "chosen"]
}
