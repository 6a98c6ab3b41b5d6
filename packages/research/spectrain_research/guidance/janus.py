"""Janus as a causal LM of image codes: its language model, with the embeddings and the output layer
that it has for codes.

Code k has the token id V + k, after the V tokens of text. Shapes: V text tokens, C codes, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from spectrain.errors import UserError

from .model import FORBIDDEN


class CodeEmbedding(nn.Module):
    """The embedding of text tokens, and after them that of codes, which an aligner maps to the
    language model's width.
    """

    def __init__(self, text: nn.Embedding, codes: nn.Embedding, aligner: nn.Module) -> None:
        super().__init__()
        self.text, self.codes, self.aligner = text, codes, aligner

    def forward(self, tokens: Tensor) -> Tensor:
        num_text = self.text.num_embeddings
        embedded: Tensor = self.aligner(self.codes((tokens - num_text).clamp(min=0)))
        return torch.where(
            (tokens < num_text)[..., None], self.text(tokens.clamp(max=num_text - 1)), embedded
        )


def convert_janus(model: Any) -> LlamaForCausalLM:
    """Make a causal LM of a Janus model, whose modules it takes over. It writes images and no text.

    The final norm goes on through the first layer of the head of codes, so that the output layer is
    linear.
    """
    parts = model.model
    text = model.config.text_config
    head = parts.generation_head
    width = text.hidden_size
    num_text = parts.language_model.embed_tokens.num_embeddings
    num_codes = head.vision_head.out_features
    if head.vision_head.in_features != width:
        raise UserError(
            f"target: its head of codes is {head.vision_head.in_features} wide, and its layers "
            f"{width}; use another"
        )
    weight = head.vision_head.weight.detach()
    output = nn.Linear(width, num_text + num_codes, dtype=weight.dtype)
    with torch.no_grad():
        output.weight.zero_()
        output.bias.fill_(FORBIDDEN)
        output.weight[num_text:], output.bias[num_text:] = weight, head.vision_head.bias
    text.vocab_size = num_text + num_codes
    text.tie_word_embeddings = False
    with torch.device("meta"):
        shell = LlamaForCausalLM(text)
    language_model = parts.language_model
    language_model.embed_tokens = CodeEmbedding(
        language_model.embed_tokens, parts.generation_embeddings, parts.generation_aligner
    )
    language_model.norm = nn.Sequential(language_model.norm, head.proj_out, head.activation_fn)
    shell.model = language_model
    shell.lm_head = output
    shell.generation_config = model.generation_config
    return shell
