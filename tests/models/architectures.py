"""Small random models of the architectures that transformers knows, their special features switched
on.

Windows are of 8 positions, chunks and indexers as small, so that a text of 20 tokens passes them.
Vocabularies have 96 entries, models four layers of width 32, in float32.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 96
LAYERS = 4
WINDOW = 8

SMALL: dict[str, Any] = {  # of these, a configuration gets those that it has
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "word_embed_proj_dim": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48, "ffn_dim": 48, "ffn_hidden_size": 48, "n_inner": 48,
    "dense_intermediate_size": 48,
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "n_layers": LAYERS, "num_layers": LAYERS,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8,
    "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256, "n_ctx": 256,
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "use_sliding_window": True, "max_window_layers": 1, "local_attention": 2 * WINDOW,
    "keep_window_size": WINDOW,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "zero_expert_num": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "expert_ffn_hidden_size": 24, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "o_lora_rank": 16,
    "o_groups": 2, "index_topk": 6, "index_head_dim": 8, "index_n_heads": 2, "index_block_size": 4,
    "index_topk_blocks": 2,
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_ssm": 32, "mamba_expand": 1,
    "mamba_chunk_size": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "state_size": 8,
    "mamba_dt_rank": 4, "n_mamba_heads": 2,
    "chunk_size": 8, "n_groups": 1, "mamba_n_groups": 1, "use_mamba_kernels": False,
    "time_step_rank": 4, "lru_width": 32,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8, "linear_num_heads": 4, "rotary_dim": 4, "block_size": 8,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
LINEAR = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
LATENT: dict[str, Any] = {"num_key_value_heads": 4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "factor": 8.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 6.0],
}
GEMMA4: dict[str, Any] = {
    "layer_types": MIXED,
    "final_logit_softcapping": 2.0,
    "num_global_key_value_heads": 1,
    "global_head_dim": 16,
}
OWN: dict[str, dict[str, Any]] = {  # what differs from SMALL
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": LATENT | {"layer_types": LINEAR},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere2": {"logit_scale": 0.25},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "layer_types": ["full_attention"] * 4,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32},
    },
    "deepseek_v2": LATENT | {"head_dim": 8},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "dots3_note_text": LATENT,
    "falcon_h1": {"lm_head_multiplier": 0.5, "embedding_multiplier": 2.0},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": MIXED,
        "final_logit_softcapping": 2.0,
        "laurel_rank": 4,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4 | {"use_bidirectional_attention": None},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "granitemoehybrid": {"layer_types": LINEAR},
    "hyperclovax": {"logits_scaling": 0.25, "attention_multiplier": 0.3},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LATENT | {"layer_types": LINEAR},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "longcat_flash": LATENT,
    "mamba2": {"num_heads": 4, "head_dim": 8, "expand": 1},
    "minicpm3": LATENT,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "vaultgemma": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5},
    "youtu": LATENT,
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
# case -> its architecture and what differs from that one's OWN
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    ),
    "phi3, longrope across its switch": (
        "phi3",
        {
            "rope_parameters": LONGROPE | {"original_max_position_embeddings": 32},
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen3, no windows": ("qwen3", {"use_sliding_window": False, "layer_types": None}),
    "qwen2_moe, no windows": ("qwen2_moe", {"use_sliding_window": False, "layer_types": None}),
    "phimoe, no windows": ("phimoe", {"sliding_window": None}),
    "deepseek_v3, equal widths": ("deepseek_v3", {"v_head_dim": 16}),
    "gemma4_text, shared": ("gemma4_text", {"num_kv_shared_layers": 2}),
    "falcon, alibi": ("falcon", {"alibi": True}),
}
SIGHT: dict[str, Any] = {  # of a vision tower, whatever it calls them
    "depth": 2, "num_hidden_layers": 2, "hidden_size": 32, "num_heads": 4, "num_attention_heads": 4,
    "intermediate_size": 32,
    "out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "image_size": 56, "patch_size": 14, "window_size": 56, "projection_dim": 32,
    "vision_output_dim": 32, "head_dim": 8,
    "embed_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    "num_key_value_heads": 4, "mlp_ratio": 1,
}  # fmt: skip
VISION: dict[str, tuple[str, str]] = {  # of text and of images: the two models inside it
    "gemma3": ("gemma3_text", "siglip_vision_model"),
    "gemma4": ("gemma4_text", "gemma4_vision"),
    "glm4v": ("glm4v_text", "glm4v_vision"),
    "internvl": ("qwen2", "internvl_vision"),
    "kimi_k25": ("deepseek_v3", "kimi_k25_vision"),
    "llama4": ("llama4_text", "llama4_vision_model"),
    "llava": ("llama", "clip_vision_model"),
    "llava_next": ("llama", "clip_vision_model"),
    "llava_onevision": ("qwen2", "siglip_vision_model"),
    "mistral3": ("mistral", "pixtral"),
    "qwen2_vl": ("qwen2_vl_text", "qwen2_vl_vision"),
    "qwen2_5_vl": ("qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_vision"),
    "qwen3_vl": ("qwen3_vl_text", "qwen3_vl_vision"),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
OWN |= {
    name: {"rope_parameters": MROPE}
    for name in (
        "glm4v_text",
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
    )
}
TOKENS = {
    name: 1000 + index
    for index, name in enumerate(
        (
            "image_token_id",
            "video_token_id",
            "image_token_index",
            "boi_token_index",
            "eoi_token_index",
            "audio_token_index",
        )
    )
}
LEFT_OUT = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot",
    "blenderbot-small", "camembert",
    "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "musicgen",
    "musicgen_melody",
    "pegasus", "plbart", "prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer",
    "trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod", "cpmant", "ctrl",
    "dots3_note_text",
    "gemma4_assistant", "gemma4_unified_assistant", "git", "moss_transcribe_diarize",
    "phi4_multimodal", "xlstm", "zamba",
}  # fmt: skip
"""Encoders; and parts of other models, and those that have no small size."""


def config_of(architecture: str, own: dict[str, Any]) -> Any:
    """A small configuration of an architecture."""
    return AutoConfig.for_model(
        architecture, **make_small_settings(CONFIG_MAPPING[architecture]) | own
    )


def make_small_settings(config_class: Any) -> dict[str, Any]:
    """Return the settings that make a configuration small."""
    has = {*config_class.__dataclass_fields__}
    settings = {key: value for key, value in SMALL.items() if key in has}
    if {"layer_types", "sliding_window"} <= has:
        kinds = {*(config_class().layer_types or [])}
        if kinds and kinds <= {"sliding_attention", "full_attention"}:
            settings["layer_types"] = MIXED
    return settings


def config_named(name: str) -> Any:
    if name in VISION:
        return make_vision_config(name, *VISION[name])
    architecture, own = VARIANTS.get(name, (name, {}))
    return config_of(architecture, OWN.get(architecture, {}) | own)


def make_vision_config(name: str, text: str, vision: str) -> Any:
    """A small configuration of a model of text and images."""
    parts = {part: CONFIG_MAPPING[part].__dataclass_fields__ for part in (name, vision)}
    sight = {key: value for key, value in SIGHT.items() if key in parts[vision]} | {
        "model_type": vision
    }
    tokens = {key: value for key, value in TOKENS.items() if key in parts[name]}
    words = config_of(text, OWN.get(text, {})).to_dict()
    return AutoConfig.for_model(name, text_config=words, vision_config=sight, **tokens)


def names() -> list[str]:
    architectures = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - LEFT_OUT
    return [*sorted(name for name in architectures if is_text(name)), *VARIANTS, *VISION]


def is_text(architecture: str) -> bool:
    """Tell whether a configuration is of one model of text, not of several models."""
    return not any(
        name.endswith(("text_config", "decoder_config"))
        for name in CONFIG_MAPPING[architecture].sub_configs
    )


def auto_class(config: Any) -> Any:
    return (
        AutoModelForCausalLM
        if type(config) in AutoModelForCausalLM._model_mapping
        else AutoModelForImageTextToText
    )


def save_small(name: str, folder: Path) -> None:
    """Write a random model, whose weights are large, so that attention is sharp and a wrong mask
    shows.
    """
    torch.manual_seed(0)
    config = config_named(name)
    model = auto_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = (
            1.5 * noise * parameter.shape[-1] ** -0.5
            if noise.dim() > 1
            else parameter.data + 0.1 * noise
        )
    model.save_pretrained(folder)
