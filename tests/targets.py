"""Targets with few layers, for tests that ask whether two ways of computing agree: a forward's layers are most of its cost."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spectrain.models.loading import load_tiny
from spectrain.models.target import Target


def cut_tiny(num_layers: int) -> Target:
    """Return the tiny target's first layers, its final norm and its head; its path is the full target's. With three layers its
    answers are as varied as the full target's, with four or more they repeat themselves."""
    target = load_tiny()
    target.decoder.layers = target.layers[:num_layers]
    target.config.num_hidden_layers = num_layers
    target.config.layer_types = None
    return target


def make_random_target(vocab_size: int, num_layers: int = 1, seed: int = 0, sharpness: float = 1.0) -> Target:
    """A random Llama of width 16 whose tokens are numbers, without a stop token; its logits are multiplied by `sharpness`."""
    words = Tokenizer(WordLevel({str(number): number for number in range(vocab_size)}))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=num_layers, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return Target(model, tokenizer, "random", "")
