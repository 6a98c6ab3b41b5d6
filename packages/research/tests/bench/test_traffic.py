"""The bytes that decoding reads, per token."""

import pytest

from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.ngram import Ngram
from spectrain.eval.notes import explain_numbers
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_research.less_cache.bytes_read import weight_bytes
from spectrain_research.less_cache.drafter import SelfDraft
from spectrain_research.less_cache.evaluation import count_traffic


def test_traffic_counts_drafting_and_verification(shallow: Target) -> None:
    """Of a drafter that counts: a plain step reads every weight, a round those of its drafts and
    of its verification.
    """
    prompt = [*range(10, 40)]
    weights = weight_bytes(shallow)
    assert count_traffic(shallow, Ngram(shallow), Chain(2), Greedy(), prompt) is None
    traffic = count_traffic(shallow, SelfDraft(shallow, "window", 200), Chain(2), Greedy(), prompt)
    assert traffic is not None and traffic["prompt_tokens"] == 30
    assert traffic["autoregressive"]["weights"] == weights
    # two drafts a round
    assert traffic["draft"]["weights"] == pytest.approx(2 * traffic["verify"]["weights"], abs=2)
    # and all of them are kept
    assert traffic["verify"]["weights"] == pytest.approx(weights / 3, abs=2)
    assert traffic["ratio"] == pytest.approx(1, abs=0.1)
    bounds = {
        "time_share": {},
        "acceptance_by_depth": [],
        "setting": {"batch_size": 1, "device": "", "dtype": ""},
    }
    assert any(
        "Megabytes read per token after 30 tokens" in line
        for line in explain_numbers({**bounds, "traffic": traffic})
    )
