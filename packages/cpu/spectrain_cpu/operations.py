"""The operations that this package computes on a CPU, by the names that the core asks for.

Importing this module imports no kernel: Numba takes a second, and not every process needs it. Each
function returns None for operands that its kernel does not serve.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from .available import are_kernels_loaded

AT_ONCE = {
    "attend_cached": "attention:attend_if_served",
    "attend_token": "attention:attend_token_if_served",
    "block_bytes": "packed_product:count_block_bytes",
    "causal_attention": "causal:find_text_kernels",
    "choose_by_noise": "sampling:choose_if_served",
    "load_blocks": "block_loading:load_block_weights",
    "join_blocks": "packed_product:join_blocks",
    "loss": "losses:find_loss_kernels",
    "pack_panels": "packed_product:pack_panels",
    "panel_bytes": "packed_product:count_panel_bytes",
    "panels_suffice": "packed_product:panels_suffice",
}
"""Operations that are compiled, or loaded, at their first use."""
AFTER_LAYERS = {
    "accept_greedy": "trees:accept_greedy",
    "append_children": "trees:append_children",
    "commit_tokens": "trees:commit_tokens",
    "find_ancestors": "trees:find_ancestors",
    "select_nodes": "trees:select_nodes",
}
"""Operations of a round, which serve after `CpuEngine.prepare`, so that no round compiles them."""
AFTER_COPYING = {
    "merge_continuations": "copies:merge_continuations",
    "search_store": "copies:search_store",
}
"""Operations of a round that serve after `CpuEngine.prepare_copying`."""
PREPARED: set[str] = set()
"""Names of the operations that were prepared."""


def find_kernel(operation: str) -> Callable[..., Any] | None:
    """Return the function that computes an operation, or None where it does not serve, or not
    yet.
    """
    if operation not in AT_ONCE and operation not in PREPARED:
        return None
    return load_kernel(operation)


@cache
def load_kernel(operation: str) -> Callable[..., Any] | None:
    """Import the function that computes an operation; return None where kernels cannot run."""
    address = (AT_ONCE | AFTER_LAYERS | AFTER_COPYING).get(operation)
    if address is None or not are_kernels_loaded():
        return None
    module, _, name = address.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"spectrain_cpu.{module}"), name)
    return function
