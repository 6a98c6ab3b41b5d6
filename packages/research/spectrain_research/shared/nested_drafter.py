"""A drafter that changes the drafts of another one. Shapes: B batch, T tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from spectrain.drafters.base import prefill_prompts
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.inner_drafters import DrafterWrapper, wrapper_capabilities
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .nesting import build_nestable


class NestedDrafter(DrafterWrapper):
    """Drafts with `inner`, which reads prompts and committed tokens as it would alone; subclasses
    change its drafts.

    The changed drafts have no q, so the rules that weigh p against q refuse them.
    """

    saved = SavedFiles(inner=("inner",))

    def __init__(self, target: Target, inner: str | dict[str, Any]) -> None:
        super().__init__()
        self.inner, description = build_nestable(inner, "inner", target)
        self.layers = self.inner.layers
        self.saved = replace(self.saved, settings={"inner": description})
        self.capabilities = replace(
            wrapper_capabilities(self.inner), has_no_q=True, prefill=type(self).prefill
        )

    def prefill(self, context: Context, tokens: Tensor, lengths: Tensor) -> Features:
        """Run the prompts as the inner drafter does."""
        return prefill_prompts(self.inner, context, tokens, lengths)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return self.inner.verify(context, tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        self.inner.commit(context, accepted)
