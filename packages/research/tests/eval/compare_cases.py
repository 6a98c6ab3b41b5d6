"""Cases of the ideas for packages/studies/tests/comparison/test_compare.py."""

from typing import Any

CASES: dict[str, Any] = {
    "MISTAKES": {"recipes=medusa1,judge": "recipes=judge: what it trains drafts nothing"}
}
