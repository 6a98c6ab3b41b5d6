"""Cases of the ideas for tests/eval/test_compare.py."""

from typing import Any

CASES: dict[str, Any] = {
    "MISTAKES": {"recipes=medusa1,judge": "recipes=judge: what it trains drafts nothing"}
}
