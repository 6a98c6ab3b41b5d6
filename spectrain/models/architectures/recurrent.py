"""Targets some of whose layers keep a state (linear attention, Mamba, short convolutions) instead
of keys and values.

Their recurrent modules run over packed documents one by one, and with a cache over prompts and
nodes from its states. Shapes: B batch, N tokens or nodes, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.kernels.tree_attention import Visibility
from spectrain.models.forward_override import Forward, override_forwards
from spectrain.models.forward_plan import ALL_LAYERS
from spectrain.models.model_parts import ModelParts

from .base import ForwardCall
from .probe import Probe
from .recurrent_calls import RecurrentModule, make_state_call
from .recurrent_states import PathPolicy, Recurrence
from .standard import Standard, attention_fields


@dataclass(frozen=True)
class Recurrent(Standard):
    """Layers that keep a state, among layers that attend or alone."""

    keeps_state: ClassVar[bool] = True

    recurrent_modules: dict[int, RecurrentModule] = field(default_factory=dict)  # by layer
    path_policy: PathPolicy = "never"  # when recurrent layers run several nodes at once

    @classmethod
    def matches(cls, probe: Probe) -> bool:
        return bool(probe.recurrent_modules)

    @classmethod
    def from_probe(cls, probe: Probe) -> Recurrent:
        return cls(**attention_fields(probe), recurrent_modules=probe.recurrent_modules)

    def forward_contexts(self, call: ForwardCall) -> Iterator[AbstractContextManager[Any]]:
        yield from super().forward_contexts(call)
        yield override_forwards(self._recurrent_forwards(call))

    def _recurrent_forwards(self, call: ForwardCall) -> Iterator[tuple[nn.Module, Forward]]:
        """Yield the recurrent modules with the forward that runs them over a prompt, a tree, or
        packed documents.
        """
        plan = call.plan
        if plan.cache is None and plan.mask is None and plan.lengths is None:
            return
        if (plan.cache is None and plan.mask is not None) or (
            plan.cache is not None and plan.span is not ALL_LAYERS
        ):
            raise UserError(
                f"target {call.parts.name}: its layers keep a state, which this drafter's trees "
                "without a cache, or over some of the layers, do not; use another drafter, such "
                "as eagle3"
            )
        for layer, recurrent in self.recurrent_modules.items():
            run = (
                self._run_documents(call, recurrent)
                if plan.cache is None
                else self._run_nodes(call, recurrent, layer)
            )
            yield recurrent.module, run

    def _run_documents(self, call: ForwardCall, recurrent: RecurrentModule) -> Forward:
        """Return a forward over packed documents, one by one."""
        lengths = call.plan.lengths
        forward = recurrent.class_forward
        assert lengths is not None

        def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            parts = [forward(part, *args, **kwargs) for part in hidden_states.split(lengths, dim=1)]
            if isinstance(parts[0], Tensor):
                return torch.cat(parts, dim=1)
            return tuple(
                torch.cat(outputs, dim=1) if outputs[0] is not None else None
                for outputs in zip(*parts)
            )

        return run

    def _run_nodes(self, call: ForwardCall, recurrent: RecurrentModule, layer: int) -> Forward:
        """Return a forward over prompts or nodes [B, N, D], from the states of the cache."""
        cache, visibility = call.plan.cache, call.visibility
        assert cache is not None

        def run(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            state_call = make_state_call(recurrent, layer, cache, args, kwargs)
            recurrence = cache.recurrences.setdefault(layer, Recurrence(self.path_policy))
            assert isinstance(recurrence, Recurrence)
            if visibility is None:
                lengths = (
                    torch.full_like(cache.lengths, hidden.shape[1])
                    if cache.prompt_lengths is None
                    else cache.prompt_lengths
                )
                return state_call.split_output(recurrence.run_prompts(state_call, hidden, lengths))
            assert isinstance(visibility, Visibility)
            return state_call.split_output(
                recurrence.run_nodes(state_call, hidden, visibility.tree)
            )

        return run

    def capture_blocker(self, parts: ModelParts) -> str | None:
        reason = (
            f"target {parts.name} has recurrent layers, whose state is computed level by "
            "level of a tree"
        )
        return super().capture_blocker(parts) or reason
