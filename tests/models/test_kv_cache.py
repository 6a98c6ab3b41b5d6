"""The cache by itself."""

import torch

from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target


def test_a_cropped_cache_equals_a_cache_of_the_shorter_text(shallow: Target) -> None:
    """Rows that are cropped to lengths of their own and read on equal rows that were never
    longer.
    """
    tokens = torch.randint(3, 2000, (2, 9))
    long, short = (shallow.new_cache(2, 32) for _ in range(2))
    lengths = torch.tensor([3, 6])
    shallow.run(tokens, ForwardPlan(cache=long))
    long.commit(None, torch.tensor([9, 8]))
    shallow.run(tokens[:, :1], ForwardPlan(cache=long))  # appended, and not committed
    long.crop(lengths)
    shallow.run(tokens, ForwardPlan(cache=short))
    short.commit(None, lengths)
    assert long.lengths.tolist() == short.lengths.tolist() and long.longest == short.longest == 6
    news = torch.randint(3, 2000, (2, 4))
    logits = [
        shallow.run(news, ForwardPlan(logits=True, cache=cache)).logits for cache in (long, short)
    ]
    assert logits[0] is not None and logits[1] is not None
    torch.testing.assert_close(logits[0], logits[1])
