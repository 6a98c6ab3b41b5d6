"""What this package computes in place of a target's layers, of an EAGLE drafter's layer, and of
the batches of a writer of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.models.accelerator import Accelerator, DrafterSteps
from spectrain.models.forward_override import Forward
from spectrain.models.threads import ThreadTuner

from .available import are_kernels_loaded, has_cpu_kernels
from .operations import AFTER_COPYING, AFTER_LAYERS, PREPARED


class CpuEngine(Accelerator):
    """Layers of targets and drafters in few calls on a CPU, by compiled kernels where they
    serve.
    """

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        if has_cpu_kernels(dtype, device):
            prepare_layers(dtype)

    def prepare_copying(self) -> None:
        if not AFTER_COPYING.keys() <= PREPARED and are_kernels_loaded():
            from .copies import prepare_copy_kernels

            prepare_copy_kernels()
            PREPARED.update(AFTER_COPYING)

    def reads_keys(self, dtype: torch.dtype, device: torch.device) -> bool:
        return has_cpu_kernels(dtype, device)

    def forwards(
        self,
        decoder: nn.Module,
        layers: nn.ModuleList,
        attend: Any,
        tokens: Tensor | None,
        arguments: dict[str, Any],
    ) -> Iterable[tuple[nn.Module, Forward]]:
        from .forwards import fuse_forwards

        return fuse_forwards(decoder, layers, attend, tokens, arguments)

    def runs_texts_alone(self, target: Any) -> bool:
        from .prompts import runs_texts_alone

        return runs_texts_alone(target)

    def prefill_each(
        self, target: Any, tokens: Tensor, lengths: Tensor, cache: Any, layers: tuple[Any, ...]
    ) -> Any | None:
        from .prompts import prefill_each

        return prefill_each(target, tokens, lengths, cache, layers)

    def write_answers(
        self, writer: Any, shards: Iterable[Any], on_outcome: Callable[[Any, Any], None]
    ) -> bool:
        from .continuous_answers import write_continuously

        return write_continuously(writer, shards, on_outcome)

    def make_tuner(self, device: torch.device, trial_steps: int) -> ThreadTuner | None:
        from .thread_tuner import make_tuner

        return make_tuner(device, trial_steps)

    def drafter_steps(self, drafter: Any) -> DrafterSteps | None:
        from .eagle_steps import find_steps

        return find_steps(drafter)


@cache
def prepare_layers(dtype: torch.dtype) -> None:
    """Load every kernel of a type, or compile it where this machine has not, so that no step
    that is timed does.
    """
    from .attention import prepare_attention
    from .rows import prepare_rows

    prepare_attention(dtype)
    prepare_rows(dtype)
    if dtype == torch.bfloat16:
        from .linear import prepare_panels
        from .trees import prepare_tree_kernels

        prepare_tree_kernels()
        PREPARED.update(AFTER_LAYERS)
        prepare_panels()
