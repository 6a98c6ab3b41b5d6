"""The planned memory of keys and values against transformers' own caches."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3NextConfig,
)

from spectrain.drafters.eagle3 import Eagle3
from spectrain.models.target import Target
from spectrain_studies.planning.serving_memory import (
    LayerCache,
    list_drafter_caches,
    list_layer_caches,
    plan_serving_memory,
)
from tests.targets import cut_tiny

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
CONFIGS = {
    "grouped heads": LlamaConfig(**SIZES),
    "sliding windows": Gemma3TextConfig(
        **SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "a window in every layer": MistralConfig(**SIZES, sliding_window=8),
}


@torch.inference_mode()
def measure_cache(config: Any, context: int) -> int:
    """Return the numbers in the cache of a model after a text."""
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=config)
    model(torch.ones(1, context, dtype=torch.int64), past_key_values=cache, use_cache=True)
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("context", [4, 24])
def test_planned_numbers_are_those_of_a_cache(name: str, context: int) -> None:
    """A sliding layer of transformers leaves the newest token's place to the next one."""
    config = CONFIGS[name]
    planned = plan_serving_memory(config, [], 1, context, 1).target
    measured = measure_cache(config, context)
    slack = sum(cache.size for cache in list_layer_caches(config) if cache.window is not None)
    assert measured <= planned <= measured + slack


def test_states_and_latents_are_counted_as_engines_keep_them() -> None:
    """Of Qwen3-Next's layers every fourth keeps tokens; latent attention keeps one vector."""
    config = Qwen3NextConfig(**SIZES)
    kept = [cache.size for cache in list_layer_caches(config)]
    assert kept == [0, 0, 0, 2 * 2 * 16]
    latent = LlamaConfig(**SIZES)
    latent.kv_lora_rank, latent.qk_rope_head_dim = 512, 64
    assert list_layer_caches(latent) == [LayerCache(576)] * 4


def test_seventy_billion_at_128k() -> None:
    """Llama 3 70B: 80 layers of 8 key-value heads of 128 take 320 KiB a token in 16 bits, 40 GiB
    for a text of 128k tokens."""
    config = LlamaConfig(
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        hidden_size=8192,
    )
    memory = plan_serving_memory(config, [LayerCache(2 * 8 * 128)], 4, 128 * 1024)
    assert memory.target_per_token == 320 * 1024
    assert memory.target == 4 * 40 * 1024**3
    assert memory.drafter * 80 == memory.target


def test_a_drafter_keeps_what_its_projections_return() -> None:
    layers = nn.ModuleList(
        nn.ModuleDict({"k_proj": nn.Linear(8, 6), "v_proj": nn.Linear(8, 6)}) for _ in range(2)
    )
    assert list_drafter_caches(layers) == [LayerCache(6)] * 4
    assert list_drafter_caches(nn.Linear(8, 6)) == []


def test_a_small_model_keeps_what_its_layers_keep(tiny: Target) -> None:
    small = nn.ModuleDict({"model": cut_tiny(2)})
    assert list_drafter_caches(small) == list_layer_caches(tiny.config)[:2]


def test_windows_of_a_drafter_keep_no_more_than_themselves(tiny: Target) -> None:
    """Those of a small model with sliding layers, and that of an EAGLE-3 drafter's attention."""
    small = nn.ModuleDict({"model": cut_tiny(2)})
    config: Any = small["model"].config
    config.layer_types, config.sliding_window = ["sliding_attention", "full_attention"], 8
    eagle = Eagle3(tiny, window=8, num_layers=2)
    for drafter, count in ((small, 8 + 100), (eagle, 2 * 8)):
        caches = list_drafter_caches(drafter)
        size = sum(cache.size for cache in caches) // 2
        memory = plan_serving_memory(tiny.config, caches, 3, 100)
        assert memory.drafter == 3 * 2 * size * count
