"""What families declare that they can do, and what a drafter around another one passes on."""

import copy

import torch

from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.hybrid import CostWithCopies, DrafterWithCopies
from spectrain.drafters.layers.copies import CopySource
from spectrain.models.target import Target
from tests.drafters.test_contract import ARCHITECTURE


def make_hybrid(inner: Eagle3 | Causal, target: Target) -> DrafterWithCopies:
    return DrafterWithCopies(inner, CopySource.open(None, target.tokenizer, 6, 200, 64))


def test_eagle3_declares_its_fit_and_how_its_loss_is_shared(shallow: Target) -> None:
    """Only start=fitted fits; the labels of a column are as far away as there are draft steps."""
    fitted = Eagle3(shallow, ttt_steps=3, vocab_size=64, start="fitted", fit_tokens=100)
    fit = fitted.capabilities.initial_fit
    assert fit is not None and fit.num_tokens == 100
    shared = fitted.capabilities.context_parallel
    assert shared is not None and shared.label_reach == 3
    assert shared.num_heads == fitted.self_attn.num_heads
    plain = Eagle3(shallow, ttt_steps=3, vocab_size=64, start="target")
    assert plain.capabilities.initial_fit is None
    assert Eagle3.capabilities.context_parallel is None


def test_a_wrapper_passes_on_how_its_drafter_drafts(shallow: Target) -> None:
    """What the inner drafter does outside of rounds stays behind, and the store is the wrapper's
    own.
    """
    inner = Eagle3(shallow, ttt_steps=2, vocab_size=64, start="fitted")
    wrapped = make_hybrid(inner, shallow).capabilities
    assert wrapped.drafts_from_features
    assert wrapped.has_no_q and not wrapped.nestable and wrapped.capture is None
    assert wrapped.initial_fit is None and wrapped.context_parallel is None
    assert wrapped.cost is CostWithCopies and wrapped.datastore is None
    causal = Causal(shallow, architecture=ARCHITECTURE)
    assert causal.capabilities.rewind is not None
    assert make_hybrid(causal, shallow).capabilities.rewind is None
    assert Capabilities().rewind is None


def test_a_copy_of_a_drafter_rewinds_itself(shallow: Target) -> None:
    """The function that a family declares takes the drafter, so a copy's is about the copy."""
    drafter = Causal(shallow, architecture=ARCHITECTURE)
    other = copy.deepcopy(drafter)
    drafter.cache, other.cache = (shallow.new_cache(1, 8) for _ in range(2))
    for cache in (drafter.cache, other.cache):
        cache.lengths.fill_(5)
    rewind = other.capabilities.rewind
    assert rewind is not None
    rewind(other, torch.tensor([2]))
    assert (int(drafter.cache.lengths), int(other.cache.lengths)) == (5, 2)
