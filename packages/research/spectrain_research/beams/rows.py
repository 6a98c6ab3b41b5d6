"""Reordering the rows of a batch, as beams do when they branch. Shapes: K rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.kv_cache import TreeCache
from spectrain.trees.token_tree import TokenTree


def select_cache_rows(cache: TreeCache, rows: Tensor) -> None:
    """Let row k of a cache be what row `rows[k]` was, appended nodes included."""
    if cache.recurrences:
        raise UserError(
            "eval.beams: layers of this model keep a state, whose rows cannot branch; use another "
            "target or drafter"
        )
    cache.lengths = cache.lengths[rows]
    for name in ("storage", "positions", "position_offsets"):
        value = getattr(cache, name)
        if value is not None:
            setattr(cache, name, value[:, :, rows] if name == "storage" else value[rows])


def select_context_rows(context: Context, rows: Tensor) -> None:
    """Let row k of a context be what row `rows[k]` was; its new features follow in the next
    commit.
    """
    select_cache_rows(context.cache, rows)
    for name in ("tokens", "sequence_ids", "num_new", "active", "tokens_left"):
        setattr(context, name, getattr(context, name)[rows])


def select_feature_rows(features: Features, rows: Tensor) -> Features:
    """Return the features of these rows, without logits."""
    return Features(features.tokens[rows], features.layers, features.hidden[rows])


def select_tree_rows(tree: TokenTree, rows: Tensor) -> TokenTree:
    """Return the trees of these rows."""
    parts = {name: getattr(tree, name)[rows] for name in ("tokens", "parents", "valid", "can_emit")}
    return replace(tree, **parts, q=None, scores=None)


def select_drafter_rows(drafter: Drafter, rows: Tensor) -> None:
    """Do the same to what a drafter carries from round to round."""
    assert drafter.capabilities.capture is not None
    for name in drafter.capabilities.capture.state_names:
        state = getattr(drafter, name)
        if isinstance(state, TreeCache):
            select_cache_rows(state, rows)
        elif isinstance(state, Tensor):
            setattr(drafter, name, state[rows])


def check_drafter(drafter: Drafter) -> None:
    """Raise a UserError for a drafter whose rows cannot branch, or which has no distribution."""
    capabilities = drafter.capabilities
    if (
        capabilities.capture is None
        or not capabilities.nestable
        or capabilities.is_copier
        or capabilities.has_no_q
    ):
        raise UserError(
            "eval.beams: this drafter copies, runs layers of the target, or keeps a state that "
            "cannot branch with the beams; use another one, such as drafter=causal, eagle3 or "
            "medusa"
        )


def repeat_row(count: int, device: torch.device) -> Tensor:
    """Return the rows [K] that make a batch of `count` copies of its only row."""
    return torch.zeros(count, dtype=torch.int64, device=device)
