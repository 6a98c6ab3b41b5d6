"""Small random encoder-decoder models, saved with the tiny tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from lab.small_targets.make_encoder_decoder import write_sound
from spectrain.models.bundled import load_tiny_tokenizer
from tests.factories import add_noise

SOUND = "{}.wav"
SHAPE = {
    "decoder_start_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "vocab_size": 2048,
    "d_model": 32,
    "tie_word_embeddings": False,
}
ATTENTION = {
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
KINDS: dict[str, Any] = {
    "t5": (
        T5ForConditionalGeneration,
        T5Config,
        {"d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 4},
    ),
    "bart": (
        BartForConditionalGeneration,
        BartConfig,
        {**ATTENTION, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 96,
            "decoder_start_token_id": 2},
    ),
    "whisper": (
        WhisperForConditionalGeneration,
        WhisperConfig,
        {
            **ATTENTION, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 96, "decoder_start_token_id": 1, "bos_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
}  # fmt: skip


def save_model(kind: str, folder: Path) -> Path:
    """Write a random model whose answers vary; beside Whisper, three sounds of noise."""
    model_class, config_class, changes = KINDS[kind]
    torch.manual_seed(3)
    model = model_class(config_class(**{**SHAPE, **changes}))
    add_noise((parameter for parameter in model.parameters() if parameter.dim() > 1), 1.5)
    with torch.no_grad():
        # Tied embeddings would make a token its own successor.
        model.get_input_embeddings().weight.mul_(0.05)
    if kind == "bart":
        model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    load_tiny_tokenizer().save_pretrained(folder)
    if kind == "whisper":
        extractor = WhisperFeatureExtractor(
            feature_size=8, hop_length=800, n_fft=1600, chunk_length=1
        )
        extractor.save_pretrained(folder)
        for number in range(3):
            write_sound(
                folder / SOUND.format(number),
                np.random.default_rng(number).normal(size=16000) * 0.1,
            )
    return folder
