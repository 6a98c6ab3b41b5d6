"""Kalman filters of joints: against the textbook's matrices, on straight motion, and decoding
with them.
"""

import numpy as np
import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.models.attention import ATTENTION_NAME
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain_research.robot_actions.drafter import JointFilter, KalmanActions, bin_chance


@pytest.fixture(scope="module")
def target() -> Target:
    """The tiny target's first layer, with bins as further tokens."""
    tiny = load_tiny()
    model, tokenizer = tiny.model, tiny.tokenizer
    tokenizer.add_tokens([f"<c{bin}>" for bin in range(64)])
    model.resize_token_embeddings(len(tokenizer))  # type: ignore[operator]
    model.config._attn_implementation = ATTENTION_NAME
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    return Target(model, tokenizer, "arm", "")


def test_filter_equals_the_matrices() -> None:
    """Position, speed and covariance are those of the Kalman equations, after every prediction
    and update.
    """
    joint = JointFilter(1.5, 0.8)
    step = np.array([[1.0, 1.0], [0.0, 1.0]])
    noise = np.array([[0.25, 0.5], [0.5, 1.0]]) * 1.5**2
    state = np.zeros(2)
    covariance = np.diag([1e4, 1e2])
    for measured in (3.0, 4.1, 6.0, 6.5, 9.0):
        joint.predict()
        joint.update(measured)
        state = step @ state
        covariance = step @ covariance @ step.T + noise
        gain = covariance[:, 0] / (covariance[0, 0] + 0.8**2)
        state = state + gain * (measured - state[0])
        covariance = covariance - np.outer(gain, covariance[0])
        assert np.allclose([joint.position, joint.speed], state)
        assert np.allclose(
            [joint.var_position, joint.var_speed, joint.covariance],
            [covariance[0, 0], covariance[1, 1], covariance[0, 1]],
        )
    later = step @ step @ state
    assert joint.forecast(2)[1][0] == pytest.approx(later[0])
    assert sum(bin_chance(bin, 10.3, 2.0) for bin in range(-30, 50)) == pytest.approx(1.0)


def test_straight_motion_is_forecast(target: Target) -> None:
    """Three joints of constant speed, of which the first is due next: the path holds their next
    bins.
    """
    drafter = KalmanActions(target, joints=3, noise=0.2)
    bins = [value for step in range(6) for value in (10 + 2 * step, 50 - 3 * step, 20)]
    text = [
        5,
        7,
        *(drafter.tokens[bin] for bin in bins[:9]),
        9,
        *(drafter.tokens[bin] for bin in bins[9:]),
    ]
    drafter.filters = [[JointFilter(2.0, 0.2) for _ in range(3)]]
    drafter.counts = [(0, 0)]
    drafter._read_tokens(0, text)
    trie = drafter.make_trie(0, 6)
    path = [trie.tokens[node] for node in trie.heaviest_path(6)[1:]]
    assert path == [drafter.tokens[bin] for bin in (22, 32, 20, 24, 29, 20)]


def test_drafted_equals_greedy(target: Target) -> None:
    """Outputs are equal over texts with actions and without, in chains and trees."""
    actions = target.tokenizer.convert_tokens_to_ids([f"<c{10 + bin}>" for bin in range(12)])
    prompts = [[5, 7, *actions], [40, 50], [9, *actions[:4]]]
    plain = [row.output for row in decode(target, prompts, Greedy(), 12)]
    drafter = KalmanActions(target, joints=3)
    for builder in (Chain(4), Eagle2(4, 10, 3)):
        assert [
            row.output for row in decode(target, prompts, Greedy(), 12, drafter, builder)
        ] == plain
    assert torch.is_inference_mode_enabled() is False
