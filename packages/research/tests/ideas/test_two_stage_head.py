"""An output layer in two stages: exact with all candidates, and exact for those that it judges."""

import pytest
import torch
from torch import Tensor

from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.candidates import IMPOSSIBLE
from spectrain.errors import UserError
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain_research.no_positions.drafter import NoPositions
from spectrain_research.two_stage_head.drafter import TwoStageHead, make_first_stage
from spectrain_research.two_stage_head.head import FirstStage
from tests.drafters.forced import shaken


def multiply(stage: FirstStage) -> Tensor:
    """Return the approximation [V, D] of the output layer."""
    return stage.up.weight @ stage.down.weight


def test_all_candidates_give_the_full_output_layer(shallow: Target) -> None:
    vocab_size = shallow.head.vocab_size
    drafter = shaken(TwoStageHead(shallow, rank=8, candidates=vocab_size), shallow)
    eagle3 = Eagle3(shallow, vocab_size=vocab_size).eval()
    own = drafter.state_dict()
    own.pop("token_weights")
    eagle3.load_state_dict(own, strict=True)
    hidden = torch.randn(2, 3, shallow.width)
    with torch.no_grad():
        torch.testing.assert_close(drafter.log_q(hidden), eagle3.log_q(hidden))
        torch.testing.assert_close(drafter.logits(hidden), eagle3.logits(hidden))


def test_candidates_have_the_logits_of_the_full_layer_and_others_no_probability(
    shallow: Target,
) -> None:
    """At full rank the candidates are the most likely tokens."""
    drafter = shaken(TwoStageHead(shallow, rank=shallow.width, candidates=20), shallow)
    hidden = torch.randn(2, 3, shallow.width)
    with torch.no_grad():
        full = drafter.lm_head(drafter.head_inputs(hidden))
        logits = drafter.logits(hidden)
        likely = full.topk(20, dim=-1)
        torch.testing.assert_close(logits.gather(-1, likely.indices), likely.values)
        assert int((logits != IMPOSSIBLE).sum()) == 2 * 3 * 20
        q = drafter.log_q(hidden).exp()
        torch.testing.assert_close(q.gather(-1, likely.indices).sum(-1), torch.ones(2, 3))


def test_the_first_stage_is_the_best_approximation_for_frequent_rows() -> None:
    """Its weighted error is that of the discarded singular values, and no other approximation of
    that rank that we try has less."""
    torch.manual_seed(0)
    weight = torch.randn(60, 12, dtype=torch.float64)
    frequency = torch.rand(60, dtype=torch.float64) ** 4
    rank = 5

    def weighted_error(stage: FirstStage) -> float:
        return float(
            (frequency[:, None] * (weight - stage.up.weight @ stage.down.weight) ** 2).sum()
        )

    best = weighted_error(FirstStage(weight, frequency, rank))
    values = torch.linalg.svdvals(frequency.sqrt()[:, None] * weight)
    assert best == pytest.approx(float((values[rank:] ** 2).sum()))
    assert best < weighted_error(FirstStage(weight, torch.ones(60), rank))


def test_the_first_stage_follows_the_weights(shallow: Target) -> None:
    drafter = shaken(TwoStageHead(shallow, rank=8, freeze_output=False), shallow)
    first = drafter.find_first_stage()
    assert drafter.find_first_stage() is first
    with torch.no_grad():
        drafter.lm_head.weight.mul_(2)
    second = drafter.find_first_stage()
    torch.testing.assert_close(
        second.up.weight @ second.down.weight, 2 * first.up.weight @ first.down.weight
    )


def test_decoding_can_begin_in_inference_mode(shallow: Target) -> None:
    """The first stage that is made while decoding is that which is made before."""
    drafter = shaken(TwoStageHead(shallow, rank=8), shallow)
    hidden = torch.randn(1, 2, shallow.width)
    with torch.inference_mode():
        log_q = drafter.log_q(hidden)
    before = shaken(TwoStageHead(shallow, rank=8), shallow)
    make_first_stage(before)
    with torch.inference_mode():
        assert torch.equal(before.log_q(hidden), log_q)


def test_a_rank_above_the_width_is_refused(shallow: Target) -> None:
    with pytest.raises(UserError, match=f"use {shallow.width} or less"):
        TwoStageHead(shallow, rank=shallow.width + 1)


def test_all_parts_of_eagle4_fit_into_one_drafter(shallow: Target) -> None:
    """With all candidates, a window and no positions it computes what the drafter without
    positions does, with the full output layer over the same vocabulary.
    """
    vocab_size = shallow.head.vocab_size
    settings = {"rank": 8, "candidates": vocab_size, "window": 3}
    drafter = shaken(TwoStageHead(shallow, positions=False, **settings), shallow)
    alone = NoPositions(shallow, vocab_size=vocab_size, window=3).eval()
    own = drafter.state_dict()
    own.pop("token_weights")
    alone.load_state_dict(own, strict=True)
    rotated = TwoStageHead(shallow, **settings).eval()
    rotated.load_state_dict(drafter.state_dict())
    torch.manual_seed(1)
    tokens = torch.randint(3, vocab_size, (1, 6))
    hidden = torch.randn(1, 6, shallow.width)
    log_q = []
    with torch.inference_mode():
        for variant in (drafter, alone, rotated):
            cache = TreeCache(1, 1, 8, "cpu")
            states = variant.run(tokens, hidden, torch.arange(6)[None], cache, None)
            log_q.append(variant.log_q(states))
    torch.testing.assert_close(log_q[0], log_q[1])
    assert not torch.allclose(log_q[0], log_q[2], atol=1e-3)
