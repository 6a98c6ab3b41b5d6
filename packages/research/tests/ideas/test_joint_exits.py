"""Joint training of exits: the losses of BranchyNet and FREE from the states of plain forwards."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.drafters.base import TrainingState
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain_research.exits.training import JointExits, align_layers, distil_states
from tests.factories import random_batch
from tests.targets import cut_tiny

LAYERS = 4


@pytest.fixture
def target() -> Target:
    return cut_tiny(LAYERS)


def read_states(target: Target, batch: Batch) -> list[Tensor]:
    """Return the states [R, D] after every number of layers, at the supervised positions."""
    layers = tuple(range(1, LAYERS + 1))
    features = target.run(batch.tokens, ForwardPlan(layers=layers))
    rows = batch.next_is_supervised
    return [torch.zeros(0), *(features.at_layer(layer)[rows] for layer in layers)]


def start(target: Target, **settings: Any) -> JointExits:
    drafter = JointExits(target, **settings)
    drafter.prepare(target, torch.ones(target.head.vocab_size))
    for parameter in drafter.target_training.parameters:
        # The trainer does so for the parameters of a stage.
        parameter.requires_grad_(True)
    return drafter


@pytest.mark.parametrize(
    ("exits", "weights"),
    [([2], None), ([1, 3], [0.5, 0.25, 2.0])],
    ids=["weights by depth", "given weights"],
)
def test_losses_are_weighted_cross_entropies(
    target: Target, exits: list[int], weights: list[float] | None
) -> None:
    drafter = start(target, exits=exits, weights=weights)
    batch = random_batch(target, (), (2, 12))
    tokens = batch.tokens.roll(-1, dims=1)[batch.next_is_supervised]
    states = read_states(target, batch)
    expected = [
        F.cross_entropy(
            target.head.logits(target.apply_final_norm(states[depth][None])[0]),
            tokens,
            reduction="sum",
        )
        for depth in (*exits, LAYERS)
    ]
    shares = weights or [2 / 6, 4 / 6]
    losses = drafter.loss(batch, target, TrainingState())
    assert {*losses.terms} == {"language_model", "exits"}
    assert float(losses.terms["language_model"].detach()) == pytest.approx(
        shares[-1] * float(expected[-1].detach()), rel=1e-4
    )
    assert float(losses.terms["exits"].detach()) == pytest.approx(
        sum(share * float(loss.detach()) for share, loss in zip(shares, expected[:-1])), rel=1e-4
    )


@pytest.mark.parametrize("hidden", ["last", "uniform", "dynamic"])
def test_hidden_states_learn_from_deep_layers(target: Target, hidden: Any) -> None:
    """The distillation by its definition; of the layers it is the first ones that learn from it,
    because the deep states are held fixed.
    """
    exit_layer = 2
    drafter = start(target, exits=[exit_layer], hidden=hidden, hidden_weight=0.5)
    batch = random_batch(target, (), (2, 12))
    states = read_states(target, batch)

    def distance(layer: int, deep: int) -> float:
        return float((states[layer] - states[deep]).float().pow(2).mean())

    if hidden == "last":
        mean = distance(2, 4)
    elif hidden == "uniform":
        mean = (distance(1, 2) + distance(2, 4)) / 2
    else:
        nearest = min((1, 2), key=lambda layer: distance(layer, 4))
        mean = (distance(nearest, 4) + distance(1, 2)) / 2
    term = drafter.loss(batch, target, TrainingState()).terms["hidden"]
    assert float(term.detach()) == pytest.approx(0.5 * len(states[1]) * mean, rel=1e-4)
    term.backward()
    learning = {
        int(number[1])
        for name, parameter in target.named_parameters()
        if (number := re.search(r"layers\.(\d+)\.", name))
        if parameter.grad is not None and bool(parameter.grad.any())
    }
    assert learning == {0, 1}


def test_dynamic_pairs_keep_the_order_of_the_layers() -> None:
    """Exit 3 of 6, whose deep layers are 2, 4 and 6. The last is nearest to layer 2, so that layer
    4 takes layer 1, although layer 3 has its very state, and none is left below it for layer 2.
    """
    values = {1: 0.0, 2: 5.0, 3: 9.0, 4: 9.0, 5: 0.0, 6: 6.0}
    states = {layer: torch.full((3, 8), value) for layer, value in values.items()}
    assert align_layers(states, 3, [2, 4, 6]) == [(2, 6), (1, 4), (1, 2)]
    expected = 3 * ((5 - 6) ** 2 + (0 - 9) ** 2 + (0 - 5) ** 2) / 3
    assert distil_states(states, 3, "dynamic").item() == pytest.approx(expected)
    # In order, the three layers learn the three deep ones.
    uniform = 3 * ((0 - 5) ** 2 + (5 - 9) ** 2 + (9 - 6) ** 2) / 3
    assert distil_states(states, 3, "uniform").item() == pytest.approx(uniform)


@pytest.mark.parametrize(
    "settings", [{"exits": [LAYERS]}, {"exits": [2, 1]}, {"weights": [1.0]}, {"weights": [-1.0, 1]}]
)
def test_invalid_settings_are_refused(target: Target, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="^drafter.(exits|weights)="):
        JointExits(target, **settings)


def test_a_copy_for_another_exit_keeps_the_deeper_ones(target: Target) -> None:
    drafter = JointExits(target, [1, 3])
    other = drafter.at_exit(2, target)
    assert isinstance(other, JointExits)
    assert other.exits == [2, 3] and other.saved.settings == {"exits": [2, 3]}
    assert drafter.exits == [1, 3]


@pytest.mark.parametrize("hidden", ["last", "uniform", "dynamic"])
def test_a_batch_without_labels_distils_nothing(hidden: Any) -> None:
    states = {layer: torch.zeros(0, 8, requires_grad=True) for layer in (1, 2, 3, 4)}
    assert distil_states(states, 2, hidden).item() == 0
