"""A causal LM of codes with classifier-free guidance. Shapes: B batch, T tokens, D width, V
vocabulary.

Guidance mixes the logits of a text with those of the same text without its condition: l = l_u + s
(l_c - l_u).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.modeling_outputs import CausalLMOutput

FORBIDDEN = -1e4
"""Added to the logits of tokens that are no codes; in half precision minus infinity would spoil
differences.
"""


@dataclass(frozen=True)
class Guidance:
    """How a model of codes is guided."""

    scale: float  # 1 is no guidance
    begin: int  # token after which codes follow; what stands before it is the condition
    null: int  # token in place of each token of the condition
    # tokens of a condition that stay, such as the text's first
    unchanged: frozenset[int] = frozenset()

    def drop_condition(self, tokens: Sequence[int]) -> list[int]:
        """Return a text without its condition, of the same length."""
        end = self.find_begin(tokens)
        return [
            *(token if token in self.unchanged else self.null for token in tokens[:end]),
            *tokens[end:],
        ]

    def find_begin(self, tokens: Sequence[int]) -> int:
        """Return the index of the first token that begins codes; the number of tokens where
        there is none.
        """
        return next(
            (index for index, token in enumerate(tokens) if token == self.begin), len(tokens)
        )


class CodesOnly(LogitsProcessor):
    """Adds a bias to all logits, by which only codes remain."""

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias


class GuidedLM(nn.Module):
    """A causal LM whose output layer allows codes only. `forward` and `generate` guide the
    unmodified model as transformers does, so they are the reference."""

    def __init__(self, model: Any, guidance: Guidance, allowed: Tensor) -> None:
        super().__init__()
        self.model, self.guidance = model, guidance
        weight = model.get_output_embeddings().weight
        own_bias = getattr(model.get_output_embeddings(), "bias", None)
        bias = torch.full((len(weight),), FORBIDDEN, device=weight.device, dtype=weight.dtype)
        bias[allowed] = 0
        self.register_buffer("codes_bias", bias, persistent=False)
        self.output = nn.Linear(weight.shape[1], len(weight), device="meta")
        self.output.weight = weight
        self.output.bias = nn.Parameter(bias if own_bias is None else bias + own_bias)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def get_output_embeddings(self) -> nn.Linear:
        return self.output

    def drop_conditions(self, tokens: Tensor) -> Tensor:
        """Return texts [B, T] without their conditions."""
        return tokens.new_tensor([self.guidance.drop_condition(row) for row in tokens.tolist()])

    def forward(self, input_ids: Tensor, **options: Any) -> CausalLMOutput:
        """Return the guided logits [B, T, V] of texts."""
        logits = self.model(input_ids, use_cache=False).logits
        if self.guidance.scale != 1:
            without = self.model(self.drop_conditions(input_ids), use_cache=False).logits
            logits = without + self.guidance.scale * (logits - without)
        return CausalLMOutput(logits=logits + self.codes_bias)

    def generate(self, tokens: Tensor, **options: Any) -> Tensor:
        """Return a text [1, T] with what transformers generates after it under guidance."""
        if self.guidance.scale != 1:
            options |= {
                "guidance_scale": self.guidance.scale,
                "negative_prompt_ids": self.drop_conditions(tokens),
            }
        processors = LogitsProcessorList([CodesOnly(self.codes_bias.float())])
        output: Tensor = self.model.generate(tokens, logits_processor=processors, **options)
        return output
