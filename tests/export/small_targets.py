"""Targets of random weights with few layers and chosen rotary embeddings, and drafters of random
weights for them.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf, open_dict
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.config.build import build
from spectrain.config.spec import RunSpec
from spectrain.drafters.base import Drafter
from spectrain.models.attention import ATTENTION_NAME
from spectrain.models.bundled import load_tiny_tokenizer
from spectrain.models.target import Target
from spectrain.runs.drafters import save_drafter

from .test_converter import settings_for

BASE_SETTINGS = cache(settings_for)

SIZE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}


def make_target(folder: Path, kind: str = "llama", **own: Any) -> Target:
    """Save and return a target of random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZE, **own})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    tokenizer = load_tiny_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target(model.eval(), tokenizer, folder.name, str(folder))


def save_random(folder: Path, target: Target, family: str, **options: Any) -> Drafter:
    """Save a drafter of random weights for a target as training would, and return it."""
    config = copy.deepcopy(BASE_SETTINGS(family))
    with open_dict(config):
        config.drafter.update(options)
    config.target = OmegaConf.create(
        {"_target_": "spectrain.models.loading.load_hf", "model": target.path}
    )
    torch.manual_seed(1)
    module: Drafter = build(config.drafter, target=target)
    counts = torch.arange(target.head.vocab_size, 0, -1)
    counts[target.tokenizer.all_special_ids] = 0
    module.prepare(target, counts)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    save_drafter(folder, module, RunSpec.from_nodes(config))
    return module.eval()
