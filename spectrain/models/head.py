"""The ends of the target that drafters borrow. Shapes: D width, V vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.kernels.linear_divergence import Projection

LOGIT_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
LOGIT_DIVISOR = "logits_scaling"
MULTIPLYING_MODELS = ("hyperclovax",)  # model types that multiply by what other ones divide by


def logit_scale(config: Any) -> float:
    """What a model multiplies the products of its output layer by."""
    divisor = getattr(config, LOGIT_DIVISOR, None) or 1.0
    scale = divisor if config.model_type in MULTIPLYING_MODELS else 1 / divisor
    for name in LOGIT_MULTIPLIERS:
        scale *= getattr(config, name, None) or 1.0
    return scale


class Head:
    """The ends of the target that drafters borrow: its embedding and its output layer.

    Not a module, so a drafter that keeps one neither owns nor saves what is the target's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self.output: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
        config: Any = model.config
        text = config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.scale = logit_scale(text)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Head":
        """A copied drafter borrows from the same target."""
        return self

    @property
    def vocab_size(self) -> int:
        return self.output.weight.shape[0]

    @property
    def width(self) -> int:
        return self.output.weight.shape[1]

    @property
    def projection(self) -> Projection:
        """The output layer as a loss takes it."""
        return Projection(self.output.weight, self.output.bias, self.scale, self.softcap)

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]"""
        return self.embedding(tokens)

    def all_embeddings(self, device: torch.device) -> Tensor:
        """Of every token, [V, D], looked up on a device, for some models scale what they look up."""
        return self.embed(torch.arange(self.vocab_size, device=device))

    def logits(self, final: Tensor, rows: Tensor | None = None, upcast: bool = True) -> Tensor:
        """Logits [..., V] in float32 from "final" features; with `rows`, of these vocabulary entries only. Without `upcast`
        they stay as the output layer gives them where nothing scales or caps them."""
        if rows is None:
            logits = self.output(final)
        else:
            bias = self.output.bias
            logits = F.linear(final, self.output.weight[rows], None if bias is None else bias[rows])
        return logits if not upcast and self.scale == 1 and self.softcap is None else self.scale_and_cap(logits.float())

    def scale_and_cap(self, product: Tensor) -> Tensor:
        """Products of the output layer [..., V], in float32, scaled and capped."""
        logits = (
            product if self.scale == 1 else product * self.scale
        )  # a pass over a verified tree's logits, where it can be saved
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
