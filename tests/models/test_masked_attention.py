"""Layers that attend by themselves: the masks that they get make every text the same as alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import capture_blocker
from spectrain.errors import UserError
from spectrain.models.architectures.masked import MASKED, Masked, MaskVisibility, PerRowBias
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.reference_model import reference_model
from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree
from tests.models.architectures import VOCAB, WINDOW, save_small


@pytest.fixture(scope="module", params=["mpt", "gpt_neo"])
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Load a target with biases by position, or one with windows in masks of its own."""
    return load_target(request.param, tmp_path_factory.mktemp(request.param))


def load_target(name: str, folder: Path) -> Target:
    save_small(name, folder)
    load_tiny().tokenizer.save_pretrained(folder)
    return load_hf(str(folder), name, device="cpu")


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape)


def test_masked_architectures_are_detected(target: Target) -> None:
    """Biases are detected in the layers' arguments, windows in the masks that layers store."""
    own = target.architecture
    windows = [
        attention.range.window for attention in target.architecture.attention_layers.values()
    ]
    assert isinstance(own, Masked) and target.config._attn_implementation == MASKED
    assert own.bias_arguments == (("position_bias",) if target.name == "mpt" else ())
    assert windows == ([None] * 4 if target.name == "mpt" else [None, WINDOW, None, WINDOW])


def test_packed_documents_do_not_see_each_other(target: Target) -> None:
    tokens = random_tokens(1, 25)
    packed = target.features(tokens, (2, "final"), (11, 14)).hidden
    alone = [target.features(part, (2, "final")).hidden for part in tokens.split((11, 14), dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_trees_without_a_cache(target: Target, packed: bool) -> None:
    """Every node has the features of the path that leads to it, alone."""
    parents = torch.tensor([[-1, *(max(0, node - 2) for node in range(1, 18))]])
    tree = TokenTree.from_parents(random_tokens(1, 18), parents)
    lengths = (18, 18) if packed else None
    tokens, positions = (
        torch.cat([tensor] * (2 if packed else 1), dim=1) for tensor in (tree.tokens, tree.depths)
    )
    mask = (tree.ancestors, tree.ancestors) if packed else tree.ancestors
    plan = ForwardPlan(layers=("final",), positions=positions, mask=mask, lengths=lengths)
    actual = target.run(tokens, plan).hidden[0, -18:, 0]
    for node in (3, 16, 17):
        path = tree.tokens[:, tree.ancestors[0, node]]
        torch.testing.assert_close(
            actual[node], target.features(path, ("final",)).hidden[0, -1, 0], atol=1e-4, rtol=1e-4
        )


def test_a_split_forward_equals_a_full_forward(target: Target) -> None:
    """A forward that starts from the inputs of the third layer of a cached tree gives what the
    full forward gives.
    """
    prompt = random_tokens(2, 12)
    tree = TokenTree.from_parents(random_tokens(2, 5), torch.tensor([[-1, 0, 0, 1, 2]] * 2))
    outputs = []
    for split in (False, True):
        cache = target.new_cache(2, 32)
        target.prefill(prompt, torch.tensor([12, 9]), cache, ())
        positions = cache.lengths[:, None] + tree.depths
        plan = ForwardPlan(
            layers=(2, "final"), positions=positions, mask=tree.ancestors, cache=cache
        )
        if split:
            first = target.run(
                tree.tokens,
                ForwardPlan(
                    (2,),
                    positions=positions,
                    mask=tree.ancestors,
                    cache=cache,
                    span=LayerSpan(last=2),
                ),
            ).hidden[:, :, 0]
            cache.roll_back()
            span = LayerSpan(first=2, hidden=first)
            plan = ForwardPlan(
                ("final",), positions=positions, mask=tree.ancestors, cache=cache, span=span
            )
        outputs.append(target.run(tree.tokens, plan).at_layer("final"))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


def test_the_reference_model_has_no_masks_of_ours(target: Target) -> None:
    """Held against transformers, a target goes back to its masks, and no mask of ours stays in a
    layer.
    """
    tokens = random_tokens(1, 20)
    before = target.features(tokens, ("final",)).hidden
    with reference_model(target) as model, torch.no_grad():
        logits = model(input_ids=tokens).logits
    torch.testing.assert_close(
        target.head.logits(before[:, :, 0]), logits.float(), atol=1e-3, rtol=1e-3
    )
    assert torch.equal(target.features(tokens, ("final",)).hidden, before)
    assert capture_blocker(target, Greedy(), None, None) is not None


def test_biases_follow_positions() -> None:
    """A bias that equals a key's slot becomes the key's position, for all texts or for each."""
    positions = torch.tensor([[0, 1, 2, 2], [0, 1, 1, 2]])
    slots = torch.arange(4.0)
    visibility = MaskVisibility(lambda window: torch.ones(1, 1, 1, 4), positions, 3)
    each = visibility.gather_bias((slots * torch.ones(6, 1, 1)).view(6, 1, 4))
    assert isinstance(each, torch.Tensor) and torch.equal(
        each, positions.repeat_interleave(3, 0)[:, None].float()
    )
    longer = torch.arange(-2.0, 4.0).expand(3, 1, 6)
    alike = visibility.gather_bias(longer)
    assert isinstance(alike, PerRowBias) and alike.size(-1) == 6
    assert torch.equal(alike[:, :, 2:], positions[:, None, None].expand(-1, 3, 1, -1).float())


def test_biases_in_masks_are_refused(tmp_path: Path) -> None:
    """Trees replace masks, and Falcon's hold its biases."""
    with pytest.raises(UserError, match="ALiBi"):
        load_target("falcon, alibi", tmp_path)
