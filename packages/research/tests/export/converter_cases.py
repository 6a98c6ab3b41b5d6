"""Cases of the ideas for tests/export/test_converter.py."""

from typing import Any

from tests.export.test_converter import DFLASH, ours

DOMINO = {**DFLASH, "gru_width": 12, "rank": 8}
XPRESS = {**DFLASH, "rank": 8, "num_passes": 2}
UNO = {"num_masks": 3, "rank": 4}
REDRAFTER = {"vocab_size": 2048, "num_blocks": 1, "cell": "linear"}
CASES: dict[str, Any] = {
    "CASES": {
        "vispec": (
            lambda path, tiny: ours(path, tiny, "vispec", num_queries=3),
            ("flat", "spectrain"),
        ),
        "gated lora": (
            lambda path, tiny: ours(path, tiny, "gated_lora", num_masks=2, rank=4),
            ("peft", "spectrain"),
        ),
        "PaSS": (
            lambda path, tiny: ours(path, tiny, "gated_lora", num_masks=2, rank=0, sampler=False),
            ("spectrain",),
        ),
        "uno": (lambda path, tiny: ours(path, tiny, "uno", **UNO), ("uno", "spectrain")),
        "jetspec": (
            lambda path, tiny: ours(path, tiny, "dflash", causal=True, **DFLASH),
            ("jetspec", "spectrain"),
        ),
        "domino": (lambda path, tiny: ours(path, tiny, "domino", **DOMINO), ("flat", "spectrain")),
        "domino, unshifted": (
            lambda path, tiny: ours(
                path,
                tiny,
                "domino",
                sample_from_anchor=False,
                uncorrected=0,
                layers=[1, 3, 8],
                **DOMINO,
            ),
            ("flat", "spectrain"),
        ),
        "xpress": (
            lambda path, tiny: ours(path, tiny, "xpress", **XPRESS),
            ("speculators", "flat", "spectrain"),
        ),
        "xpress, cut vocabulary": (
            lambda path, tiny: ours(path, tiny, "xpress", vocab_size=256, mlp_ratio=1, **XPRESS),
            ("speculators", "spectrain"),
        ),
        "redrafter": (
            lambda path, tiny: ours(path, tiny, "redrafter", **REDRAFTER),
            ("tensorrt", "spectrain"),
        ),
    },
    "REFUSED": {
        "Hydra": (
            lambda path, tiny: ours(path, tiny, "hydra", vocab_size=256),
            "vllm",
            ("hydra", "spectrain eval"),
        ),
        "Kangaroo": (
            lambda path, tiny: ours(path, tiny, "kangaroo"),
            "hf",
            ("kangaroo", "spectrain eval"),
        ),
        "jump drafting": (
            lambda path, tiny: ours(path, tiny, "jump"),
            "vllm",
            ("jump", "spectrain eval"),
        ),
        "DFly": (
            lambda path, tiny: ours(path, tiny, "dfly", **DFLASH, rank=8),
            "sglang",
            ("dfly", "spectrain eval"),
        ),
        "two stages": (
            lambda path, tiny: ours(path, tiny, "two_stage_head"),
            "vllm",
            ("two_stage_head", "spectrain eval"),
        ),
        "sinks": (
            lambda path, tiny: ours(path, tiny, "sinks"),
            "vllm",
            ("sinks", "spectrain eval"),
        ),
        "gated LoRA for vLLM": (
            lambda path, tiny: ours(path, tiny, "gated_lora", num_masks=2, rank=4),
            "vllm",
            ("gated_lora", "peft"),
        ),
        "masks for SGLang": (
            lambda path, tiny: ours(path, tiny, "gated_lora", num_masks=2, rank=4),
            "uno",
            ("drafter=gated_lora", "format=peft"),
        ),
        "Uno's adapter with masks": (
            lambda path, tiny: ours(path, tiny, "uno", **UNO),
            "peft",
            ("drafter=uno", "format=uno"),
        ),
    },
}
