"""The input that EAGLE's layers and block drafters share. Shapes: B batch, T tokens, D width."""

import torch
from torch import nn

from spectrain.drafters.dflash import DFlash
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.fused_input import FusedInput
from spectrain.models.target import Target
from tests.factories import make_drafter


def test_norms_stand_before_and_after_the_projection(shallow: Target) -> None:
    """norm_out(fc(norm_fused(x))) where all are given; one norm for each layer where they are."""
    torch.manual_seed(0)
    width = shallow.width
    fc = nn.Linear(2 * width, width, bias=False)
    around = FusedInput(
        (1, 2),
        shallow.head,
        fc,
        None,
        fused_norm=nn.LayerNorm(2 * width),
        output_norm=nn.LayerNorm(width),
    )
    features = shallow.features(torch.randint(3, 200, (2, 5)), (1, 2, "final"))
    fused = around.fuse(features)
    assert torch.equal(fused, torch.cat([features.at_layer(1), features.at_layer(2)], dim=-1))
    normed = nn.functional.layer_norm(fused, (2 * width,))
    expected = nn.functional.layer_norm(normed @ fc.weight.T, (width,))
    torch.testing.assert_close(around.project(fused), expected)
    halves = FusedInput(
        (1, 2),
        shallow.head,
        fc,
        None,
        layer_norms=nn.ModuleList([nn.LayerNorm(width), nn.Identity()]),
    )
    first = nn.functional.layer_norm(fused[..., :width], (width,))
    expected = torch.cat([first, fused[..., width:]], dim=-1) @ fc.weight.T
    torch.testing.assert_close(halves.project(fused), expected)


def test_its_own_embedding_starts_as_the_target_s(shallow: Target) -> None:
    """Both embed alike after the copy, and only the own one has a gradient."""
    tokens = torch.tensor([[3, 7, 5]])
    fc = nn.Linear(shallow.width, shallow.width, bias=False)
    embedding = nn.Embedding(shallow.head.vocab_size, shallow.width)
    own = FusedInput((1,), shallow.head, fc, embedding)
    own.copy_embedding(shallow.device)
    target_s = FusedInput((1,), shallow.head, fc, None)
    assert torch.equal(own.embed(tokens), target_s.embed(tokens))
    assert own.embed(tokens).requires_grad and not target_s.embed(tokens).requires_grad


def test_tensors_keep_the_names_of_the_drafter(shallow: Target) -> None:
    """The modules of the input are the drafter's own, and nothing is saved under the input."""
    eagle = Eagle3(
        shallow, ttt_steps=2, vocab_size=64, architecture={"fc_norm": True, "own_embedding": True}
    )
    block = make_drafter(DFlash, shallow, num_layers=1, block_size=4, own_embedding=True)
    for drafter in (eagle, block):
        names = {*drafter.state_dict()}
        assert {"fc.weight", "embed_tokens.weight", "hidden_norm.weight", "d2t", "t2d"} <= names
        assert not [name for name in names if name.startswith("fused_input")]
    count = len(eagle.fused_layers)
    assert {f"fc_norm.{index}.weight" for index in range(count)} <= {*eagle.state_dict()}
