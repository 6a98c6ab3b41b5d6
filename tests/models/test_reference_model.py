"""The reference of every comparison computes in float64 without holding all weights in it."""

import copy

import pytest
import torch
from torch import nn

from spectrain.models.loading import load_tiny
from spectrain.models.reference_model import compute_in_float64, reference_model


@pytest.mark.parametrize("layer_by_layer", [True, False])
def test_a_model_computes_in_float64_and_keeps_its_weights(layer_by_layer: bool) -> None:
    """Logits are those of a copy in float64, and never are two layers converted at once."""
    target = load_tiny(dtype="bfloat16")
    tokens = torch.arange(3, 20)[None]
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    converted: list[int] = []
    with reference_model(target) as model, torch.inference_mode():
        expected = copy.deepcopy(model).double()(tokens).logits
        rounded = model(tokens).logits
        with compute_in_float64(model, layer_by_layer):
            layers = [*model.model.layers]
            for layer in layers:
                layer.self_attn.o_proj.register_forward_hook(
                    lambda *args: converted.append(count_converted(layers))
                )
            actual = model(tokens).logits
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert (rounded.double() - expected).abs().max() > 1e-3
    assert converted == [1 if layer_by_layer else len(layers)] * len(layers)
    after = target.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert {tensor.dtype for tensor in target.model.parameters()} == {torch.bfloat16}


def count_converted(layers: list[nn.Module]) -> int:
    """Count the layers that are in float64 now."""
    return sum(next(layer.parameters()).dtype == torch.float64 for layer in layers)
