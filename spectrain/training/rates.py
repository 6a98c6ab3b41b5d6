"""Learning rates by the sizes of the weights (`trainer.lr=auto`).

A step of Adam changes every entry of a weight by about its rate. The changes of one step agree over
the inputs, so an output of a weight w [O, I] changes by up to I times the rate, while the output
itself has the size sqrt(I) rms(w) for inputs of unit size. The rate rms(w) / sqrt(I) therefore
changes outputs by a fixed share of what they are. For a random weight, whose entries have the size
1 / sqrt(I), that is the rule 1 / I of the maximal update parametrization (Yang et al., 2022). For a
weight with a meaning, fitted or trained, it keeps large inputs, such as those of massive
activations, from undoing it.

Weights with a meaning take an eighth of the share of new ones: the noise of the first small batches
moves them away from where they are good, and new ones from where they are not.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .parallel.base import ParameterGroups

NEW_SHARE = 0.8
"""The largest share of its outputs by which a step changes a new weight, at the peak of the
schedule.
"""
KEPT_SHARE = 0.1
"""The same for a weight that was fitted or trained before."""
RANDOM_SIZE = 3**-0.5
"""The size of outputs of a linear as torch initialises it, for inputs of size 1."""
STEPS_PER_DOUBLING = 2
"""Rates are rounded to this many values in a factor of two, so that weights of similar size
share a group.
"""
SMALLEST_WIDTH = 64
"""Vectors learn as slowly as matrices of their width; shorter ones, such as single gates, as
those of this width.
"""
FEWEST_INPUTS = 8
"""Matrices of fewer inputs learn as slowly as those of so many, because the inputs of a step agree
more often the fewer they are.
"""


def choose_rate(weight: Tensor, is_new: bool) -> float:
    """Return the peak rate of a weight from its size: of a matrix [.., O, I], or of a vector, which
    scales or shifts outputs and may have further dimensions of one entry.

    A new matrix of less than the usual size of random ones counts as one of that size, because it
    was made small to grow. A matrix of zeros, such as the second factor of an adapter, counts as
    one with outputs of size 1 and as many inputs as its longer side has.
    """
    entries = weight.detach().float()
    size = float(entries.square().mean().sqrt()) if weight.numel() else 0.0
    share = NEW_SHARE if is_new else KEPT_SHARE
    longest = max(weight.shape, default=1)
    if longest == weight.numel():
        rate = share * (size or 1.0) / max(longest, SMALLEST_WIDTH)
    elif size > 0:
        num_inputs = weight.shape[-1]
        if is_new:
            size = max(size, RANDOM_SIZE * num_inputs**-0.5)
        rate = share * size * num_inputs**0.5 / max(num_inputs, FEWEST_INPUTS)
    else:
        rate = share / max(*weight.shape[-2:], FEWEST_INPUTS)
    return float(2.0 ** (round(STEPS_PER_DOUBLING * math.log2(rate)) / STEPS_PER_DOUBLING))


def choose_rates(named: Mapping[str, nn.Parameter], kept: set[str]) -> dict[str, float]:
    """Return the peak rate of every parameter, by its name; `kept` holds the names of those with
    a meaning.
    """
    return {name: choose_rate(parameter, name not in kept) for name, parameter in named.items()}


def describe_rates(rates: Mapping[str, float]) -> str:
    """Describe the smallest and the largest of some rates, with a parameter that has it, for a
    line of the output.
    """
    ends = [pick(rates, key=lambda name: rates[name]) for pick in (min, max)]
    shown = " to ".join(f"{rates[name]:.1e} ({name})" for name in ends)
    return f"learning rates by the sizes of the weights: {shown}"


def split_by_rate(groups: ParameterGroups, rates: dict[int, float]) -> ParameterGroups:
    """Split parameter groups so that each has one rate, by the id of a parameter, which its
    `lr_scale` is multiplied by.
    """
    split: ParameterGroups = []
    for group in groups:
        by_rate: dict[float, list[Any]] = {}
        for parameter in group["params"]:
            by_rate.setdefault(rates[id(parameter)], []).append(parameter)
        split += [
            {**group, "params": parameters, "lr_scale": rate * group["lr_scale"]}
            for rate, parameters in by_rate.items()
        ]
    return split
