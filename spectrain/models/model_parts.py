"""The parts of a Hugging Face causal LM: its decoder, the decoder's layers, embedding and output
layer.
"""

from typing import Any

import torch
from torch import nn

from spectrain.errors import UserError

from .forward_plan import SublayerKind
from .head import Head
from .limits import find_rope_switch, max_text_length

LAYER_LIST_NAMES = ("layers", "h", "blocks")
"""The attributes by which decoders name their layers."""
LAYER_INPUT_NAMES = ("per_layer_model_projection", "per_layer_projection_norm")
"""Modules of decoders that only feed the layers."""
SUBLAYER_NAMES: dict[SublayerKind, str] = {"attention": "self_attn", "mlp": "mlp"}


class ModelParts(nn.Module):
    """A frozen model and its parts, whatever their names in its classes."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.name = name
        # Whether all processes run the same layers at the same time, if need be on no row.
        self.runs_in_lockstep = False
        self.layer_list_name = layer_list_name(find_decoder(model)) or ""
        if not self.layer_list_name:
            raise UserError(
                f"target {name}: its decoder has no list of layers, so features cannot be "
                "captured from it"
            )
        self.rope_switch = find_rope_switch(self.config)

    @property
    def decoder(self) -> nn.Module:
        """Return the model without its output layer."""
        decoder = self.model.get_decoder()  # type: ignore[operator]
        return decoder if self.layer_list_name in decoder._modules else find_decoder(self.model)

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder._modules[self.layer_list_name]  # type: ignore[return-value]

    @property
    def config(self) -> Any:
        config: Any = self.model.config
        return config.get_text_config()

    @property
    def head(self) -> Head:
        return Head(self.model)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def width(self) -> int:
        return int(self.config.hidden_size)

    @property
    def max_length(self) -> int:
        """Return the longest text, in tokens, that decodes as with transformers."""
        return max_text_length(self.config)

    @property
    def device(self) -> torch.device:
        return self._embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding_weight.dtype

    @property
    def _embedding_weight(self) -> torch.Tensor:
        """Return a weight that every target has, even without its layers."""
        embedding: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        return next(embedding.parameters())

    @property
    def final_norm(self) -> nn.Module:
        """Return the norm before the output layer; raise UserError where the decoder has other
        modules there too.
        """
        left_out = {self.layer_list_name, *LAYER_INPUT_NAMES}
        outside = [
            (name, part) for name, part in self.decoder.named_children() if name not in left_out
        ]
        norms = [
            part
            for _, part in outside
            if [*part.parameters()] and not isinstance(part, nn.Embedding)
        ]
        if all(weight.shape == (self.width,) for part in norms for weight in part.parameters()):
            # A norm without weights has only its name.
            norms = norms or [part for name, part in outside if name == "norm"]
            if norms:
                return norms[-1]
        raise UserError(
            f"target {self.name}: its final norm cannot be told from other modules; use "
            "target.parts=all"
        )

    def get_sublayer(self, layer: int, kind: SublayerKind) -> nn.Module:
        """Return the attention or MLP module of a layer."""
        module = getattr(self.layers[layer], SUBLAYER_NAMES[kind], None)
        if not isinstance(module, nn.Module) or isinstance(module, nn.ModuleList):
            raise UserError(
                f"target {self.name}: its layers have no {kind} of their own to skip; skip whole "
                "layers"
            )
        return module


def find_decoder(model: Any) -> nn.Module:
    """Return the part of a model that holds the decoder layers but no output layer; in a
    multimodal model, that of the text.
    """
    decoder: nn.Module = model.get_decoder()
    candidates = (decoder, getattr(decoder, "model", None), getattr(model, "base_model", None))
    return next(
        (
            module
            for module in candidates
            if module is not None and layer_list_name(module) is not None
        ),
        decoder,
    )


def layer_list_name(decoder: nn.Module) -> str | None:
    """Return the attribute of a decoder that lists its layers; None where it has none."""
    return next(
        (
            name
            for name in LAYER_LIST_NAMES
            if isinstance(getattr(decoder, name, None), nn.ModuleList)
        ),
        None,
    )


def find_layers(decoder: nn.Module) -> nn.ModuleList | None:
    name = layer_list_name(decoder)
    return None if name is None else getattr(decoder, name)
