"""Kangaroo: the untrained adapter is the target's own early exit, and training equals decoding."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from spectrain.cli.main import dispatch_command
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.losses import DIVERGENCES
from spectrain.drafters.layers.self_speculation import resolve_exit_layer
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target
from spectrain.training.checkpoints import select_trained_groups
from spectrain.training.trainer import Trainer
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain.trees.base import Prefix
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import TokenTree
from spectrain_research.kangaroo.drafter import Kangaroo
from tests.decoding.rounds import Keeping
from tests.factories import add_noise

VOCAB = 83
LAYERS = 4
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 32}
ARCHITECTURES: dict[str, Any] = {
    "llama": hf.LlamaConfig(**SIZE, tie_word_embeddings=False),
    "qwen3": hf.Qwen3Config(**SIZE, head_dim=16, rms_norm_eps=1e-3),
    "gemma": hf.GemmaConfig(**SIZE, head_dim=8),
    "gemma2": hf.Gemma2Config(**SIZE, **GEMMA, final_logit_softcapping=2.0),
}


def make_pair(tiny: Target, name: str = "llama") -> tuple[Target, Any]:
    """Make a small random target, and the same model of transformers' own."""
    reference, model = (
        AutoModelForCausalLM.from_config(ARCHITECTURES[name], attn_implementation=a).eval()
        for a in ("eager", "spectrain")
    )
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(
                1.5 * noise * parameter.shape[-1] ** -0.5
                if noise.dim() > 1
                else parameter + 0.2 * noise
            )
    model.load_state_dict(reference.state_dict())
    return Target(model, tiny.tokenizer, name, ""), reference


def make_drafter(target: Target, noise: float = 0.0, **options: Any) -> Kangaroo:
    """Make a prepared drafter; with `noise`, it has weights of its own."""
    drafter = Kangaroo(target, **options)
    drafter.prepare(target, torch.zeros(target.head.vocab_size))
    add_noise(drafter.parameters(), noise)
    return drafter


def make_dataset(vocab: int = VOCAB, count: int = 6) -> Dataset:
    """Make sequences of unequal length whose later part is the assistant's."""
    rows = torch.randint(3, vocab, (count, 20), generator=torch.Generator().manual_seed(5)).tolist()
    return Dataset(
        [
            Example(row[: 20 - n % 5], [i >= 8 for i in range(20 - n % 5)])
            for n, row in enumerate(rows)
        ],
        count,
        0,
        0,
    )


def make_batch(target: Target, drafter: Kangaroo) -> Batch:
    return LiveSource().make_batch(
        BatchRequest(make_dataset()[[0, 1, 2, 4]], target, drafter.stages[0].layers)
    )


def compute_early_exit(target: Target, reference: Any, tokens: Tensor, layer: int) -> Tensor:
    """Compute log q [B, T, V] of the first `layer` layers with the model's norm and output
    layer, all of transformers' own.
    """
    all_layers = reference.model.layers
    reference.model.layers = nn.ModuleList(all_layers[:layer])
    reference.config.num_hidden_layers = layer
    try:
        with torch.no_grad():
            logits: Tensor = reference(tokens, use_cache=False).logits
        return logits.log_softmax(-1)
    finally:
        reference.model.layers = all_layers
        reference.config.num_hidden_layers = len(all_layers)


def compute_adapted(drafter: Kangaroo, target: Target, x: Tensor, head: nn.Linear) -> Tensor:
    """Compute log q [B, T, V] of x + attention(norm(x)), normed, from exit states x, in
    transformers' modules.
    """
    heads = target.config
    config = hf.LlamaConfig(
        hidden_size=heads.hidden_size,
        num_attention_heads=heads.num_attention_heads,
        num_key_value_heads=heads.num_key_value_heads,
        head_dim=heads.hidden_size // heads.num_attention_heads,
        rope_parameters=dict(heads.rope_parameters),
        max_position_embeddings=heads.max_position_embeddings,
        attn_implementation="eager",
    )
    attention = LlamaAttention(config, 0)
    attention.load_state_dict(drafter.self_attn.state_dict())
    before, after = (LlamaRMSNorm(heads.hidden_size, heads.rms_norm_eps) for _ in range(2))
    before.load_state_dict(drafter.input_layernorm.state_dict())
    after.load_state_dict(drafter.norm.state_dict())
    length = x.shape[1]
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    rope = LlamaRotaryEmbedding(config)(x, torch.arange(length)[None])
    attended, _ = attention(before(x), position_embeddings=rope, attention_mask=mask)
    return head(after(x + attended)).log_softmax(-1)


@pytest.fixture
def recorded_levels(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Log q of decoding, one tensor per level."""
    levels: list[Tensor] = []
    log_q = Kangaroo.log_q

    def record_level(self: Kangaroo, level: Any) -> Tensor:
        levels.append(log_q(self, level))
        return levels[-1]

    monkeypatch.setattr(Kangaroo, "log_q", record_level)
    return levels


# Untrained


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("layer", [1, 3])
def test_untrained_is_the_targets_early_exit(tiny: Target, name: str, layer: int) -> None:
    """Before training the loss is KL(target || early exit at `exit_layer`), however the model
    writes its norm's weight.
    """
    target, reference = make_pair(tiny, name)
    drafter = make_drafter(target, exit_layer=layer)
    batch = make_batch(target, drafter)
    with torch.no_grad():
        log_p = reference(batch.tokens, use_cache=False).logits.log_softmax(-1)
        losses = drafter.loss(batch, target, TrainingState())
    log_q = compute_early_exit(target, reference, batch.tokens, layer)
    rows = batch.loss_mask[:, 1:]
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)[:, :-1][rows].sum()
    assert float(losses.total) == pytest.approx(float(expected), rel=1e-4)
    assert losses.hits.tolist() == [int((log_p.argmax(-1) == log_q.argmax(-1))[:, :-1][rows].sum())]


@pytest.mark.parametrize("layer", [1, 4, 7])
def test_untrained_drafts_are_the_early_exits(
    tiny: Target, layer: int, recorded_levels: list[Tensor]
) -> None:
    """In decoding, log_q after the prompt and the root is that of the first layers, the norm and
    the output layer.
    """
    prompt = [5, 6, 7, 8, 9, 10]
    drafter = make_drafter(tiny, exit_layer=layer).eval()
    (generation,) = decode(tiny, [prompt], Greedy(), 6, drafter, Chain(3), ignore_eos=True)
    tokens = torch.tensor([prompt + generation.output[:1]])
    final = tiny.run(tokens, ForwardPlan(layers=("final",), span=LayerSpan(last=layer))).at_layer(
        "final"
    )
    torch.testing.assert_close(
        recorded_levels[0][0, 0],
        tiny.head.logits(final)[0, -1].log_softmax(-1),
        rtol=1e-4,
        atol=1e-4,
    )


# Training


@pytest.mark.parametrize("kind", ["cross_entropy", *DIVERGENCES])
@pytest.mark.parametrize("layer", [1, 2])
def test_loss_is_that_of_transformers_modules(tiny: Target, kind: str, layer: int) -> None:
    """Loss, hits and counts equal those of the same adapter made of LlamaAttention on
    transformers' hidden states.
    """
    target, reference = make_pair(tiny)
    drafter = make_drafter(target, noise=1.0, exit_layer=layer, loss=kind)
    batch = make_batch(target, drafter)
    losses = drafter.loss(batch, target, TrainingState())
    with torch.no_grad():
        outputs = reference(batch.tokens, output_hidden_states=True, use_cache=False)
    log_p = outputs.logits.log_softmax(-1)
    log_q = compute_adapted(drafter, target, outputs.hidden_states[layer], reference.lm_head)
    rows = batch.loss_mask[:, 1:]
    following = batch.tokens[:, 1:]
    if kind == "cross_entropy":
        token_losses = -log_q[:, :-1].gather(-1, following[..., None])[..., 0]
        best = following
    elif kind == "forward_kl":
        token_losses = (log_p.exp() * (log_p - log_q)).sum(-1)[:, :-1]
        best = log_p.argmax(-1)[:, :-1]
    else:
        token_losses = DIVERGENCES[kind](log_p.flatten(0, 1), log_q.flatten(0, 1)).view_as(
            batch.tokens
        )[:, :-1]
        best = log_p.argmax(-1)[:, :-1]
    assert set(losses.terms) == {kind}
    assert losses.total.item() == pytest.approx(token_losses[rows].sum().item(), rel=1e-4)
    assert losses.hits.tolist() == [int((log_q.argmax(-1)[:, :-1] == best)[rows].sum())]
    assert losses.counts.tolist() == [int(rows.sum())]


def test_the_gradient_is_the_adapters_alone(tiny: Target) -> None:
    """Every weight of the adapter has the gradient of a finite difference; the target's weights
    have none.
    """
    target, _ = make_pair(tiny)
    drafter = make_drafter(target, noise=1.0)
    batch = make_batch(target, drafter)
    (group,) = drafter.stages[0].groups
    select_trained_groups(drafter, target, 0)
    assert {id(p) for p in group["params"]} == {id(p) for p in drafter.parameters()}
    drafter.loss(batch, target, TrainingState()).total.backward()
    assert all(
        parameter.grad is None and not parameter.requires_grad for parameter in target.parameters()
    )
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        step = 1e-2 * parameter.grad / parameter.grad.norm()
        with torch.no_grad():
            parameter += step
            above = float(drafter.loss(batch, target, TrainingState()).total)
            parameter -= 2 * step
            below = float(drafter.loss(batch, target, TrainingState()).total)
            parameter += step
        assert (above - below) / 2e-2 == pytest.approx(float(parameter.grad.norm()), rel=3e-2), name


def test_the_output_projection_learns_first(tiny: Target) -> None:
    """The untrained attention adds nothing, so its inputs have a zero gradient until its output
    projection has moved.
    """
    target, _ = make_pair(tiny)
    drafter = make_drafter(target)
    drafter.loss(make_batch(target, drafter), target, TrainingState()).total.backward()
    moved = {
        name
        for name, parameter in drafter.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
    }
    assert moved == {"self_attn.o_proj.weight", "norm.weight"}


def test_loss_is_summed_over_the_assistants_tokens(tiny: Target) -> None:
    """Losses of batches add up; padding and sequences without an answer add nothing."""
    target, _ = make_pair(tiny)
    drafter = make_drafter(target, noise=1.0)
    rows = make_dataset()
    layers = drafter.stages[0].layers
    silent = Dataset([*rows.examples, Example([5] * 40, [False] * 40)], 7, 0, 0)
    with torch.no_grad():
        full = drafter.loss(
            LiveSource().make_batch(BatchRequest(rows[list(range(6))], target, layers)),
            target,
            TrainingState(),
        )
        parts = [
            drafter.loss(
                LiveSource().make_batch(BatchRequest(rows[[n]], target, layers)),
                target,
                TrainingState(),
            )
            for n in range(6)
        ]
        padded = drafter.loss(
            LiveSource().make_batch(BatchRequest(silent[list(range(7))], target, layers)),
            target,
            TrainingState(),
        )
    assert float(full.total) == pytest.approx(sum(float(part.total) for part in parts), rel=1e-4)
    assert float(full.total) == pytest.approx(float(padded.total), rel=1e-4)
    assert full.counts.tolist() == padded.counts.tolist() == [rows.num_supervised]


def test_training_lowers_the_loss_and_not_the_target(tiny: Target, tmp_path: Path) -> None:
    """Sixty steps lower the loss on the training data, and leave the target bit by bit."""
    target, _ = make_pair(tiny)
    drafter = make_drafter(target)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    batch = make_batch(target, drafter)
    losses = [drafter.loss(batch, target, TrainingState()).total.item()]
    Trainer(lr=1e-2, max_steps=60, warmup=0.0).fit(
        drafter, target, make_dataset(), LiveSource(), tmp_path
    )
    losses.append(drafter.loss(batch, target, TrainingState()).total.item())
    assert losses[1] < 0.8 * losses[0]
    after = target.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


# Decoding


class LevelRecorder(Keeping):
    """A builder that records log q, level by level, while a tree grows."""

    def __init__(self, builder: TreeBuilder, recorded_levels: list[Tensor]) -> None:
        super().__init__(builder)
        self.recorded_levels = recorded_levels
        self.levels = list[list[Tensor]]()

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        before = len(self.recorded_levels)
        tree = super().grow(prefix, draft)
        self.levels.append(self.recorded_levels[before:])
        return tree


@pytest.mark.sweep(1)
@pytest.mark.parametrize("lengths", [(6,), (6, 3, 9)])
@pytest.mark.parametrize("layer", [1, 5])
def test_decoding_says_what_training_says(
    tiny: Target, recorded_levels: list[Tensor], lengths: tuple[int, ...], layer: int
) -> None:
    """Over all rounds, log_q at a node equals that of the adapter in parallel on the exit states of
    what was accepted.

    The states of a drafted node come from the target's first layers on its path, so they are those
    of one run.
    """
    drafter = make_drafter(tiny, noise=1.0, exit_layer=layer).eval()
    prompts = [torch.randint(3, 2000, (length,)).tolist() for length in lengths]
    recorder = LevelRecorder(Chain(3), recorded_levels)
    generations = decode(tiny, prompts, Greedy(), 12, drafter, recorder, ignore_eos=True)
    plain = decode(tiny, prompts, Greedy(), 12, ignore_eos=True)
    assert [generation.output for generation in generations] == [
        generation.output for generation in plain
    ]
    assert len(recorder.trees) > 2
    for texts, tree, levels in zip(recorder.texts, recorder.trees, recorder.levels, strict=True):
        assert len(levels) == 3
        for row, (*text, _) in enumerate(texts):
            tokens = torch.tensor([text + tree.tokens[row].tolist()])
            x = tiny.features(tokens, (layer,)).at_layer(layer)
            with torch.no_grad():
                expected = compute_adapted(drafter, tiny, x, tiny.head.output)[0]
            for depth, log_q in enumerate(levels):
                torch.testing.assert_close(
                    log_q[row, 0], expected[len(text) + depth], rtol=1e-3, atol=1e-3
                )


@pytest.mark.parametrize("stop", [0.1, 0.3])
def test_a_draft_ends_before_an_unlikely_token(
    tiny: Target, recorded_levels: list[Tensor], stop: float
) -> None:
    """With stop_on=token every drafted token but none after the first shortfall has a largest q
    of at least `stop`.
    """
    drafter = make_drafter(tiny, exit_layer=6).eval()
    prompt = [5, 6, 7, 8, 9, 10]
    recorder = LevelRecorder(Chain(5, stop=stop, stop_on="token"), recorded_levels)
    out = decode(tiny, [prompt], Greedy(), 20, drafter, recorder, ignore_eos=True)[0].output
    assert out == decode(tiny, [prompt], Greedy(), 20, ignore_eos=True)[0].output
    for tree, levels in zip(recorder.trees, recorder.levels, strict=True):
        likely = [float(log_q.exp().max()) >= stop for log_q in levels]
        drafted = int((tree.valid & tree.can_emit).sum()) - 1
        assert drafted == (likely.index(False) if False in likely else 5)
    assert len({int(tree.valid.sum()) for tree in recorder.trees}) > 1


def test_trees_stay_lossless(tiny: Target) -> None:
    """A tree over a batch gives greedy decoding's tokens."""
    drafter = make_drafter(tiny, noise=0.3, exit_layer=3).eval()
    prompts = [[5, 6, 7], [40, 41, 42, 43, 44]]
    generations = decode(
        tiny, prompts, Greedy(), 14, drafter, Eagle2(depth=3, budget=8, top_k=3), ignore_eos=True
    )
    plain = decode(tiny, prompts, Greedy(), 14, ignore_eos=True)
    assert [generation.output for generation in generations] == [
        generation.output for generation in plain
    ]


@pytest.mark.parametrize("num_layers, exit_layer", [(2, 1), (8, 1), (30, 2), (32, 2), (40, 3)])
def test_the_default_exit_is_the_authors(tiny: Target, num_layers: int, exit_layer: int) -> None:
    """The default exit is a fourteenth of the layers, at least one: 2 of 32 and 3 of 40, 2 of
    SmolLM2's 30.
    """
    assert (
        resolve_exit_layer(cast(Target, SimpleNamespace(num_layers=num_layers)), None, 1 / 14)
        == exit_layer
    )
    assert Kangaroo(tiny).exit_layer == 1


@pytest.mark.parametrize("layer", [0, 8, -1])
def test_an_exit_that_is_not_there_is_refused(tiny: Target, layer: int) -> None:
    """The message names the valid exits."""
    with pytest.raises(UserError, match=f"drafter.exit_layer={layer}.*use 1 to 7"):
        Kangaroo(tiny, exit_layer=layer)


def test_init_takes_the_exit_from_the_saved_drafter(tmp_path: Path) -> None:
    """A run that starts from another run's drafter, with steps of almost no size, ends with its
    weights and its exit.
    """
    settings = [
        "target=tiny",
        "recipe=kangaroo",
        "data.limit=6",
        "data.max_length=48",
        "data.held_out=0",
        "eval=none",
        "trainer.max_steps=2",
    ]
    argv = sys.argv
    try:
        dispatch_command(["train", *settings, "drafter.exit_layer=3", f"run={tmp_path / 'one'}"])
        dispatch_command(
            [
                "train",
                *settings,
                f"drafter.init={tmp_path / 'one'}",
                "trainer.lr=1e-12",
                f"run={tmp_path / 'two'}",
            ]
        )
    finally:
        sys.argv = argv
    first, second = (
        load_file(tmp_path / name / "drafter/model.safetensors") for name in ("one", "two")
    )
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-8)
    assert (
        json.loads((tmp_path / "two/drafter/config.json").read_text())["drafter"]["exit_layer"] == 3
    )
