"""Cases of this package for tests/export/test_layouts.py."""

from typing import Any

from tests.export.test_converter import DFLASH2

CASES: dict[str, Any] = {
    "SMALL": {"spectrain_serve.layouts.gguf_dflash.GGUF_DFLASH2": {**DFLASH2, "selector_top_k": 8}}
}
