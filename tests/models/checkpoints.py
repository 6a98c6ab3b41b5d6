"""Small checkpoints whose weights are stored in few bits, in the layouts that people publish."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.loading import load_tokenizer

WIDTH = 64
INNER = 128
VOCAB = 2048
BLOCK = 32
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}


def save_unquantized(folder: Path, kind: str = "llama", **own: Any) -> dict[str, Tensor]:
    """Random weights, as numbers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{"intermediate_size": INNER, **SIZE, **own})
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = 0.9 * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
    model.save_pretrained(folder)
    load_tokenizer(str(TINY_DIRECTORY), False, True).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def _save_checkpoint(
    folder: Path, weights: dict[str, Tensor], quantization: dict[str, Any]
) -> None:
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def save_fp8(folder: Path) -> None:
    """Save weights as DeepSeek-V3's: float8 with a scale for every block of 32 by 32."""
    tensors = {}
    for name, weight in save_unquantized(folder).items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            blocks = weight.view(weight.shape[0] // BLOCK, BLOCK, -1, BLOCK)
            scales = blocks.abs().amax((1, 3)) / 448
            tensors[name] = (
                (blocks / scales[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
            )
            tensors[f"{name}_scale_inv"] = scales
    _save_checkpoint(
        folder,
        tensors,
        {
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
        },
    )


def save_mxfp4(folder: Path) -> None:
    """Save weights as gpt-oss's: experts in fours of bits, 32 of which share an exponent."""
    own = {
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    }
    tensors = {}
    for name, weight in save_unquantized(folder, "gpt_oss", **own).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weight
            continue
        count, width_in, width_out = weight.shape
        tensors[f"{name}_blocks"] = torch.randint(
            256, (count, width_out, width_in // BLOCK, BLOCK // 2), dtype=torch.uint8
        )
        # 2^-3
        tensors[f"{name}_scales"] = torch.full(
            (count, width_out, width_in // BLOCK), 124, dtype=torch.uint8
        )
    unquantized = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    _save_checkpoint(
        folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": unquantized}
    )


def save_compressed(folder: Path) -> None:
    """Save weights as vLLM's own: integers of 8 bits with a scale for every row, and inputs
    rounded token by token.
    """
    tensors = {}
    for name, weight in save_unquantized(folder).items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            scales = weight.abs().amax(1, keepdim=True) / 127
            tensors[name], tensors[f"{name}_scale"] = (
                (weight / scales).round().to(torch.int8),
                scales,
            )
    bits: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": bits | {"strategy": "channel"},
        "input_activations": bits | {"strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
    }
    _save_checkpoint(
        folder, tensors, quantization | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    )


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
}


def save_gguf_file(
    folder: Path, chat_template: str | None = None
) -> tuple[Path, dict[str, Tensor]]:
    """Save a Llama as llama.cpp stores it, in blocks of 32 integers (Q8_0); return its file and
    the dequantized weights.
    """
    weights = save_unquantized(folder / "whole")
    path = folder / "small-q8_0.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "context_length": 256,
        "embedding_length": WIDTH,
        "block_count": 2,
        "feed_forward_length": INNER,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    for key, value in {"head_count": 2, "head_count_kv": 1}.items():
        writer.add_uint32(f"llama.attention.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    tokenizer = json.loads((TINY_DIRECTORY / "tokenizer.json").read_text())
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word.startswith("<|") else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(2)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, weight in weights.items():
        for hf_name, gguf_name in NAMES.items():
            name = name.replace(hf_name, gguf_name)
        kind = gguf.GGMLQuantizationType.Q8_0 if weight.dim() > 1 else gguf.GGMLQuantizationType.F32
        values = weight
        # llama.cpp turns pairs of neighbours where transformers turns halves
        if ".attn_q." in name or ".attn_k." in name:
            heads = len(weight) // 32
            values = weight.view(heads, 2, 16, WIDTH).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(name, gguf.quants.quantize(values.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights
