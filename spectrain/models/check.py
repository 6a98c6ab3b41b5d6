"""The check of a target when it is loaded: what it computes here must equal what transformers
computes with it.

A few tokens run both ways: features and logits of a text, the text read in pieces through the
cache, and its tokens again as one path of a tree, between nodes that it must not see. Shapes: B
batch, T tokens, N nodes, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spectrain.data.image_processor import Images
from spectrain.errors import UserError
from spectrain.trees.token_tree import TokenTree

from .architectures.probe import explain_incompatibility
from .architectures.recurrent_states import PathPolicy
from .cache_arguments import accepts_argument, read_cache
from .checked_tensors import has_finite_values
from .features import Layer
from .forward_plan import ForwardPlan
from .kv_cache import attention_dtype
from .reference_model import reference_model
from .target import Target

CHECK_LENGTH = 24  # tokens of the sample text
TREE_NODES = 7  # nodes; every second node is a token of the text
MAX_GAP = {torch.float32: 1e-3}
"""Largest relative difference of a token's states; types shorter than float32 sum in another
order.
"""
MAX_GAP_HALF = 0.1
MAX_STEP_GAP = {torch.float32: 1e-4}  # relative difference of logits, token by token or at once


@torch.no_grad()
def check_exact(target: Target) -> None:
    """Raise UserError for a target that computes something else here than with the attention and
    cache of transformers.
    """
    tokens = _sample_tokens(target)
    layers = _checked_layers(target)
    keeps_state = target.architecture.keeps_state
    check_weights(target.model, f"target {target.name}")
    with explain_incompatibility(target.name), reference_model(target) as model:
        # Requesting output_hidden_states would leave hooks in the model.
        with target.capture_layers(layers) as captured:
            logits = model(input_ids=tokens, use_cache=False).logits.float()
        stepped = _stepwise_logits(model, tokens, target) if keeps_state else logits
    check_varied(target, logits)
    reference = ReferenceOutput(tokens, logits, stepped, layers, captured)
    limit = MAX_GAP.get(target.dtype, MAX_GAP_HALF)
    if keeps_state:
        _set_path_policy(target, _find_path_policy(target, reference))
    with explain_incompatibility(target.name):
        for name, gap in _measure_gaps(target, reference):
            if math.isnan(gap):
                raise UserError(f"target {target.name}: {describe_not_finite(target, name)}")
            if not gap <= limit:
                raise UserError(
                    f"target {target.name}: its {name} differ by {gap:.1%} from what transformers "
                    "computes, so drafts would be judged by another model; use another target, "
                    "and report this one"
                )


def check_weights(model: nn.Module, what: str) -> None:
    """Raise UserError for a weight that holds NaN or infinity, also where the sample text does not
    reach it, as in the row of a rare token or in an expert; `what` names the model.
    """
    for name, weight in model.named_parameters():
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        # Tensors of quantizers have classes of their own.
        is_plain = type(own) in (Tensor, nn.Parameter) and not own.is_meta
        if not is_plain or not own.is_floating_point() or own.itemsize == 1:
            continue
        # A sum is one pass without memory; one of large numbers may overflow.
        if not own.sum().isfinite() and not has_finite_values(own):
            raise UserError(
                f"{what}: its weight {name} holds NaN or infinity; copy its files again"
            )


def check_varied(target: Target, logits: Tensor) -> None:
    """Raise UserError where all tokens have the same logit everywhere, as where a loader filled
    weights that it did not find with zeros.
    """
    if (logits == logits[..., :1]).all():
        named = target.model.named_parameters()
        weight = next((name for name, p in named if not p.any()), None)
        cause = "" if weight is None else f", and its weight {weight} is zero throughout"
        raise UserError(
            f"target {target.name}: it gives every token the same logit{cause}; copy its files "
            "again, or use another target"
        )


def describe_not_finite(target: Target, output: str) -> str:
    """Describe an output that is no number although all weights are."""
    dtype = str(target.dtype).removeprefix("torch.")
    remedy = "" if target.dtype == torch.float32 else "target.dtype=float32, or "
    return f"its {output} are not finite in {dtype}; use {remedy}another target"


def _set_path_policy(target: Target, policy: PathPolicy) -> None:
    target.architecture = replace(target.architecture, path_policy=policy)  # type: ignore[call-arg]


def _find_path_policy(target: Target, reference: ReferenceOutput) -> PathPolicy:
    """Return whether recurrent layers compute the same from several tokens at once as from one
    after another. In half precision on a CPU that would have to hold bit by bit, which it does not.
    """
    if attention_dtype(target.dtype, target.device) != target.dtype:
        return "never"
    _set_path_policy(target, "always")
    try:
        gap = max(_cached_gaps(target, reference.tokens, reference.stepped_logits))
    # Errors are of any kind: the module may not support such a call.
    except Exception:
        return "never"
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
    return tuple(range(target.num_layers)) if target.architecture.has_single_stream else ()


def _sample_tokens(target: Target) -> Tensor:
    """Return [1, T] ordinary tokens, none of which is special or stands for an image."""
    settings = {**target.model.config.to_dict(), **target.config.to_dict()}  # type: ignore[operator, union-attr]
    special = {
        value for key, value in settings.items() if "token" in key and isinstance(value, int)
    }
    size = target.head.vocab_size
    usable = [token for token in range(min(size, 4096)) if token not in special]
    return torch.tensor(
        [[usable[31 * index % len(usable)] for index in range(1, CHECK_LENGTH + 1)]],
        device=target.device,
    )


def _relative_gap(actual: Tensor | None, expected: Tensor) -> float:
    """Return the relative difference of states or logits [B, T, ..] at the third quartile of
    tokens. A real error shows at many tokens, while rounding alone can move single tokens where
    experts have nearly equal scores."""
    assert actual is not None
    if actual.shape != expected.shape:
        return float("inf")
    actual = actual.float()
    expected = expected.float()
    gaps = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
    return float(gaps.flatten().quantile(0.75))


def _measure_gaps(target: Target, reference: ReferenceOutput) -> Iterator[tuple[str, float]]:
    """Yield the name of each output that is compared, with its relative difference."""
    features = target.run(reference.tokens, ForwardPlan(layers=reference.layers, logits=True))
    gaps = [
        _relative_gap(features.at_layer(layer), reference.states[layer])
        for layer in reference.layers
    ]
    yield "features", max([0.0, *gaps])
    yield "logits", _relative_gap(features.logits, reference.logits)
    yield (
        "logits over a cached tree",
        max(_cached_gaps(target, reference.tokens, reference.stepped_logits)),
    )


@torch.no_grad()
def check_vision(target: Target, text: Sequence[int], images: Images) -> None:
    """Raise UserError where a text with images gives other logits than with transformers: at its
    last tokens, read at once and after the cached rest."""
    last = min(CHECK_LENGTH // 4, len(text) - images.end)
    tokens = torch.tensor([text], device=target.device)
    with explain_incompatibility(target.name), reference_model(target) as model:
        inputs = images.model_inputs(len(text), model)
        logits = model(
            input_ids=tokens, use_cache=False, logits_to_keep=last + 1, **inputs
        ).logits.float()
    with explain_incompatibility(target.name):
        final = target.features(tokens, ("final",), texts=[text]).at_layer("final")[:, -last - 1 :]
        gaps = [_relative_gap(target.head.logits(final), logits)]
        cache = target.new_cache(1, len(text))
        length = len(text) - last
        prompt = target.prefill(
            tokens[:, :length],
            torch.tensor([length], device=target.device),
            cache,
            (),
            [text[:length]],
        )
        gaps.append(_relative_gap(prompt.logits, logits[:, :1]))
        if last:
            gaps.append(
                _relative_gap(
                    target.verify(TokenTree.from_chain(tokens[:, length:]), cache).logits,
                    logits[:, 1:],
                )
            )
    if not max(gaps) <= MAX_GAP.get(target.dtype, MAX_GAP_HALF):
        raise UserError(
            f"target {target.name}: with images its logits differ by {max(gaps):.1%} from what "
            "transformers computes, so it reads text alone here; leave out conversations with "
            "images"
        )


def _stepwise_logits(model: Any, tokens: Tensor, target: Target) -> Tensor:
    """Return the logits as `generate` computes them, token by token: recurrent layers read a whole
    text by another algorithm, which for some models is not quite the same."""
    name = target.architecture.cache_argument
    parts = []
    cache = None
    done = 0
    has_positions = accepts_argument(model, "position_ids")
    for part in (tokens[:, : CHECK_LENGTH // 2], *tokens[:, CHECK_LENGTH // 2 :].split(1, dim=1)):
        positions = torch.arange(done, done := done + part.shape[1], device=part.device)[None]
        arguments: dict[str, Any] = {"position_ids": positions} if has_positions else {}
        output = model(
            input_ids=part, use_cache=True, **({} if cache is None else {name: cache}), **arguments
        )
        cache = read_cache(output)
        parts.append(output.logits.float())
    return torch.cat(parts, dim=1)


def _cached_gaps(target: Target, tokens: Tensor, logits: Tensor) -> Iterator[float]:
    """Yield the differences for half of the text as a prompt, some of it as a path of a tree, and
    the rest after the committed path."""
    half = CHECK_LENGTH // 2
    text_nodes = [*range(0, TREE_NODES, 2)]
    device = target.device
    cache = target.new_cache(1, CHECK_LENGTH + TREE_NODES)
    prompt = target.prefill(tokens[:, :half], torch.tensor([half], device=device), cache, ())
    yield _relative_gap(prompt.logits, logits[:, half - 1 : half])
    end = half + len(text_nodes)
    nodes = tokens[:, half:end].repeat_interleave(2, dim=1)[:, :TREE_NODES].clone()
    # Every other node is a wrong sibling, a child of the text node before it.
    nodes[:, 1::2] = tokens[:, : TREE_NODES // 2]
    parents = torch.tensor(
        [[-1, *(max(0, node - 2 + node % 2) for node in range(1, TREE_NODES))]], device=device
    )
    tree = target.verify(TokenTree.from_parents(nodes, parents), cache).logits
    yield _relative_gap(None if tree is None else tree[:, text_nodes], logits[:, half:end])
    cache.commit(
        torch.tensor([text_nodes], device=device), torch.tensor([len(text_nodes)], device=device)
    )
    rest = target.verify(TokenTree.from_chain(tokens[:, end:]), cache).logits
    yield _relative_gap(rest, logits[:, end:])
