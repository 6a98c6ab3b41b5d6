"""Cases of the ideas for tests/decoding/test_known_distribution.py."""

from typing import Any

from packages.research.tests.decoding.known_variants import INVARIANT, SMALL_BATCHES, VARIANTS

CASES: dict[str, Any] = {
    "VARIANTS": VARIANTS,
    "INVARIANT": INVARIANT,
    "SMALL_BATCHES": SMALL_BATCHES,
}
