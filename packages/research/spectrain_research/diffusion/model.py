"""A masked language model: attention in both directions, an embedding for the mask, and heads that
choose and edit.

Shapes: B batch, T tokens, D width, V vocabulary without the mask.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain.config.plain_files import read_json_object
from spectrain.drafters.layers.llama_layer import Attention, Mlp, Rotary
from spectrain.errors import UserError
from spectrain.files import atomic_write
from spectrain.kernels.fused_attention import fused_attention
from spectrain.models.check import check_weights
from spectrain.models.checked_tensors import read_tensors
from spectrain.training.checkpoints import find_mismatches

KEEP, REPLACE, DELETE, INSERT = range(4)
"""What the edit head says of a token: keep it, replace it, delete it, or insert another one
after it.
"""


@dataclass(frozen=True)
class MaskedConfig:
    """The shape of a masked language model."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    vocab_size: Annotated[int, Field(ge=1, le=10_000_000)]
    width: Annotated[int, Field(ge=1, le=1 << 17)] = 128
    num_layers: Annotated[int, Field(ge=1, le=256)] = 4
    num_heads: Annotated[int, Field(ge=1, le=1 << 16)] = 4
    mlp_width: Annotated[int, Field(ge=1, le=1 << 24)] = 384
    max_length: Annotated[int, Field(ge=1, le=1 << 30)] = 512
    # Heads of keys and values; None means as many as heads of queries.
    num_kv_heads: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    # Whether the state of a token predicts the next one, as in the causal model that the weights
    # were taken from.
    predicts_next: bool = False
    norm_eps: Annotated[float, Field(gt=0, le=0.01)] = 1e-6

    def __post_init__(self) -> None:
        num_kv_heads = self.num_kv_heads or self.num_heads
        if self.width % self.num_heads or self.num_heads % num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads, {num_kv_heads} of them for keys and values, do not "
                f"divide a width of {self.width}"
            )


def read_config(path: Path) -> MaskedConfig:
    """Read the shape of a model; a UserError names a value that no model has."""
    content = read_json_object(path)
    try:
        return TypeAdapter(MaskedConfig).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{path}: {key or 'its sizes'}: {first['msg'][0].lower()}{first['msg'][1:]}; copy the "
            "file again"
        ) from error


class MaskedLayer(nn.Module):
    """A decoder layer whose attention sees both directions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = (
            nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )
        self.attention = Attention(config, config.hidden_size)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """Transform states [B, T, D]; `visible` [B, 1, 1, T] are the tokens that are no padding."""
        q, k, v = self.attention.project_qkv(self.input_norm(x), rope)
        x = x + self.attention.project_output(fused_attention(q, k, v, visible))
        return x + self.mlp(self.mlp_norm(x))


class MaskedLM(nn.Module):
    """p(x_i | all tokens that are not masked) of every position, in one forward (LLaDA, Nie et al.,
    2025, arXiv 2502.09992).

    The mask is token V. Two further heads serve selectors: `edit_head` says what to do with a token
    (ME-DLM), and `indicator` whether the likeliest token of a mask is final (NI).
    """

    def __init__(self, config: MaskedConfig) -> None:
        super().__init__()
        self.config = config
        llama = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.mlp_width,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads or config.num_heads,
            max_position_embeddings=config.max_length,
            rms_norm_eps=config.norm_eps,
        )
        self.embedding = nn.Embedding(config.vocab_size + 1, config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(MaskedLayer(llama) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.edit_head = nn.Linear(config.width, 4)
        self.edit_states = nn.Linear(config.width, config.width)
        self.indicator = nn.Sequential(nn.Linear(config.width + 3, 64), nn.SiLU(), nn.Linear(64, 1))
        self.rotary = Rotary(llama)

    @classmethod
    @torch.no_grad()
    def from_causal(cls, causal: LlamaForCausalLM) -> MaskedLM:
        """Start from a causal model with tied embeddings and unscaled rotary angles, whose
        attention training opens to both directions (DiffuLLaMA, Gong et al., 2025, arXiv
        2410.17891). The embedding of the mask is the mean of the others."""
        llama = causal.config
        model = cls(
            MaskedConfig(
                llama.vocab_size,
                llama.hidden_size,
                llama.num_hidden_layers,
                llama.num_attention_heads,
                llama.intermediate_size,
                llama.max_position_embeddings,
                llama.num_key_value_heads,
                predicts_next=True,
                norm_eps=llama.rms_norm_eps,
            )
        )
        embedding = causal.model.embed_tokens.weight
        model.embedding.weight.copy_(torch.cat([embedding, embedding.mean(0, keepdim=True)]))
        model.norm.weight.copy_(causal.model.norm.weight)
        layers = [layer for layer in model.layers if isinstance(layer, MaskedLayer)]
        for layer, source in zip(layers, causal.model.layers, strict=True):
            layer.attention.load_state_dict(source.self_attn.state_dict())
            layer.mlp.load_state_dict(source.mlp.state_dict())
            layer.input_norm.weight.copy_(source.input_layernorm.weight)
            layer.mlp_norm.weight.copy_(source.post_attention_layernorm.weight)
        return model

    @property
    def mask_id(self) -> int:
        return self.config.vocab_size

    def run(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the states [B, T, D] that predict each token, from tokens [B, T] or embeddings [B,
        T, D]; `lengths` [B] leave out padding."""
        x = inputs if inputs.dim() == 3 else self.embedding(inputs)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        counts = torch.full((len(x),), x.shape[1], device=x.device) if lengths is None else lengths
        visible = (positions < counts[:, None])[:, None, None]
        rope = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, rope, visible)
        states = self.norm(x)
        return (
            torch.cat([states[:, :1], states[:, :-1]], dim=1)
            if self.config.predicts_next
            else states
        )

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [.., V] of the tokens, without the mask."""
        return F.linear(states, self.embedding.weight[: self.config.vocab_size])

    def edit_logits(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the edits [.., 4] and of the tokens that they write [.., V]."""
        return self.edit_head(states), self.logits(self.edit_states(states))

    def indicate_final(self, states: Tensor, logits: Tensor) -> Tensor:
        """Return the logit [..] that the likeliest token is final, from the state and the shape
        of its distribution.
        """
        log_p = logits.float().log_softmax(-1)
        top = log_p.topk(2, dim=-1).values
        shape = torch.stack(
            [top[..., 0].exp(), top[..., 0] - top[..., 1], torch.special.entr(log_p.exp()).sum(-1)],
            dim=-1,
        )
        return self.indicator(torch.cat([states, shape.to(states.dtype)], dim=-1))[..., 0]

    def save(self, folder: Path) -> None:
        """Write weights and shape."""
        with atomic_write(folder, folder=True) as scratch:
            save_file(
                {key: value.contiguous() for key, value in self.state_dict().items()},
                scratch / "model.safetensors",
            )
            (scratch / "config.json").write_text(json.dumps(asdict(self.config), indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> MaskedLM:
        """Read a model that `save` wrote."""
        path = Path(folder)
        if not (path / "config.json").is_file() or not (path / "model.safetensors").is_file():
            raise UserError(
                f"eval.model={folder}: there is no masked language model; train one with python "
                "-m lab.small_targets.make_masked_model"
            )
        config = read_config(path / "config.json")
        weights = read_tensors(path / "model.safetensors", "copy the file again")
        # Without memory, because the sizes may be other ones than those of the weights.
        with torch.device("meta"):
            shape = cls(config)
        for _, fault in find_mismatches(shape, weights):
            raise UserError(
                f"eval.model={folder}: its weights do not fit its config.json: {fault}; copy the "
                "folder again"
            )
        model = cls(config)
        model.load_state_dict(weights)
        check_weights(model, f"eval.model={folder}")
        return model.eval()
