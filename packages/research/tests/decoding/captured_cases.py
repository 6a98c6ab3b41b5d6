"""Cases of the ideas for tests/decoding/test_captured.py."""

from typing import Any

import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.base import Drafter
from spectrain.drafters.eagle3 import Eagle3
from spectrain.models.target import Target
from spectrain_research.amphista.drafter import Amphista
from spectrain_research.ctc.drafter import Ctc
from spectrain_research.entropy_tree.builder import Entropy
from spectrain_research.gated_lora.drafter import GatedLora, GatedLoraConfig
from spectrain_research.gumiho.drafter import Gumiho
from spectrain_research.hydra.drafter import Hydra
from spectrain_research.kangaroo.drafter import Kangaroo
from spectrain_research.layer_skip.drafter import LayerSkipping
from spectrain_research.opt_tree.builder import OptTree
from spectrain_research.redrafter.drafter import Redrafter
from spectrain_research.transformer_heads.drafter import TransformerHeads
from spectrain_research.uno.drafter import Uno, UnoConfig


def busy_gated_lora(target: Target) -> Drafter:
    """Mask tokens whose LoRA does something."""
    drafter = GatedLora(target, GatedLoraConfig(num_masks=3))
    for factors in drafter.factors:
        torch.nn.init.normal_(factors.lora_B.weight, std=0.05)  # type: ignore[arg-type,union-attr]
    return drafter


CASES: dict[str, Any] = {
    "DRAFTERS": {
        "hydra": lambda target: Hydra(target, num_heads=3, vocab_size=512),
        "hydra++": lambda target: Hydra(target, num_heads=3, vocab_size=512, prefix_attention=True),
        "amphista": lambda target: Amphista(target, num_heads=3, vocab_size=512),
        "ctc": lambda target: Ctc(target, num_drafts=3, num_slots=5, vocab_size=512),
        "gumiho": lambda target: Gumiho(target, num_parallel=2, num_layers=1, vocab_size=512),
        "transformer_heads": lambda target: TransformerHeads(target, num_heads=3, vocab_size=512),
        "redrafter": lambda target: Redrafter(target, vocab_size=512),
        "layer_skip": lambda target: LayerSkipping(target, skipped=[1]),
        "kangaroo": lambda target: Kangaroo(target, exit_layer=1),
        "gated_lora": busy_gated_lora,
        "uno": lambda target: Uno(target, UnoConfig(num_masks=3)),
    },
    "BUILDERS": {"entropy": lambda: Entropy(3, 8, 3)},
    "test_rounds_that_cannot_be_captured_are_refused": [
        (Greedy(), Eagle3, OptTree(3, 8), "tree=opt decides the draft length on the host")
    ],
    "drafters_with_state": ["gated_lora"],
    "chain_drafters": ["hydra"],
    "chains": [("kangaroo", "chain", 2)],
}
