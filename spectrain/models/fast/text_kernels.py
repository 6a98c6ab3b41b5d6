"""The norms, gated units and rotations of a target that reads texts for their features, on a GPU:
one launch each, where transformers' modules take six, two and ten.

Only modules that compute what the kernels compute are overridden: each is tried on a few rows.
Decoding keeps the modules' own code, which is compiled there, but for the rotation of queries and
keys: attention over a cached tree rotates them in the launch that appends keys and values. Shapes:
B batch, N new nodes, H query heads, K key-value heads, D width or head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import deprecation

from spectrain.kernels.dispatch import runs_on, takes_gradients
from spectrain.kernels.gated_unit import gated_unit, gated_unit_reference
from spectrain.kernels.norm_gradients import can_norm, norm_rows
from spectrain.kernels.rms_norm import rms_norm_reference
from spectrain.kernels.rotate_heads import (
    can_rotate,
    rotate_heads_reference,
    rotate_split_heads,
)
from spectrain.models.forward_override import set_forward

if TYPE_CHECKING:
    from spectrain.models.kv_cache import TreeCache

PARTS = ("gate_proj", "up_proj", "down_proj")
ROTATION = "apply_rotary_pos_emb"
"""The function of a module of transformers that rotates queries and keys."""
LATE_ROTATION = "attention_rotates"
"""The argument that asks attention modules to leave their rotation to attention."""
TRIED_ROWS = 4

_reads_texts = ContextVar("reads_texts", default=False)


@contextmanager
def use_text_kernels() -> Iterator[None]:
    """Run fused modules by kernels while the context is open."""
    token = _reads_texts.set(True)
    try:
        yield
    finally:
        _reads_texts.reset(token)


def _runs_kernel(x: Tensor) -> bool:
    # Compiled code fuses the module's own operations.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return _reads_texts.get() and takes_gradients(x)


def _find_eps(norm: nn.Module) -> float | None:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if isinstance(eps, float) else None


def _norm_forward(norm: Any, x: Tensor) -> Tensor:
    """Return the norm of rows by the kernel, or by the module's own code."""
    if not _runs_kernel(x):
        output: Tensor = type(norm).forward(norm, x)
        return output
    return norm_rows(x, norm.weight, _find_eps(norm) or 0.0)


def _block_forward(block: Any, x: Tensor) -> Tensor:
    """Return a gated block's output with the gated unit by the kernel, or by the module's own
    code.
    """
    if not _runs_kernel(x):
        output: Tensor = type(block).forward(block, x)
        return output
    down: Tensor = block.down_proj(gated_unit(block.gate_proj(x), block.up_proj(x)))
    return down


@cache
def _fuse_rotation(forward: Callable[..., Any], late_size: int | None) -> Callable[..., Any] | None:
    """Return the forward of an attention module with its rotation by the kernel; None where it
    does not rotate, or in another way. Where attention is asked to rotate, the module leaves its
    heads of `late_size` as they are.

    The same code runs with another function by the name of the rotation, so that nothing in
    transformers changes.
    """
    own = _find_rotating_code(forward)
    if own is None:
        return None
    rotation = own.__globals__.get(ROTATION)
    if rotation is None or not _is_rotation(rotation):
        return None

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not can_rotate(q, k, cos):
            return rotation(q, k, cos, sin, *args, **kwargs)
        return rotate_split_heads(q, k, cos, sin)

    fused = _replace_rotation(own, rotate)
    unrotated = _replace_rotation(own, _keep_heads)

    @wraps(forward)
    def run(attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
        angles = kwargs.get("position_embeddings")
        if kwargs.get(LATE_ROTATION) and angles is not None and angles[0].shape[-1] == late_size:
            return unrotated(attention, *args, rotation=angles, **kwargs)
        x = args[0] if args else kwargs.get("hidden_states")
        by_kernel = isinstance(x, Tensor) and _runs_kernel(x)
        return (fused if by_kernel else forward)(attention, *args, **kwargs)

    return run


def can_rotate_late(cache: TreeCache, dtype: torch.dtype) -> bool:
    """Tell whether attention over a cache may rotate queries and keys of a type where it appends.
    The interpreter computes bfloat16 wrongly.
    """
    device = cache.lengths.device
    types = (torch.float32, torch.float16, torch.bfloat16)
    return (
        runs_on(device)
        and dtype in (types[:2] if device.type == "cpu" else types)
        and cache.lends_storage(dtype)
    )


def _find_rotating_code(forward: Callable[..., Any]) -> FunctionType | None:
    """Return the function of a forward that calls the rotation; None where there is none.

    It may stand behind the wrapper by which transformers renames old arguments. The layers of a
    model pass the new names, so the wrapper changes nothing for them.
    """
    is_renaming = getattr(forward, "__globals__", {}).get("__name__") == deprecation.__name__
    own = getattr(forward, "__wrapped__", forward) if is_renaming else forward
    if not isinstance(own, FunctionType) or ROTATION not in own.__code__.co_names:
        return None
    return own


def _replace_rotation(forward: FunctionType, rotate: Callable[..., Any]) -> Any:
    """Return a copy of a forward that calls another function by the name of the rotation."""
    names = {**forward.__globals__, ROTATION: rotate}
    # A compiler would look names up in the module of this name.
    del names["__name__"]
    copied = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _keep_heads(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return q, k


def _find_late_size(attention: Any) -> int | None:
    """Return the size of an attention module's heads where nothing changes queries and keys between
    their rotation and attention, so that attention may rotate them; else None.
    """
    own = _find_rotating_code(type(attention).forward)
    if own is None:
        return None
    rotated: list[Tensor] = []
    attended: list[Tensor] = []

    def rotate(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rotated.extend((q, k))
        return q, k

    def attend(q: Tensor, k: Tensor, v: Tensor, options: Any) -> Tensor:
        attended.extend((q, k, v))
        return q.new_zeros(*q.shape[:-1], v.shape[-1])

    x = next(attention.parameters()).new_zeros(1, 1, attention.config.hidden_size)
    call = {"hidden_states": x, "attention_mask": None, "attends": attend}
    try:
        _replace_rotation(own, rotate)(attention, position_embeddings=(x, x), **call)
    except (RuntimeError, TypeError):
        # It takes other arguments, or reads the angles itself.
        return None
    if len(rotated) != 2 or len(attended) != 3:
        return None
    q, k = rotated
    query, key, value = attended
    angles = q.new_empty(1, 1, q.shape[-1])
    is_last = query is q and key is k and key.shape == value.shape
    return q.shape[-1] if is_last and can_rotate(q, k, angles) else None


def _is_rotation(rotation: Callable[..., Any]) -> bool:
    """Tell whether a function rotates the halves of heads as the kernel does."""
    if [*inspect.signature(rotation).parameters][:4] != ["q", "k", "cos", "sin"]:
        return False
    heads = _make_rows(24, torch.zeros(1)).view(1, 4, 3, 8)
    angles = torch.arange(12.0).view(1, 3, 4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    q, k = (x.transpose(1, 2).flatten(2) for x in (heads, heads[:, :2]))
    expected = rotate_heads_reference(q, k, k, cos, sin)
    try:
        rotated = rotation(heads, heads[:, :2], cos, sin)
    except RuntimeError:
        # It takes a cosine for every two dimensions.
        return False
    return all(_is_equal(x, y) for x, y in zip(rotated, expected[:2], strict=True))


@torch.no_grad()
def fuse_text_layers(model: nn.Module) -> None:
    """Let the RMS norms, gated blocks and rotations of a model run by kernels where it reads texts.
    A module that already runs something else, or computes something else, stays as it is.
    """
    for module in model.modules():
        if "forward" in vars(module):
            continue
        rotating = _fuse_rotation(type(module).forward, _find_late_size(module))
        if rotating is not None:
            set_forward(module, MethodType(rotating, module))
        # A norm with a gate takes two tensors.
        if len(inspect.signature(type(module).forward).parameters) != 2:
            continue
        if _is_norm(module):
            set_forward(module, MethodType(_norm_forward, module))
        elif _is_gated_block(module):
            set_forward(module, MethodType(_block_forward, module))


def _is_norm(module: nn.Module) -> bool:
    """Tell whether a module is an RMS norm times its weight."""
    weight = getattr(module, "weight", None)
    eps = _find_eps(module)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or eps is None:
        return False
    if "RMSNorm" not in type(module).__name__ or len([*module.parameters()]) != 1:
        return False
    if not can_norm(len(weight)):
        return False
    rows = _make_rows(len(weight), weight)
    return _is_equal(module(rows), rms_norm_reference(rows, weight, eps))


def _is_gated_block(module: nn.Module) -> bool:
    """Tell whether a module is down(silu(gate(x)) * up(x))."""
    linears: list[Any] = [getattr(module, name, None) for name in PARTS]
    names = {name for name, _ in module.named_children()}
    if not all(isinstance(linear, nn.Linear) for linear in linears) or not names <= {
        *PARTS,
        "act_fn",
    }:
        return False
    rows = _make_rows(linears[0].in_features, linears[0].weight)
    unit = gated_unit_reference(linears[0](rows), linears[1](rows))
    return _is_equal(module(rows), linears[2](unit))


def _make_rows(width: int, like: Tensor) -> Tensor:
    """Return a few rows of different sizes and signs, in the type and on the device of a weight."""
    values = torch.arange(TRIED_ROWS * width, device=like.device).view(TRIED_ROWS, width)
    rows = (values.float() * 0.7).sin() * torch.tensor([[0.01], [1.0], [3.0], [40.0]]).to(
        like.device
    )
    return rows.to(like.dtype)


def _is_equal(outputs: Any, expected: Tensor) -> bool:
    """Tell whether outputs are equal up to rounding; tensors without values count as equal."""
    if not isinstance(outputs, Tensor) or outputs.shape != expected.shape:
        return False
    if outputs.is_meta:
        return True
    difference = (outputs.float() - expected.float()).norm(dim=-1)
    tolerance = 4 * torch.finfo(expected.dtype).eps * expected.float().norm(dim=-1)
    return bool((difference <= tolerance).all())
