"""Features are cut and joined as plain lists are."""

import random

import pytest
import torch

from spectrain.models.features import Features, Layer


@pytest.mark.parametrize("layers", [(), (2,), ("final", 2), (2, 4, "final")])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_joined_equals_lists(layers: tuple[Layer, ...], num_parts: int) -> None:
    """Row by row, the real positions of every part follow each other; a part may hold more
    layers, in another order.
    """
    source = random.Random(num_parts)
    parts = []
    tokens: list[list[int]] = [[], [], []]
    states: list[list[list[list[float]]]] = [[], [], []]
    for number in range(num_parts):
        part_layers: tuple[Layer, ...] = (
            layers if number + 1 == num_parts else source.choice([layers, ("final", 4, 2)])
        )
        width = source.randint(1, 4)
        part = Features(
            torch.randint(100, (3, width)), part_layers, torch.randn(3, width, len(part_layers), 2)
        )
        counts = [source.randint(0, width), 0, width]
        parts.append((part, torch.tensor(counts)))
        for row, count in enumerate(counts):
            tokens[row] += part.tokens[row, :count].tolist()
            for position in range(count):
                states[row].append(
                    [
                        part.hidden[row, position, part_layers.index(layer)].tolist()
                        for layer in layers
                    ]
                )
    joined = Features.concat_prefixes(parts)
    assert (
        joined.layers == layers
        and joined.tokens.shape == (3, len(tokens[2])) == joined.hidden.shape[:2]
    )
    for row in range(3):
        assert joined.tokens[row, : len(tokens[row])].tolist() == tokens[row]
        assert joined.hidden[row, : len(tokens[row])].tolist() == states[row]
