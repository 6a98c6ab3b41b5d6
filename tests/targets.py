"""Targets with few layers, for tests that ask whether two ways of computing agree: a forward's
layers are most of its cost.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spectrain.models.loading import load_tiny
from spectrain.models.target import Target


def cut_tiny(num_layers: int) -> Target:
    """Return the tiny target's first layers, its final norm and its head; its path is the full
    target's. With three layers its answers are as varied as the full target's, with four or more
    they repeat themselves."""
    target = load_tiny()
    target.decoder.layers = target.layers[:num_layers]
    target.config.num_hidden_layers = num_layers
    target.config.layer_types = None
    return target


def make_random_target(
    vocab_size: int, num_layers: int = 1, seed: int = 0, sharpness: float = 1.0
) -> Target:
    """A random Llama of width 16 whose tokens are numbers, without a stop token; its logits are
    multiplied by `sharpness`.
    """
    words = Tokenizer(WordLevel({str(number): number for number in range(vocab_size)}))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return Target(model, tokenizer, "random", "")


@contextmanager
def count_attention_nodes(target: Target) -> Iterator[list[list[int]]]:
    """Record the number of nodes of each call of each layer's attention; a skipped layer does
    not call its attention.
    """
    calls: list[list[int]] = [[] for _ in target.layers]

    def make_hook(layer: int) -> Any:
        def record_nodes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[layer].append((args[0] if args else kwargs["hidden_states"]).shape[1])

        return record_nodes

    attentions: list[Any] = [layer.self_attn for layer in target.layers]
    handles = [
        each.register_forward_pre_hook(make_hook(index), with_kwargs=True)
        for index, each in enumerate(attentions)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
