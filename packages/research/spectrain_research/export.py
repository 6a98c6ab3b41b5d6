"""What the ideas add to exports: layouts, names in model cards, and why some of them cannot be
served.
"""

from spectrain.export.table import SCORE_WITHOUT_ENGINE, LayoutPackage, TableRow

RESEARCH = "spectrain_research"
INNER_HINT = f"no engine has it; {SCORE_WITHOUT_ENGINE}, or export its inner drafter"
EXPORT = LayoutPackage(
    rows=(
        TableRow(
            f"{RESEARCH}.xpress.layout.SpeculatorsXPress",
            "speculators",
            "xpress",
            before="medusa.VllmMedusa",
        ),
        TableRow(
            f"{RESEARCH}.domino.layout.FlatDomino",
            "flat",
            "domino",
            before="dflash_flat.FlatDFlash",
        ),
        TableRow(
            f"{RESEARCH}.xpress.layout.FlatXPress",
            "flat",
            "xpress",
            before="dflash_flat.FlatDFlash",
        ),
        TableRow(
            f"{RESEARCH}.jetspec.layout.FlatJetSpec",
            "jetspec",
            "dflash",
            before="dflash_flat.FlatDFlash",
        ),
        TableRow(
            f"{RESEARCH}.vispec.layout.FlatViSpec",
            "flat",
            "vispec",
            before="dflash_flat.TransformersDFlash",
        ),
        TableRow(
            f"{RESEARCH}.redrafter.layout.TensorRtRedrafter",
            "tensorrt",
            "redrafter",
            before="mtp.MtpTargetLayout",
        ),
        TableRow(
            f"{RESEARCH}.gated_lora.layout.PeftLayout", "peft", "gated_lora", before="uno.UnoLayout"
        ),
    ),
    native_families=(
        "hydra kangaroo gated_lora amphista ctc gumiho redrafter transformer_heads domino xpress "
        "vispec"
    ),
    titles={
        "gated_lora": "gated LoRA",
        "amphista": "Amphista",
        "ctc": "CTC drafting",
        "gumiho": "Gumiho",
        "transformer_heads": "transformer heads",
        "redrafter": "ReDrafter",
        "domino": "Domino",
        "xpress": "XPress",
        "vispec": "ViSpec",
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
        "gated_lora": "spectrain.export.native.shape_of_adapter",
    },
    foreign_parts={
        "prefix_gru": "a recurrent cell over the block, which Domino has",
        "embed_proj": "a correction by earlier tokens, which Domino has",
        "refiner_head": "a refiner of the block, which XPress has",
        "xpress_head": "a refiner of the block, which XPress has",
    },
)
