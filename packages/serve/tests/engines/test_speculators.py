"""The speculators library reads our EAGLE-3 and we read its own, with the same logits at every
unrolled step.

Needs an environment of its own, for the library holds transformers back; everywhere else this file
is skipped.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("speculators")

from omegaconf import OmegaConf
from speculators import SpeculatorModelConfig
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.peagle import PEagleDraftModel
from transformers import LlamaConfig, Qwen3Config

from spectrain.config.spec import RunSpec
from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.chains import sample_chains
from spectrain.drafters.peagle import PEagle
from spectrain.export.converter import convert, read_drafter
from spectrain.export.measure import load_drafter
from spectrain.export.targets import TargetFiles
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.runs.drafters import save_drafter

STEPS = 3
TINY = TargetFiles("tiny")


def load_reference(directory: Path) -> Any:
    """Load the library's model with eager attention, because its own kernels need a GPU."""
    config: Any = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(directory, config=config).float().eval()


def tokenize_text(tiny: Target) -> Tensor:
    """Return the tokens [1, T] of a sentence."""
    return torch.tensor(
        [tiny.tokenizer("The river runs through three towns before it meets the sea.")["input_ids"]]
    )


def reference_logits(model: Any, tokens: Tensor, fused: Tensor) -> list[Tensor]:
    """Return the library's logits [T - 1, V] of each unrolled step: row t pairs features at t
    with token t + 1.
    """
    logits: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(
        lambda module, args, output: logits.append(output[0].detach())
    )
    with torch.no_grad():
        documents = torch.zeros(1, tokens.shape[1] - 1, dtype=torch.int64)
        model(fused[:, :-1], tokens[:, 1:], documents, ttt_steps=STEPS)
    handle.remove()
    return logits


def drafter_logits(
    drafter: Eagle3, tokens: Tensor, target: Target, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Return our logits of each step that our loss trains; step i ends i rows earlier."""
    states: list[Tensor] = []
    judge = drafter.judge_steps
    monkeypatch.setattr(
        drafter,
        "judge_steps",
        lambda targets, outputs: (states.extend(outputs), judge(targets, outputs))[1],
    )
    batch = Batch(
        tokens, torch.ones_like(tokens, dtype=torch.bool), target.features(tokens, drafter.layers)
    )
    with torch.no_grad():
        drafter.loss(batch, target, TrainingState())
        return [drafter.lm_head(drafter.head_inputs(state)) for state in states]


def compare_logits(
    model: Any, drafter: Eagle3, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> float:
    """Return the largest difference of any logit."""
    tokens = tokenize_text(tiny)
    fused = tiny.features(tokens, drafter.fused_layers).fuse_layers(drafter.fused_layers)
    pairs = zip(
        reference_logits(model, tokens, fused),
        drafter_logits(drafter, tokens, tiny, monkeypatch),
        strict=True,
    )
    return max(float((reference[: len(own)] - own).abs().max()) for reference, own in pairs)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "the library's defaults": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
    },
    "a norm for each layer": {"fc_norm": True},
    "head norms": {"qk_norm": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    **{variant: {"architecture": architecture} for variant, architecture in VARIANTS.items()},
    "three layers": {
        "num_layers": 3,
        "architecture": {"qk_norm": True, "norm_before_residual": True},
    },
    # it does not count the steps' own positions, so texts are shorter here
    "a window": {"num_layers": 2, "window": 64},
}


@pytest.mark.parametrize("variant", OPTIONS)
def test_the_library_reads_ours(
    variant: str, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our export, loaded by the library, gives our logits at every unrolled step (1e-4)."""
    drafter = Eagle3(tiny, ttt_steps=STEPS, vocab_size=512, **OPTIONS[variant])
    drafter.prepare(tiny, torch.randint(0, 1000, (tiny.head.vocab_size,)))
    for norm in (module for module in drafter.modules() if isinstance(module, torch.nn.RMSNorm)):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    settings = {
        "_target_": "spectrain.drafters.eagle3.Eagle3",
        "vocab_size": 512,
        **OPTIONS[variant],
    }
    config = OmegaConf.create(
        {"drafter": settings, "target": TINY.settings, "recipe_name": "eagle3"}
    )
    save_drafter(tmp_path / "ours", drafter, RunSpec.from_nodes(config))
    convert(tmp_path / "ours", tmp_path / "out", "vllm", None)
    model = load_reference(tmp_path / "out")
    assert float(model.embed_tokens.weight.std()) > 0.01
    difference = compare_logits(model, drafter, tiny, monkeypatch)
    print(f"{variant}: {difference:.1e}")
    assert difference < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_we_read_what_the_library_trained(
    variant: str, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that the library trained and saved gives its logits here at every unrolled
    step (1e-4).
    """
    drafter = Eagle3(tiny, ttt_steps=STEPS, vocab_size=512)
    drafter.prepare(tiny, torch.randint(0, 1000, (tiny.head.vocab_size,)))
    model = train_by_library(tiny, drafter, tmp_path, VARIANTS[variant])
    model.save_pretrained(tmp_path / "theirs")
    checkpoint = read_drafter(tmp_path / "theirs", TINY)
    ours: Any = load_drafter(
        replace(checkpoint, drafter={**checkpoint.drafter, "ttt_steps": STEPS}), tiny
    )
    difference = compare_logits(load_reference(tmp_path / "theirs"), ours, tiny, monkeypatch)
    print(f"{variant}: {difference:.1e}")
    assert difference < 1e-4


def train_by_library(tiny: Target, drafter: Eagle3, folder: Path, flags: dict[str, Any]) -> Any:
    """Train the library's own untrained model by ten steps of its own loss on one text."""
    kind = Qwen3Config if flags.get("qk_norm") else LlamaConfig
    settings = tiny.model.config.to_diff_dict()
    config = kind(
        **{
            key: value
            for key, value in settings.items()
            if key not in ("model_type", "architectures")
        }
    )
    config.num_hidden_layers = 1
    config.layer_types = ["full_attention"]
    options = {
        "norm_before_residual": False,
        **{flag: on for flag, on in flags.items() if flag != "qk_norm"},
    }
    model: Any = Eagle3DraftModel.from_training_args(
        config,
        t2d=drafter.t2d,
        d2t=drafter.d2t,
        draft_vocab_size=512,
        ttt_steps=STEPS,
        verifier_name_or_path=tiny.path,
        target_layer_ids=list(drafter.fused_layers),
        draft_attn_impl="eager",
        **options,
    )
    tokens = tokenize_text(tiny)
    features = tiny.features(tokens, (*drafter.fused_layers, tiny.num_layers))
    last = features.at_layer(tiny.num_layers)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(10):
        documents = torch.zeros(1, tokens.shape[1] - 1, dtype=torch.int64)
        everywhere = torch.ones(1, tokens.shape[1] - 1, dtype=torch.bool)
        _, loss, _ = model(
            features.fuse_layers(drafter.fused_layers)[:, :-1],
            tokens[:, 1:],
            documents,
            everywhere,
            verifier_last_hidden_states=last[:, 1:],
            ttt_steps=STEPS,
            loss_config=eager_loss(),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return model.eval()


def eager_loss() -> Any:
    from speculators.losses import resolve_loss_config

    return resolve_loss_config("kl_div", "eager")


PARALLEL: dict[str, dict[str, Any]] = {
    "plain": {"num_layers": 1},
    "two layers": {
        "num_layers": 2,
        "architecture": {"qk_norm": True, "norm_before_residual": True, "norm_before_fc": True},
    },
    "a window": {
        "num_layers": 2,
        "window": 64,
        "own_embedding": False,
        "architecture": {"fc_norm": True},
    },
}


def make_peagle(variant: str, tiny: Target) -> PEagle:
    """Make a drafter whose norms are not the identity."""
    drafter = PEagle(tiny, num_drafts=4, vocab_size=512, **PARALLEL[variant])
    drafter.prepare(tiny, torch.arange(tiny.head.vocab_size))
    for norm in (module for module in drafter.modules() if isinstance(module, torch.nn.RMSNorm)):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return drafter.eval()


def load_reference_peagle(directory: Path) -> Any:
    """Load the library's model."""
    config: Any = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return PEagleDraftModel.from_pretrained(directory, config=config).float().eval()


def assert_same_logits(
    model: Any, drafter: Any, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the library's logits are ours at every position and behind every mask that we
    drew (1e-4).
    """
    tokens = tokenize_text(tiny)
    batch = Batch(
        tokens, torch.ones_like(tokens, dtype=torch.bool), tiny.features(tokens, drafter.layers)
    )
    chains = sample_chains(batch, drafter.drop, 0)
    positions = torch.arange(tokens.shape[1] - 1)
    samples = (
        torch.cat([positions, chains.anchors]),
        torch.cat([torch.zeros_like(positions), chains.depths]),
    )
    monkeypatch.setattr(
        "speculators.models.peagle.core.generate_cod_sample_indices", lambda **arguments: samples
    )
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(
        lambda module, args, output: logits.append(output[0].detach())
    )
    with torch.no_grad():
        assert batch.features is not None
        documents = torch.zeros(1, len(positions), dtype=torch.int64)
        model(
            batch.features.fuse_layers(drafter.fused_layers)[:, :-1],
            tokens[:, 1:],
            documents,
            loss_config=eager_loss(),
            verifier_last_hidden_states=batch.features.at_layer("final")[:, 1:],
        )
        states = drafter._trained_states(batch, chains, TrainingState())[0]
        ours = drafter.lm_head(
            drafter.norm(torch.cat([states[: len(positions)], states[tokens.shape[1] :]]))
        )
    assert len(chains.depths) > 10 and float(model.mask_hidden.std()) > 0.5
    torch.testing.assert_close(ours, logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", PARALLEL)
def test_the_library_reads_our_peagle(
    variant: str, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our export, loaded by the library, gives our logits."""
    drafter = make_peagle(variant, tiny)
    settings = {
        "_target_": "spectrain.drafters.peagle.PEagle",
        "num_drafts": 4,
        "vocab_size": 512,
        **PARALLEL[variant],
    }
    config = OmegaConf.create(
        {"drafter": settings, "target": TINY.settings, "recipe_name": "peagle"}
    )
    save_drafter(tmp_path / "ours", drafter, RunSpec.from_nodes(config))
    convert(tmp_path / "ours", tmp_path / "out", "vllm", None)
    assert_same_logits(load_reference_peagle(tmp_path / "out"), drafter, tiny, monkeypatch)


@pytest.mark.parametrize("variant", PARALLEL)
def test_we_read_the_librarys_peagle(
    variant: str, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that the library made from its own settings and saved gives its logits here."""
    drafter = make_peagle(variant, tiny)
    options = PARALLEL[variant]
    flags = {flag: on for flag, on in options.get("architecture", {}).items() if flag != "qk_norm"}
    settings = tiny.model.config.to_diff_dict()
    kind = Qwen3Config if options.get("architecture", {}).get("qk_norm") else LlamaConfig
    config = kind(
        **{
            key: value
            for key, value in settings.items()
            if key not in ("model_type", "architectures")
        }
    )
    window = drafter.window
    config.num_hidden_layers = options["num_layers"]
    config.sliding_window = window
    config.layer_types = ["full_attention" if window is None else "sliding_attention"] * options[
        "num_layers"
    ]
    model: Any = PEagleDraftModel.from_training_args(
        config,
        t2d=drafter.t2d,
        d2t=drafter.d2t,
        draft_vocab_size=512,
        num_depths=4,
        verifier_name_or_path=tiny.path,
        target_layer_ids=list(drafter.fused_layers),
        mask_token_id=drafter.mask_token_id,
        draft_attn_impl="eager",
        **flags,
    )
    model.save_pretrained(tmp_path / "theirs")
    ours = load_drafter(read_drafter(tmp_path / "theirs", TINY), tiny)
    assert_same_logits(load_reference_peagle(tmp_path / "theirs"), ours, tiny, monkeypatch)
