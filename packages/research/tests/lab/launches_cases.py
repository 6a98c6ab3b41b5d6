"""Cases of the ideas for tests/lab/test_launches.py."""

from typing import Any

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.acceptance.rejection import SpeculativeSampling
from spectrain.trees import Chain
from spectrain.trees.fixed import Static
from spectrain_research.amphista.drafter import Amphista
from spectrain_research.ctc.drafter import Ctc
from spectrain_research.gated_lora.drafter import GatedLora, GatedLoraConfig
from spectrain_research.gumiho.drafter import Gumiho
from spectrain_research.hydra.drafter import Hydra
from spectrain_research.redrafter.beam import Beam
from spectrain_research.redrafter.drafter import Redrafter
from spectrain_research.transformer_heads.drafter import TransformerHeads
from tests.lab.test_launches import PATHS

CASES: dict[str, Any] = {
    "ROUNDS": {
        "hydra++, static": (
            Greedy(),
            lambda target: Hydra(target, num_heads=3, vocab_size=512, prefix_attention=True),
            Static(paths=PATHS),
        ),
        "amphista, static": (
            Greedy(),
            lambda target: Amphista(target, num_heads=3, vocab_size=512),
            Static(paths=PATHS),
        ),
        "ctc, static": (
            Greedy(),
            lambda target: Ctc(target, num_drafts=3, vocab_size=512),
            Static(paths=PATHS),
        ),
        "gumiho, static": (
            Greedy(),
            lambda target: Gumiho(target, num_parallel=2, vocab_size=512),
            Static(paths=PATHS),
        ),
        "transformer heads, static": (
            Greedy(),
            lambda target: TransformerHeads(target, num_heads=3, vocab_size=512),
            Static(paths=PATHS),
        ),
        "redrafter, beam of 12": (
            Greedy(),
            lambda target: Redrafter(target, vocab_size=512),
            Beam(4, 12, 4),
        ),
        "gated lora, drawn chain of 3": (
            SpeculativeSampling(),
            lambda target: GatedLora(target, GatedLoraConfig(num_masks=3)),
            Chain(3, "sampled"),
        ),
        "gated lora, chain of 3": (
            Greedy(),
            lambda target: GatedLora(target, GatedLoraConfig(num_masks=3)),
            Chain(3),
        ),
    },
}
