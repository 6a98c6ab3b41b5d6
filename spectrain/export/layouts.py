"""The table of export layouts: which exist, which one a directory has, and which one a format means for a family."""

from __future__ import annotations

from spectrain.errors import UserError, suggest_nearest

from .dflash_flat import FlatDFlash, FlatDFlash2, FlatDSpark
from .dflash_speculators import SpeculatorsDFlash, SpeculatorsDFlash2, SpeculatorsDSpark
from .dflash_transformers import TransformersDFlash
from .eagle1 import OriginalEagle1, SglangEagle1, VllmEagle1
from .flat import FlatEagle3
from .huggingface import HuggingFaceLayout
from .layout import DrafterFiles, Layout
from .medusa import OriginalMedusa, VllmMedusa
from .mtp import MtpTargetLayout
from .native import NativeLayout
from .peagle import FlatPEagle, SpeculatorsPEagle
from .peft import PeftLayout
from .speculators import SpeculatorsEagle3
from .uno import UnoLayout

LAYOUTS: tuple[Layout, ...] = (
    NativeLayout(),
    PeftLayout(),
    UnoLayout(),
    SpeculatorsEagle3(),
    SpeculatorsPEagle(),
    SpeculatorsDFlash(),
    SpeculatorsDFlash2(),
    SpeculatorsDSpark(),
    VllmMedusa(),
    OriginalMedusa(),
    TransformersDFlash(),
    FlatDFlash2(),
    FlatDSpark(),
    FlatDFlash(),
    VllmEagle1(),
    SglangEagle1(),
    OriginalEagle1(),
    FlatPEagle(),
    FlatEagle3(),
    MtpTargetLayout(),
    HuggingFaceLayout(),
)
FORMATS: dict[str, tuple[Layout, ...]] = {
    "vllm": (
        SpeculatorsEagle3(), SpeculatorsPEagle(), SpeculatorsDFlash(), SpeculatorsDFlash2(), SpeculatorsDSpark(), VllmMedusa(),
        VllmEagle1(), HuggingFaceLayout(),
    ),
    "sglang": (FlatEagle3(), FlatDFlash(), FlatDFlash2(), FlatDSpark(), SglangEagle1(), HuggingFaceLayout()),
    "eagle": (OriginalEagle1(),),
    "flat": (FlatEagle3(), FlatPEagle(), FlatDFlash(), FlatDFlash2(), FlatDSpark()),
    "hf": (HuggingFaceLayout(), TransformersDFlash()),
    "medusa": (OriginalMedusa(),),
    "mtp": (MtpTargetLayout(),),
    "peft": (PeftLayout(),),
    "spectrain": (NativeLayout(),),
    "uno": (UnoLayout(),),
}  # fmt: skip
"""Format -> its layouts, at most one for each family."""
SCORE_WITHOUT_ENGINE = "score it with spectrain eval, which needs no engine"
UNSERVED_FAMILIES = {
    "amphista": f"no engine drafts with heads that attend to each other; {SCORE_WITHOUT_ENGINE}, or train recipe=medusa1",
    "cascade": f"no engine speculates on a drafter; {SCORE_WITHOUT_ENGINE}, or export the inner drafter",
    "chosen": f"no engine chooses between drafters; {SCORE_WITHOUT_ENGINE}, or export one of them",
    "ctc": f"no engine collapses CTC slots; {SCORE_WITHOUT_ENGINE}, or train recipe=medusa1",
    "gumiho": f"no engine combines serial steps with parallel heads; {SCORE_WITHOUT_ENGINE}, or train recipe=eagle3",
    "hydra": f"no engine drafts with heads that read each other's tokens; {SCORE_WITHOUT_ENGINE}, or train recipe=medusa1",
    "hybrid": f"no engine merges copies into a drafter's trees; {SCORE_WITHOUT_ENGINE}, or export the inner drafter",
    "jacobi": "it has no weights of its own; the target that CLLM trained is RUN/target, in transformers format",
    "kangaroo": f"no engine drafts with an adapter after an early exit; {SCORE_WITHOUT_ENGINE}, or train recipe=eagle3",
    "layer_skip": f"no engine skips layers of the target; {SCORE_WITHOUT_ENGINE}",
    "lookahead": f"it has no weights, and no engine has its pool of n-grams; {SCORE_WITHOUT_ENGINE}",
    "ngram": 'it has no weights; vLLM has its own, --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
    "self": f"no engine drafts with a part of the target's own cache or weights; {SCORE_WITHOUT_ENGINE}",
    "transformer_heads": f"no engine drafts with heads that are layers; {SCORE_WITHOUT_ENGINE}, or train recipe=medusa1",
    "redrafter": f"only TensorRT-LLM drafts with a recurrent cell, from files not written here; {SCORE_WITHOUT_ENGINE}",
    "retrieval": f"it has no weights, and no engine reads its store; {SCORE_WITHOUT_ENGINE}",
}
"""Family -> why no engine serves it, and what to do instead."""
UNSUPPORTED_FORMATS = {
    ("hf", "dflash2"): "transformers has only DFlash",
    ("hf", "dspark"): "transformers has only DFlash",
    ("sglang", "peagle"): "SGLang has no P-EAGLE",
}
"""(format, family) -> why the format cannot hold a family that other formats hold."""


def detect_layout(files: DrafterFiles) -> Layout:
    """Return the layout of a directory."""
    for layout in LAYOUTS:
        if layout.matches_files(files):
            return layout
    titles = ", ".join(dict.fromkeys(layout.title for layout in LAYOUTS))
    raise UserError(f"{files.directory}: its config.json has no supported layout; supported are {titles}")


def select_layout(family: str, format_name: str) -> Layout:
    """Return the layout of a format for a family's drafters, or raise UserError saying which format to use."""
    if format_name not in FORMATS:
        raise UserError(f"format={format_name}: there is no such format; {suggest_nearest(format_name, FORMATS)}")
    for layout in FORMATS[format_name]:
        if family in layout.families:
            return layout
    if family in UNSERVED_FAMILIES:
        raise UserError(f"format={format_name}: {family} cannot be served: {UNSERVED_FAMILIES[family]}")
    alternatives = [key for key, layouts in FORMATS.items() if any(family in layout.families for layout in layouts)]
    if not alternatives:
        raise UserError(f"format={format_name}: no layout supports drafter={family}; {SCORE_WITHOUT_ENGINE}")
    cause = UNSUPPORTED_FORMATS.get((format_name, family), f"it does not support drafter={family}")
    raise UserError(f"format={format_name}: {cause}; use {' or '.join(alternatives)}")
