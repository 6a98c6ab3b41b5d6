"""EAGLE-3 with parts of the target's own kind: latent attention computes what transformers
computes, cached nodes compute what training computes, drafted decoding is greedy, and training
lowers the loss.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.decoding.session import prepare_for_decoding
from spectrain.drafters.base import TrainingState
from spectrain.drafters.dflash import DFlash, DFlashConfig
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.anchors import sample_anchors
from spectrain.drafters.layers.state_rollout import StateRollout
from spectrain.drafters.layers.target_kind import LATENT_KEYS, LatentAttention
from spectrain.drafters.mtp import Mtp
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.live_source import LiveSource
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.kv_cache import TreeCache
from spectrain.models.loading import load_hf, load_tokenizer
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer
from spectrain.trees import Chain, Eagle2
from tests.models.architectures import YARN, config_of, save_small

LATENT = {"latent_attention": True}
EXPERTS = {"experts": True}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | EXPERTS,
    "deepseek_v2": LATENT | EXPERTS,
    "axk1": LATENT | EXPERTS,
    "bailing_hybrid": LATENT | EXPERTS,
    "glm4_moe_lite": LATENT | EXPERTS,
    "kimi_linear": LATENT | EXPERTS,
    "longcat_flash": LATENT,
    "minicpm3": LATENT,
    "youtu": LATENT,
    **dict.fromkeys(
        (
            "afmoe", "aria_text", "beam", "cohere2_moe", "dbrx", "dots1", "ernie4_5_moe",
            "exaone_moe", "flex_olmo", "flint", "glm4_moe", "gpt_oss", "granitemoe",
            "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3",
            "jamba", "kolibri1", "laguna", "lfm2_moe", "llama4_text", "mellum",
            "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe",
            "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open",
            "zaya",
        ),
        EXPERTS,
    ),
}  # fmt: skip
PROMPTS = [[5, 9, 17, 33, 4], [8, 7, 6, 60, 61, 62, 63, 11, 12]]


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    save_small(request.param, folder)
    load_tokenizer(str(TINY_DIRECTORY), False, True).save_pretrained(folder)
    return load_hf(str(folder))


def make_drafter(target: Target, architecture: dict[str, Any], **options: Any) -> Eagle3:
    torch.manual_seed(1)
    drafter = Eagle3(
        target, ttt_steps=3, vocab_size=96, architecture=architecture, start="random", **options
    )
    drafter.prepare(target, torch.arange(96, 0, -1))
    return drafter.eval()


def make_dataset() -> Dataset:
    torch.manual_seed(2)
    rows = torch.randint(3, 90, (4, 24)).tolist()
    return Dataset([Example(row, [index >= 6 for index in range(24)]) for row in rows], 4, 0, 0)


@pytest.mark.parametrize("rope", [None, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}])
@pytest.mark.parametrize("query_rank", [None, 16])
def test_latent_attention_is_that_of_transformers(
    query_rank: int | None, rope: dict[str, Any] | None
) -> None:
    """By the same weights under the same names, and for a plain and a scaled rotary embedding."""
    own: dict[str, Any] = {"num_key_value_heads": 4, "q_lora_rank": query_rank}
    config = config_of("deepseek_v3", own if rope is None else own | {"rope_parameters": rope})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    reference = DeepseekV3Attention(config, 0).eval()
    config.head_dim = config.qk_rope_head_dim
    attention = LatentAttention(config, config.hidden_size)
    attention.load_state_dict(reference.state_dict())
    x = torch.randn(2, 11, config.hidden_size)
    positions = torch.arange(11)[None]
    embeddings = DeepseekV3RotaryEmbedding(config)(x, positions)
    mask = torch.full((11, 11), float("-inf")).triu(1)[None, None]
    expected = reference(x, position_embeddings=embeddings, attention_mask=mask)[0]
    cos, sin = embeddings
    attended = attention.attend_causal(
        *attention.project_qkv(x, (cos.expand(2, -1, -1), sin.expand(2, -1, -1)))
    )
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sweep(2, free=("target", "architecture"))
@pytest.mark.parametrize(
    ("target", "architecture"), KINDS.items(), indirect=["target"], ids=[*KINDS]
)
def test_drafted_decoding_is_greedy_and_training_lowers_the_loss(
    target: Target, architecture: dict[str, Any], tmp_path: Path
) -> None:
    drafter = make_drafter(target, architecture)
    with torch.inference_mode():
        check_cached_nodes(drafter, target)
    plain = [generation.output for generation in decode(target, PROMPTS, Greedy(), 10)]
    for builder in (Chain(3), Eagle2(depth=3, top_k=3, budget=8)):
        drafted = decode(target, PROMPTS, Greedy(), 10, drafter, builder)
        assert [generation.output for generation in drafted] == plain
    Trainer(lr=5e-3, max_steps=12, batch_tokens=512, log_every=1).fit(
        drafter, target, make_dataset(), LiveSource(), tmp_path
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < 0.9 * losses[0]
    trained = decode(target, PROMPTS, Greedy(), 10, prepare_for_decoding(drafter, target), Chain(3))
    assert [generation.output for generation in trained] == plain


def check_cached_nodes(drafter: Eagle3, target: Target) -> None:
    """Run the drafter's nodes at once and one after the other: the states are the same."""
    torch.manual_seed(3)
    tokens = torch.randint(3, 90, (1, 7))
    hidden = torch.randn(1, 7, target.width)
    states = []
    for sizes in ([7], [3, 1, 1, 2]):
        cache = TreeCache(1, 1, 16, "cpu")
        parts = []
        for part_tokens, part_hidden in zip(tokens.split(sizes, 1), hidden.split(sizes, 1)):
            count = part_tokens.shape[1]
            positions = cache.next_slots(count)
            parts.append(drafter.run(part_tokens, part_hidden, positions, cache, None))
            cache.commit(None, torch.tensor([count]))
        states.append(torch.cat(parts, 1))
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)


def test_what_the_target_lacks_is_refused(shallow: Target) -> None:
    for architecture, words in (
        (LATENT, "has no latent attention"),
        (EXPERTS, "have no experts"),
        ({"kv_lora_rank": 8}, "add drafter.architecture.latent_attention=true"),
        (LATENT | {"qk_norm": True}, "use one of them"),
    ):
        with pytest.raises(UserError, match=words):
            make_drafter(shallow, architecture)


@pytest.mark.parametrize("target", ["longcat_flash"], indirect=True)
def test_layers_that_cannot_be_built_alone_are_refused(target: Target) -> None:
    """A layer of LongCat-Flash counts as two, so its code makes none of one."""
    with pytest.raises(UserError, match="cannot be built alone"):
        make_drafter(target, EXPERTS)
    with pytest.raises(UserError, match="cannot be built alone"):
        Mtp(target)
    assert isinstance(make_drafter(target, LATENT).self_attn, LatentAttention)


@pytest.mark.parametrize("target", ["deepseek_v3"], indirect=True)
def test_sizes_are_the_targets_or_those_that_are_named(target: Target) -> None:
    drafter = make_drafter(target, LATENT | {"kv_lora_rank": 24})
    attention = drafter.self_attn
    assert isinstance(attention, LatentAttention)
    sizes = {key: getattr(target.config, key) for key in LATENT_KEYS}
    assert attention.rank == 24 and attention.value_size == sizes["v_head_dim"]
    assert attention.q_a_proj.in_features == 2 * target.width


@pytest.mark.parametrize("target", ["deepseek_v3"], indirect=True)
def test_training_unroll_equals_decoding(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of the unrolled training forward are those of drafting the same tokens."""
    drafter = make_drafter(target, LATENT | EXPERTS, num_layers=2)
    example = make_dataset().examples[0]
    batch = LiveSource().make_batch(BatchRequest([example], target, drafter.layers))
    trained: list[torch.Tensor] = []
    judge = drafter.judge_steps
    monkeypatch.setattr(
        drafter,
        "judge_steps",
        lambda supervision, states: (trained.extend(states), judge(supervision, states))[1],
    )
    supervised = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    drafter.loss(supervised, target, TrainingState())
    for root in (4, 11):
        cache = TreeCache(2, 1, 40, "cpu")
        hidden = drafter.fuse_features(batch.input_features)[:, : root + 1]
        positions = torch.arange(root + 1)[None]
        output = drafter.run(batch.tokens[:, 1 : root + 2], hidden, positions, cache, None)
        cache.commit(None, torch.tensor([root + 1]))
        rollout = StateRollout(drafter, cache, output[:, -1:], drafter.draft_ids)
        for step in (1, 2):
            rollout.extend(batch.tokens[:, root + 1 + step][None], torch.tensor([[step - 1]]))
        for step in range(3):
            torch.testing.assert_close(
                rollout.hidden[0, step], trained[step][root], rtol=1e-3, atol=1e-3
            )


@pytest.mark.parametrize(
    ("target", "architecture"),
    [("deepseek_v3", LATENT | EXPERTS), ("qwen3_moe", EXPERTS)],
    indirect=["target"],
)
def test_block_drafters_have_such_layers_too(
    target: Target, architecture: dict[str, Any], tmp_path: Path
) -> None:
    """Blocks in training are those of decoding, drafted decoding is greedy, and the loss falls."""
    torch.manual_seed(1)
    options = {"num_layers": 2, "block_size": 4, "num_anchors": 6, "mask_token_id": 95}
    drafter = DFlash(target, DFlashConfig(architecture=architecture, **options)).eval()
    counts = torch.arange(96, 0, -1)
    counts[95] = 0
    drafter.prepare(target, counts)
    example = make_dataset().examples[0]
    batch = LiveSource().make_batch(BatchRequest([example], target, drafter.layers))
    anchors = sample_anchors(batch, 6, drafter.seed, 0)
    states = drafter._training_states(batch, anchors, TrainingState())[:, 1:]
    for position, state in list(zip(anchors.positions.tolist(), states))[::2]:
        tokens = batch.tokens[:, : position + 1]
        context: Any = SimpleNamespace(
            new_features=target.features(tokens[:, :-1], drafter.layers),
            root=tokens[:, -1],
            num_new=torch.tensor([position]),
        )
        with torch.inference_mode():
            decoded = drafter._decoding_states(context, TreeCache(2, 1, 40, "cpu"))
        torch.testing.assert_close(decoded[0, 1:], state, rtol=1e-3, atol=1e-3)
    plain = [generation.output for generation in decode(target, PROMPTS, Greedy(), 10)]
    drafted = decode(target, PROMPTS, Greedy(), 10, drafter, Chain(3))
    assert [generation.output for generation in drafted] == plain
    Trainer(lr=5e-3, max_steps=16, batch_tokens=512, log_every=1).fit(
        drafter, target, make_dataset(), LiveSource(), tmp_path
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < 0.95 * losses[0]
