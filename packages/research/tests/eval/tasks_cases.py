"""Cases of the ideas for tests/eval/test_tasks.py."""

from typing import Any

from spectrain_research.lossy_rules.relaxed import Rollback

CASES: dict[str, Any] = {
    "test_quality_is_shown_for_lossy_rules_or_on_request": [Rollback(9.0)],
}
