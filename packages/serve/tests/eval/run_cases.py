"""Cases of the settings of servers for tests/eval/test_run.py."""

from typing import Any

CASES: dict[str, Any] = {
    "test_bad_settings_are_refused": [
        ({"concurrency": (0,)}, "eval.concurrency"),
        ({"slo": {"ttft": "1s"}}, "eval.slo: it is about a running server"),
    ],
}
