"""The target: an unmodified Hugging Face causal LM, run over token batches, cached trees or some of its layers only.

Shapes: B batch, T tokens, N nodes, L captured layers, D width, V vocabulary.
Nothing here copies or patches model code: attention goes through `AttentionInterface`, keys and values through our
`Cache`, features through hooks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError
from spectrain.kernels.tree_attention import Visibility
from spectrain.trees.token_tree import TokenTree

from .attention import ATTENTION_NAME, uncached_visibility
from .check import UNINSPECTED, check_vision, inspect_target
from .compiled_layers import set_forward_context
from .decoder import find_decoder, layer_list_name
from .features import Features, Layer, document_positions
from .forward_override import Forward, checkpoint_layer, identity, override_forwards, run_on_subset, zeros
from .forward_plan import ALL_LAYERS, DEFAULT_PLAN, ForwardPlan, LayerSpan, Sublayer, SublayerKind
from .fused_cpu_layers import fuse_cpu_layers
from .head import Head
from .images import DecoderInputs, ImageProcessor, get_images, layer_kinds, make_decoder_inputs, masks_for_kind
from .kv_cache import TreeCache
from .limits import find_rope_switch, max_text_length
from .masked_attention import MASKED, apply_masks, make_mask_visibility
from .merged_linears import merge_linears
from .packed_linears import enforce_batch_invariance, pack_linears
from .recurrent_forward import make_recurrent_forward
from .sharding import Sharding

TokenVisibility = Visibility | list[Visibility] | None
"""What tokens see, in each of packed documents; None: the text before them."""


class Target(nn.Module):
    """A frozen causal LM whose output is wanted. It learns only where a stage of a drafter's training names its parameters."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str, path: str, sharding: Sharding = "none"
    ) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name, self.path = name, path
        self.sharding = sharding  # how the processes of the launch hold it together
        self.runs_in_lockstep = sharding != "none"  # all processes run the same layers at the same time, if need be on no row
        self.layer_list_name = layer_list_name(find_decoder(model)) or ""  # what its decoder calls its layers
        if not self.layer_list_name:
            raise UserError(f"target {name}: its decoder has no list of layers, so features cannot be captured from it")
        sees = "vision_config" in getattr(model.config, "sub_configs", {}) and self.decoder is not model.base_model
        self.vision = ImageProcessor(path, sees)
        self.vision_checked = False  # a text with images, and was found to see it as transformers does
        self.rope_switch = find_rope_switch(self.config)
        self.traits = UNINSPECTED if self.device.type == "meta" else inspect_target(self)  # of no data only shapes are asked

    @classmethod
    def from_pretrained(cls, name: str | Path, dtype: str = "auto", device: str = "auto") -> Target:
        """Load a target by the name of a model that ships with the project (tiny, smollm2), from a directory, or from the
        hub."""
        from .loading import load_hf, load_smollm2, load_tiny

        if name == "tiny":
            return load_tiny(dtype, device)
        return load_smollm2(dtype, device) if name == "smollm2" else load_hf(str(name), dtype=dtype, device=device)

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
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer."""
        generation = getattr(self.model, "generation_config", None)
        ids = [getattr(one, "eos_token_id", None) for one in (self.tokenizer, self.config, generation)]
        flat = [i for entry in ids for i in (entry if isinstance(entry, list) else [entry])]
        return frozenset(i for i in flat if i is not None)

    def new_cache(self, batch_size: int, max_length: int, bound: int | None = None) -> TreeCache:
        return TreeCache(self.num_layers, batch_size, max_length, self.device, bound, self.traits.kv_shapes)

    def pack_weights(self) -> None:
        """Switch decoding and feature capture to faster linears: reordered weights on a CPU, and on a GPU one product for the
        linears that read the same input. A sharded target stays as it is."""
        if self.sharding != "none":
            return
        pack_linears(self.model)
        if self.device.type == "cuda":
            merge_linears(self.model)

    def features(
        self,
        tokens: Tensor,
        layers: tuple[Layer, ...],
        lengths: tuple[int, ...] | None = None,
        texts: Sequence[Sequence[int]] = (),
    ) -> Features:
        """Return frozen features of sequences [B, T], padded on the right, or of packed ones, without logits. `texts` are the
        same tokens with their images."""
        return self.run(tokens, ForwardPlan(layers=layers, lengths=lengths, texts=self._check_images(texts)))

    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: TreeCache,
        layers: tuple[Layer, ...],
        texts: Sequence[Sequence[int]] = (),
    ) -> Features:
        """Run prompts [B, T], padded on the right, into an empty cache. Return features, with logits [B, 1, V] after the last
        token of each row. `texts` are the same prompts with their images."""
        kept = layers if "final" in layers else (*layers, "final")
        cache.prompt_lengths = lengths
        features = self.run(tokens, ForwardPlan(layers=kept, cache=cache, texts=self._check_images(texts)))
        cache.commit(None, lengths)
        last = features.at_layer("final").gather(1, (lengths - 1)[:, None, None].expand(-1, 1, self.width))
        return Features(tokens, features.layers, features.hidden, self.head.logits(last))

    def verify(self, tree: TokenTree, cache: TreeCache, layers: tuple[Layer, ...] = ()) -> Features:
        """Run a tree [B, N] on top of the committed tokens of the cache and return logits [B, N, V] at every node. Commit
        afterwards.

        Every rule computes in float32 or only compares, so on a GPU half-precision logits are not upcast, which spares a pass
        and twice the bytes. Torch's argmax on a CPU takes three times as long in half precision, so there they are.
        """
        positions = cache.lengths[:, None] + tree.depths
        upcast = self.device.type == "cpu"
        plan = ForwardPlan(layers, logits=True, upcast=upcast, positions=positions, mask=tree.ancestors, cache=cache)
        return self.run(tree.tokens, plan)

    def run(self, tokens: Tensor, plan: ForwardPlan = DEFAULT_PLAN) -> Features:
        """Run one forward over tokens [B, N] as the plan says and return what it keeps."""
        implementation = ATTENTION_NAME if self.traits.masked_attention is None else MASKED
        assert self.config._attn_implementation == implementation, "another attention would see no tree and fill no cache"
        assert plan.lengths is None or len(tokens) == 1, "documents are packed into one row"
        positions, visibility = self._resolve_visibility(tokens, self._limit_positions(tokens, plan))
        inputs, sights = self._decoder_inputs(tokens, positions, plan)
        states_visibility, visibility = visibility, sights[-1] if sights else visibility
        working = plan.span.active_layers(self.num_layers)
        with ExitStack() as stack, torch.set_grad_enabled(plan.grad):
            captured = stack.enter_context(self.capture_layers(plan.layers))
            stack.enter_context(self._feed_hidden(plan.span))
            if not plan.grad and self.device.type == "cpu" and not self.traits.output_tuple_size:
                stack.enter_context(override_forwards(fuse_cpu_layers(self.layers)))
            stack.enter_context(override_forwards(self._skipped_forwards(plan, working)))
            if plan.recompute and plan.grad and plan.cache is None:
                layers = [self.layers[index] for index in working]
                stack.enter_context(override_forwards([(layer, checkpoint_layer(layer)) for layer in layers]))
            if visibility is not None:
                stack.enter_context(enforce_batch_invariance())
            stack.enter_context(override_forwards(self._recurrent_forwards(plan, states_visibility)))
            stack.enter_context(set_forward_context(plan.cache, visibility, self._attention_indices(plan)))
            stack.enter_context(self._apply_masks(positions, visibility, plan))
            output = self.decoder(
                **inputs,
                **{self.traits.cache_argument: plan.cache},
                use_cache=plan.cache is not None and self.traits.accepts_use_cache,
                **self._attention_arguments(visibility, plan, sights),
            )
            final = captured["final"] = output.last_hidden_state
            states = [captured[layer] for layer in plan.layers]
            hidden = torch.stack(states, dim=2) if states else final.new_empty(*tokens.shape, 0, self.width)
            result = Features(tokens, plan.layers, hidden, self.head.logits(final, upcast=plan.upcast) if plan.logits else None)
        if plan.cache is not None:
            plan.cache.add_uncommitted(tokens.shape[1])
        return result

    def _attention_arguments(
        self, visibility: TokenVisibility, plan: ForwardPlan, sights: list[TokenVisibility]
    ) -> dict[str, Any]:
        """Return the arguments that layers pass on to attention."""
        if self.traits.masked_attention is not None:
            return {}
        told = {"visibility": visibility, "tree_cache": plan.cache, "lengths": plan.lengths}
        return told | {"reaches": self.traits.attention_ranges, **({"sights": sights} if sights else {})}

    def _apply_masks(
        self, positions: Tensor, visibility: Visibility | list[Visibility] | None, plan: ForwardPlan
    ) -> AbstractContextManager[None]:
        """Return the context in which masked-attention layers see what the plan says."""
        own = self.traits.masked_attention
        if own is None:
            return nullcontext()
        heads = getattr(self.config, "num_attention_heads", 1)
        seen = make_mask_visibility(positions, visibility, plan.lengths, plan.cache, heads)
        return apply_masks(self.layers, own, seen, plan.cache)

    def apply_final_norm(self, hidden: Tensor, grad: bool = False) -> Tensor:
        """Apply the final norm to states [B, T, D] of any layer: what the head reads at an early exit."""
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        span = LayerSpan(first=self.num_layers, hidden=hidden)
        return self.run(tokens, ForwardPlan(layers=("final",), grad=grad, span=span)).at_layer("final")

    def save(self, path: str | Path) -> None:
        """Write model and tokenizer in transformers format."""
        if not torch.cuda.is_available():  # saving imports deepspeed where it is installed, which would warn of just this
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self.model.save_pretrained(path)  # type: ignore[operator]
        self.tokenizer.save_pretrained(path)

    def _check_images(self, texts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the texts where any has images, else nothing. The first text with images is checked against transformers."""
        seen = next(((text, images) for text in texts if (images := get_images(text)) is not None), None)
        if seen is None:
            return ()
        if not self.vision_checked:
            self.vision_checked = True
            try:
                check_vision(self, *seen)
            except UserError:
                self.vision_checked = False
                raise
        return texts

    def _decoder_inputs(
        self, tokens: Tensor, positions: Tensor, plan: ForwardPlan
    ) -> tuple[dict[str, Any], list[TokenVisibility]]:
        """Return the decoder's inputs for the tokens (with images, their embeddings), and the visibility of each layer where
        image tokens see ahead."""
        offsets = None if plan.cache is None else plan.cache.position_offsets
        if not plan.texts:
            if self.traits.masked_attention is not None and not self.traits.masked_attention.takes_positions:
                return {"input_ids": tokens}, []
            places = positions if offsets is None else positions + offsets[:, None]
            return {"input_ids": tokens, "position_ids": places}, []
        found = make_decoder_inputs(self, tokens, plan.texts, positions, plan.lengths)
        if plan.cache is not None:
            plan.cache.position_offsets = found.offsets
        return found.arguments, self._layer_visibility(found, positions, plan) if any(found.visible_masks) else []

    def _layer_visibility(self, found: DecoderInputs, positions: Tensor, plan: ForwardPlan) -> list[TokenVisibility]:
        """Return for each layer what the tokens of texts with images see."""
        if plan.mask is not None:
            raise UserError(
                f"target {self.name}: tokens of images see each other, which trees over texts do not know; use text"
            )
        sights: dict[str, TokenVisibility] = {}
        for kind in {*layer_kinds(self)}:
            masks = masks_for_kind(found.visible_masks, plan.lengths or [positions.shape[1]] * len(found.visible_masks), kind)
            if plan.cache is not None:
                sights[kind] = plan.cache.visibility(torch.stack(masks), positions, positions)
            else:
                seen = torch.stack(masks) if plan.lengths is None else tuple(mask[None] for mask in masks)
                sights[kind] = uncached_visibility(seen, positions, plan.lengths)
        return [sights[kind] for kind in layer_kinds(self)]

    def _limit_positions(self, tokens: Tensor, plan: ForwardPlan) -> ForwardPlan:
        """Clamp positions to those that the model has, and to those before its rotary embedding switches. Nodes past the end of
        the longest text are never emitted."""
        switch, cache = self.rope_switch, plan.cache
        if switch is not None and cache is None and (longest := max(plan.lengths or (tokens.shape[1],))) > switch:
            raise UserError(
                f"target {self.name}: a text of {longest} tokens is longer than the {switch} up to which its rotary embedding "
                f"is one; use data.max_length={switch} or less"
            )
        last = self.max_length if switch is None else switch
        if switch is None and (cache is None or cache.longest + cache.uncommitted + tokens.shape[1] <= last):
            return plan
        if plan.positions is None and cache is not None and not cache.is_empty:
            plan = replace(plan, positions=cache.next_slots(tokens.shape[1]))
        return plan if plan.positions is None else replace(plan, positions=plan.positions.clamp(max=last - 1))

    def _resolve_visibility(self, tokens: Tensor, plan: ForwardPlan) -> tuple[Tensor, Visibility | list[Visibility] | None]:
        """Return the positions of tokens [B, N], and their visibility where it is not plain causal attention."""
        positions, mask, cache = plan.positions, plan.mask, plan.cache
        batch, num_new = tokens.shape
        if cache is None:
            if positions is None:
                positions = document_positions(plan.lengths or (num_new,), tokens.device).expand(batch, -1)
            return positions, None if mask is None else uncached_visibility(mask, positions, plan.lengths)
        if cache.is_empty and positions is None and mask is None:
            cache.positions = cache.next_slots(num_new).clamp(max=self.max_length - 1)  # past it, mask tokens or padding
            return cache.positions, None
        positions = cache.next_slots(num_new) if positions is None else positions
        if mask is None:
            ones = torch.ones(num_new, cache.uncommitted + num_new, dtype=torch.bool, device=positions.device)
            mask = ones.tril(cache.uncommitted).expand(batch, -1, -1)
        assert isinstance(mask, Tensor)
        cache.set_positions(positions)
        return positions, cache.visibility(mask, positions, cache.positions)

    def check_layers(self, layers: Sequence[Layer]) -> None:
        """Raise UserError for a layer that this target does not have."""
        for layer in layers:
            if layer != "final" and not 0 <= layer <= self.num_layers:
                raise UserError(f"drafter.layers: {layer} is not a layer of {self.name}, which has 0 to {self.num_layers}")

    @contextmanager
    def capture_layers(self, layers: tuple[Layer, ...]) -> Iterator[dict[Layer, Tensor]]:
        """Capture the residual stream at the given layers through hooks while the context is open."""
        self.check_layers(layers)
        if {*layers} - {"final"}:
            self.check_single_stream()
        captured: dict[Layer, Tensor] = {}

        def keep_input(layer: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                captured[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        def keep_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            captured[self.num_layers] = output[0] if isinstance(output, tuple) else output

        handles = []
        for layer in layers:
            if layer == "final":
                continue
            if layer == self.num_layers:
                handles.append(self.layers[-1].register_forward_hook(keep_output))
            else:
                handles.append(self.layers[layer].register_forward_pre_hook(keep_input(layer), with_kwargs=True))
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def check_single_stream(self) -> None:
        """Raise UserError where a layer reads more than one state per token."""
        if not self.traits.has_single_stream:
            raise UserError(
                f"target {self.name}: several residual streams run through its layers, so only its final features can be "
                "captured; use drafter.layers=[final] or a drafter without features"
            )

    @contextmanager
    def _feed_hidden(self, span: LayerSpan) -> Iterator[None]:
        """Feed `span.hidden`, where there is one, into layer `span.first`."""
        if span.hidden is None:
            yield
            return
        self.check_single_stream()

        def feed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (span.hidden, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": span.hidden}

        layer = self.layers[min(span.first, self.num_layers - 1)]  # the last one, skipped, passes it on to the final norm
        handle = layer.register_forward_pre_hook(feed, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def _skipped_forwards(self, plan: ForwardPlan, working: list[int]) -> Iterator[tuple[nn.Module, Forward]]:
        """Yield the layers that do not run, or not for all sequences, each with the forward that replaces its own."""
        dropped = plan.span.dropped
        for index, layer in enumerate(self.layers):
            kept = None if dropped is None else ~dropped[index].cpu()
            if index not in working or (kept is not None and not kept.any() and not self.runs_in_lockstep):
                yield layer, identity(self.traits.output_tuple_size)
            elif kept is not None and not kept.all():
                yield layer, run_on_subset(layer, kept, plan.lengths, self.traits.output_tuple_size > 0, self.device)
        for index, part in (one for one in plan.span.skipped if isinstance(one, Sublayer)):
            layer = self.layers[index]
            yield layer, partial(type(layer).forward, layer)  # uncompiled: one compilation serves whole layers
            yield self.get_sublayer(index, part), zeros(returns_tuple=part == "attention")

    def _attention_indices(self, plan: ForwardPlan) -> list[int]:
        """Return the cache indices of the attention modules that run."""
        layers, inside = plan.span.attention_layers(self.num_layers), self.traits.attention_indices
        return layers if inside is None else [number for layer in layers for number in inside[layer]]

    def cache_slice_below(self, layer: int) -> slice:
        """Return the slice of cache layers that the layers before this one write."""
        inside = self.traits.attention_indices
        return slice(0, layer if inside is None else sum(map(len, inside[:layer])))

    def _recurrent_forwards(
        self, plan: ForwardPlan, visibility: Visibility | list[Visibility] | None
    ) -> Iterator[tuple[nn.Module, Forward]]:
        """Yield the recurrent modules with the forward that runs them over a prompt, a tree, or packed documents."""
        if not self.traits.recurrent_modules or (plan.cache is None and plan.mask is None and plan.lengths is None):
            return
        if (plan.cache is None and plan.mask is not None) or (plan.cache is not None and plan.span is not ALL_LAYERS):
            raise UserError(
                f"target {self.name}: its layers keep a state, which this drafter's trees without a cache, or over some of "
                "the layers, do not; use another drafter, such as eagle3"
            )
        for layer, stateful in self.traits.recurrent_modules.items():
            run = make_recurrent_forward(stateful, layer, plan.cache, visibility, plan.lengths, self.traits.path_policy)
            yield stateful.module, run

    def get_sublayer(self, layer: int, part: SublayerKind) -> nn.Module:
        """Return the attention or MLP module of a layer."""
        found = getattr(self.layers[layer], {"attention": "self_attn", "mlp": "mlp"}[part], None)
        if not isinstance(found, nn.Module) or isinstance(found, nn.ModuleList):
            raise UserError(f"target {self.name}: its layers have no {part} of their own to skip; skip whole layers")
        return found
