"""Cases of the ideas for tests/decoding/test_known_distribution.py."""

from typing import Any

from packages.research.tests.decoding.known_variants import VARIANTS

CASES: dict[str, Any] = {"VARIANTS": VARIANTS}
