"""The input that EAGLE's layers and block drafters share. Shapes: B batch, T tokens, D width."""

import torch
from torch import nn

from spectrain.drafters.dflash import DFlash
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.fused_input import copy_embedding
from spectrain.models.target import Target
from tests.factories import make_drafter


def test_norms_stand_before_and_after_the_projection(shallow: Target) -> None:
    """EAGLE has norm(x), or a norm for each layer, before fc; a block drafter has norm(fc(x))."""
    torch.manual_seed(0)
    width = shallow.width
    features = shallow.features(torch.randint(3, 200, (2, 5)), (1, 2, "final"))
    fused = torch.cat([features.at_layer(1), features.at_layer(2)], dim=-1)
    eagle = Eagle3(shallow, vocab_size=64, layers=[1, 2], architecture={"norm_before_fc": True})
    eagle.input_norm = nn.LayerNorm(2 * width)
    expected = nn.functional.layer_norm(fused, (2 * width,)) @ eagle.fc.weight.T
    torch.testing.assert_close(eagle.fuse_features(features), expected)
    eagle = Eagle3(shallow, vocab_size=64, layers=[1, 2], architecture={"fc_norm": True})
    eagle.fc_norm = nn.ModuleList([nn.LayerNorm(width), nn.Identity()])
    first = nn.functional.layer_norm(fused[..., :width], (width,))
    expected = torch.cat([first, fused[..., width:]], dim=-1) @ eagle.fc.weight.T
    torch.testing.assert_close(eagle.fuse_features(features), expected)
    block = make_drafter(DFlash, shallow, num_layers=1, block_size=4, layers=[1, 2])
    block.hidden_norm = nn.LayerNorm(width)
    expected = nn.functional.layer_norm(fused @ block.fc.weight.T, (width,))
    torch.testing.assert_close(block.fuse_features(features), expected)


def test_its_own_embedding_starts_as_the_target_s(shallow: Target) -> None:
    """Both embed alike after the copy, and only the own one has a gradient."""
    tokens = torch.tensor([[3, 7, 5]])
    own, target_s = (
        make_drafter(DFlash, shallow, num_layers=1, block_size=4, own_embedding=is_own)
        for is_own in (True, False)
    )
    copy_embedding(own, shallow.device)
    assert torch.equal(own.embed_inputs(tokens), target_s.embed_inputs(tokens))
    assert own.embed_inputs(tokens).requires_grad
    assert not target_s.embed_inputs(tokens).requires_grad


def test_tensors_keep_the_names_of_the_drafter(shallow: Target) -> None:
    """Both kinds of drafters name what they share alike."""
    eagle = Eagle3(
        shallow, ttt_steps=2, vocab_size=64, architecture={"fc_norm": True, "own_embedding": True}
    )
    block = make_drafter(DFlash, shallow, num_layers=1, block_size=4, own_embedding=True)
    for drafter in (eagle, block):
        names = {*drafter.state_dict()}
        assert {"fc.weight", "embed_tokens.weight", "hidden_norm.weight", "d2t", "t2d"} <= names
    count = len(eagle.fused_layers)
    assert {f"fc_norm.{index}.weight" for index in range(count)} <= {*eagle.state_dict()}
