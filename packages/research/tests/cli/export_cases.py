"""Cases of the ideas for tests/cli/test_export.py."""

from typing import Any

CASES: dict[str, Any] = {
    "SERVED": {"gated_lora peft": {"spectrain"}, "uno uno": {"SGLang", "spectrain"}},
    "OPTIONS": {"gated_lora peft": {}, "uno uno": {"num_masks": 3, "rank": 4, "alpha": 8.0}},
    "WIDE": {
        "gated_lora": ("peft", {"num_masks": 2, "rank": 4}),
        "hydra": ("spectrain", {"vocab_size": 64, "num_heads": 1}),
        "kangaroo": ("spectrain", {}),
    },
}
