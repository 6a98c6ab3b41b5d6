"""Layers that keep a state, over trees, packed documents and what is forgotten again: Qwen3-Next, three such layers of four."""

import pytest
import torch

from spectrain.decoding.calibration import time_levels
from spectrain.errors import UserError
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree
from tests.models.architectures import VOCAB, save_small


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("hybrid")
    save_small("qwen3_next", folder)
    load_tiny().tokenizer.save_pretrained(folder)
    return load_hf(str(folder), "hybrid", device="cpu")


def words(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape)


def test_packed_documents_do_not_see_each_other(target: Target) -> None:
    """Each of two documents in a row has the features that it has alone."""
    tokens = words(1, 15)
    packed = target.features(tokens, (2, "final"), (7, 8)).hidden
    alone = [target.features(part, (2, "final")).hidden for part in tokens.split((7, 8), dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[9], [4, 9]])
def test_a_tree_in_stages_after_a_forgotten_one(target: Target, lengths: list[int]) -> None:
    """What was forgotten leaves no trace, and a tree in two stages, committed, equals one in a single stage."""
    batch = len(lengths)
    prompts, tree, other = words(batch, 9), words(batch, 6), words(batch, 5)
    whole = TokenTree.of(tree, torch.tensor([-1, 0, 0, 1, 2, 3]).expand(batch, -1))
    caches = [target.new_cache(batch, 32) for _ in range(2)]
    for cache in caches:
        target.prefill(prompts, torch.tensor(lengths), cache, ())
    target.verify(TokenTree.chain(other), caches[0])
    caches[0].forget()
    positions = caches[0].lengths[:, None] + whole.depths
    parts = []
    for new in (slice(0, 3), slice(3, 6)):
        mask = whole.ancestors[:, new, : new.stop]
        plan = ForwardPlan(logits=True, positions=positions[:, new], mask=mask, cache=caches[0])
        parts.append(target.run(whole.tokens[:, new], plan).logits)
    expected = target.verify(whole, caches[1]).logits
    torch.testing.assert_close(torch.cat([part for part in parts if part is not None], dim=1), expected, atol=1e-4, rtol=1e-4)
    for cache in caches:
        cache.commit(torch.tensor([[0, 1, 3]]).expand(batch, -1), torch.tensor([3, 2][:batch]))
    after = [target.verify(TokenTree.chain(other), cache).logits for cache in caches]
    torch.testing.assert_close(*after, atol=1e-4, rtol=1e-4)


def test_a_level_costs_time_only_where_states_are_kept(target: Target) -> None:
    """What trees are shaped by."""
    assert time_levels(target, words(6).tolist(), 6, 3) > 0
    assert time_levels(load_tiny(), [3, 4], 6) == 0


def test_what_a_state_cannot_do_is_refused(target: Target) -> None:
    """Trees without a cache, some of the layers only, and committed tokens that are taken back."""
    cache = target.new_cache(1, 16)
    target.prefill(words(1, 4), torch.tensor([4]), cache, ())
    mask = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    with pytest.raises(UserError, match="keep a state"):
        target.run(words(1, 2), ForwardPlan(mask=mask))
    with pytest.raises(UserError, match="keep a state"):
        target.run(words(1, 2), ForwardPlan(cache=cache, span=LayerSpan(last=2)))
    with pytest.raises(UserError, match="keep a state"):
        cache.forget(committed=1)
