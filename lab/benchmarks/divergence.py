"""The fused output layer and loss against unfused torch: time and peak memory of loss and
gradients.

Shapes: R rows, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.errors import describe_error
from spectrain.kernels.linear_divergence import HeadTarget, Projection, linear_divergence

from .measure import (
    TimedWork,
    check_alive,
    paired_ratio,
    relative_error,
    summarize_times,
    time_interleaved,
)

Gradients = tuple[Tensor, ...]


@dataclass(frozen=True)
class LossShape:
    """The shape of one row."""

    rows: int
    width: int
    vocab: int

    @property
    def name(self) -> str:
        """The name of its row in the results."""
        return f"divergence/R={self.rows} V={self.vocab}"


def peak_memory(work: Callable[[], Any], device: torch.device) -> int | None:
    """Return the peak bytes that a call allocates on a GPU beyond those in use before; None
    elsewhere.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def unfused_loss(hidden: Tensor, weight: Tensor, final: Tensor, target_weight: Tensor) -> Tensor:
    """Return KL(p || q) summed over rows, from full matrices of logits in float32."""
    log_p = F.linear(final, target_weight).float().log_softmax(-1)
    log_q = F.linear(hidden, weight).float().log_softmax(-1)
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)


def loss_systems(
    hidden: Tensor, weight: Tensor, final: Tensor, target_weight: Tensor
) -> dict[str, Callable[[int], Gradients]]:
    """Return functions of loss and gradients of the drafter's states and output layer, fused and
    unfused.
    """

    def compute_fused(i: int) -> Gradients:
        loss = linear_divergence(
            hidden, Projection(weight), HeadTarget(final, Projection(target_weight))
        ).loss
        return torch.autograd.grad(loss, (hidden, weight))

    def compute_unfused(i: int) -> Gradients:
        return torch.autograd.grad(
            unfused_loss(hidden, weight, final, target_weight), (hidden, weight)
        )

    systems: dict[str, Callable[[int], Gradients]] = {
        "fused": compute_fused,
        "unfused": compute_unfused,
    }
    if hidden.device.type == "cuda":
        torch.compiler.reset()
        compiled = torch.compile(unfused_loss, dynamic=False)
        systems["unfused_compiled"] = lambda i: torch.autograd.grad(
            compiled(hidden, weight, final, target_weight), (hidden, weight)
        )
    return systems


def divergence_row(
    loss: LossShape, dtype: torch.dtype, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Measure times, interleaved, and peaks of both; return what share of unfused torch's time
    and memory fusion takes.
    """
    rows, width, vocab = loss.rows, loss.width, loss.vocab
    scale = width**-0.5
    hidden, final = (torch.randn(rows, width, dtype=dtype, device=device) for _ in range(2))
    weight, target_weight = (
        torch.randn(vocab, width, dtype=dtype, device=device) * scale for _ in range(2)
    )
    works = loss_systems(hidden.requires_grad_(), weight.requires_grad_(), final, target_weight)
    replays: dict[str, TimedWork] = {}
    peaks: dict[str, int | None] = {}
    failed: dict[str, str] = {}
    answer = works["fused"](0)
    for name, work in works.items():
        try:
            errors = [relative_error(actual, expected) for actual, expected in zip(work(0), answer)]
            if max(errors) > 0.05:
                raise ValueError(
                    f"its gradients differ from the fused ones by {max(errors):.2g} of their size"
                )
            peaks[name] = peak_memory(partial(work, 0), device)
            replays[name] = TimedWork(work, device, launches=1, graph=False)
        except Exception as error:
            failed[name] = describe_error(error)
            check_alive(device)
    samples = time_interleaved(replays, repeats)
    row: dict[str, Any] = {
        "rows": rows,
        "width": width,
        "vocab": vocab,
        "repeats": repeats,
        "not_run": failed,
        "peak_bytes": peaks,
        "us": {name: summarize_times(seconds) for name, seconds in samples.items()},
    }
    if not {"fused", "unfused"} <= set(samples):
        return {**row, "failed": "; ".join(failed.values())}
    row["time_ratio"] = paired_ratio(samples["unfused"], samples["fused"])
    row["memory_ratio"] = (
        peaks["fused"] / peaks["unfused"] if peaks["fused"] and peaks["unfused"] else None
    )
    return row
