"""Cases of the ideas for tests/drafters/test_output_layer.py."""

from typing import Any

from spectrain_research.hydra.drafter import Hydra

CASES: dict[str, Any] = {
    "FAMILIES": {"hydra": (Hydra, {"num_heads": 2})},
}
