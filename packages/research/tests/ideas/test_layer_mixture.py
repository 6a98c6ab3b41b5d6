"""DFlare and DFly: mixtures of the target's layers, which contain DFlash and DSpark."""

from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.dflash import DFlash, DFlashConfig
from spectrain.drafters.dspark import DSpark, DSparkConfig
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain_research.layer_mixture.drafter import DFlare, DFlareConfig, DFly
from tests.drafters.forced import walk
from tests.factories import add_noise, random_batch

SMALL: dict[str, Any] = {"num_layers": 2, "block_size": 4, "vocab_size": 512}


def shake_weights(drafter: Any, target: Target) -> Any:
    """Prepare a drafter, and add noise to what it trains."""
    torch.manual_seed(3)
    counts = torch.randint(1, 1000, (target.head.vocab_size,))
    counts[drafter.mask_token_id] = 0
    drafter.prepare(target, counts)
    add_noise((p for p in drafter.parameters() if p.requires_grad), 0.3)
    return drafter.eval()


def compare_drafters(drafter: Any, plain: Drafter, names: list[str], target: Target) -> None:
    """Compare loss, shared gradients, and drafts of two drafters."""
    gradients: list[dict[str, Tensor | None]] = []
    losses = []
    for candidate in (drafter, plain):
        batch = random_batch(target, candidate.layers)
        loss = candidate.loss(batch, target, TrainingState()).total
        loss.backward()
        losses.append(loss.detach())
        parameters = dict(candidate.named_parameters())
        gradients.append({name: parameters[name].grad for name in names})
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)
    tokens = batch.tokens
    drafts = [[*walk(candidate, target, tokens, 3)] for candidate in (drafter, plain.eval())]
    for (_, _, log_q), (_, _, expected) in zip(*drafts, strict=True):
        torch.testing.assert_close(log_q, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chosen", [0, 2])
def test_all_weight_on_one_layer_is_dflash_of_that_layer(shallow: Target, chosen: int) -> None:
    layers = [1, 2, 3]
    config = DFlareConfig(layers=layers, context_projections=False, **SMALL)
    drafter = shake_weights(DFlare(shallow, config), shallow)
    for block in drafter.blocks:
        with torch.no_grad():
            block.self_attn.mixture.fill_(-1e9)
            block.self_attn.mixture[chosen] = 0.0
    plain = DFlash(shallow, DFlashConfig(layers=[layers[chosen]], **SMALL))
    weights = {k: v for k, v in drafter.state_dict().items() if not k.endswith("mixture")}
    plain.load_state_dict(weights, strict=True)
    compare_drafters(drafter, plain, [name for name, _ in plain.named_parameters()], shallow)


def test_a_residual_of_scale_0_is_dspark(shallow: Target) -> None:
    torch.manual_seed(0)
    drafter = shake_weights(DFly(shallow, DSparkConfig(**SMALL)), shallow)
    with torch.no_grad():
        drafter.mixture_norm.weight.zero_()
    plain = DSpark(shallow, DSparkConfig(**SMALL))
    weights = {k: v for k, v in drafter.state_dict().items() if "mixture" not in k}
    plain.load_state_dict(weights, strict=True)
    compare_drafters(drafter, plain, [name for name, _ in plain.named_parameters()], shallow)


def test_mixtures_are_weighted_means_of_layers(shallow: Target) -> None:
    """Each layer of the drafter has weights of its own, which are all the same at first."""
    drafter = DFlare(shallow, DFlareConfig(layers=[0, 1, 3], **SMALL))
    context = torch.randn(2, 5, 3 * shallow.width)
    layers = context.unflatten(-1, (3, -1))
    attention: Any = drafter.blocks[0].self_attn
    torch.testing.assert_close(attention.mix_layers(context), layers.mean(-2))
    with torch.no_grad():
        attention.mixture.copy_(torch.tensor([0.5, 0.2, 0.3]).log())
    expected = 0.5 * layers[..., 0, :] + 0.2 * layers[..., 1, :] + 0.3 * layers[..., 2, :]
    torch.testing.assert_close(attention.mix_layers(context), expected)
    other: Any = drafter.blocks[1].self_attn
    torch.testing.assert_close(other.mix_layers(context), layers.mean(-2))


@pytest.mark.parametrize("part", ["latent_attention", "experts"])
def test_parts_of_the_targets_kind_are_refused(shallow: Target, part: str) -> None:
    with pytest.raises(UserError):
        DFlare(shallow, DFlareConfig(architecture={part: True}, **SMALL))
