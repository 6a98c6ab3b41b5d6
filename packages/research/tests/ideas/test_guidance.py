"""Guided targets against transformers' own classifier-free guidance, and sampling under it
against exact chances.
"""

from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.emu3 import Emu3ForCausalLM, Emu3TextConfig

from spectrain.data.chat import Example
from spectrain.decoding.acceptance import Greedy, SpeculativeSampling
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.live_source import LiveSource
from spectrain.models.attention import ATTENTION_NAME
from spectrain.models.bundled import load_tiny_tokenizer
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain_research.guidance.model import Guidance
from spectrain_research.guidance.target import GuidedTarget, guide_target, wrap_janus
from tests.factories import add_noise

LIMIT = 12
NUM_CODES = 40
BEGIN = 1
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "emu3": (Emu3ForCausalLM, Emu3TextConfig),
}
"""LlamaGen's form, and the text model of Emu3, whose vocabulary holds the codes of images."""


def make_plain(kind: str, num_codes: int) -> Target:
    """A random causal model over the tiny vocabulary and codes."""
    tokenizer = load_tiny_tokenizer()
    tokenizer.add_tokens([f"<c{code}>" for code in range(num_codes)])
    torch.manual_seed(1)
    model_class, config_class = KINDS[kind]
    model = model_class(config_class(vocab_size=len(tokenizer), **SHAPE))
    add_noise((parameter for parameter in model.parameters() if parameter.dim() > 1), 1.0)
    model.config._attn_implementation = ATTENTION_NAME
    return Target(model, tokenizer, "codes", "")


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest) -> GuidedTarget:
    return guide_target(make_plain(request.param, NUM_CODES), Guidance(2.5, BEGIN, 0), "<c")


@pytest.fixture(scope="module")
def prompts(target: GuidedTarget) -> list[list[int]]:
    code = target.tokenizer.convert_tokens_to_ids("<c3>")
    return [[5, 7, 9, 11, BEGIN], [40, 50, BEGIN], [40, 60, 70, BEGIN, code, code + 4]]


@pytest.fixture(scope="module")
def outputs(target: GuidedTarget, prompts: list[list[int]]) -> list[list[int]]:
    with reference_model(target) as model:
        return [generate(model, prompt, LIMIT, target.stop_ids) for prompt in prompts]


def test_decoding_equals_guided_generate(
    target: GuidedTarget, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Plain, with copies, with EAGLE-3 in trees and with a small model, in a ragged batch; guidance
    changes the output, and only codes and the end are chosen."""
    eagle = Eagle3(target, vocab_size=256, ttt_steps=2)
    eagle.prepare(target, torch.arange(target.head.vocab_size))
    drafters: list[tuple[Drafter | None, Chain | Eagle2 | None]] = [
        (None, None),
        (Ngram(target), Chain(3)),
        (eagle.eval(), Eagle2(3, 8, 3)),
        (Causal(target, num_layers=1).eval(), Chain(3)),
    ]
    for drafter, builder in drafters:
        assert [
            row.output for row in decode(target, prompts, Greedy(), LIMIT, drafter, builder)
        ] == outputs
    unguided = guide_target(target._plain[0], Guidance(1.0, BEGIN, 0), "<c")
    assert [row.output for row in decode(unguided, prompts, Greedy(), LIMIT)] != outputs
    codes = {target.tokenizer.convert_tokens_to_ids(f"<c{code}>") for code in range(NUM_CODES)}
    assert {token for output in outputs for token in output} <= codes | target.stop_ids
    with pytest.raises(UserError, match="begins codes"):
        decode(target, [[5, 7, 9]], Greedy(), 4)


def test_features_and_losses_are_guided(
    target: GuidedTarget, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Final features of packed texts give the guided logits, and a drafter's loss against them
    falls.
    """
    texts = [prompt + output for prompt, output in zip(prompts, outputs)]
    with reference_model(target) as model:
        expected = [model(torch.tensor([text])).logits[0] for text in texts]
    examples = [
        Example(text, [False] * len(prompt) + [True] * (len(text) - len(prompt)))
        for prompt, text in zip(prompts, texts)
    ]
    batch = LiveSource().make_batch(BatchRequest(examples, target, ("final",), packed=True))
    assert batch.features is not None
    logits = target.head.logits(batch.features.at_layer("final"))[0].split([*map(len, texts)])
    assert all(torch.allclose(a, b, atol=2e-3, rtol=1e-4) for a, b in zip(logits, expected))
    drafter = Causal(target, num_layers=1)
    losses = []
    optimizer = torch.optim.Adam(
        [weight for weight in drafter.parameters() if weight.requires_grad], 1e-2
    )
    for _ in range(5):
        loss = drafter.loss(batch, target, TrainingState()).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_sampled_codes_have_the_guided_distribution() -> None:
    """Pairs of codes from speculative sampling, 500 of them, against their exact chances
    (chi-squared, fixed seeds).
    """
    target = guide_target(make_plain("llama", 5), Guidance(1.5, BEGIN, 0), "<c")
    prompt = [5, 7, BEGIN]
    codes = target.tokenizer.convert_tokens_to_ids([f"<c{code}>" for code in range(5)])
    drafter = Causal(target, num_layers=1).eval()
    rule = SpeculativeSampling(temperature=2.0)
    counts = torch.zeros(6, 6)
    count = 500
    rows = decode(target, [prompt] * count, rule, 2, drafter, Chain(2, "sampled", temperature=2.0))
    indices = {**{code: index for index, code in enumerate(codes)}, 2: 5}
    for row in rows:
        counts[indices[row.output[0]], indices[row.output[1]] if len(row.output) > 1 else 0] += 1
    order = [*codes, 2]
    with reference_model(target) as model, torch.no_grad():
        first = (model(torch.tensor([prompt])).logits[0, -1, order] / 2).softmax(-1)
        after = [
            (model(torch.tensor([[*prompt, code]])).logits[0, -1, order] / 2).softmax(-1)
            for code in codes
        ]
    expected = torch.zeros(6, 6)
    for index, row in enumerate(after):
        expected[index] = first[index] * row
    expected[5, 0] = first[5]
    is_frequent = expected * count > 5
    statistic = float(
        (((counts - expected * count) ** 2) / (expected * count).clamp(min=1e-9))[is_frequent].sum()
    )
    freedom = int(is_frequent.sum()) - 1
    assert freedom > 4 and statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_janus_equals_its_own_generate() -> None:
    """Images of Janus, whose codes have a table and an output layer of their own: plain and drafted
    as its `generate` writes them."""
    text = {**SHAPE, "model_type": "llama", "vocab_size": 2048, "bos_token_id": 3}
    vision = {
        "hidden_size": 16,
        "projection_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "num_image_tokens": 16,
        "intermediate_size": 32,
    }
    codes = {
        "embed_dim": 8,
        "num_embeddings": 40,
        "latent_channels": 8,
        "num_patches": 4,
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
        "projection_dim": 32,
        "image_token_embed_dim": 32,
    }
    torch.manual_seed(0)
    model = JanusForConditionalGeneration(
        JanusConfig(text_config=text, vision_config=vision, vq_config=codes)
    ).eval()
    add_noise((parameter for parameter in model.parameters() if parameter.dim() > 1), 1.0)
    settings = {
        "bos_token_id": 3,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "generation_kwargs": {"boi_token_id": BEGIN},
    }
    model.generation_config = GenerationConfig(guidance_scale=2.5, max_length=64, **settings)
    prompts = [[3, 5, 7, 9, BEGIN], [3, 40, BEGIN]]
    images = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        image = model.generate(
            tokens,
            torch.ones_like(tokens),
            generation_mode="image",
            do_sample=False,
            guidance_scale=2.5,
        )
        images.append([2048 + code for code in image[0].tolist()])
    plain = wrap_janus(model, load_tiny_tokenizer(), "janus")
    target = guide_target(plain, Guidance(2.5, BEGIN, 0, frozenset({3})), "<c")
    assert len({code for image in images for code in image}) > 8
    eagle = Eagle3(target, vocab_size=256, ttt_steps=2)
    eagle.prepare(target, torch.arange(target.head.vocab_size))
    for drafter, builder in (
        (None, None),
        (Ngram(target), Chain(3)),
        (eagle.eval(), Eagle2(3, 8, 3)),
    ):
        rows = decode(target, prompts, Greedy(), 16, drafter, builder, ignore_eos=True)
        assert [row.output for row in rows] == images
