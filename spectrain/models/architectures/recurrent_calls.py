"""A recurrent module, called over nodes from the states before them, with a cache of states as
transformers has it.

The input and output linears of the module treat every token by itself and hold most of its weights.
Their products of all new nodes are computed once, however many calls the states between them take.
Shapes: B batch, M nodes, D width, K rows of a call, T tokens of a row, I inner width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from spectrain.errors import UserError
from spectrain.models.forward_override import override_forwards

LayerStates: TypeAlias = LinearAttentionLayer
"""States of several rows, [rows, ..] each."""
ATTENTION_ARGUMENTS = (
    "visibility",
    "tree_cache",
    "lengths",
    "ranges",
    "layer_visibility",
    "calls",
    "attention_rotates",
)
"""Arguments for attention, which recurrent layers do not receive."""
# tokens that a recurrence computes at once, where its module has no chunk size
DEFAULT_CHUNK_SIZE = 64


@dataclass(frozen=True)
class RecurrentModule:
    """A module that keeps a state."""

    module: nn.Module
    input_linears: tuple[nn.Module, ...] = ()  # linears that read its input
    output_linear: nn.Module | None = None  # the linear whose output is its own

    @property
    def chunk_size(self) -> int:
        return int(getattr(self.module, "chunk_size", DEFAULT_CHUNK_SIZE))

    @property
    def class_forward(self) -> Callable[..., Any]:
        """The module's own forward, whatever overrides it."""
        module: Any = self.module
        forward: Callable[..., Any] = type(module).forward.__get__(module)
        return forward


@dataclass(frozen=True)
class StateCall:
    """The recorded call of a recurrent module, without its states and its first argument, which
    are supplied later.
    """

    recurrent: RecurrentModule
    layer: int
    forward: Callable[..., Tensor]
    # The argument that holds its states.
    cache: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # For each part of a tuple output, its shape per token; None where it has no part per token.
    output_sizes: list[torch.Size | None] = field(default_factory=list)

    def __call__(self, hidden: Tensor, states: LayerStates) -> Tensor:
        """Run [K, T, D] -> [K, T, D] from the states of K rows and update these. A tuple of
        outputs becomes one tensor.
        """
        cache = _LayerStateCache(self.layer, states)
        args = [cache if value is self.cache else value for value in self.args]
        kwargs = {
            key: cache if value is self.cache else value for key, value in self.kwargs.items()
        }
        output = self.forward(hidden, *args, **kwargs)
        if isinstance(output, Tensor):
            return output
        per_token = [
            isinstance(part, Tensor) and part.shape[:2] == hidden.shape[:2] for part in output
        ]
        self.output_sizes[:] = [
            part.shape[2:] if each else None for part, each in zip(output, per_token)
        ]
        return torch.cat([part.flatten(2) for part, each in zip(output, per_token) if each], dim=-1)

    def split_output(self, output: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """Return [B, N, ..] in the form in which the module returns it."""
        if not self.output_sizes:
            return output
        parts = iter(
            output.split([size.numel() for size in self.output_sizes if size is not None], dim=-1)
        )
        return tuple(
            None if size is None else next(parts).unflatten(-1, size) for size in self.output_sizes
        )


def make_state_call(
    recurrent: RecurrentModule,
    layer: int,
    cache: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StateCall:
    """Record the call of a module, so that it can be repeated. `cache` is the argument that
    holds its states.
    """
    if not any(value is cache for value in (*args, *kwargs.values())):
        raise UserError(
            f"target: layer {layer} does not read its state from the cache as other models do; "
            "use another target"
        )
    own_kwargs = {
        key: value
        for key, value in kwargs.items()
        if key not in (*ATTENTION_ARGUMENTS, "hidden_states")
    }
    return StateCall(recurrent, layer, recurrent.class_forward, cache, args[1:], own_kwargs)


class StateNodes:
    """Nodes [B, M, D] of a module, with the products of its input linears."""

    def __init__(
        self, call: StateCall, hidden: Tensor, products: Sequence[Tensor] | None = None
    ) -> None:
        self.call, self.hidden = call, hidden
        self.products = (
            [linear(hidden) for linear in call.recurrent.input_linears]
            if products is None
            else list(products)
        )

    def append_nodes(self, new: StateNodes) -> StateNodes:
        """Return these nodes followed by new ones."""
        products = [torch.cat(both, dim=1) for both in zip(self.products, new.products)]
        return StateNodes(new.call, torch.cat([self.hidden, new.hidden], dim=1), products)

    def reorder_nodes(self, order: Tensor) -> StateNodes:
        """Return the nodes with node `order[b, i]` at index i."""
        rows = torch.arange(len(order), device=order.device)[:, None]
        return StateNodes(
            self.call, self.hidden[rows, order], [product[rows, order] for product in self.products]
        )

    def run(self, rows: Tensor, nodes: Tensor, states: LayerStates) -> Tensor:
        """Run nodes [K, T] of batch rows [K] from given states; return [K, T, I], which
        `project_output` turns into the output."""
        index = rows[:, None], nodes
        hidden = self.hidden[index]
        recurrent = self.call.recurrent
        overrides = [
            _reuse_product(linear, hidden, product[index])
            for linear, product in zip(recurrent.input_linears, self.products)
        ]
        if recurrent.output_linear is not None:
            overrides.append((recurrent.output_linear, lambda inner: inner))
        with override_forwards(overrides):
            return self.call(hidden, states)

    def project_output(self, inner: Tensor) -> Tensor:
        """Apply the output linear, [B, N, I] -> [B, N, D]."""
        linear = self.call.recurrent.output_linear
        return inner if linear is None else linear(inner)


def _reuse_product(
    linear: nn.Module, hidden: Tensor, product: Tensor
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return a linear and a forward that returns the product already computed for this input."""
    forward = linear.forward

    def run(input: Tensor) -> Tensor:
        return product if input is hidden else forward(input)

    return linear, run


# States of several rows


def map_states(states: LayerStates, change: Callable[[int, str], Tensor | None]) -> LayerStates:
    """Copy states, with every tensor changed by `change(index, name)`."""
    changed = copy.copy(states)
    changed.conv_states = {index: change(index, "conv_states") for index in states.conv_states}
    changed.recurrent_states = {
        index: change(index, "recurrent_states") for index in states.recurrent_states
    }
    return changed


def gather_states(states: LayerStates, rows: Tensor) -> LayerStates:
    """Copy the states of some rows."""

    def select_rows(index: int, name: str) -> Tensor | None:
        state = getattr(states, name)[index]
        return None if state is None else state[rows]

    return map_states(states, select_rows)


def concat_states(parts: Sequence[LayerStates]) -> LayerStates:
    if len(parts) == 1:
        return parts[0]

    def concat(index: int, name: str) -> Tensor | None:
        tensors = [getattr(part, name)[index] for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    return map_states(parts[0], concat)


def count_rows(states: LayerStates) -> int:
    tensors = [*states.conv_states.values(), *states.recurrent_states.values()]
    return next(len(tensor) for tensor in tensors if tensor is not None)


def is_conv_only(states: LayerStates) -> bool:
    """Return whether the states hold nothing but the last inputs of a convolution."""
    return all(state is None for state in states.recurrent_states.values())


class _LayerStateCache(Cache):
    """The cache that a recurrent module receives: its own states."""

    def __init__(self, layer: int, states: LayerStates) -> None:
        super().__init__(layers=[])
        self.layers = {layer: states}

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state for MiniMax, which calls this method."""
        return self.layers[layer_idx].recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.layers[layer_idx].recurrent_states[0] = state


# Detection


@dataclass
class _ActiveModule:
    """A module that is running."""

    module: nn.Module
    argument: Any  # its first argument
    input_linears: list[nn.Module] = field(default_factory=list)
    # The linear inside it that ran last, and its output.
    last_linear: tuple[nn.Module | None, Any] = (None, None)


class StateRecorder(DynamicCache):
    """A cache that records which modules read a state: those that run when it is read."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.active: list[_ActiveModule] = []
        self.recurrent_modules: dict[int, RecurrentModule] = {}
        self.updated_layers: list[int] = []  # the layer index of every call of `update`

    @property
    def is_recurrent(self) -> bool:
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self.recurrent_modules[layer_idx] = RecurrentModule(self.active[-1].module)
        return super().get_conv_state(layer_idx, state_idx)

    def get_linear_cache(self, layer_idx: int) -> None:
        """Record a state request of MiniMax, which calls this method."""
        self.recurrent_modules[layer_idx] = RecurrentModule(self.active[-1].module)

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None: ...

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.updated_layers.append(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @contextmanager
    def record_layers(self, layers: nn.ModuleList) -> Iterator[None]:
        """Follow the modules of these layers while the context is open."""
        with ExitStack() as hooks:
            for module in layers.modules():
                hooks.enter_context(
                    module.register_forward_pre_hook(self._enter_module, with_kwargs=True)
                )
                hooks.enter_context(module.register_forward_hook(self._leave_module))
            yield

    def _enter_module(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        argument = args[0] if args else kwargs.get("hidden_states")
        if isinstance(module, nn.Linear):
            for outer in self.active:
                if outer.argument is argument:
                    outer.input_linears.append(module)
        self.active.append(_ActiveModule(module, argument))

    def _leave_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        done = self.active.pop()
        if isinstance(module, nn.Linear):
            for outer in self.active:
                outer.last_linear = module, output
        for layer, recurrent in self.recurrent_modules.items():
            if recurrent.module is module:
                output_linear = done.last_linear[0] if done.last_linear[1] is output else None
                self.recurrent_modules[layer] = RecurrentModule(
                    module, tuple(done.input_linears), output_linear
                )
