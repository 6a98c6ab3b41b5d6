"""A target with an encoder: it reads the source once, and its decoder drafts and verifies as any
other target.

Shapes: B batch, T tokens of texts, N decoder tokens or nodes, S slots, E source positions, L
captured layers, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from spectrain.errors import UserError
from spectrain.models.architectures.standard import Standard
from spectrain.models.cache_arguments import accepts_argument, cache_argument
from spectrain.models.features import Features, Layer
from spectrain.models.forward_override import override_forwards
from spectrain.models.forward_plan import ALL_LAYERS, DEFAULT_PLAN, ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.model_parts import ModelParts
from spectrain.models.target import SmallModelOrigin, Target

from .attention import ENCODER_DECODER, DecoderCall, run_decoder_call
from .model import SourcePrefixLM
from .small_model import make_small_network
from .sources import shift_right, split_rows


@dataclass(frozen=True)
class EncoderDecoder(Standard):
    """An encoder and a decoder with cross-attention."""

    attention_name: ClassVar[str] = ENCODER_DECODER

    def capture_blocker(self, parts: ModelParts) -> str | None:
        return f"target {parts.name} has an encoder, whose sources differ in length"

    def set_attention(self, model: Any, implementation: str) -> None:
        model.model.set_attn_implementation(implementation)


@dataclass
class EncodedSources:
    """The sources of a cache's texts, as the decoder's layers attend to them."""

    starts: Tensor  # [B] index of the decoder's first token in each text
    states: Tensor  # [B, E, D]
    visible: Tensor | None  # [B, 1, 1, E]
    cross_cache: DynamicCache


class EncoderDecoderTarget(Target):
    """Texts begin with their source. The decoder runs over what follows it; a source token's
    features are the encoder's last states, or zero where the source is no text."""

    model: SourcePrefixLM

    def __init__(self, model: SourcePrefixLM, tokenizer: Any, name: str, path: str) -> None:
        model.model.set_attn_implementation(ENCODER_DECODER)
        super().__init__(model, tokenizer, name, path, architecture=EncoderDecoder())
        self.sources: WeakKeyDictionary[TreeCache, EncodedSources] = WeakKeyDictionary()

    @property
    def reads_tokens(self) -> bool:
        """Return whether sources are text."""
        return self.model.reader.reads_tokens

    def find_start(self, text: Sequence[int]) -> int:
        """Return the index of the decoder's first token in a text."""
        return self.model.boundary.find(text)

    @property
    def saved_config(self) -> Any:
        return self.model.model.config

    def make_small_model(self, origin: SmallModelOrigin) -> EncoderDecoderTarget:
        network = make_small_network(self, origin)
        network.generation_config = GenerationConfig(
            decoder_start_token_id=self.model.boundary.start
        )
        wrapped = SourcePrefixLM(network, self.model.reader, self.model.boundary.end)
        return EncoderDecoderTarget(wrapped, self.tokenizer, "drafter", "")

    def apply_final_norm(self, hidden: Tensor, grad: bool = False) -> Tensor:
        with torch.set_grad_enabled(grad):
            normed: Tensor = self.model.parts.norm(hidden)
            return normed

    def run(self, tokens: Tensor, plan: ForwardPlan = DEFAULT_PLAN) -> Features:
        """Run whole texts, packed or padded ones or those of an empty cache, or tokens after
        those of a cache.
        """
        if plan.span is not ALL_LAYERS:
            raise UserError(
                f"target {self.name}: a part of its layers cannot run alone; use a drafter with "
                "layers of its own"
            )
        with torch.set_grad_enabled(plan.grad):
            if plan.cache is not None and plan.cache in self.sources and not plan.cache.is_empty:
                return self._run_nodes(tokens, plan, plan.cache)
            if plan.mask is not None:
                raise UserError(
                    f"target {self.name}: it reads no trees over whole texts; use another "
                    "training of the drafter"
                )
            return self._run_texts(tokens, plan)

    def _run_texts(self, tokens: Tensor, plan: ForwardPlan) -> Features:
        """Run whole texts [B, T], or packed ones [1, T], through encoder and decoder."""
        rows = (
            [part[0].tolist() for part in tokens.split(plan.lengths, dim=1)]
            if plan.lengths
            else tokens.tolist()
        )
        sources, answers = split_rows(rows, self.model.boundary)
        if plan.cache is not None and not all(answers):
            raise UserError(
                f"target {self.name}: a prompt has no end of text with a decoder start after it; "
                "use the target's chat template"
            )
        starts = torch.tensor([*map(len, sources)], device=tokens.device)
        longest = max(map(len, rows))
        states, is_real = self.model.encode(sources, tokens.device)
        width = max(1, *map(len, answers))
        padded = torch.tensor(
            [[*answer, *[0] * (width - len(answer))] for answer in answers], device=tokens.device
        )
        encoded = EncodedSources(
            starts,
            states,
            None if is_real is None else is_real[:, None, None],
            DynamicCache(config=self.config),
        )
        positions = torch.arange(width, device=tokens.device)
        causal = positions <= positions[:, None]
        call = DecoderCall(positions[None], positions[None], causal[None, None], encoded.visible)
        if plan.cache is not None:
            plan.cache.positions = plan.cache.next_slots(longest)
            call.store = partial(store_texts, plan.cache, starts, longest)
            self.sources[plan.cache] = encoded
        features = self._run_decoder(padded, plan, call, encoded, positions.expand(len(rows), -1))
        text_states = shift_right(features.hidden, starts, longest) + self._source_features(
            sources, states, features, longest
        )
        if plan.cache is not None:
            plan.cache.add_uncommitted(longest)
        if plan.lengths is not None:
            text_states = torch.cat(
                [row[:length] for row, length in zip(text_states, plan.lengths)]
            )[None]
        wanted = [features.layers.index(layer) for layer in plan.layers]
        logits = (
            self.head.logits(text_states[:, :, -1], upcast=plan.upcast) if plan.logits else None
        )
        return Features(tokens, plan.layers, text_states[:, :, wanted], logits)

    def _source_features(
        self, sources: list[list[int]], states: Tensor, features: Features, length: int
    ) -> Tensor:
        """Return [B, T, L, D]: the encoder's states at the tokens of the source, and zero
        elsewhere.
        """
        if not self.model.reader.reads_tokens:
            return states.new_zeros(1)
        zeros = torch.zeros(len(sources), dtype=torch.int64, device=states.device)
        is_source = (
            torch.arange(length, device=states.device)
            < torch.tensor([*map(len, sources)], device=states.device)[:, None]
        )
        text_states = shift_right(states, zeros, length) * is_source[..., None]
        return text_states[:, :, None].expand(-1, -1, len(features.layers), -1)

    def _run_nodes(self, tokens: Tensor, plan: ForwardPlan, cache: TreeCache) -> Features:
        """Run tokens or nodes [B, N] after the committed tokens."""
        encoded = self.sources[cache]
        positions = cache.next_slots(tokens.shape[1]) if plan.positions is None else plan.positions
        mask = plan.mask
        if mask is None:
            ones = torch.ones(
                tokens.shape[1],
                cache.uncommitted + tokens.shape[1],
                dtype=torch.bool,
                device=tokens.device,
            )
            mask = ones.tril(cache.uncommitted).expand(len(tokens), -1, -1)
        assert isinstance(mask, Tensor)
        cache.set_positions(positions)
        visibility = cache.visibility(mask, positions, cache.positions)
        num_slots = visibility.longest + mask.shape[2]
        appended = cache.positions
        assert appended is not None
        slots = torch.arange(num_slots, device=tokens.device)
        offset = (slots - cache.lengths[:, None]).clamp(0, mask.shape[2] - 1)
        key_positions = torch.where(
            slots < cache.lengths[:, None], slots, appended.gather(1, offset)
        )
        visible_slots = visibility.attention_mask(None)
        visible_slots = (
            tokens.new_ones(len(tokens), 1, tokens.shape[1], num_slots).bool()
            if visible_slots is None
            else visible_slots
        )
        visible_slots = visible_slots & (slots >= encoded.starts[:, None])[:, None, None]
        starts = encoded.starts[:, None]
        call = DecoderCall(
            positions - starts,
            key_positions - starts,
            visible_slots,
            encoded.visible,
            store=cache.append,
        )
        call_positions = (positions - starts).clamp(0, self.max_length - 1)
        features = self._run_decoder(tokens, plan, call, encoded, call_positions)
        cache.add_uncommitted(tokens.shape[1])
        wanted = [features.layers.index(layer) for layer in plan.layers]
        logits = (
            self.head.logits(features.at_layer("final"), upcast=plan.upcast)
            if plan.logits
            else None
        )
        return Features(tokens, plan.layers, features.hidden[:, :, wanted], logits)

    def _run_decoder(
        self,
        tokens: Tensor,
        plan: ForwardPlan,
        call: DecoderCall,
        encoded: EncodedSources,
        positions: Tensor,
    ) -> Features:
        """Run the decoder over tokens [B, N] at these positions; the final features come last
        among the layers.
        """
        decoder: Any = self.model.model.get_decoder()
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "encoder_hidden_states": encoded.states,
            "use_cache": False,
        }
        if plan.cache is not None:
            # The tree cache stores the decoder's own keys; here they only pass through.
            both = EncoderDecoderCache(DynamicCache(config=self.config), encoded.cross_cache)
            arguments |= {cache_argument(decoder): both, "use_cache": True}
        layers: tuple[Layer, ...] = (*(layer for layer in plan.layers if layer != "final"), "final")
        with (
            self.capture_layers(layers) as captured,
            run_decoder_call(call),
            set_token_positions(decoder, positions, arguments),
        ):
            captured["final"] = decoder(**arguments).last_hidden_state
        return Features(tokens, layers, torch.stack([captured[layer] for layer in layers], dim=2))


def store_texts(
    cache: TreeCache, starts: Tensor, length: int, layer: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Write keys and values [B, H, N, D] of the decoder's first tokens behind the slots of their
    sources.
    """
    cache.write(layer, *(shift_right(part, starts, length, dim=2) for part in (keys, values)))
    return keys, values


@contextmanager
def set_token_positions(
    decoder: Any, positions: Tensor, arguments: dict[str, Any]
) -> Iterator[None]:
    """Give the decoder's tokens their positions [B, N]: as an argument, or through its table of
    positions.
    """
    table: nn.Module | None = getattr(decoder, "embed_positions", None)
    if table is None:
        yield
        return
    if accepts_argument(decoder, "position_ids"):
        arguments["position_ids"] = positions
        yield
        return
    forward: Any = table.forward

    def look_up(*args: Any, **kwargs: Any) -> Tensor:
        embedded: Tensor = forward(positions.flatten()[None], position_ids=positions.flatten())
        return embedded.view(*positions.shape, -1)

    with override_forwards([(table, look_up)]):
        yield
