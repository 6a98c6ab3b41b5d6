"""Checkpoints as other projects lay them down, written out by hand: what their files hold, not what our writers say."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrain.models.target import Target


def eagle3_tensors(target: Target, prefix: str, draft_vocab: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A random EAGLE-3 head with the shapes of a target."""
    config = target.config
    width, inner, vocab = config.hidden_size, config.intermediate_size, target.head.vocab_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim

    def draw(*shape: int) -> Tensor:
        return 0.05 * torch.randn(*shape, generator=generator)

    ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    marks = torch.zeros(vocab, dtype=torch.bool)
    marks[ids] = True
    return {
        "fc.weight": draw(width, 3 * width),
        "norm.weight": 1 + draw(width),
        "lm_head.weight": target.head.output.weight[ids].detach().clone(),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": marks,
        **{
            f"{prefix}{name}.weight": 1 + draw(width) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
        f"{prefix}self_attn.q_proj.weight": draw(queries, 2 * width),
        f"{prefix}self_attn.k_proj.weight": draw(keys, 2 * width),
        f"{prefix}self_attn.v_proj.weight": draw(keys, 2 * width),
        f"{prefix}self_attn.o_proj.weight": draw(width, queries),
        f"{prefix}mlp.gate_proj.weight": draw(inner, width),
        f"{prefix}mlp.up_proj.weight": draw(inner, width),
        f"{prefix}mlp.down_proj.weight": draw(width, inner),
    }


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / file)
    return directory


def specforge(directory: Path, target: Target, draft_vocab: int = 256, seed: int = 0, prefix: str = "midlayer.") -> Path:
    """SpecForge's and EAGLE's own layout, or with `layers.0.` ModelOpt's."""
    config = target.config
    said = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": target.head.vocab_size,
        "draft_vocab_size": draft_vocab,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }
    return write(directory, said, eagle3_tensors(target, prefix, draft_vocab, torch.Generator().manual_seed(seed)))


def speculators(directory: Path, target: Target, seed: int = 0, **flags: Any) -> Path:
    """What the speculators library saves, its own embedding included."""
    config = target.config
    tensors = eagle3_tensors(target, "layers.0.", 256, torch.Generator().manual_seed(seed))
    tensors["embed_tokens.weight"] = target.head.embedding.weight.detach().clone()  # type: ignore[union-attr]
    width = config.hidden_size
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.linspace(0.5, 1.5, 3 * width)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": torch.linspace(0.5, 1.5, width) for index in range(3)}
    layer = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": target.head.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]},
    }
    said = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 256,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        **flags,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target.path, "architectures": ["LlamaForCausalLM"]},
        },
    }
    return write(directory, said, tensors)


def medusa(directory: Path, target: Target, heads: int = 3, version: int = 1, seed: int = 0) -> Path:
    """FasterDecoding's layout, as its training writes it; heads of version 2 end in the target's output layer."""
    generator = torch.Generator().manual_seed(seed)
    width = target.width
    tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = 0.02 * torch.randn(width, width, generator=generator)
        tensors[f"{head}.0.linear.bias"] = 0.02 * torch.randn(width, generator=generator)
        if version == 1:
            tensors[f"{head}.1.weight"] = target.head.output.weight.detach().clone()
    said = {"medusa_num_heads": heads, "medusa_num_layers": 1, "base_model_name_or_path": target.path}
    return write(directory, said | ({"version": "2"} if version == 2 else {}), tensors, "medusa_lm_head.safetensors")


def medusa_vllm(directory: Path, target: Target, draft_vocab: int = 256, seed: int = 0) -> Path:
    """vLLM's names: one output layer for all heads, over a part of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    width, vocab = target.width, target.head.vocab_size
    ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    tensors: dict[str, Tensor] = {"token_map": ids, "lm_head.weight": target.head.output.weight[ids].detach().clone()}
    for head in range(3):
        tensors[f"blocks.{head}.layers.0.weight"] = 0.02 * torch.randn(width, width, generator=generator)
        tensors[f"blocks.{head}.layers.0.bias"] = 0.02 * torch.randn(width, generator=generator)
    said = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": width,
        "vocab_size": vocab,
        "truncated_vocab_size": draft_vocab,
        "num_heads": 3,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "torch_dtype": "float32",
    }
    return write(directory, said, tensors)
