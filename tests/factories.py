"""Factories of what many tests need: batches of random tokens with the target's features, and
data sets of random texts.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from spectrain.config.parts import make_arguments
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter
from spectrain.eval.default import DefaultEvaluation
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.target import Target


def make_drafter(constructor: Any, target: Target, **settings: Any) -> Drafter:
    """Construct a drafter from its settings, which it takes directly or as one dataclass."""
    drafter: Drafter = constructor(target, **make_arguments(constructor, settings))
    return drafter


def add_noise(parameters: Iterable[Tensor], size: float = 1.0) -> None:
    """Add normal noise to parameters, of `size` for the sum over their last dimension, so that
    all that they do matters.
    """
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(size * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)


def random_batch(
    target: Target,
    layers: tuple[Layer, ...],
    shape: tuple[int, int] = (2, 32),
    has_prompt: bool = False,
) -> Batch:
    """Return random tokens, all supervised or, with a prompt, all but the first four and three
    of the first row.
    """
    torch.manual_seed(7)
    tokens = torch.randint(3, 2000, shape)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    if has_prompt:
        mask[:, :4] = False
        mask[0, 11:14] = False
    return Batch(tokens, mask, target.features(tokens, layers))


def dataset_with_spans(count: int) -> Dataset:
    """Return random texts of unequal length, with the assistant's tokens in two spans."""
    torch.manual_seed(5)
    rows = torch.randint(3, 2000, (count, 26)).tolist()
    masks = [[i in (4, 5, 6) or i >= 11 for i in range(26 - 3 * n)] for n in range(count)]
    return Dataset([Example(row[: len(mask)], mask) for row, mask in zip(rows, masks)], count, 0, 0)


def build_evaluation(**settings: Any) -> DefaultEvaluation:
    """Build the evaluation of these settings of `eval`, with the parts of installed packages, as
    eval=default does.
    """
    return DefaultEvaluation(**make_arguments(DefaultEvaluation, settings))
