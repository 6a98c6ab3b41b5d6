"""Hooks that read the residual stream of a model between its layers, or replace it. Shapes: B
batch, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from .features import Layer


class InputReader:
    """A hook that stores the states that enter a layer, and changes nothing."""

    def __init__(self, captured: dict[Layer, Tensor], layer: int) -> None:
        self.captured, self.layer = captured, layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.captured[self.layer] = args[0] if args else kwargs["hidden_states"]


def only_reads_input(module: nn.Module) -> bool:
    """Return whether all hooks of a module only store the states that enter it."""
    return not module._forward_hooks and all(
        type(hook) is InputReader for hook in module._forward_pre_hooks.values()
    )


@contextmanager
def capture_stream(
    modules: nn.ModuleList, layers: Sequence[Layer]
) -> Iterator[dict[Layer, Tensor]]:
    """Capture what enters the given layers, and what leaves the last one, while the context is
    open. "final" is left out.
    """
    captured: dict[Layer, Tensor] = {}
    num_layers = len(modules)

    def store_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        captured[num_layers] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for layer in layers:
            if layer == num_layers:
                hooks.enter_context(modules[-1].register_forward_hook(store_output))
            elif layer != "final":
                reader = InputReader(captured, layer)
                hooks.enter_context(
                    modules[layer].register_forward_pre_hook(reader, with_kwargs=True)
                )
        yield captured


@contextmanager
def feed_stream(layer: nn.Module, hidden: Tensor) -> Iterator[None]:
    """Feed states [B, N, D] into a layer, in place of what the layer before it returns, while
    the context is open.
    """

    def replace_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (
            ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
        )

    with layer.register_forward_pre_hook(replace_input, with_kwargs=True, prepend=True):
        yield
