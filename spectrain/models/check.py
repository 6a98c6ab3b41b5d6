"""Inspection of a target when it is loaded: what it computes here must equal what transformers computes with it.

First, one forward records the attention calls of its layers: how far back each attends, at any length of text, and arguments
that are not supported here. Then a few tokens run both ways: features and logits of a text, the text read in pieces through the
cache, and its tokens again as one path of a tree, between nodes that it must not see. Shapes: B batch, T tokens, N nodes, V
vocabulary, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spectrain.errors import UserError, first_line
from spectrain.trees.token_tree import TokenTree

from .attention import AttentionCall, AttentionRange
from .decoder import accepts_argument, cache_argument
from .features import Layer
from .forward_plan import ForwardPlan
from .images import Images
from .kv_cache import KeyValueShape, attention_dtype
from .masked_attention import MASKED, KVRecorder, MaskedAttention, inspect_masked_attention
from .masks import RequestedMask, record_masks
from .recurrent import PathPolicy
from .recurrent_nodes import RecurrentModule, StateRecorder

if TYPE_CHECKING:
    from .target import Target

CHECK_LENGTH = 24  # tokens of the sample text
TREE_NODES = 7  # nodes; every second node is a token of the text
MAX_GAP = {torch.float32: 1e-3}  # relative difference of a token's states; of shorter types sums are rounded in another order
MAX_GAP_HALF = 0.1
MAX_STEP_GAP = {torch.float32: 1e-4}  # relative difference of logits, token by token or at once
MAX_POSITION = 1 << 20  # largest probed position


@dataclass(frozen=True)
class LayerAttention:
    """The keys and values that an attention layer stores per token, and how far back it attends."""

    shape: KeyValueShape
    range: AttentionRange


@dataclass(frozen=True)
class ModelTraits:
    """The properties of a target's layers, as one forward shows them."""

    output_tuple_size: int = 0  # size of the tuple that a layer returns; 0 is a tensor
    has_single_stream: bool = True  # one residual stream enters each layer
    cache_argument: str = "past_key_values"  # argument of the decoder for its cache
    accepts_use_cache: bool = True  # False: with it, only a cache of its own class would do
    attention_indices: tuple[tuple[int, ...], ...] | None = None  # cache indices by layer; None: one each
    kv_shapes: dict[int, KeyValueShape] | None = None  # by attention layer, where shapes differ or not all layers attend
    attention_ranges: dict[int, AttentionRange] | None = None  # of layers that do not pass their own range
    recurrent_modules: dict[int, RecurrentModule] = field(default_factory=dict)  # by layer
    attention_layers: dict[int, LayerAttention] = field(default_factory=dict)  # by attention layer
    path_policy: PathPolicy = "never"  # when recurrent layers run several nodes at once
    masked_attention: MaskedAttention | None = None  # of layers that compute attention themselves


UNINSPECTED = ModelTraits()


def inspect_target(target: Target) -> ModelTraits:
    """Return the traits of a target; raise UserError where its attention does not suit tree decoding."""
    if target.config._attn_implementation == MASKED:
        return _inspect_masked(target)
    calls: list[AttentionCall] = []
    outputs: list[Any] = []
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=target.device)
    watching = StateRecorder(target.config)
    name, starts = cache_argument(target.decoder), list[int]()
    cached: dict[str, Any] = {name: watching, "use_cache": True} if watching.is_recurrent else {"use_cache": False}
    handles = [layer.register_forward_pre_hook(lambda *given: starts.append(len(calls))) for layer in target.layers]
    handles.append(target.layers[0].register_forward_hook(lambda module, args, output: outputs.append(output)))
    try:
        with torch.no_grad(), explain_incompatibility(target), record_masks() as masks, watching.record_layers(target.layers):
            uses_cache = _run_decoder(target, cached | {"input_ids": tokens, "calls": calls})
    finally:
        for handle in handles:
            handle.remove()
    if len(watching.updated_layers) == len(calls):  # shared modules have no layer index
        calls = [replace(call, layer=layer) for call, layer in zip(calls, watching.updated_layers)]
    layers = [call.layer for call in calls]
    if not calls and not watching.recurrent_modules:
        target.config._attn_implementation = MASKED
        return _inspect_masked(target)
    _check_calls(target, layers, {*watching.recurrent_modules})
    unheeded = sorted({name for call in calls for name in call.unsupported})
    if unheeded:
        raise UserError(
            f"target {target.name}: its attention depends on {', '.join(unheeded)}, which tree attention does not know; use "
            "a model whose layers are all ordinary attention"
        )
    shapes = {call.layer: call.shape for call in calls}
    alike = len(shapes) == target.num_layers and len({*shapes.values()}) == 1
    alike = alike and all(shape.key_size == shape.value_size for shape in shapes.values())
    reaches = {call.layer: reach for call in calls if (reach := _find_range(target, call, masks)) is not None}
    num_returned = len(outputs[0]) if isinstance(outputs[0], tuple) else 0
    states = outputs[0][0] if num_returned else outputs[0]
    kept = {call.layer: LayerAttention(call.shape, reaches.get(call.layer, AttentionRange(call.window))) for call in calls}
    ends = [*starts[1:], len(calls)]
    inside = None if alike else tuple(tuple(layers[start:end]) for start, end in zip(starts, ends))
    held = uses_cache, inside, None if alike else shapes, reaches or None, watching.recurrent_modules, kept
    return ModelTraits(num_returned, states.dim() == 3, name, *held)


def _inspect_masked(target: Target) -> ModelTraits:
    """Return the traits of a target whose layers compute attention themselves."""
    holding, outputs, told = KVRecorder(), list[Any](), dict[str, Any]()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=target.device)
    layer, name = target.layers[0], cache_argument(target.decoder)
    handles = [
        layer.register_forward_pre_hook(lambda module, args, kwargs: told.update(kwargs), with_kwargs=True),
        layer.register_forward_hook(lambda module, args, output: outputs.append(output)),
    ]
    try:
        with torch.no_grad(), explain_incompatibility(target), record_masks() as masks:
            target.decoder(input_ids=tokens, use_cache=True, **{name: holding})
    finally:
        for handle in handles:
            handle.remove()
    places = _probe_positions(None, target.device)
    causal = bool(masks) and all(
        torch.equal(mask.visible_keys(places, places), _range_mask(AttentionRange(), places)) for _, mask in masks
    )
    if sorted(holding.shapes) != [*range(target.num_layers)] or not causal:
        what = "keep no keys in a cache of transformers" if causal or not holding.shapes else "make masks of their own"
        raise UserError(
            f"target {target.name}: its layers go past transformers' attention interface and {what}, so trees cannot be "
            "verified with it; use a model whose layers are all ordinary attention"
        )
    shapes = holding.shapes
    alike = len({*shapes.values()}) == 1 and all(shape.key_size == shape.value_size for shape in shapes.values())
    num_returned = len(outputs[0]) if isinstance(outputs[0], tuple) else 0
    own = inspect_masked_attention(target.layers, told, accepts_argument(target.decoder, "position_ids"))
    windows = [
        next((own.stored_masks[module].window for module in layer.modules() if module in own.stored_masks), None)
        for layer in target.layers
    ]
    kept = {layer: LayerAttention(shape, AttentionRange(windows[layer])) for layer, shape in shapes.items()}
    return ModelTraits(
        num_returned, True, name, kv_shapes=None if alike else shapes, attention_layers=kept, masked_attention=own
    )


def _check_calls(target: Target, layers: list[int], recurrent: set[int]) -> None:
    """Raise UserError for layers that attend more than once, or that neither attend nor keep a state."""
    if len({*layers}) < len(layers):
        what = "its layers attend several times to keys of their own"
    elif layers != sorted(layers) or not {*layers} | recurrent or (not recurrent and len(layers) < target.num_layers):
        silent = [str(layer) for layer in range(target.num_layers) if layer not in layers]
        what = (
            f"layers {', '.join(silent)} neither attend by transformers' interface nor keep a state in a cache of transformers"
        )
    else:
        return
    raise UserError(
        f"target {target.name}: {what}, so trees cannot be verified with it; use a model whose layers are all ordinary "
        "attention"
    )


def _run_decoder(target: Target, told: dict[str, Any]) -> bool:
    """Run the decoder with a cache; return whether it accepts `use_cache`."""
    try:
        target.decoder(**told)
    except ValueError:
        if not told["use_cache"]:
            raise
        target.decoder(**told | {"use_cache": False})
        return False
    return True


@contextmanager
def explain_incompatibility(target: Target) -> Iterator[None]:
    """Turn any error of the model's code into a UserError that says that the model does not run here."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind: the model's code is transformers' or a stranger's
        if "'NoneType' object" in str(error):
            raise UserError(
                f"target {target.name}: its layers compute with masks themselves, to choose by content what they see, and "
                "trees have none; use a model whose layers are all ordinary attention"
            ) from error
        raise UserError(
            f"target {target.name}: its layers do not run on spectrain's attention and cache "
            f"({type(error).__name__}: {first_line(error)}); use a model whose layers are all ordinary attention"
        ) from error


def _find_range(target: Target, call: AttentionCall, masks: Sequence[tuple[Tensor, RequestedMask]]) -> AttentionRange | None:
    """Return the range of a layer by its mask; None where its call gives the same range, or it has no mask."""
    mask = next((mask for given, mask in masks if given is call.mask), None)
    if mask is None:
        return None
    size = mask.size or call.window
    candidates = [AttentionRange(), *([] if size is None else [AttentionRange(window=size), AttentionRange(chunk=size)])]
    places = _probe_positions(size, target.device)
    seen = mask.visible_keys(places, places)
    for reach in candidates:
        if torch.equal(seen, _range_mask(reach, places)):
            return None if reach == AttentionRange(call.window) else reach
    raise UserError(
        f"target {target.name}: layer {call.layer} sees neither all the text before a token nor a window or chunk of it, so "
        "trees cannot be verified with it; use a model whose layers are all ordinary attention"
    )


def _probe_positions(size: int | None, device: torch.device) -> Tensor:
    """Return positions around which a mask can change."""
    found = {0, 1, 2, 3, *(1 << power for power in range(2, MAX_POSITION.bit_length()))}
    found |= {max(0, turn * size + beside) for turn in range(1, 4) for beside in (-2, -1, 0, 1, 2)} if size else set()
    return torch.tensor(sorted(found), device=device)


def _range_mask(reach: AttentionRange, places: Tensor) -> Tensor:
    """Return [P, P], what a layer of this range sees at these positions."""
    here, there = places[:, None], places[None]
    seen = there <= here
    if reach.window is not None:
        seen = seen & (here - there < reach.window)
    return seen if reach.chunk is None else seen & (here // reach.chunk == there // reach.chunk)


@torch.no_grad()
def check_exact(target: Target) -> None:
    """Raise UserError for a target that computes something else here than with the attention and cache of transformers."""
    from .reference_model import reference_model

    tokens, layers = _sample_tokens(target), _checked_layers(target)
    with explain_incompatibility(target), reference_model(target) as model:
        with target.capture_layers(layers) as captured:  # output_hidden_states would leave hooks in the model
            logits = model(input_ids=tokens, use_cache=False).logits.float()
        stepped = _stepwise_logits(model, tokens, target) if target.traits.recurrent_modules else logits
    plain = ReferenceOutput(tokens, logits, stepped, layers, captured)
    limit = MAX_GAP.get(target.dtype, MAX_GAP_HALF)
    if target.traits.recurrent_modules:
        target.traits = replace(target.traits, path_policy=_find_path_policy(target, plain))
    with explain_incompatibility(target):
        for what, gap in _measure_gaps(target, plain):
            if not gap <= limit:
                raise UserError(
                    f"target {target.name}: its {what} differ by {gap:.1%} from what transformers computes, so drafts would be "
                    "judged by another model; use another target, and report this one"
                )


def _find_path_policy(target: Target, plain: ReferenceOutput) -> PathPolicy:
    """Return whether recurrent layers compute the same from several tokens at once as from one after another. In half precision
    on a CPU that would have to hold bit by bit, which it does not."""
    if attention_dtype(target.dtype, target.device) != target.dtype:
        return "never"
    tried, target.traits = target.traits, replace(target.traits, path_policy="always")
    try:
        gap = max(_cached_gaps(target, plain.tokens, plain.stepped_logits))
    except Exception:  # of any kind: a module that knows no such call
        return "never"
    finally:
        target.traits = tried
    return "where cheaper" if gap <= MAX_STEP_GAP.get(target.dtype, MAX_GAP_HALF) else "never"


@dataclass(frozen=True)
class ReferenceOutput:
    """What transformers computes for a text."""

    tokens: Tensor  # [1, T]
    logits: Tensor  # [1, T, V]
    stepped_logits: Tensor  # [1, T, V], the second half token by token
    layers: tuple[Layer, ...]
    states: dict[Layer, Tensor]  # [1, T, D], the input of each layer


def _checked_layers(target: Target) -> tuple[Layer, ...]:
    return tuple(range(target.num_layers)) if target.traits.has_single_stream else ()


def _sample_tokens(target: Target) -> Tensor:
    """Return [1, T] ordinary tokens, none of which is special or stands for an image."""
    settings = {**target.model.config.to_dict(), **target.config.to_dict()}  # type: ignore[operator, union-attr]
    special = {value for key, value in settings.items() if "token" in key and isinstance(value, int)}
    size = target.head.vocab_size
    usable = [token for token in range(min(size, 4096)) if token not in special]
    return torch.tensor([[usable[31 * place % len(usable)] for place in range(1, CHECK_LENGTH + 1)]], device=target.device)


def _relative_gap(ours: Tensor | None, theirs: Tensor) -> float:
    """Return the relative difference of states or logits [B, T, ..] at the third quartile of tokens. A real error shows at many
    tokens, while rounding alone can move single tokens where experts have nearly equal scores."""
    assert ours is not None
    if ours.shape != theirs.shape:
        return float("inf")
    ours, theirs = ours.float(), theirs.float()
    gaps = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)
    return float(gaps.flatten().quantile(0.75))


def _measure_gaps(target: Target, plain: ReferenceOutput) -> Iterator[tuple[str, float]]:
    """Yield each output that is compared, with its relative difference."""
    seen = target.run(plain.tokens, ForwardPlan(layers=plain.layers, logits=True))
    yield "features", max([0.0, *(_relative_gap(seen.at_layer(layer), plain.states[layer]) for layer in plain.layers)])
    yield "logits", _relative_gap(seen.logits, plain.logits)
    yield "logits over a cached tree", max(_cached_gaps(target, plain.tokens, plain.stepped_logits))


@torch.no_grad()
def check_vision(target: Target, text: Sequence[int], images: Images) -> None:
    """Raise UserError where a text with images gives other logits than with transformers: at its last tokens, read at once and
    after the cached rest."""
    from .reference_model import reference_model

    last = min(CHECK_LENGTH // 4, len(text) - images.end)
    tokens = torch.tensor([text], device=target.device)
    with explain_incompatibility(target), reference_model(target) as model:
        told = images.model_inputs(len(text), model)
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=last + 1, **told).logits.float()
    with explain_incompatibility(target):
        final = target.features(tokens, ("final",), texts=[text]).at_layer("final")[:, -last - 1 :]
        gaps = [_relative_gap(target.head.logits(final), logits)]
        cache, read = target.new_cache(1, len(text)), len(text) - last
        prompt = target.prefill(tokens[:, :read], torch.tensor([read], device=target.device), cache, (), [text[:read]])
        gaps.append(_relative_gap(prompt.logits, logits[:, :1]))
        if last:
            gaps.append(_relative_gap(target.verify(TokenTree.from_chain(tokens[:, read:]), cache).logits, logits[:, 1:]))
    if not max(gaps) <= MAX_GAP.get(target.dtype, MAX_GAP_HALF):
        raise UserError(
            f"target {target.name}: with images its logits differ by {max(gaps):.1%} from what transformers computes, so it "
            "reads text alone here; leave out conversations with images"
        )


def _stepwise_logits(model: Any, tokens: Tensor, target: Target) -> Tensor:
    """Return the logits as `generate` computes them, token by token: recurrent layers read a whole text by another algorithm,
    which for some models is not quite the same."""
    name, parts, cache, done = target.traits.cache_argument, [], None, 0
    has_positions = "position_ids" in inspect.signature(model.forward).parameters
    for part in (tokens[:, : CHECK_LENGTH // 2], *tokens[:, CHECK_LENGTH // 2 :].split(1, dim=1)):
        places = torch.arange(done, done := done + part.shape[1], device=part.device)[None]
        told: dict[str, Any] = {"position_ids": places} if has_positions else {}
        output = model(input_ids=part, use_cache=True, **({} if cache is None else {name: cache}), **told)
        cache = output[name]
        parts.append(output.logits.float())
    return torch.cat(parts, dim=1)


def _cached_gaps(target: Target, tokens: Tensor, logits: Tensor) -> Iterator[float]:
    """Yield the differences for half of the text as a prompt, some of it as a path of a tree, and the rest after the committed
    path."""
    half, own, device = CHECK_LENGTH // 2, [*range(0, TREE_NODES, 2)], target.device
    cache = target.new_cache(1, CHECK_LENGTH + TREE_NODES)
    prompt = target.prefill(tokens[:, :half], torch.tensor([half], device=device), cache, ())
    yield _relative_gap(prompt.logits, logits[:, half - 1 : half])
    end = half + len(own)
    nodes = tokens[:, half:end].repeat_interleave(2, dim=1)[:, :TREE_NODES].clone()
    nodes[:, 1::2] = tokens[:, : TREE_NODES // 2]  # wrong siblings: each is a child of the text node before it
    parents = torch.tensor([[-1, *(max(0, node - 2 + node % 2) for node in range(1, TREE_NODES))]], device=device)
    tree = target.verify(TokenTree.from_parents(nodes, parents), cache).logits
    yield _relative_gap(None if tree is None else tree[:, own], logits[:, half:end])
    cache.commit(torch.tensor([own], device=device), torch.tensor([len(own)], device=device))
    rest = target.verify(TokenTree.from_chain(tokens[:, end:]), cache).logits
    yield _relative_gap(rest, logits[:, end:])
