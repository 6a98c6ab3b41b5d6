"""A target whose decoder layers hold 4-bit codes and nothing else: what QSpec verifies with, and
drafts with.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from spectrain.errors import UserError
from spectrain.models.architectures.quantized import has_dense_weight
from spectrain.models.loading import load_hf, load_smollm2, load_tiny
from spectrain.models.target import Target

from .quantized_kv import Bits, CodedLinear

SHIPPED: dict[str, Any] = {"tiny": load_tiny, "smollm2": load_smollm2}


def load_coded(
    # Target whose weights are rounded: tiny, smollm2, a name on the hub, or a directory in
    # transformers format.
    model: str = "smollm2",
    # Weight type before rounding and type of the products: float32, bfloat16 or float16; auto takes
    # the device's fast one.
    dtype: str = "auto",
    # Device such as cpu or cuda:0; auto takes the GPU of this process, or the CPU where there is
    # none.
    device: str = "auto",
    # File with a chat template in place of the tokenizer's own; null keeps the tokenizer's.
    chat_template: str | None = None,
    # Arguments of the chat template in training, scoring, chat and regeneration, as in
    # {enable_thinking: true}.
    template_kwargs: dict[str, Any] | None = None,
) -> Target:
    """Load a target and replace the weights of its decoder layers by 4-bit codes in groups of 32,
    dequantized at every product.

    Embeddings, norms and the output layer stay as they are. The rounded model is the target:
    outputs are its own.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device, "chat_template": chat_template}
    options["template_kwargs"] = template_kwargs
    target: Target = SHIPPED[model](**options) if model in SHIPPED else load_hf(model, **options)
    replace_linears(target, 4)
    target.name += "-int4"
    return target


def replace_linears(target: Target, bits: Bits) -> None:
    """Replace the linear layers of a target's decoder layers by codes; raise UserError where
    they have no dense weights.
    """
    linears = {
        name: child for name, child in target.layers.named_modules() if isinstance(child, nn.Linear)
    }
    if not linears or not all(map(has_dense_weight, linears.values())):
        raise UserError(
            f"target.model={target.name}: its layers have no linear weights to round; use another "
            "model"
        )
    for name, linear in linears.items():
        parent, _, attribute = name.rpartition(".")
        setattr(target.layers.get_submodule(parent), attribute, CodedLinear(linear, bits))
