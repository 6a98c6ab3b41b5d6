"""What the ideas add to exports: layouts, names in model cards, and why some of them cannot be
served.
"""

from spectrain.export.table import (
    SCORE_WITHOUT_ENGINE,
    EngineSupport,
    LayoutPackage,
    TableRow,
)

RESEARCH = "spectrain_research"
INNER_HINT = f"no engine has it; {SCORE_WITHOUT_ENGINE}, or export its inner drafter"
EXPORT = LayoutPackage(
    rows=(
        TableRow(
            f"{RESEARCH}.xpress.layout.SPECULATORS_XPRESS",
            ("speculators",),
            ("xpress",),
            before="medusa.VLLM_MEDUSA",
        ),
        TableRow(
            f"{RESEARCH}.domino.layout.FLAT_DOMINO",
            ("flat",),
            ("domino",),
            before="dflash_flat.FLAT_DFLASH",
        ),
        TableRow(
            f"{RESEARCH}.domino.layout.SGLANG_DOMINO",
            ("sglang",),
            ("domino",),
            before="dflash_flat.FLAT_DFLASH",
        ),
        TableRow(
            f"{RESEARCH}.xpress.layout.FLAT_XPRESS",
            ("vllm", "flat"),
            ("xpress",),
            before="dflash_flat.FLAT_DFLASH",
        ),
        TableRow(
            f"{RESEARCH}.jetspec.layout.FLAT_JETSPEC",
            ("jetspec",),
            ("dflash",),
            before="dflash_flat.FLAT_DFLASH",
        ),
        TableRow(
            f"{RESEARCH}.vispec.layout.FLAT_VISPEC",
            ("flat",),
            ("vispec",),
            before="dflash_flat.TRANSFORMERS_DFLASH",
        ),
        TableRow(
            f"{RESEARCH}.redrafter.layout.TENSORRT_REDRAFTER",
            ("tensorrt",),
            ("redrafter",),
            before="mtp.MTP_TARGET",
        ),
        TableRow(
            f"{RESEARCH}.gated_lora.layout.PEFT",
            ("peft",),
            ("gated_lora",),
            before="native.NATIVE",
        ),
        TableRow(f"{RESEARCH}.uno.layout.UNO", ("uno",), ("uno",), before="native.NATIVE"),
    ),
    # Only its loss differs from EAGLE-3's.
    families={
        "speculators.SPECULATORS_EAGLE3": ("expected_length",),
        "flat.FLAT_EAGLE3": ("expected_length",),
    },
    support=(
        EngineSupport(
            "vllm",
            f"{RESEARCH}.xpress.layout.FLAT_XPRESS",
            ("Qwen3XPressModel",),
            since="0.33",
            note="on a GPU",
        ),
        EngineSupport("speculators", f"{RESEARCH}.xpress.layout.SPECULATORS_XPRESS"),
        EngineSupport(
            "sglang",
            f"{RESEARCH}.domino.layout.SGLANG_DOMINO",
            ("DFlashDraftModel",),
            note="weights in bfloat16",
        ),
        EngineSupport("specforge", f"{RESEARCH}.domino.layout.FLAT_DOMINO"),
        EngineSupport("jetspec", f"{RESEARCH}.jetspec.layout.FLAT_JETSPEC"),
        EngineSupport(
            "vllm", f"{RESEARCH}.jetspec.layout.FLAT_JETSPEC", ("DFlashDraftModel",), note="chains"
        ),
        EngineSupport("automodel", f"{RESEARCH}.vispec.layout.FLAT_VISPEC"),
        EngineSupport(
            "tensorrt",
            f"{RESEARCH}.redrafter.layout.TENSORRT_REDRAFTER",
            note="drafter.cell=linear",
        ),
        EngineSupport("peft", f"{RESEARCH}.gated_lora.layout.PEFT"),
        EngineSupport("sglang", f"{RESEARCH}.uno.layout.UNO"),
        EngineSupport("peft", f"{RESEARCH}.uno.layout.UNO"),
    ),
    programs={
        "specforge": "SpecForge",
        "jetspec": "JetSpec's code",
        "automodel": "NeMo AutoModel",
    },
    titles={
        "hydra": "hydra",
        "kangaroo": "kangaroo",
        "gated_lora": "gated LoRA",
        "uno": "Uno",
        "amphista": "Amphista",
        "ctc": "CTC drafting",
        "gumiho": "Gumiho",
        "transformer_heads": "transformer heads",
        "redrafter": "ReDrafter",
        "domino": "Domino",
        "xpress": "XPress",
        "vispec": "ViSpec",
        "jump": "jump drafting",
        "dflare": "DFlare",
        "dfly": "DFly",
        "two_stage_head": "EAGLE-3 with a two-stage output layer",
        "expected_length": "EAGLE-3 trained for the expected length",
        "sinks": "EAGLE-3 with attention sinks",
        "no_positions": "EAGLE-3 without positions",
    },
    serving_hints={
        "cascade": INNER_HINT,
        "chosen": INNER_HINT,
        "jacobi": (
            "it has no weights of its own; the target that CLLM trained is RUN/target, in "
            "transformers format"
        ),
    },
    shape_readers={
        "vispec": f"{RESEARCH}.vispec.layout.read_shape",
        "domino": f"{RESEARCH}.domino.layout.read_shape",
        "xpress": f"{RESEARCH}.xpress.layout.read_shape",
        "gated_lora": f"{RESEARCH}.shared.adapters.read_shape",
        "uno": f"{RESEARCH}.shared.adapters.read_shape",
        "expected_length": "spectrain.export.native.shape_of_eagle3",
    },
    foreign_parts={
        "prefix_gru": "a recurrent cell over the block, which Domino has",
        "embed_proj": "a correction by earlier tokens, which Domino has",
        "refiner_head": "a refiner of the block, which XPress has",
        "xpress_head": "a refiner of the block, which XPress has",
    },
)
