"""The target: an unmodified Hugging Face causal LM, run over token batches, cached trees or some of its layers only.

Shapes: B batch, T tokens, N nodes, L captured layers, D width, V vocabulary.
Nothing here copies or patches model code: attention goes through `AttentionInterface`, keys and values through our
`Cache`, features through hooks.
"""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedTokenizerBase
from transformers.masking_utils import AttentionMaskInterface

from spectrain.errors import UserError
from spectrain.features.batch import Features, Layer, document_positions
from spectrain.kernels.linear_divergence import Projection
from spectrain.kernels.tree_attention import Visibility, tree_attention
from spectrain.trees.token_tree import TokenTree

from .attention import by_document, causal_attention
from .kv_cache import TreeCache
from .prepacked import pack_linears
from .replaced_forward import attend_layer, passed, running
from .sharding import Sharding

ATTENTION = "spectrain"


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    visibility: Visibility | list[Visibility] | None = None,
    tree_cache: TreeCache | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    calls: list[int] | None = None,
    lengths: tuple[int, ...] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What every layer of a target calls: tree attention, or without a `visibility` causal attention of whole texts, which
    may be packed documents of these `lengths`."""
    if s_aux is not None:
        raise UserError("target: it uses attention sinks, which tree attention does not support")
    if calls is not None:
        calls.append(module.layer_idx)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(visibility, list):
        seen = iter(visibility)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tree_attention(q, k, v, next(seen), scale, sliding_window, softcap)

        return by_document(attend, lengths, query, key, value).transpose(1, 2).contiguous(), None
    if visibility is not None:
        if tree_cache is not None and torch.compiler.is_compiling():
            return attend_layer(query, key, value, scale, sliding_window, softcap), None
        if tree_cache is not None:
            passed(module.layer_idx)
            output = tree_cache.attend(module.layer_idx, query, key, value, visibility, scale, sliding_window, softcap)
        else:
            output = tree_attention(query, key, value, visibility, scale, sliding_window, softcap)
        return output.transpose(1, 2).contiguous(), None
    if tree_cache is not None:
        tree_cache.append(module.layer_idx, key, value)
    output = causal_attention(query, key, value, lengths, scale, sliding_window, softcap)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def _kept(value: Any, index: Tensor, size: int, dim: int) -> Any:
    """The same arguments for some sequences of the batch, dim 0, or for some tokens, dim 1, of packed ones."""
    if isinstance(value, Tensor):
        return value.index_select(dim, index) if value.dim() > 1 and value.shape[dim] == size else value
    if isinstance(value, (tuple, list)):
        return type(value)(_kept(item, index, size, dim) for item in value)
    return {key: _kept(item, index, size, dim) for key, item in value.items()} if isinstance(value, dict) else value


def _trees(mask: Tensor | tuple[Tensor, ...], positions: Tensor, lengths: tuple[int, ...] | None) -> Any:
    """What tokens see behind no committed ones: a Visibility, or one for each of packed documents."""
    if lengths is None:
        assert isinstance(mask, Tensor)
        return Visibility(positions.new_zeros(len(positions)), 0, mask, positions, positions)
    places = positions.split(lengths, dim=1)
    return [Visibility(place.new_zeros(1), 0, tree, place, place) for tree, place in zip(mask, places)]


class Head:
    """The ends of the target that drafters borrow: its embedding and its output layer.

    Not a module, so a drafter that keeps one neither owns nor saves what is the target's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self.output: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
        self.softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self.scale: float = getattr(model.config, "logit_scale", None) or 1 / getattr(model.config, "logits_scaling", 1.0)

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

    def logits(self, final: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits [..., V] in float32 from "final" features; with `rows`, of these vocabulary entries only."""
        if rows is None:
            logits = self.output(final)
        else:
            bias = self.output.bias
            logits = F.linear(final, self.output.weight[rows], None if bias is None else bias[rows])
        logits = logits.float() * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Target(nn.Module):
    """A causal LM whose output is wanted. Frozen unless a drafter's `param_groups` names its parameters."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str, path: str, sharding: Sharding = "none"
    ) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name, self.path = name, path
        self.sharding = sharding  # how the processes of the launch hold it together
        self.in_step = sharding != "none"  # all processes run the same layers at the same time, if need be on no row
        if not isinstance(getattr(self.decoder, "layers", None), nn.ModuleList):
            raise UserError(f"target {name}: its decoder has no list of layers, so features cannot be captured from it")
        self._check_attention()

    @property
    def decoder(self) -> nn.Module:
        """The model without its output layer."""
        return self.model.get_decoder()  # type: ignore[operator]

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers  # type: ignore[return-value]

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
        """The context that the model was made for, in tokens."""
        return int(self.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        generation = getattr(self.model, "generation_config", None)
        ids = [self.tokenizer.eos_token_id, self.config.eos_token_id, getattr(generation, "eos_token_id", None)]
        flat = [i for entry in ids for i in (entry if isinstance(entry, list) else [entry])]
        return frozenset(i for i in flat if i is not None)

    def new_cache(self, batch_size: int, max_length: int) -> TreeCache:
        return TreeCache(self.num_layers, batch_size, max_length, self.device)

    def pack(self) -> None:
        """On a CPU, move decoding and feature capture to the faster linears, where this process holds them."""
        if self.sharding != "none":
            return
        pack_linears(self.model)

    def features(self, tokens: Tensor, layers: tuple[Layer, ...], lengths: tuple[int, ...] | None = None) -> Features:
        """Frozen features of whole sequences [B, T], padded on the right, or of packed ones; no logits are built."""
        return self.run(tokens, layers=layers, lengths=lengths)

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: TreeCache, layers: tuple[Layer, ...]) -> Features:
        """Run prompts [B, T], padded on the right, into an empty cache; logits [B, 1, V] follow each row's last token."""
        features = self.run(tokens, cache=cache, layers=(*layers, "final") if "final" not in layers else layers)
        cache.commit(None, lengths)
        last = features.at("final").gather(1, (lengths - 1)[:, None, None].expand(-1, 1, self.width))
        return Features(tokens, features.layers, features.hidden, self.head.logits(last))

    def verify(self, tree: TokenTree, cache: TreeCache, layers: tuple[Layer, ...] = ()) -> Features:
        """Run a tree [B, N] behind the cache's committed tokens; logits [B, N, V] at every node. Commit afterwards."""
        positions = cache.lengths[:, None] + tree.depths
        return self.run(tree.tokens, position_ids=positions, mask=tree.ancestors, cache=cache, layers=layers, logits=True)

    def run(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        mask: Tensor | tuple[Tensor, ...] | None = None,
        cache: TreeCache | None = None,
        layers: tuple[Layer, ...] = (),
        first: int = 0,
        last: int | None = None,
        hidden: Tensor | None = None,
        logits: bool = False,
        grad: bool = False,
        skipped: Collection[int] = (),
        dropped: Tensor | None = None,
        lengths: tuple[int, ...] | None = None,
        recompute: bool = False,
    ) -> Features:
        """One forward over layers `first` to `last` (excluded), from tokens [B, N] or, at `first`, from `hidden` [B, N, D].

        Layers in `skipped` pass their input on; so does layer l for row b where `dropped` [layers, B] is True (in training:
        without cache and mask). Neither costs the layer's work. With `recompute`, gradient checkpointing, layers that train
        are run again in the backward pass.

        With `lengths`, the one row [1, N] holds packed documents, which do not see each other: positions start anew in each,
        `dropped` is [layers, documents], and `mask` has one [1, n, n] for each.

        Without a cache, `mask` [B, N, N] says what each token sees; with one it marks, for every new node, the nodes
        behind the committed tokens that it sees [B, N, pending + N]. None is causal. "final" is the final norm of
        whatever layer ran last, so an early exit reads it the same way. Positions default to the order of the tokens.
        """
        assert self.config._attn_implementation == ATTENTION, "another attention would neither see the tree nor fill the cache"
        last = self.num_layers if last is None else last
        assert dropped is None or (cache is None and mask is None), "layers are dropped in training only"
        assert lengths is None or (cache is None and len(tokens) == 1), "documents are packed into one row, in training only"
        batch, num_new = tokens.shape
        kwargs: dict[str, Any] = {"visibility": None, "tree_cache": cache, "lengths": lengths}
        if cache is not None and cache.is_empty and position_ids is None and mask is None:
            position_ids = cache.positions = cache.slots(num_new)
        elif cache is not None:
            if position_ids is None:
                position_ids = cache.slots(num_new)
            assert not isinstance(mask, tuple)
            kwargs["visibility"] = self._visibility(cache, num_new, position_ids, mask)
        elif position_ids is None:
            position_ids = document_positions(lengths or (num_new,), tokens.device).expand(batch, -1)
        if cache is None and mask is not None:  # a tree behind no committed tokens: windows count positions
            kwargs["visibility"] = _trees(mask, position_ids, lengths)
        with ExitStack() as stack, torch.set_grad_enabled(grad):
            captured = stack.enter_context(self._capture(layers))
            working = [layer for layer in range(first, last) if layer not in skipped]
            stack.enter_context(self._only(working, hidden, first, dropped, lengths))
            if recompute and grad and cache is None:
                stack.enter_context(self._checkpointed(working))
            stack.enter_context(running(cache, kwargs["visibility"], working))
            output = self.decoder(
                input_ids=tokens,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=cache is not None,
                **kwargs,
            )
            final = output.last_hidden_state
            captured["final"] = final
            states = [captured[layer] for layer in layers]
            stacked = torch.stack(states, dim=2) if states else final.new_empty(batch, num_new, 0, self.width)
            result = Features(tokens, layers, stacked, self.head.logits(final) if logits else None)
        if cache is not None:
            cache.advance(num_new)
        return result

    def normed(self, hidden: Tensor, grad: bool = False) -> Tensor:
        """The final norm of states [B, T, D] of any layer: what the head reads at an early exit."""
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        return self.run(tokens, layers=("final",), first=self.num_layers, hidden=hidden, grad=grad).at("final")

    def save(self, path: str | Path) -> None:
        """Write model and tokenizer in transformers format."""
        if not torch.cuda.is_available():  # saving imports deepspeed where it is installed, which would warn of just this
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self.model.save_pretrained(path)  # type: ignore[operator]
        self.tokenizer.save_pretrained(path)

    def _visibility(self, cache: TreeCache, num_new: int, position_ids: Tensor, mask: Tensor | None) -> Visibility:
        if mask is None:
            ones = torch.ones(num_new, cache.pending + num_new, dtype=torch.bool, device=position_ids.device)
            mask = ones.tril(cache.pending).expand(position_ids.shape[0], -1, -1)
        previous = cache.positions
        cache.positions = position_ids if previous is None else torch.cat([previous, position_ids], dim=1)
        return cache.sees(mask, position_ids, cache.positions)

    @contextmanager
    def _capture(self, layers: tuple[Layer, ...]) -> Iterator[dict[Layer, Tensor]]:
        """Hooks that keep the residual stream where `layers` ask for it."""
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
            if not 0 <= layer <= self.num_layers:
                raise UserError(f"drafter.layers: {layer} is not a layer of {self.name}, which has 0 to {self.num_layers}")
            if layer == self.num_layers:
                handles.append(self.layers[-1].register_forward_hook(keep_output))
            else:
                handles.append(self.layers[layer].register_forward_pre_hook(keep_input(layer), with_kwargs=True))
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _only(
        self,
        working: Collection[int],
        hidden: Tensor | None,
        first: int,
        dropped: Tensor | None,
        lengths: tuple[int, ...] | None,
    ) -> Iterator[None]:
        """Let layers that are not `working` pass their input on, and others for sequences that are `dropped`; feed `hidden`
        to layer `first`."""

        def skip(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return (hidden_states,) if self._returns_tuple else hidden_states

        def run_kept(layer: nn.Module, kept: Tensor) -> Callable[..., Any]:
            """The layer for the sequences in `kept`, [B] bool, which are rows, or stretches of a packed row."""
            forward = layer.forward
            dim, remaining, index = 0, None, kept
            if lengths is not None:
                dim, remaining = 1, tuple(length for length, keep in zip(lengths, kept.tolist()) if keep)
                index = kept.repeat_interleave(torch.tensor(lengths))
            index = index.nonzero()[:, 0].to(self.device)
            if not len(index):  # nothing to run, but others wait for this layer: a sequence that counts for nothing
                index = index.new_tensor(range(lengths[0]) if lengths is not None else [0])
                remaining = lengths[:1] if lengths is not None else None

            def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                """Whatever else has a part for each sequence is cut to the same ones."""
                size = hidden_states.shape[dim]
                args, kwargs = (_kept(value, index, size, dim) for value in (args, kwargs))
                kwargs["lengths"] = remaining
                output = forward(hidden_states.index_select(dim, index), *args, **kwargs)
                states = output[0] if self._returns_tuple else output
                result = hidden_states.index_copy(dim, index, states) if kept.any() else hidden_states + 0 * states.sum()
                return (result, *output[1:]) if self._returns_tuple else result

            return run

        replaced: list[tuple[nn.Module, Callable[..., Any]]] = []
        for index, layer in enumerate(self.layers):
            kept = None if dropped is None else ~dropped[index].cpu()
            if index not in working or (kept is not None and not kept.any() and not self.in_step):
                replaced.append((layer, skip))
            elif kept is not None and not kept.all():
                replaced.append((layer, run_kept(layer, kept)))

        def feed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (hidden, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": hidden}

        previous = [layer.__dict__.get("forward") for layer, _ in replaced]
        handle = None
        if hidden is not None:  # with no layer left to run, the last one, skipped, passes it on to the final norm
            handle = self.layers[min(first, self.num_layers - 1)].register_forward_pre_hook(
                feed, with_kwargs=True, prepend=True
            )
        for layer, forward in replaced:
            layer.forward = forward
        try:
            yield
        finally:
            for (layer, _), before in zip(replaced, previous):
                if before is None:
                    del layer.forward
                else:
                    layer.forward = before
            if handle is not None:
                handle.remove()

    @contextmanager
    def _checkpointed(self, working: Collection[int]) -> Iterator[None]:
        """Gradient checkpointing: of each layer only the input is kept, and the backward pass runs it again."""
        layers = [self.layers[index] for index in working]
        before = [(layer.__dict__.get("forward"), layer.forward) for layer in layers]
        for layer, (_, forward) in zip(layers, before):
            layer.forward = partial(checkpoint, forward, use_reentrant=False)
        try:
            yield
        finally:
            for layer, (own, _) in zip(layers, before):
                if own is None:
                    del layer.forward
                else:
                    layer.forward = own

    def _check_attention(self) -> None:
        """Refuse a model whose attention does not go through the interface: a tree would be verified wrongly."""
        calls: list[int] = []
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        outputs: list[Any] = []
        handle = self.layers[0].register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            with torch.no_grad():
                self.decoder(input_ids=tokens, use_cache=False, calls=calls)
        finally:
            handle.remove()
        if len(calls) != self.num_layers:
            raise UserError(
                f"target {self.name}: {len(calls)} of its {self.num_layers} layers go through transformers' attention "
                "interface, so trees cannot be verified with it; use a model whose layers are all ordinary attention"
            )
        self._returns_tuple = isinstance(outputs[0], tuple)
