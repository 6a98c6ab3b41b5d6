"""Which layouts there are, which one lies in a directory, and which one a format means for a family."""

from __future__ import annotations

from spectrain.errors import UserError, nearest

from .dflash_flat import FlatDFlash, FlatDFlash2, FlatDSpark
from .dflash_speculators import SpeculatorsDFlash, SpeculatorsDFlash2, SpeculatorsDSpark
from .dflash_transformers import TransformersDFlash
from .eagle1 import OriginalEagle1, SglangEagle1, VllmEagle1
from .flat import Flat
from .huggingface import HuggingFace
from .layout import Files, Layout
from .medusa import MedusaOriginal, VllmMedusa
from .mtp import Stitched
from .own import Own
from .peagle import FlatPEagle, SpeculatorsPEagle
from .peft import Peft
from .speculators import Speculators
from .uno import Uno

LAYOUTS: tuple[Layout, ...] = (
    Own(),
    Peft(),
    Uno(),
    Speculators(),
    SpeculatorsPEagle(),
    SpeculatorsDFlash(),
    SpeculatorsDFlash2(),
    SpeculatorsDSpark(),
    VllmMedusa(),
    MedusaOriginal(),
    TransformersDFlash(),
    FlatDFlash2(),
    FlatDSpark(),
    FlatDFlash(),
    VllmEagle1(),
    SglangEagle1(),
    OriginalEagle1(),
    FlatPEagle(),
    Flat(),
    Stitched(),
    HuggingFace(),
)
FORMATS: dict[str, tuple[Layout, ...]] = {
    "vllm": (
        Speculators(), SpeculatorsPEagle(), SpeculatorsDFlash(), SpeculatorsDFlash2(), SpeculatorsDSpark(), VllmMedusa(),
        VllmEagle1(), HuggingFace(),
    ),
    "sglang": (Flat(), FlatDFlash(), FlatDFlash2(), FlatDSpark(), SglangEagle1(), HuggingFace()),
    "eagle": (OriginalEagle1(),),
    "flat": (Flat(), FlatPEagle(), FlatDFlash(), FlatDFlash2(), FlatDSpark()),
    "hf": (HuggingFace(), TransformersDFlash()),
    "medusa": (MedusaOriginal(),),
    "mtp": (Stitched(),),
    "peft": (Peft(),),
    "spectrain": (Own(),),
    "uno": (Uno(),),
}  # fmt: skip
ALONE = "score it with spectrain eval, which needs no engine"
NOWHERE = {
    "amphista": f"no engine drafts with heads that see each other; {ALONE}, or train recipe=medusa1",
    "cascade": f"no engine drafts for a drafter; {ALONE}, or export the drafter inside",
    "chosen": f"no engine chooses between drafters; {ALONE}, or export one of them",
    "ctc": f"no engine collapses slots to drafts; {ALONE}, or train recipe=medusa1",
    "gumiho": f"no engine drafts with heads behind serial steps; {ALONE}, or train recipe=eagle3",
    "hydra": f"no engine drafts with heads that read each other's tokens; {ALONE}, or train recipe=medusa1",
    "hybrid": f"no engine merges copies into a drafter's trees; {ALONE}, or export the drafter inside",
    "jacobi": "it has no weights beside its target's; the one that CLLM trained lies in RUN/target, in transformers format",
    "kangaroo": f"no engine drafts with an adapter behind an early exit; {ALONE}, or train recipe=eagle3",
    "layer_skip": f"no engine leaves layers of the target out; {ALONE}",
    "lookahead": f"it has no weights, and no engine has its pool of n-grams; {ALONE}",
    "ngram": 'it has no weights; vLLM has its own, --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
    "self": f"no engine drafts with a part of the target's own cache or weights; {ALONE}",
    "transformer_heads": f"no engine drafts with heads that are layers; {ALONE}, or train recipe=medusa1",
    "redrafter": f"TensorRT-LLM alone drafts with a recurrent cell, from files that are not written here; {ALONE}",
    "retrieval": f"it has no weights, and no engine reads its store; {ALONE}",
}
UNREAD = {
    ("hf", "dflash2"): "transformers has DFlash alone",
    ("hf", "dspark"): "transformers has DFlash alone",
    ("sglang", "peagle"): "SGLang has no P-EAGLE",
}
"""Of families that can be served: why a client that knows the method does not read them."""


def detect(files: Files) -> Layout:
    """The layout of a directory."""
    for layout in LAYOUTS:
        if layout.recognises(files):
            return layout
    titles = ", ".join(dict.fromkeys(layout.title for layout in LAYOUTS))
    raise UserError(f"{files.directory}: its config.json is of no known layout; known are {titles}")


def layout_for(family: str, form: str) -> Layout:
    """The layout that a format stands for with a family's drafters, or one sentence on what can be done instead."""
    if form not in FORMATS:
        raise UserError(f"format={form}: there is no such format; {nearest(form, FORMATS)}")
    for layout in FORMATS[form]:
        if family in layout.families:
            return layout
    if family in NOWHERE:
        raise UserError(f"format={form}: {family} cannot be served: {NOWHERE[family]}")
    fitting = [key for key, layouts in FORMATS.items() if any(family in layout.families for layout in layouts)]
    if not fitting:
        raise UserError(f"format={form}: no layout holds drafter={family}; {ALONE}")
    why = UNREAD.get((form, family), f"it does not hold drafter={family}")
    raise UserError(f"format={form}: {why}; use {' or '.join(fitting)}")
