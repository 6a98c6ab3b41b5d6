"""Cases of draft tokens by load for tests/export/test_damaged_scores.py."""

from typing import Any

CASES: dict[str, Any] = {"DAMAGES": [{"axis": {"load": {"schedule": {"ranges": 5}}}}]}
