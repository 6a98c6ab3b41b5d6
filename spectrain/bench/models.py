"""Targets and drafters of any size with random weights: what takes as long as the real ones, and needs no download."""

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

LOGIT_DEVIATION = (
    40  # the deviation of a random drafter's logits: first choices near certain, so that dynamic trees are as deep as those
)
# of a drafter that knows its target; one that is unsure would spend the whole budget on two levels


@dataclass(frozen=True)
class ModelGeometry:
    """A Llama's geometry; by default that of Llama-3.1-8B and of the usual EAGLE-3 drafter for it."""

    layers: int = 32
    width: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    vocab: int = 128256
    draft_vocab: int = 32000
    context: int = 131072


def random_network(model: ModelGeometry, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama whose weights are drawn where they will stay."""
    config = LlamaConfig(
        hidden_size=model.width, intermediate_size=model.inner, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_size, vocab_size=model.vocab,
        max_position_embeddings=model.context, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    network.to_empty(device=device)
    with device:
        network.model.rotary_emb = LlamaRotaryEmbedding(config)  # its frequencies are no parameters
    randomize_weights(network)
    return network


def random_target(model: ModelGeometry, device: torch.device, dtype: torch.dtype) -> Target:
    """A target of random weights with the tiny target's tokenizer, of which nothing is asked."""
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "data" / "tiny")
    return Target(random_network(model, device, dtype), tokenizer, "random", "random")


def build_meta_target(model: ModelGeometry, dtype: torch.dtype) -> Target:
    """A target without data, on the device "meta", where a target cannot be examined as others are when they are made."""
    target = load_tiny(device="cpu")
    target.model = random_network(model, torch.device("meta"), dtype)
    return target


@torch.no_grad()
def randomize_weights(module: torch.nn.Module) -> None:
    """Matrices from a normal distribution of deviation 0.02, norms of ones."""
    for weight in module.parameters():
        weight.normal_(0, 0.02) if weight.dim() > 1 else weight.fill_(1)


def random_drafter(target: Target, model: ModelGeometry, dtype: torch.dtype, ttt_steps: int = 7) -> Eagle3:
    """An EAGLE-3 drafter of random weights, sure of itself."""
    with target.device:
        drafter = Eagle3(target, ttt_steps, model.draft_vocab).to(dtype)
    randomize_weights(drafter)
    with torch.no_grad():
        drafter.lm_head.weight.normal_(0, LOGIT_DEVIATION / model.width**0.5)
    return drafter
