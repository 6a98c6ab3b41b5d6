"""Training of small models for tests and measurements, which scripts make in minutes."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

WARM_UP_STEPS = 50


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Update the weights by the gradient of a loss, whose norm is clipped at 1."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def minimize_loss(
    model: nn.Module, compute_loss: Callable[[], Tensor], steps: int, lr: float
) -> None:
    """Train a model by AdamW on the losses of `steps` batches, with warm-up and a cosine down to 2
    % of the rate; print every hundredth loss, in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(
                (step + 1) / WARM_UP_STEPS, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.02
            )
        loss = compute_loss()
        take_step(model, optimizer, loss)
        if step % 100 == 99 or step == steps - 1:
            print(
                f"step {step + 1}: {loss.item():.3f} nats, {time.monotonic() - began:.0f} s",
                flush=True,
            )
