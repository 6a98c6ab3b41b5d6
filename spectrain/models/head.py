"""The parts of the target that drafters borrow: embedding and output layer. Shapes: D width, V
vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.kernels.linear_divergence import Projection
from spectrain.kernels.row_kl import scale_and_cap

LOGIT_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
LOGIT_DIVISOR = "logits_scaling"
MULTIPLYING_MODELS = ("hyperclovax",)
"""Model types that multiply by the number by which other types divide."""


def logit_scale(config: Any) -> float:
    """Return the factor by which a model multiplies the products of its output layer."""
    divisor = getattr(config, LOGIT_DIVISOR, None) or 1.0
    scale = divisor if config.model_type in MULTIPLYING_MODELS else 1 / divisor
    for name in LOGIT_MULTIPLIERS:
        scale *= getattr(config, name, None) or 1.0
    return scale


class Head:
    """The embedding and the output layer of the target, which drafters borrow.

    It is not a module, so a drafter that holds one neither owns nor saves the weights of the
    target.
    """

    def __init__(self, model: nn.Module) -> None:
        self.embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self.output: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
        config: Any = model.config
        text = config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.scale = logit_scale(text)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Head":
        """Return the same head: a copied drafter borrows from the same target."""
        return self

    @property
    def vocab_size(self) -> int:
        return self.output.weight.shape[0]

    @property
    def num_embeddings(self) -> int:
        """The number of tokens that the target can read; those of an embedding of another kind
        are its outputs.
        """
        return (
            self.embedding.num_embeddings
            if isinstance(self.embedding, nn.Embedding)
            else self.vocab_size
        )

    @property
    def width(self) -> int:
        return self.output.weight.shape[1]

    @property
    def projection(self) -> Projection:
        """Return the output layer in the form that losses take."""
        return Projection(self.output.weight, self.output.bias, self.scale, self.softcap)

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]"""
        return self.embedding(tokens)

    def all_embeddings(self, device: torch.device) -> Tensor:
        """Return the embedding of every token, [V, D], through a look-up, because some models
        scale what they look up.
        """
        return self.embed(torch.arange(self.vocab_size, device=device))

    def logits(self, final: Tensor, rows: Tensor | None = None, upcast: bool = True) -> Tensor:
        """Return logits [..., V] in float32 from "final" features; with `rows`, of these vocabulary
        entries only. Without `upcast` the logits keep the type of the output layer where nothing
        scales or caps them."""
        if rows is None:
            logits = self.output(final)
        else:
            bias = self.output.bias
            logits = F.linear(final, self.output.weight[rows], None if bias is None else bias[rows])
        return (
            logits
            if not upcast and self.scale == 1 and self.softcap is None
            else self.scale_and_cap(logits.float())
        )

    def scale_and_cap(self, product: Tensor) -> Tensor:
        """Scale and cap products of the output layer [..., V], in float32."""
        return scale_and_cap(product, self.scale, self.softcap)
