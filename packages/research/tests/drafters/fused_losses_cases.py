"""Cases of the ideas for tests/drafters/test_fused_losses.py."""

from typing import Any

import torch

from spectrain.drafters.base import Losses
from spectrain.drafters.layers.mask_blocks import add_blocks
from spectrain.features.batch import Batch
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain_research.ctc import drafter as ctc
from spectrain_research.gated_lora.drafter import GatedLora
from spectrain_research.hydra.drafter import Hydra
from spectrain_research.kangaroo.drafter import Kangaroo
from tests.drafters.test_fused_losses import (
    SMALL,
    combine_steps,
    compute_logits,
    compute_next_token_losses,
    compute_row_losses,
    compute_step_loss,
    count_by_mask,
    list_head_weights,
    weigh_sequences,
)


def compute_hydra_losses(drafter: Hydra, batch: Batch, target: Target) -> Losses:
    assert batch.features is not None
    logits = compute_logits(target, batch)
    final = batch.features.at_layer("final")
    results = []
    for k, head in enumerate(drafter.heads):
        embedded = [
            target.head.embed(batch.tokens.roll(-1 - j, dims=1)).detach() for j in range(k + 1)
        ]
        results.append(
            compute_step_loss(
                drafter, batch, logits, head(torch.cat([final, *embedded], dim=-1)), k
            )
        )
    return combine_steps(results, *list_head_weights(drafter))


def compute_kangaroo_losses(drafter: Kangaroo, batch: Batch, target: Target) -> Losses:
    assert batch.features is not None
    x = batch.features.at_layer(drafter.exit_layer)
    normed = drafter.input_layernorm(x)
    q, k, v = drafter.self_attn.project_qkv(
        normed, drafter.rotary(normed, torch.arange(x.shape[1])[None])
    )
    states = drafter.norm(x + drafter.self_attn.attend_causal(q, k, v))
    return compute_next_token_losses(
        drafter, batch, compute_logits(target, batch), target.head.logits(states)
    )


def compute_gated_lora_losses(drafter: GatedLora, batch: Batch, target: Target) -> Losses:
    blocks = add_blocks(batch, drafter.prefixes(batch, 0))
    with drafter.insert_masks(target, blocks.mask_index):
        final = target.run(
            blocks.tokens,
            ForwardPlan(
                layers=("final",), grad=True, positions=blocks.positions, mask=blocks.visible
            ),
        ).at_layer("final")
    mask = blocks.supervised
    states = final[mask]
    positions = blocks.positions
    anchors = final.detach().gather(1, positions[..., None].expand_as(final))[mask]
    log_p = target.head.logits(anchors).log_softmax(-1)
    previous = target.head.embed(batch.tokens.gather(1, positions)[mask])
    assert drafter.sampler is not None
    terms = {}
    weight = weigh_sequences(mask, batch)
    for name, read in (("masks", states), ("sampler", drafter.sampler(states, previous))):
        log_q = target.head.logits(read).log_softmax(-1)
        terms[name] = (
            weight * compute_row_losses(drafter.divergence, log_p, log_q, blocks.labels[mask])
        ).sum()
    terms["consistency"] = (weight * (states - anchors).square().mean(-1)).sum()
    return Losses(
        terms,
        *count_by_mask(
            blocks.mask_index[mask], log_q.argmax(-1) == log_p.argmax(-1), drafter.num_masks
        ),
    )


CASES: dict[str, Any] = {
    "FAMILIES": {
        "hydra": (Hydra, compute_hydra_losses, {**SMALL, "num_layers": 2}),
        "kangaroo": (Kangaroo, compute_kangaroo_losses, {"exit_layer": 2}),
        "gated_lora": (GatedLora, compute_gated_lora_losses, {"num_masks": 3}),
    },
    "distant": ["hydra", "kangaroo"],
    "modules_with_chunks": [ctc],
}
