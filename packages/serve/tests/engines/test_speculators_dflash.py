"""The speculators library reads our DFlash and we read its own, with the same logits in every slot
of every block.

Windows are wider than the text: the library counts them from the anchor, while engines and we count
from the slot itself.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("speculators")

from omegaconf import OmegaConf
from speculators import SpeculatorModelConfig
from speculators.models.dflash import DFlashDraftModel
from transformers import AutoConfig

from spectrain.config.spec import RunSpec
from spectrain.drafters.base import TrainingState
from spectrain.drafters.dflash import DFlash, DFlashConfig
from spectrain.drafters.layers.anchors import Anchors
from spectrain.export.converter import convert, read_drafter
from spectrain.export.measure import load_drafter
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.runs.drafters import save_drafter

from .test_speculators import TINY, tokenize_text

QWEN3 = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "both ways": {},
    "causal in a window": {"causal": True, "window": 500},
    "a cut vocabulary": {"vocab_size": 512},
}


def load_reference(directory: Path) -> Any:
    """Load the library's model with eager attention, because its own kernels need a GPU."""
    config: Any = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return DFlashDraftModel.from_pretrained(directory, config=config).float().eval()


def compare_logits(model: Any, drafter: Any, tiny: Target) -> float:
    """Return the largest difference of any logit, over blocks behind the library's own choice of
    anchors.
    """
    tokens = tokenize_text(tiny)
    features = tiny.features(tokens, (*drafter.layers, tiny.num_layers))
    full_mask = torch.ones_like(tokens)
    documents = torch.zeros_like(tokens)
    with torch.no_grad():
        _, logits, _, _, positions = model._backbone_forward(
            features.fuse_layers(drafter.fused_layers),
            tokens,
            full_mask,
            features.at_layer(tiny.num_layers),
            documents,
            max_anchors=4,
        )
        anchors = positions[:: drafter.block_size]
        blocks = Anchors(anchors, anchors, ((len(anchors), tokens.shape[1]),))
        states: Tensor = drafter._training_states(
            Batch(tokens, full_mask.bool(), features), blocks, TrainingState()
        )
        return float((logits[0] - drafter.compute_products(states).flatten(0, 1)).abs().max())


def make_drafter(tiny: Target, **options: Any) -> DFlash:
    """Make a drafter of two layers whose norms are not the identity."""
    torch.manual_seed(3)
    drafter = DFlash(tiny, DFlashConfig(block_size=5, num_layers=2, **options))
    counts = torch.randint(1, 1000, (tiny.head.vocab_size,))
    counts[drafter.mask_token_id] = 0
    drafter.prepare(tiny, counts)
    for norm in (module for module in drafter.modules() if isinstance(module, torch.nn.RMSNorm)):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return drafter.eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_library_reads_ours(variant: str, tiny: Target, tmp_path: Path) -> None:
    """Our export, loaded by the library, gives our logits (1e-4)."""
    drafter = make_drafter(tiny, **VARIANTS[variant])
    settings = {
        "_target_": "spectrain.drafters.dflash.DFlash",
        "block_size": 5,
        "num_layers": 2,
        **VARIANTS[variant],
    }
    config = OmegaConf.create(
        {"drafter": settings, "target": TINY.settings, "recipe_name": "dflash"}
    )
    save_drafter(tmp_path / "ours", drafter, RunSpec.from_nodes(config))
    convert(tmp_path / "ours", tmp_path / "out", "vllm", None)
    difference = compare_logits(load_reference(tmp_path / "out"), drafter, tiny)
    print(f"{variant}: {difference:.1e}")
    assert difference < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_we_read_what_the_library_saves(variant: str, tiny: Target, tmp_path: Path) -> None:
    """A checkpoint that the library made from its own settings and saved gives its logits here
    (1e-4).
    """
    ours = make_drafter(tiny, **VARIANTS[variant])
    config = tiny.model.config.__class__.from_pretrained(tiny.path).to_dict()
    config = {key: config[key] for key in QWEN3} | {"num_hidden_layers": 2, "model_type": "qwen3"}
    kind = "sliding_attention" if ours.window else "full_attention"
    config |= {
        "layer_types": [kind] * 2,
        "sliding_window": ours.window,
        "use_sliding_window": bool(ours.window),
    }
    cut = {"t2d": ours.t2d, "d2t": ours.d2t} if ours.lm_head is not None else {}
    model: Any = DFlashDraftModel.from_training_args(
        AutoConfig.for_model(**config),
        **cut,
        draft_vocab_size=len(ours.d2t),
        verifier_name_or_path=tiny.path,
        block_size=5,
        target_layer_ids=list(ours.fused_layers),
        mask_token_id=ours.mask_token_id,
        draft_attn_impl="eager",
        sliding_window_non_causal=not ours.causal,
    )
    model.float().eval().save_pretrained(tmp_path / "theirs")
    drafter: Any = load_drafter(read_drafter(tmp_path / "theirs", TINY), tiny)
    difference = compare_logits(load_reference(tmp_path / "theirs"), drafter, tiny)
    print(f"{variant}: {difference:.1e}")
    assert difference < 1e-4
