"""The speculators library reads our DSpark and DFlash2 and we read its own, with the same logits in
every slot that drafts.

As for DFlash, windows are wider than the text. What its heads say is taken where it would measure
them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("speculators")

from omegaconf import OmegaConf
from speculators import SpeculatorModelConfig
from speculators.models.dflash2 import DFlash2DraftModel
from speculators.models.dspark import DSparkDraftModel
from transformers import AutoConfig

from spectrain.config.spec import RunSpec
from spectrain.drafters.base import TrainingState
from spectrain.drafters.dflash2 import DFlash2, DFlash2Config
from spectrain.drafters.dspark import DSpark, DSparkConfig
from spectrain.drafters.layers.anchors import Anchors
from spectrain.drafters.layers.block_drafter import BlockDrafter
from spectrain.export.converter import convert, read_drafter
from spectrain.export.measure import load_drafter
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.runs.drafters import save_drafter

from .test_speculators import TINY, tokenize_text
from .test_speculators_dflash import QWEN3

SIZE = {"block_size": 5, "num_layers": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DSpark": ("dspark", {"rank": 8}),
    "DSpark, gated, causal in a window": (
        "dspark",
        {"rank": 8, "markov_head": "gated", "causal": True, "window": 500},
    ),
    "DSpark, a cell": ("dspark", {"rank": 8, "markov_head": "rnn", "confidence": False}),
    "DSpark, a cut vocabulary": (
        "dspark",
        {"rank": 8, "sample_from_anchor": False, "vocab_size": 512},
    ),
    "DFlash2": ("dflash2", {"selector_rank": 8}),
    "DFlash2, both ways in a window": (
        "dflash2",
        {"selector_rank": 8, "window": 500, "conv_kernel_size": 3},
    ),
    "DFlash2, other groups": (
        "dflash2",
        {"selector_rank": 4, "conv_group_size": 8, "selector_top_k": 5},
    ),
}
CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "dspark": (DSpark, DSparkConfig, DSparkDraftModel),
    "dflash2": (DFlash2, DFlash2Config, DFlash2DraftModel),
}
"""The drafter of a family, its settings, and the library's model."""


def make_drafter(case: str, tiny: Target) -> BlockDrafter:
    """Make a drafter whose norms, convolutions and heads are not the identity."""
    torch.manual_seed(3)
    family, options = CASES[case]
    kind, config, _ = CLASSES[family]
    drafter: BlockDrafter = kind(tiny, config(**SIZE, **options))
    counts = torch.randint(1, 1000, (tiny.head.vocab_size,))
    counts[drafter.mask_token_id] = 0
    drafter.prepare(tiny, counts)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            elif any(part in name for part in ("markov", "confidence", "selector", "conv")):
                weight.add_(0.2 * torch.randn_like(weight))
    return drafter.eval()


@dataclass
class ReferenceOutputs:
    """The inputs of the library's metrics for one text."""

    positions: Tensor  # of every slot in the text
    outputs: dict[str, Tensor]


def run_reference(
    model: Any, family: str, tiny: Target, fused: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> ReferenceOutputs:
    """Run the library's own forward over a text, with the anchors that it chooses."""
    outputs: dict[str, Any] = {}
    names = ("logits", "targets", "confidence_logits")

    def record_outputs(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        outputs.update(zip(names, args), **kwargs)
        return torch.zeros(()), {}

    monkeypatch.setattr(f"speculators.models.{family}.core.compute_metrics", record_outputs)
    backbone = model._backbone_forward

    def record_positions(*args: Any, **kwargs: Any) -> Any:
        result = backbone(*args, **kwargs)
        outputs["places"] = result[-1]
        return result

    monkeypatch.setattr(model, "_backbone_forward", record_positions)
    tokens = tokenize_text(tiny)
    features = tiny.features(tokens, (*fused, tiny.num_layers))
    full_mask = torch.ones_like(tokens)
    documents = torch.zeros_like(tokens)
    with torch.no_grad():
        model(
            features.fuse_layers(fused),
            tokens,
            full_mask,
            features.at_layer(tiny.num_layers),
            documents,
            max_anchors=4,
        )
    return ReferenceOutputs(
        outputs["places"],
        {
            name: output[0]
            for name, output in outputs.items()
            if isinstance(output, Tensor) and output.dim() > 1
        },
    )


def compare_outputs(
    reference: ReferenceOutputs, drafter: Any, family: str, tiny: Target
) -> dict[str, float]:
    """Return the largest difference over the drafting slots, for each output of the library's
    heads.
    """
    tokens = tokenize_text(tiny)
    features = tiny.features(tokens, (*drafter.layers, tiny.num_layers))
    starts = reference.positions[:: drafter.block_size]
    blocks = Anchors(starts, starts, ((len(starts), tokens.shape[1]),))
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), features)
    states = drafter._training_states(batch, blocks, TrainingState())[:, drafter.first_draft_slot :]
    before = tokens[0, starts[:, None] + torch.arange(drafter.num_drafts)]
    expected = {
        name: output.unflatten(0, (len(starts), -1))[:, drafter.first_draft_slot :]
        for name, output in reference.outputs.items()
    }
    if family == "dspark":
        embedded = drafter.markov.markov_w1(before)
        bias = drafter.markov.markov_w2(drafter.markov.run_path(states, embedded))
        actual = {"logits": drafter.compute_products(states) + bias}
        if drafter.confidence_head is not None:
            actual["confidence_logits"] = drafter.confidence_head(
                torch.cat([states, embedded], dim=-1)
            )
    else:
        candidates = expected["training_candidate_ids"].flatten(0, 1)
        scores = drafter._score_candidates(states.flatten(0, 1), before.flatten(), candidates)
        actual = {
            "unary_logits": drafter.compute_products(states),
            "candidate_logits": scores.unflatten(0, before.shape),
        }
    return {name: float((output - expected[name]).abs().max()) for name, output in actual.items()}


def load_reference(directory: Path, family: str) -> Any:
    config: Any = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return CLASSES[family][2].from_pretrained(directory, config=config).float().eval()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_library_reads_ours(
    case: str, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our export, loaded by the library, gives our logits (1e-4)."""
    family, options = CASES[case]
    drafter = make_drafter(case, tiny)
    kind = CLASSES[family][0]
    settings = {"_target_": f"{kind.__module__}.{kind.__qualname__}", **SIZE, **options}
    config = OmegaConf.create({"drafter": settings, "target": TINY.settings, "recipe_name": family})
    save_drafter(tmp_path / "ours", drafter, RunSpec.from_nodes(config))
    convert(tmp_path / "ours", tmp_path / "out", "vllm", None)
    reference = run_reference(
        load_reference(tmp_path / "out", family), family, tiny, drafter.fused_layers, monkeypatch
    )
    differences = compare_outputs(reference, drafter, family, tiny)
    print(case, {name: f"{value:.1e}" for name, value in differences.items()})
    assert max(differences.values()) < 1e-4


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_we_read_what_the_library_saves(
    case: str, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that the library made from its own settings and saved gives its logits here
    (1e-4).
    """
    family, options = CASES[case]
    ours: Any = make_drafter(case, tiny)
    config = tiny.model.config.__class__.from_pretrained(tiny.path).to_dict()
    config = {key: config[key] for key in QWEN3} | {"num_hidden_layers": 2, "model_type": "qwen3"}
    kind = "sliding_attention" if ours.window else "full_attention"
    config |= {
        "layer_types": [kind] * 2,
        "sliding_window": ours.window,
        "use_sliding_window": bool(ours.window),
    }
    cut = {"t2d": ours.t2d, "d2t": ours.d2t} if ours.lm_head is not None else {}
    named = {
        "markov_head": "markov_head_type",
        "rank": "markov_rank",
        "confidence": "enable_confidence_head",
    }
    more = {
        named.get(key, key): value
        for key, value in options.items()
        if key not in ("causal", "window", "vocab_size")
    }
    model: Any = CLASSES[family][2].from_training_args(
        AutoConfig.for_model(**config),
        **cut,
        draft_vocab_size=len(ours.d2t),
        verifier_name_or_path=tiny.path,
        block_size=5,
        target_layer_ids=list(ours.fused_layers),
        mask_token_id=ours.mask_token_id,
        draft_attn_impl="eager",
        sliding_window_non_causal=not ours.causal,
        **{"sample_from_anchor": family == "dspark", **more},
    )
    for name, weight in model.named_parameters():
        if any(part in name for part in ("markov", "confidence", "selector", "conv")):
            weight.add_(0.2 * torch.randn_like(weight))
    model.float().eval().save_pretrained(tmp_path / "theirs")
    drafter: Any = load_drafter(read_drafter(tmp_path / "theirs", TINY), tiny)
    reference = run_reference(
        load_reference(tmp_path / "theirs", family), family, tiny, drafter.fused_layers, monkeypatch
    )
    differences = compare_outputs(reference, drafter, family, tiny)
    print(case, {name: f"{value:.1e}" for name, value in differences.items()})
    assert max(differences.values()) < 1e-4
