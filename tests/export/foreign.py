"""Checkpoints in the layouts of other projects, written out by hand from their files and not by
our writers.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.models.target import Target


def eagle3_tensors(
    target: Target, prefix: str, draft_vocab: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Make a random EAGLE-3 head with the shapes of a target."""
    config = target.config
    width = config.hidden_size
    inner = config.intermediate_size
    vocab = target.head.vocab_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim

    def draw_tensor(*shape: int) -> Tensor:
        return 0.05 * torch.randn(*shape, generator=generator)

    ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    is_drafted = torch.zeros(vocab, dtype=torch.bool)
    is_drafted[ids] = True
    return {
        "fc.weight": draw_tensor(width, 3 * width),
        "norm.weight": 1 + draw_tensor(width),
        "lm_head.weight": target.head.output.weight[ids].detach().clone(),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": is_drafted,
        **{
            f"{prefix}{name}.weight": 1 + draw_tensor(width)
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
        f"{prefix}self_attn.q_proj.weight": draw_tensor(queries, 2 * width),
        f"{prefix}self_attn.k_proj.weight": draw_tensor(keys, 2 * width),
        f"{prefix}self_attn.v_proj.weight": draw_tensor(keys, 2 * width),
        f"{prefix}self_attn.o_proj.weight": draw_tensor(width, queries),
        f"{prefix}mlp.gate_proj.weight": draw_tensor(inner, width),
        f"{prefix}mlp.up_proj.weight": draw_tensor(inner, width),
        f"{prefix}mlp.down_proj.weight": draw_tensor(width, inner),
    }


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    file: str = "model.safetensors",
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / file)
    return directory


def write_specforge(
    directory: Path,
    target: Target,
    draft_vocab: int = 256,
    seed: int = 0,
    prefix: str = "midlayer.",
) -> Path:
    """Write SpecForge's and EAGLE's own layout, or with `layers.0.` ModelOpt's."""
    config = target.config
    settings = {
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
    return write_checkpoint(
        directory,
        settings,
        eagle3_tensors(target, prefix, draft_vocab, torch.Generator().manual_seed(seed)),
    )


def write_eagle1(directory: Path, target: Target, seed: int = 0, **changes: Any) -> Path:
    """Write EAGLE's first layout: fc with a bias, one layer without its first norm, and the
    target's embedding.
    """
    config = target.config
    generator = torch.Generator().manual_seed(seed)
    tensors = eagle3_tensors(target, "layers.0.", 8, generator)
    remaining = ("o_proj", "mlp", "post_attention_layernorm")
    layer = {
        name: tensor for name, tensor in tensors.items() if any(part in name for part in remaining)
    }
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        layer[name] = tensors[name][:, : config.hidden_size].contiguous()
    fc = 0.05 * torch.randn(config.hidden_size, 2 * config.hidden_size + 1, generator=generator)
    ends = {"fc.weight": fc[:, :-1].contiguous(), "fc.bias": fc[:, -1].contiguous()}
    ends["embed_tokens.weight"] = target.head.all_embeddings(target.device).detach().clone()
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{
            key: getattr(config, key)
            for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
        },
        **{
            key: getattr(config, key)
            for key in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
        },
        "num_hidden_layers": 1,
        "rope_theta": config.rope_parameters["rope_theta"],
        "vocab_size": target.head.vocab_size,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    return write_checkpoint(directory, settings | changes, layer | ends)


def write_speculators(directory: Path, target: Target, seed: int = 0, **flags: Any) -> Path:
    """Write what the speculators library saves, its own embedding included."""
    config = target.config
    tensors = eagle3_tensors(target, "layers.0.", 256, torch.Generator().manual_seed(seed))
    tensors["embed_tokens.weight"] = target.head.embedding.weight.detach().clone()  # type: ignore[union-attr]
    width = config.hidden_size
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.linspace(0.5, 1.5, 3 * width)
    if flags.get("fc_norm"):
        tensors |= {
            f"fc_norm.{index}.weight": torch.linspace(0.5, 1.5, width) for index in range(3)
        }
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
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_parameters["rope_theta"],
        },
    }
    settings = {
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
    return write_checkpoint(directory, settings, tensors)


def write_medusa(
    directory: Path, target: Target, heads: int = 3, version: int = 1, seed: int = 0
) -> Path:
    """Write FasterDecoding's layout, as its training does; heads of version 2 end in the
    target's output layer.
    """
    generator = torch.Generator().manual_seed(seed)
    width = target.width
    tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = 0.02 * torch.randn(width, width, generator=generator)
        tensors[f"{head}.0.linear.bias"] = 0.02 * torch.randn(width, generator=generator)
        if version == 1:
            tensors[f"{head}.1.weight"] = target.head.output.weight.detach().clone()
    settings = {
        "medusa_num_heads": heads,
        "medusa_num_layers": 1,
        "base_model_name_or_path": target.path,
    }
    return write_checkpoint(
        directory,
        settings | ({"version": "2"} if version == 2 else {}),
        tensors,
        "medusa_lm_head.safetensors",
    )


def write_medusa_vllm(
    directory: Path, target: Target, draft_vocab: int = 256, seed: int = 0
) -> Path:
    """Write Medusa under vLLM's names: one output layer for all heads, over a part of the
    vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    width = target.width
    vocab = target.head.vocab_size
    ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    tensors: dict[str, Tensor] = {
        "token_map": ids,
        "lm_head.weight": target.head.output.weight[ids].detach().clone(),
    }
    for head in range(3):
        tensors[f"blocks.{head}.layers.0.weight"] = 0.02 * torch.randn(
            width, width, generator=generator
        )
        tensors[f"blocks.{head}.layers.0.bias"] = 0.02 * torch.randn(width, generator=generator)
    settings = {
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
    return write_checkpoint(directory, settings, tensors)


def qwen3_config(target: Target, layers: int, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a drafter's layers with the sizes of a target."""
    config = target.config
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": target.head.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "layer_types": ["full_attention"] * layers,
        **changes,
    }


def dflash_tensors(layer: dict[str, Any], fused: int, empty: bool = False) -> dict[str, Tensor]:
    """Make a random DFlash with these layers that reads `fused` layers of its target; with
    `empty`, shapes alone.
    """
    generator = torch.Generator().manual_seed(0)
    width = layer["hidden_size"]
    inner = layer["intermediate_size"]
    head = layer["head_dim"]
    queries = layer["num_attention_heads"] * head
    keys = layer["num_key_value_heads"] * head

    def draw_tensor(*shape: int) -> Tensor:
        if empty:
            return torch.empty(shape, device="meta")
        return float(len(shape) == 1) + 0.05 * torch.randn(*shape, generator=generator)

    tensors = {
        "fc.weight": draw_tensor(width, fused * width),
        "hidden_norm.weight": draw_tensor(width),
        "norm.weight": draw_tensor(width),
    }
    for number in range(layer["num_hidden_layers"]):
        shapes = {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        tensors |= {
            f"layers.{number}.{name}.weight": draw_tensor(*shape) for name, shape in shapes.items()
        }
    return tensors


def write_zlab(directory: Path, target: Target, **changes: Any) -> Path:
    """Write DFlash as z-lab publishes it: two layers, which read the outputs of layers 1 and 5;
    token 0 occurs in no text.
    """
    layer = qwen3_config(target, 2, rope_theta=config_theta(target), rope_scaling=None)
    settings = {
        "architectures": ["DFlashDraftModel"],
        "block_size": 6,
        "num_target_layers": target.num_layers,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 5]},
        "dtype": "float32",
        "use_sliding_window": False,
        "sliding_window": None,
    }
    return write_checkpoint(directory, {**layer, **settings, **changes}, dflash_tensors(layer, 2))


def write_speculators_dflash(directory: Path, target: Target, **changes: Any) -> Path:
    """Write what the speculators library saves of DFlash with its defaults: a sliding window in
    every layer, causal blocks, and a part of the vocabulary."""
    rope = {"rope_type": "default", "rope_theta": config_theta(target)}
    window = {
        "layer_types": ["sliding_attention"] * 2,
        "use_sliding_window": True,
        "sliding_window": 16,
    }
    layer = qwen3_config(target, 2, rope_parameters=rope, **window)
    vocab = target.head.vocab_size
    tensors = dflash_tensors(layer, 3)
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:256].sort().values
    tensors |= {
        "lm_head.weight": target.head.output.weight[ids].detach().clone(),
        "d2t": ids - torch.arange(256),
    }
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    settings = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 256,
        "block_size": 8,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "mask_token_id": 0,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"name_or_path": target.path, "architectures": ["LlamaForCausalLM"]},
        },
    }
    return write_checkpoint(directory, {**settings, **changes}, tensors)


def make_dspark_heads(layer: dict[str, Any], rank: int, rows: int) -> dict[str, Tensor]:
    """Make DSpark's vanilla Markov head and confidence head."""
    generator = torch.Generator().manual_seed(2)
    width = layer["hidden_size"]
    vocab = layer["vocab_size"]
    return {
        "markov_head.markov_w1.weight": 0.5 * torch.randn(vocab, rank, generator=generator),
        "markov_head.markov_w2.weight": 0.5 * torch.randn(rows, rank, generator=generator),
        "confidence_head.proj.weight": 0.05 * torch.randn(1, width + rank, generator=generator),
        "confidence_head.proj.bias": torch.zeros(1),
    }


def write_deepspec_dspark(directory: Path, target: Target, **changes: Any) -> Path:
    """Write DSpark as DeepSpec publishes it, with copies of the target's embedding and output
    layer.
    """
    rope = {"rope_type": "default", "rope_theta": config_theta(target)}
    layer = qwen3_config(target, 2, rope_parameters=rope)
    settings = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 5,
        "num_target_layers": target.num_layers,
        "mask_token_id": 0,
        "target_layer_ids": [1, 5],
        "num_anchors": 512,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
    }
    shared = {
        "embed_tokens.weight": target.head.embedding.weight,
        "lm_head.weight": target.head.output.weight,
    }  # type: ignore[union-attr]
    tensors = {**dflash_tensors(layer, 2), **make_dspark_heads(layer, 8, layer["vocab_size"])}
    tensors |= {name: weight.detach().clone() for name, weight in shared.items()}
    return write_checkpoint(directory, {**layer, **settings, **changes}, tensors)


def write_speculators_dspark(directory: Path, target: Target, **changes: Any) -> Path:
    """Write what the speculators library saves of DSpark with its defaults, over a part of the
    vocabulary.
    """
    start = write_speculators_dflash(directory, target)
    settings = json.loads((start / "config.json").read_text())
    tensors = load_file(start / "model.safetensors")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 8}
    settings |= {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "sample_from_anchor": True,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "speculators_config": {
            **settings["speculators_config"],
            "algorithm": "dspark",
            "proposal_methods": [proposal],
        },
    }
    return write_checkpoint(
        directory,
        {**settings, **changes},
        tensors | make_dspark_heads(settings["transformer_layer_config"], 8, 256),
    )


SELECTOR_KEYS = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 4,
}


def make_selector_tensors(layer: dict[str, Any]) -> dict[str, Tensor]:
    """Make DFlash2's convolutions and its selector."""
    generator = torch.Generator().manual_seed(2)
    width = layer["hidden_size"]
    vocab = layer["vocab_size"]
    tensors = {
        "candidate_selector.predecessor_codebook": torch.randn(vocab, 8, generator=generator),
        "candidate_selector.successor_codebook": torch.randn(vocab, 8, generator=generator),
        "candidate_selector.hidden_projection.weight": 0.05
        * torch.randn(8, width, generator=generator),
    }
    for conv in (
        f"layers.{number}.{part}_conv" for number in range(2) for part in ("attention", "mlp")
    ):
        tensors[f"{conv}.base_kernel"] = 0.5 * torch.randn(2, 2, width, generator=generator)
        tensors[f"{conv}.kernel_projection.weight"] = 0.05 * torch.randn(
            4 * width // 16, width, generator=generator
        )
    return tensors


def write_zlab_dflash2(directory: Path, target: Target, **changes: Any) -> Path:
    """Write DFlash2 as z-lab publishes it."""
    start = write_zlab(directory, target, architectures=["DFlash2DraftModel"])
    settings = json.loads((start / "config.json").read_text())
    tensors = load_file(start / "model.safetensors")
    settings["dflash_config"] |= SELECTOR_KEYS
    return write_checkpoint(
        directory, {**settings, **changes}, tensors | make_selector_tensors(settings)
    )


def write_speculators_dflash2(directory: Path, target: Target, **changes: Any) -> Path:
    """Write what the speculators library saves of DFlash2: a window in all layers, and blocks
    seen both ways.
    """
    start = write_speculators_dflash(directory, target)
    settings = json.loads((start / "config.json").read_text())
    tensors = load_file(start / "model.safetensors")
    remaining = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in ("lm_head.weight", "d2t", "t2d")
    }
    layer = settings["transformer_layer_config"]
    settings |= {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "sliding_window_non_causal": True,
    }
    settings |= {"draft_vocab_size": layer["vocab_size"], **SELECTOR_KEYS}
    return write_checkpoint(
        directory, {**settings, **changes}, remaining | make_selector_tensors(layer)
    )


def write_peagle(directory: Path, target: Target, **changes: Any) -> Path:
    """Write P-EAGLE in EAGLE-3's flat layout, with its own embedding, `ptd_token_id` and a
    second layer.
    """
    start = write_specforge(directory, target, prefix="layers.0.")
    settings = json.loads((start / "config.json").read_text())
    tensors = load_file(start / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    width = target.width
    second = eagle3_tensors(target, "layers.1.", 256, generator)
    second = {
        name: tensor
        for name, tensor in second.items()
        if name.startswith("layers.1.") and "hidden_norm" not in name
    }
    for part in ("q_proj", "k_proj", "v_proj"):
        second[f"layers.1.self_attn.{part}.weight"] = second[f"layers.1.self_attn.{part}.weight"][
            :, :width
        ].clone()
    tensors |= second | {
        "mask_hidden": torch.randn(1, 1, 3 * width, generator=generator),
        "embed_tokens.weight": target.head.embedding.weight.detach() + 0.01,  # type: ignore[union-attr]
    }
    settings |= {
        "num_hidden_layers": 2,
        "ptd_token_id": 0,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }
    return write_checkpoint(directory, {**settings, **changes}, tensors)


def config_theta(target: Target) -> float:
    return float(target.config.rope_parameters["rope_theta"])
