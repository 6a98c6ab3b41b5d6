"""Gated LoRA without training, and with embeddings alone (PaSS)."""

from pathlib import Path

import pytest
import torch

from packages.research.tests.drafters.test_uno import (
    LIMIT,
    PROMPTS,
    RootStateRecorder,
    make_conversations,
    make_drafter,
)
from spectrain.config.build import build
from spectrain.config.saved import parse_groups
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState, has_weights
from spectrain.errors import UserError
from spectrain.models.reference_model import reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_research.uno.drafter import Uno


@pytest.mark.parametrize("strategy", ["apart", "quadratic", "linear"])
def test_probing_needs_no_training(shallow: Target, strategy: str) -> None:
    """Masks that are the prompt's mean embedding need no weights and no training; the output is
    greedy.
    """
    drafter = make_drafter(shallow, noise="mean", rank=0, strategy=strategy)
    assert not has_weights(drafter) and not drafter.state_dict()
    plain = decode(shallow, PROMPTS, Greedy(), LIMIT, ignore_eos=True)
    generations = decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, Chain(4), ignore_eos=True)
    assert [row.output for row in generations] == [row.output for row in plain]
    embedding = shallow.head.embedding.weight
    expected = torch.stack([embedding[prompt].mean(0) for prompt in PROMPTS])
    assert drafter.means is not None
    torch.testing.assert_close(drafter.means[:, 0], expected)
    with pytest.raises(UserError, match="nothing to train"):
        drafter.loss(make_conversations(20), shallow, TrainingState())
    with pytest.raises(UserError, match=r"drafter\.noise=mean: nothing is trained with it"):
        make_drafter(shallow, noise="mean")


@torch.no_grad()
def test_probed_states_are_those_of_a_plain_forward(shallow: Target) -> None:
    """States equal transformers' own over the text and the prompt's mean embedding, once for
    each mask.
    """
    drafter = make_drafter(shallow, noise="mean", rank=0)
    recorder = RootStateRecorder(drafter)
    decode(shallow, PROMPTS[2:], Greedy(), LIMIT, drafter, Chain(5), ignore_eos=True)
    mean = shallow.head.embedding.weight[PROMPTS[2]].mean(0)
    for text, states in recorder.rounds:
        with reference_model(shallow) as model:
            embedded = torch.cat(
                [model.get_input_embeddings()(torch.tensor(text)), mean.expand(4, -1)]
            )
            expected = model.get_decoder()(inputs_embeds=embedded[None]).last_hidden_state[0]
        torch.testing.assert_close(states, expected[len(text) - 1 :], rtol=1e-3, atol=1e-3)


def test_pass_learns_embeddings_alone(shallow: Target) -> None:
    """PaSS: with rank 0 and no sampler, the look-ahead vectors are the only parameters, and all
    of them have gradients.
    """
    drafter = make_drafter(shallow, noise="masks", rank=0, tiles=None, loss="cross_entropy")
    assert [name for name, _ in drafter.named_parameters()] == [
        "masks"
    ] and drafter.masks is not None
    drafter.loss(make_conversations(21, 16), shallow, TrainingState()).total.backward()
    assert drafter.masks.grad is not None and (drafter.masks.grad.abs().sum(-1) > 0).all()


def test_a_drafter_saved_as_a_setting_of_gated_lora_loads(shallow: Target, tmp_path: Path) -> None:
    """A saved description with noise=uniform loads as Uno with gated LoRA's defaults."""
    saved = {"drafter": {"choice": "gated_lora", "noise": "uniform", "num_masks": 3}}
    node = parse_groups(saved, tmp_path / "config.json")["drafter"]
    drafter = build(node, target=shallow)
    assert (
        isinstance(drafter, Uno) and drafter.strategy == "quadratic" and drafter.sampler is not None
    )
