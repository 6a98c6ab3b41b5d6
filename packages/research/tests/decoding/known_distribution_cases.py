"""Cases of the ideas for tests/decoding/test_known_distribution.py."""

from typing import Any

from packages.research.tests.decoding.known_variants import SMALL_BATCHES, VARIANTS

CASES: dict[str, Any] = {"VARIANTS": VARIANTS, "SMALL_BATCHES": SMALL_BATCHES}
