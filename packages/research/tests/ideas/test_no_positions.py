"""EAGLE-3 without positions: what it computes depends on contents and their order alone."""

import torch

from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain_research.no_positions.drafter import NoPositions
from tests.drafters.forced import shaken


def test_states_do_not_depend_on_position_ids(shallow: Target) -> None:
    """A text has the same states wherever it stands, which rotary positions give only up to
    rounding."""
    drafter = shaken(NoPositions(shallow, vocab_size=512), shallow)
    torch.manual_seed(1)
    tokens = torch.randint(3, 2000, (1, 6))
    hidden = torch.randn(1, 6, shallow.width)
    states = []
    with torch.inference_mode():
        for first in (0, 1000):
            positions = torch.arange(first, first + 6)[None]
            cache = TreeCache(1, 1, 8, "cpu")
            states.append(drafter.run(tokens, hidden, positions, cache, None))
    assert torch.equal(*states)


def test_an_earlier_token_counts_the_same_at_any_distance(shallow: Target) -> None:
    """Attention is a sum over earlier tokens, so exchanging two of them changes nothing after
    them."""
    drafter = shaken(NoPositions(shallow, vocab_size=512), shallow)
    torch.manual_seed(2)
    tokens = torch.randint(3, 2000, (1, 7))
    hidden = torch.randn(1, 7, shallow.width)
    order = torch.tensor([0, 4, 2, 3, 1, 5, 6])
    states = []
    with torch.inference_mode():
        for index in (torch.arange(7), order):
            cache = TreeCache(1, 1, 8, "cpu")
            positions = torch.arange(7)[None]
            states.append(drafter.run(tokens[:, index], hidden[:, index], positions, cache, None))
    torch.testing.assert_close(states[0][:, 5:], states[1][:, 5:])
    assert not torch.allclose(states[0][:, 1], states[1][:, 1], atol=1e-3)
