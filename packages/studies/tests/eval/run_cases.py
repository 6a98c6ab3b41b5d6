"""Cases of the sweeps for tests/eval/test_run.py."""

from typing import Any

CASES: dict[str, Any] = {
    "test_bad_settings_are_refused": [
        ({"batches": (8, 0)}, "eval.batches"),
        ({"temperatures": (-0.1,)}, "eval.temperatures"),
    ],
}
