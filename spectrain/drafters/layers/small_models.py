"""Small causal LMs that families draft with: cut from the target, loaded, or newly initialised.

Shapes: B batch, T tokens, F frontier nodes, D width, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from spectrain.drafters.base import Drafter, Stage
from spectrain.drafters.context import Context
from spectrain.errors import UserError, first_line
from spectrain.kernels.linear_divergence import Projection
from spectrain.models.attention import ATTENTION_NAME
from spectrain.models.bundled import convert_gguf, load_block_network, load_gguf_network
from spectrain.models.check import check_weights
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.head import Head
from spectrain.models.kv_cache import TreeCache
from spectrain.models.load_errors import explain_load_error
from spectrain.models.model_parts import find_decoder, layer_list_name
from spectrain.models.pretrained import check_model_files, load_pretrained
from spectrain.models.published import locate_model
from spectrain.models.target import SmallModelOrigin, Target

# A larger drafter could not pay: it may have this multiple of the target's parameters, plus a
# constant.
MAX_SIZE_RATIO = 2
MAX_EXTRA_PARAMETERS = 50_000_000
Blocks = Literal["gguf", "q4_0"]
"""The blocks in which weights of a GGUF file stay: its own, or those of 4 bits."""
ROUNDED_TYPES = {"gguf": None, "q4_0": "Q4_0"}
"""The types of the gguf package to which weights of more bits are rounded."""


def own_model(drafter: SmallModelDrafter) -> Target:
    """Return the model that a drafter drafts with."""
    return drafter.model


class SmallModelDrafter(Drafter):
    """A drafter that is a small causal LM with the target's tokenizer."""

    model: Target
    head: Head  # of the target
    # Number of tokens that both models know.
    vocab_size: int
    cache: TreeCache | None = None

    def add_model(
        self,
        target: Target,
        num_layers: int | None,
        model: str | None,
        architecture: dict[str, Any] | None,
        blocks: Blocks | None = None,
    ) -> None:
        """Add the model of `make_small_model`. The saved description needs neither the target's
        layers nor another directory.
        """
        self.model = make_small_model(target, num_layers, model, architecture, blocks)
        self.starts_trained = architecture is None
        description = self.model.saved_config.to_diff_dict()
        settings = {"architecture": description, "num_layers": None, "model": None}
        self.saved = replace(self.saved, settings=settings)
        self.capabilities = replace(self.capabilities, draft_model=own_model)
        self.head = target.head
        self.vocab_size = min(self.model.head.vocab_size, target.head.vocab_size)

    @property
    def stages(self) -> list[Stage]:
        """One stage on the input of the target's head and on the features in `layers`; decoding
        needs the latter only.
        """
        return [Stage.single(self, (*self.layers, "final"), final_reach=0)]

    @property
    def output_layers(self) -> tuple[Projection, Projection]:
        """The output layers of the model and of the target over the tokens that both know."""
        own, target_s = (
            head.projection.select_entries(slice(self.vocab_size))
            for head in (self.model.head, self.head)
        )
        return own, target_s

    def open_cache(self, context: Context, slots: int) -> tuple[TreeCache, Tensor]:
        """Return the model's cache, with room for more slots than the target's, and the number [B]
        of tokens before the root that it lacks.
        """
        self.cache = context.drafting_cache(
            self.cache, self.model.num_layers, slots, self.model.architecture.kv_shapes
        )
        return self.cache, context.cache.lengths - self.cache.lengths

    def run_tokens(self, tokens: Tensor, plan: ForwardPlan) -> Tensor:
        """Return the final states [B, T, D] of tokens [B, T]. A target whose vocabulary is padded
        further may write a token that the model has no embedding of, which is then read as its last
        one.
        """
        known = tokens.clamp(max=self.model.head.num_embeddings - 1)
        return self.model.run(known, plan).at_layer("final")

    def log_q(self, final: Tensor) -> Tensor:
        """Compute log q, [B, F, D] -> [B, F, V]."""
        return self.model.head.logits(final)[..., : self.vocab_size].log_softmax(-1)


def make_small_model(
    target: Target,
    num_layers: int | None,
    model: str | None,
    architecture: dict[str, Any] | None,
    blocks: Blocks | None = None,
) -> Target:
    """Make a trainable model with the target's tokenizer.

    Its source is one of `num_layers` layers of the target, by default a quarter; a directory, a
    GGUF file or a name on the hub; and a transformers configuration. With `blocks` the weights of a
    GGUF file stay in blocks, which cannot be trained.
    """
    settings = {"num_layers": num_layers, "model": model, "architecture": architecture}
    given = [key for key, value in settings.items() if value is not None]
    if len(given) > 1:
        raise UserError(
            f"drafter.{given[1]}: drafter.{given[0]} already names the drafter's source; set only "
            "one of them"
        )
    own = target.make_small_model(SmallModelOrigin(num_layers, model, architecture))
    if own is not None:
        return own.requires_grad_(True)
    if model is not None:
        inner: Any = load_matching_model(model, target, blocks)
    elif architecture is not None:
        inner = init_model(architecture, target)
    else:
        inner = cut_model(
            target, max(1, target.num_layers // 4) if num_layers is None else num_layers
        )
    vocab_size = min(len(target.tokenizer), target.head.num_embeddings)
    rows = inner.get_input_embeddings().weight.shape[0]
    if rows < vocab_size:
        key = "model" if model is not None else "architecture"
        raise UserError(
            f"drafter.{key}: its vocab_size is {rows}, below the {vocab_size} tokens of the "
            f"target; use {vocab_size} or more"
        )
    small_model = wrap_model(inner, target.tokenizer, model or "")
    small_model.requires_grad_(True)
    return small_model


def wrap_model(inner: Any, tokenizer: PreTrainedTokenizerBase, path: str) -> Target:
    """Wrap a model as a frozen target that drafts; refuse one with layers that cannot roll back
    drafts.
    """
    inner.config._attn_implementation = ATTENTION_NAME
    target = Target(inner, tokenizer, "drafter", path)
    if target.architecture.keeps_state:
        raise UserError(
            "drafter: layers of the small model keep a state, which cannot be rolled back; use a "
            "drafter.model or drafter.architecture with attention layers only"
        )
    return target


def cut_model(target: Target, num_layers: int) -> nn.Module:
    """Copy the target with `num_layers` evenly spaced layers, the first and the last among them."""
    if not 1 <= num_layers < target.num_layers:
        raise UserError(
            f"drafter.num_layers={num_layers}: {target.name} has {target.num_layers} layers; use "
            "fewer, at least 1"
        )
    target.require_layers("a drafter that is cut from the target")
    if target.sharding != "none":
        raise UserError(
            f"target.sharding={target.sharding}: a drafter cannot be cut from it; set "
            "drafter.model or drafter.architecture"
        )
    last = target.num_layers - 1
    copied = sorted({round(index * last / max(num_layers - 1, 1)) for index in range(num_layers)})
    config: Any = copy.deepcopy(target.model.config)
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    # If no layer types are listed, they follow from the number of layers.
    if vars(text).get("layer_types"):
        text.layer_types = [text.layer_types[layer] for layer in copied]
    model: Any = type(target.model)(config)
    own_decoder = find_decoder(model)
    target_decoder = target.decoder
    layers = layer_list_name(target_decoder)
    names = {f"{layers}.{old}.": f"{layers}.{new}." for new, old in enumerate(copied)}
    weights = {}
    for name, tensor in target_decoder.state_dict().items():
        layer = next((old for old in names if name.startswith(old)), None)
        if layer is not None:
            weights[names[layer] + name.removeprefix(layer)] = tensor
        elif not name.startswith(f"{layers}."):
            weights[name] = tensor
    try:
        own_decoder.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"drafter.num_layers={num_layers}: {target.name} has weights of its layers outside of "
            "them, so it cannot be cut; set drafter.model or drafter.architecture"
        ) from error
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(target.head.output.weight)
    # Whatever the target's type, the drafter trains in float32 and is cast for decoding.
    return model.float()


def init_model(architecture: dict[str, Any], target: Target) -> nn.Module:
    """Make a model of a transformers configuration with random weights; by default its
    vocabulary is the target's.
    """
    settings = {
        "vocab_size": target.head.vocab_size,
        "max_position_embeddings": target.max_length,
        **architecture,
    }
    try:
        config = AutoConfig.for_model(settings.pop("model_type", "llama"), **settings)
        if config.get_text_config().num_hidden_layers < 1:
            raise ValueError("the model has no layers")
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            size = count_parameters(
                AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            )
        if size <= MAX_SIZE_RATIO * count_parameters(target.model) + MAX_EXTRA_PARAMETERS:
            model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            return model.float()
    except Exception as error:  # arbitrary settings may raise any error
        raise UserError(
            f"drafter.architecture: transformers cannot build it ({first_line(error)}); correct "
            "its settings"
        ) from error
    raise UserError(
        f"drafter.architecture: the model has {size:,} parameters, far more than its target; use "
        "a smaller architecture"
    )


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def load_matching_model(path: str, target: Target, blocks: Blocks | None = None) -> nn.Module:
    """Load a model whose tokenizer is the target's, from a directory, a GGUF file or the hub."""
    model, tokenizer = load_model_files(path, blocks, target.dtype)
    check_tokenizer(tokenizer, target.tokenizer, path)
    return model


def names_gguf_file(model: str) -> bool:
    """Return whether `drafter.model` is a GGUF file, which may have a name here."""
    return locate_model(model, "drafter.model").endswith(".gguf")


def load_model_files(
    path: str, blocks: Blocks | None = None, blocks_dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a model in float32 and its tokenizer, from a directory, a GGUF file, which may have a
    name here, or the hub. With `blocks` the weights of a GGUF file stay in blocks, which are
    multiplied by inputs in 8 bits, and all else has the type `blocks_dtype`.
    """
    if names_gguf_file(path):
        gguf = Path(locate_model(path, "drafter.model")).expanduser()
        settings = convert_gguf(gguf, None, "drafter.model")
        if blocks is None:
            network = load_gguf_network(gguf, "drafter.model", torch.float32)
        else:
            network = load_block_network(
                gguf, "drafter", blocks_dtype, in_bytes=True, rounded=ROUNDED_TYPES[blocks]
            )
        return network, AutoTokenizer.from_pretrained(settings)
    try:
        check_model_files(path)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        options = {"dtype": torch.float32, "trust_remote_code": False, "use_safetensors": True}
        model: nn.Module = load_pretrained(AutoModelForCausalLM, path, "drafter.model", **options)
    except UserError:
        raise
    except Exception as error:  # a foreign config.json may raise anything
        raise UserError(
            f"drafter.model={path}: it cannot be loaded ({explain_load_error(path, error)}); use "
            "a directory or a hub name"
        ) from error
    check_weights(model, f"drafter.model={path}")
    return model, tokenizer


def check_tokenizer(
    drafter_tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase, path: str
) -> None:
    """Raise `UserError` unless all tokens, special ones included, have the same ids in both.
    Embeddings may be padded.
    """
    drafter_ids = drafter_tokenizer.get_vocab()
    target_ids = target_tokenizer.get_vocab()
    differing = sorted(
        token
        for token in {*drafter_ids, *target_ids}
        if drafter_ids.get(token) != target_ids.get(token)
    )
    specials = [
        f"{name} {getattr(drafter_tokenizer, name)!r} against {getattr(target_tokenizer, name)!r}"
        for name in ("bos_token", "eos_token")
        if getattr(drafter_tokenizer, name) != getattr(target_tokenizer, name)
    ]
    if differing or specials:
        shown = [
            f"{token!r} is {drafter_ids.get(token)} against {target_ids.get(token)}"
            for token in differing[:3]
        ]
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise UserError(
            f"drafter.model={path}: its tokenizer is not the target's "
            f"({'; '.join([*shown, *specials])}{more}); use a model of the same family"
        )
