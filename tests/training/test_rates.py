"""Learning rates by the sizes of weights: a step changes outputs by the same share, whatever the
width and the scale.
"""

import pytest
import torch
from torch import nn

from spectrain.training.rates import (
    FEWEST_INPUTS,
    KEPT_SHARE,
    NEW_SHARE,
    RANDOM_SIZE,
    SMALLEST_WIDTH,
    STEPS_PER_DOUBLING,
    choose_rate,
    choose_rates,
    describe_rates,
    split_by_rate,
)

ROUNDING = 2 ** (0.5 / STEPS_PER_DOUBLING)
"""The largest factor between a rate and the rounded one."""


def is_rounded(rate: float, exact: float) -> bool:
    return exact / ROUNDING * 0.999 <= rate <= exact * ROUNDING * 1.001


@pytest.mark.parametrize("num_inputs", [64, 192, 1536])
@pytest.mark.parametrize("scale", [1.0, 0.003, 40.0])
def test_a_step_changes_outputs_by_a_share(num_inputs: int, scale: float) -> None:
    """A step of a rate in the direction that suits inputs of size 1 changes every output by the
    share of its usual size, which is at least that of random weights where the weight is new.
    """
    torch.manual_seed(0)
    weight = scale * torch.randn(200, num_inputs, dtype=torch.float64) * num_inputs**-0.5
    inputs = torch.randn(num_inputs, dtype=torch.float64).sign()
    outputs = weight @ inputs
    for is_new, share in ((True, NEW_SHARE), (False, KEPT_SHARE)):
        step = choose_rate(weight, is_new) * inputs.expand_as(weight)
        change = (weight + step) @ inputs - outputs
        assert change.std() < 1e-9 * scale
        size = float(weight.square().mean().sqrt()) * num_inputs**0.5
        size = max(size, RANDOM_SIZE) if is_new else size
        assert is_rounded(float(change.mean()), share * size)


def test_random_weights_have_the_rate_of_their_width() -> None:
    """A random weight learns at NEW_SHARE / inputs, the rule of the maximal update
    parametrization.
    """
    torch.manual_seed(0)
    for width in (192, 576, 4096):
        assert is_rounded(
            choose_rate(torch.randn(300, width) * width**-0.5, is_new=True), NEW_SHARE / width
        )


def test_vectors_and_zeros_have_finite_rates() -> None:
    """Vectors learn as matrices of their width, short ones as those of SMALLEST_WIDTH; zeros as
    matrices of unit outputs, slower in a drafter that has a meaning.
    """
    assert is_rounded(choose_rate(2 * torch.ones(512), is_new=False), KEPT_SHARE * 2 / 512)
    assert is_rounded(choose_rate(torch.ones(1), is_new=True), NEW_SHARE / SMALLEST_WIDTH)
    assert is_rounded(choose_rate(torch.tensor(1.0), is_new=True), NEW_SHARE / SMALLEST_WIDTH)
    assert is_rounded(choose_rate(torch.zeros(512), is_new=True), NEW_SHARE / 512)
    for is_new, share in ((True, NEW_SHARE), (False, KEPT_SHARE)):
        assert is_rounded(choose_rate(torch.zeros(512, 8), is_new), share / 512)
        assert is_rounded(choose_rate(torch.zeros(4, 5), is_new), share / FEWEST_INPUTS)


@pytest.mark.parametrize("shape", [(1, 1, 384), (1, 384), (384, 1)])
def test_further_dimensions_of_one_entry_change_no_vector(shape: tuple[int, ...]) -> None:
    """A vector learns alike in every form in which a drafter may hold it."""
    vector = torch.linspace(-1, 1, 384)
    assert choose_rate(vector.view(shape), is_new=True) == choose_rate(vector, is_new=True)


def test_very_few_inputs_learn_as_slowly_as_some() -> None:
    """Five inputs whose outputs have the size of those of FEWEST_INPUTS have their rate."""
    torch.manual_seed(0)
    few, many = (torch.randn(4096, width) * width**-0.5 for width in (5, FEWEST_INPUTS))
    assert choose_rate(few, is_new=True) == choose_rate(many, is_new=True)


def test_groups_are_split_by_rate() -> None:
    """Every parameter keeps its group's other keys, its rate is multiplied by the group's
    factor, and none is lost.
    """
    model = nn.Sequential(
        nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(256, 64, bias=False)
    )
    with torch.no_grad():
        model[1].weight.copy_(model[0].weight)
    named = dict(model.named_parameters())
    rates = choose_rates(named, kept={"2.weight"})
    first, second, third = named.values()
    groups = [
        {"params": [first, third], "lr_scale": 1.0},
        {"params": [second], "lr_scale": 0.25, "weight_decay": 0.1},
    ]
    split = split_by_rate(groups, {id(named[name]): rate for name, rate in rates.items()})
    assert [group["params"] for group in split] == [[first], [third], [second]]
    assert [group["lr_scale"] for group in split] == [
        rates["0.weight"],
        rates["2.weight"],
        0.25 * rates["1.weight"],
    ]
    assert (
        split[2]["weight_decay"] == 0.1
        and rates["0.weight"] == rates["1.weight"] > 10 * rates["2.weight"]
    )
    assert "(2.weight) to " in describe_rates(rates) and describe_rates(rates).endswith(
        "(0.weight)"
    )
