"""A drafter's training step without its target: EAGLE-3's unrolled loss and gradients on random
features.

Shapes: B conversations, T tokens, D width, V draft vocabulary. A twin computes the same loss from
full matrices of log-probabilities: the drafter's own loss is faster by what fusion gains.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import describe_error
from spectrain.features.batch import Batch
from spectrain.models.features import Features
from spectrain.models.target import Target

from .divergence import peak_memory
from .measure import TimedWork, check_alive, paired_ratio, summarize_times, time_interleaved
from .models import ModelGeometry, random_drafter, random_target


def random_batch(target: Target, drafter: Eagle3, conversations: int, length: int) -> Batch:
    """Return conversations whose every token is supervised, with random features."""
    device = target.device
    tokens = torch.randint(target.head.vocab_size, (conversations, length))
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool)).to(device)
    shape = (conversations, length, len(drafter.layers), target.width)
    hidden = torch.randn(shape, device=device, dtype=target.dtype)
    return replace(batch, features=Features(batch.tokens, drafter.layers, hidden))


def unfused_loss(drafter: Eagle3, batch: Batch) -> Tensor:
    """Return EAGLE-3's loss where every token is supervised: the sum over steps i of step_decay^i
    KL(p || q), over draft tokens.

    p is the target's distribution over the draft vocabulary; positions whose target's first choice
    lies outside are left out.
    """
    assert batch.features is not None
    length = batch.tokens.shape[1]
    with torch.no_grad():
        logits = drafter.head.logits(batch.features.at_layer("final"))
        log_p = logits[..., drafter.draft_ids].log_softmax(-1)
        in_vocabulary = drafter.t2d[logits.argmax(-1)]
    hidden = drafter.fuse_features(batch.features)
    total = hidden.new_zeros((), dtype=torch.float32)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    positions = torch.arange(length, device=hidden.device)[None]
    eye = torch.eye(length, dtype=torch.bool, device=hidden.device)
    for step in range(min(drafter.num_steps, length - 2)):
        x, residual = drafter.attention_inputs(batch.tokens.roll(-1 - step, dims=1), hidden)
        q, k, v = drafter.self_attn.project_qkv(x, drafter.rotary(x, positions + step))
        keys = [*keys, k]
        values = [*values, v]
        mask = torch.cat([torch.ones_like(eye).tril(), *[eye] * step], dim=1) if step else None
        attended = F.scaled_dot_product_attention(
            q,
            torch.cat(keys, 2),
            torch.cat(values, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        hidden = residual + drafter.self_attn.project_output(attended)
        hidden = hidden + drafter.mlp(drafter.post_attention_layernorm(hidden))
        # Index t predicts token t + 2 + step, whose target state is at t + 1 + step.
        supervised = slice(step + 1, length - 1)
        log_q = (
            drafter.lm_head(drafter.head_inputs(hidden[:, : length - 2 - step]))
            .float()
            .log_softmax(-1)
        )
        losses = F.kl_div(log_q, log_p[:, supervised], reduction="none", log_target=True).sum(-1)
        total = (
            total
            + drafter.step_decay**step
            * torch.where(in_vocabulary[:, supervised], losses, 0.0).sum()
        )
    return total


def training_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return the trainer's precision: on a GPU bfloat16 where that is safe, with weights in
    float32.
    """
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def loss_functions(
    drafter: Eagle3, target: Target, batch: Batch
) -> dict[str, Callable[[], Tensor]]:
    return {
        "drafter": lambda: drafter.loss(batch, target, TrainingState()).total,
        "unfused": lambda: unfused_loss(drafter, batch),
    }


def compute_gradients(loss: Callable[[], Tensor], drafter: Eagle3, number: int = 0) -> None:
    """Compute the timed step, whatever its number."""
    with training_autocast(drafter.fc.weight.device):
        value = loss()
    torch.autograd.grad(value, list(drafter.parameters()))


def count_flops(
    loss: Callable[[], Tensor], drafter: Eagle3, conversations: int, length: int
) -> int:
    """Count the operations of a loss and its gradients: products as torch counts them, attention
    by visible pairs.
    """
    with FlopCounterMode(display=False) as counter:
        compute_gradients(loss, drafter)
    # torch may compute attention by bmm; linears are mm.
    attention_ops = ("attention", "bmm")
    products = sum(
        n
        for op, n in counter.get_flop_counts()["Global"].items()
        if not any(name in str(op) for name in attention_ops)
    )
    pairs = conversations * count_visible_pairs(length, min(drafter.num_steps, length - 2))
    # Two products forward and five backward, of multiply-adds.
    return products + 14 * drafter.self_attn.q_proj.out_features * pairs


def count_visible_pairs(length: int, steps: int) -> int:
    """Return queries times the keys visible to each over unrolled steps: causal ones, and one of
    every earlier step.
    """
    return sum(length * (length + 1) // 2 + length * step for step in range(steps))


def training_row(
    model: ModelGeometry,
    conversations: int,
    length: int,
    repeats: int,
    rate: float,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Return times, interleaved, and peaks of the drafter's loss and of the twin, and the share
    of a large product's rate.
    """
    # the fewest that give three features
    target = random_target(replace(model, layers=3), device, dtype)
    drafter = random_drafter(target, model, torch.float32)
    batch = random_batch(target, drafter, conversations, length)
    functions = loss_functions(drafter, target, batch)
    flops = count_flops(functions["unfused"], drafter, conversations, length)
    replays: dict[str, TimedWork] = {}
    peaks: dict[str, int | None] = {}
    failed: dict[str, str] = {}
    for name, loss in functions.items():
        try:
            peaks[name] = peak_memory(partial(compute_gradients, loss, drafter), device)
            replays[name] = TimedWork(
                partial(compute_gradients, loss, drafter), device, launches=1, graph=False
            )
        except Exception as error:
            failed[name] = describe_error(error)
            check_alive(device)
    samples = time_interleaved(replays, repeats)
    tokens = batch.tokens.numel()
    row: dict[str, Any] = {
        "conversations": conversations,
        "length": length,
        "ttt_steps": drafter.num_steps,
        "flops": flops,
        "not_run": failed,
        "us": {name: summarize_times(seconds) for name, seconds in samples.items()},
        "peak_bytes": peaks,
        "repeats": repeats,
    }
    if failed:
        return {**row, "failed": "; ".join(failed.values())}
    seconds = {name: us["median"] / 1e6 for name, us in row["us"].items()}
    row["tokens_per_second"] = {name: tokens / time for name, time in seconds.items()}
    row["flops_per_second"] = {name: flops / time for name, time in seconds.items()}
    row["share_of_product_rate"] = flops / seconds["drafter"] / rate
    row["time_ratio"] = paired_ratio(samples["unfused"], samples["drafter"])
    row["memory_ratio"] = (
        peaks["drafter"] / peaks["unfused"] if peaks["drafter"] and peaks["unfused"] else None
    )
    return row
