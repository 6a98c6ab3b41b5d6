"""Targets and drafters of any size with random weights: they take as long as trained ones and
need no download.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.drafters.eagle3 import Eagle3
from spectrain.models.attention import ATTENTION_NAME
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target

LOGIT_DEVIATION = 40
"""Standard deviation of a random drafter's logits. First choices are near certain, so dynamic trees
are as deep as those of a trained drafter; an unsure drafter would spend the whole budget on two
levels."""


@dataclass(frozen=True)
class ModelGeometry:
    """A Llama's geometry; the defaults are those of Llama-3.1-8B and of the usual EAGLE-3
    drafter for it.
    """

    layers: int = 32
    width: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    vocab: int = 128256
    draft_vocab: int = 32000
    context: int = 131072


MODELS = {
    "8b": ModelGeometry(),
    "1.5b": ModelGeometry(28, 1536, 8960, 12, 2, 128, 151936, 32000, 32768),
    "135m": ModelGeometry(30, 576, 1536, 9, 3, 64, 49152, 32000, 8192),
}
"""Geometries by size: of Llama-3.1-8B, Qwen2.5-1.5B and SmolLM2-135M."""


def random_network(model: ModelGeometry, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a Llama whose weights are drawn on the device."""
    config = LlamaConfig(
        hidden_size=model.width,
        intermediate_size=model.inner,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_size,
        vocab_size=model.vocab,
        max_position_embeddings=model.context,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    network.to_empty(device=device)
    with device:
        # to_empty left its frequencies undefined
        network.model.rotary_emb = LlamaRotaryEmbedding(config)
    randomize_weights(network)
    return network


def random_target(model: ModelGeometry, device: torch.device, dtype: torch.dtype) -> Target:
    """Return a target of random weights with the tiny target's tokenizer, which is not used."""
    tokenizer = AutoTokenizer.from_pretrained(
        Path(__file__).parents[2] / "spectrain" / "data" / "tiny"
    )
    return Target(random_network(model, device, dtype), tokenizer, "random", "random")


def build_meta_target(model: ModelGeometry, dtype: torch.dtype) -> Target:
    """Return a target on the device "meta", where the usual inspection of a target is
    impossible.
    """
    target = load_tiny(device="cpu")
    # Weights that learn would not be merged.
    target.model = random_network(model, torch.device("meta"), dtype).requires_grad_(False)
    return target


@torch.no_grad()
def randomize_weights(module: torch.nn.Module) -> None:
    """Draw matrices from a normal distribution of deviation 0.02, and set norms to one."""
    for weight in module.parameters():
        weight.normal_(0, 0.02) if weight.dim() > 1 else weight.fill_(1)


def random_drafter(
    target: Target, model: ModelGeometry, dtype: torch.dtype, ttt_steps: int = 7
) -> Eagle3:
    """Return an EAGLE-3 drafter of random weights with near-certain first choices."""
    with target.device:
        drafter = Eagle3(target, ttt_steps, model.draft_vocab).to(dtype)
    randomize_weights(drafter)
    with torch.no_grad():
        drafter.lm_head.weight.normal_(0, LOGIT_DEVIATION / model.width**0.5)
    return drafter
