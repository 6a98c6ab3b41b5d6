"""The rule of promotion: a certain gain on the same prompts, and no loss elsewhere."""

from dataclasses import replace

from spectrain.decoding.generation import Generation
from spectrain_serve.promotion import PairedGain, compare_rounds, decide_promotion

GAIN = PairedGain(40, 1.5, 1.8, 0.2, [0.1, 0.3], 40)
EQUAL = PairedGain(40, 1.8, 1.8, 0.0, [-0.01, 0.01], 40)


def test_promotion_needs_a_certain_gain_and_no_loss_beyond_the_tolerance() -> None:
    assert decide_promotion(GAIN, EQUAL, 0.03).is_promoted
    refused = {
        "not certain": (replace(GAIN, interval=[-0.01, 0.4]), EQUAL),
        "tolerance": (GAIN, replace(EQUAL, gain=-0.02, interval=[-0.05, 0.01])),
        "too few": (replace(GAIN, num_prompts=7), EQUAL),
        "are equal": (replace(GAIN, num_equal=0), EQUAL),
    }
    for words, (new, old) in refused.items():
        proof = decide_promotion(new, old, 0.03)
        assert not proof.is_promoted and words in proof.reason
    assert not decide_promotion(replace(GAIN, interval=None), EQUAL, 0.03).is_promoted


def test_rounds_are_compared_by_prompt() -> None:
    """Twice the tokens per forward on every prompt is a gain of 1, exactly."""
    serving = [Generation([1], [2, 3], round_lengths=[1] * (4 + number)) for number in range(10)]
    candidate = [Generation([1], [2, 3], round_lengths=[2] * (4 + number)) for number in range(10)]
    gain = compare_rounds(serving, candidate)
    assert (gain.gain, gain.interval, gain.num_equal) == (1.0, [1.0, 1.0], 10)
    assert compare_rounds([], []).interval is None


def test_without_earlier_traffic_the_gain_alone_decides() -> None:
    proof = decide_promotion(GAIN)
    assert proof.is_promoted and proof.old is None
    assert not decide_promotion(replace(GAIN, num_prompts=7)).is_promoted
    assert not decide_promotion(replace(GAIN, interval=[0.0, 0.4])).is_promoted
