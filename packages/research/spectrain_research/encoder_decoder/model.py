"""An encoder-decoder model of transformers in the form of a causal LM, whose texts begin with the
source.

Shapes: B batch, T tokens, E source positions, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutput

from spectrain.errors import UserError
from spectrain.models.cache_arguments import cache_argument

from .sources import Boundary, SourceReader, TokenReader, split_rows

LAYER_LISTS = ("block", "layers")
FINAL_NORMS = ("final_layer_norm", "layer_norm")
DEFAULT_MAX_LENGTH = 1 << 14  # for positions that are relative, as T5's


class DecoderParts(nn.Module):
    """The parts of a decoder by the names that targets have: `layers` and `norm`, which without
    a final norm is empty.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.layers: nn.ModuleList = next(
            getattr(decoder, name) for name in LAYER_LISTS if hasattr(decoder, name)
        )
        norm = next(
            (getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)), None
        )
        self.norm: nn.Module = nn.Identity() if norm is None else norm


class SourcePrefixLM(nn.Module):
    """The model with the methods of a causal LM. `forward` and `generate` run it unmodified, so
    they are the reference.
    """

    _supports_sdpa = True

    def __init__(self, model: Any, reader: SourceReader, end_id: int) -> None:
        super().__init__()
        settings: Any = model.config
        if not settings.is_encoder_decoder:
            raise UserError("target: the model has no encoder; use target=hf")
        start = model.generation_config.decoder_start_token_id
        start = settings.decoder_start_token_id if start is None else start
        self.model = model
        self.reader = reader
        self.boundary = Boundary(end_id, start)
        self.parts = DecoderParts(model.get_decoder())
        self.config = describe_decoder(model)
        self.generation_config = model.generation_config
        bias = getattr(model, "final_logits_bias", None)
        self.output: nn.Linear = model.get_output_embeddings()
        if bias is not None:
            weight = self.output.weight
            self.output = nn.Linear(weight.shape[1], weight.shape[0])
            self.output.weight = weight
            self.output.bias = nn.Parameter(bias[0].to(weight.dtype))

    def get_decoder(self) -> nn.Module:
        return self.parts

    def get_input_embeddings(self) -> nn.Module:
        embedding: nn.Module = self.model.get_decoder().get_input_embeddings()
        return embedding

    def get_output_embeddings(self) -> nn.Linear:
        return self.output

    def encode(
        self, sources: list[list[int]], device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        """Return the encoder's states [B, E, D] and which of them are real [B, E]; None where
        all are.
        """
        inputs = self.reader.encoder_inputs(sources, device)
        dtype = next(self.model.parameters()).dtype
        inputs = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in inputs.items()
        }
        mask = inputs.get("attention_mask")
        states: Tensor = self.model.get_encoder()(**inputs).last_hidden_state
        return states, None if mask is None else mask.bool()

    def forward(self, input_ids: Tensor, **options: Any) -> CausalLMOutput:
        """Return logits [B, T, V] of texts of one row each; those of the source are zero."""
        rows = []
        for row in input_ids.tolist():
            (source,), (answer,) = split_rows([row], self.boundary)
            inputs = self.reader.encoder_inputs([source], input_ids.device)
            output = self.model(
                **inputs, decoder_input_ids=input_ids[:1].new_tensor([answer]), use_cache=False
            )
            rows.append(nn.functional.pad(output.logits[0], (0, 0, len(source), 0)))
        return CausalLMOutput(logits=torch.stack(rows))

    def generate(
        self, tokens: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Return a text [1, T] with what transformers generates after it."""
        (source,), _ = split_rows(tokens.tolist(), self.boundary)
        inputs = self.reader.encoder_inputs([source], tokens.device)
        given = tokens[:, len(source) :]
        if self.reader.reads_tokens:
            # transformers names the encoder's tokens `inputs`, and looks for a start token of its
            # own.
            options |= {"decoder_start_token_id": self.boundary.start}
        output = generate_plainly(self.model, inputs, given, options)
        return torch.cat([tokens, output[:, given.shape[1] :]], dim=1)

    def set_experts_implementation(self, name: str) -> None:
        """Do nothing: there are no experts."""

    def save_pretrained(self, path: Any) -> None:
        self.model.save_pretrained(path)


def generate_plainly(
    model: Any, inputs: dict[str, Tensor], given: Tensor, options: dict[str, Any]
) -> Tensor:
    """Call transformers' `generate` after given tokens of the decoder. Whisper's own method splits
    sound into windows and forces tokens, so the one that all models share is called."""
    from transformers import GenerationMixin

    # Without one, transformers makes a cache of as many layers as the encoder has.
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    options = {**options, cache_argument(model): cache}
    output: Tensor = GenerationMixin.generate(model, **inputs, decoder_input_ids=given, **options)
    return output


@dataclass(frozen=True)
class DecoderShape:
    """The numbers of a decoder, whatever its configuration calls them."""

    layers: int
    heads: int
    inner: int
    head_dim: int
    max_length: int


def read_shape(config: Any) -> DecoderShape:
    """Return the shape of a decoder from the configuration of its model."""

    def first(*names: str) -> int | None:
        return next(
            (value for name in names if isinstance(value := getattr(config, name, None), int)), None
        )

    heads = first("decoder_attention_heads", "num_heads", "num_attention_heads") or 1
    return DecoderShape(
        layers=first("num_decoder_layers", "decoder_layers", "num_layers") or 1,
        heads=heads,
        inner=first("decoder_ffn_dim", "d_ff") or 4 * config.d_model,
        head_dim=first("d_kv") or config.d_model // heads,
        max_length=first("max_target_positions", "max_position_embeddings") or DEFAULT_MAX_LENGTH,
    )


def describe_decoder(model: Any) -> LlamaConfig:
    """Return the decoder's numbers by the names of a Llama, which drafters with layers of their
    own read.
    """
    config = model.config
    shape = read_shape(model.config)
    described = LlamaConfig(
        vocab_size=model.get_output_embeddings().weight.shape[0],
        hidden_size=config.d_model,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_length,
        eos_token_id=config.eos_token_id,
        bos_token_id=getattr(config, "bos_token_id", None),
        pad_token_id=config.pad_token_id,
    )
    if getattr(config, "scale_decoder_outputs", False):
        described.logit_scale = config.d_model**-0.5
    return described


def make_reader(model: Any, tokenizer: Any, path: str) -> SourceReader:
    """Return what reads the sources of a model: text, or sound where its encoder takes mel
    features.
    """
    if model.main_input_name != "input_features":
        return TokenReader(model.config.pad_token_id or 0)
    from pathlib import Path

    from transformers import AutoFeatureExtractor

    from .sources import SoundReader

    return SoundReader(tokenizer, AutoFeatureExtractor.from_pretrained(path), Path.cwd())
