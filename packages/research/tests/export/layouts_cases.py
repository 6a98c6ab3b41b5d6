"""Cases of the ideas for tests/export/test_layouts.py."""

from typing import Any

from packages.research.tests.export.converter_cases import DOMINO, REDRAFTER, UNO, XPRESS
from tests.export.test_converter import DFLASH

CASES: dict[str, Any] = {
    "SMALL": {
        "redrafter": REDRAFTER,
        "domino": DOMINO,
        "xpress": XPRESS,
        "spectrain_research.jetspec.layout.FLAT_JETSPEC": {**DFLASH, "causal": True},
        "gated_lora": {"num_masks": 2, "rank": 4},
        "spectrain_research.uno.layout.UNO": UNO,
    }
}
