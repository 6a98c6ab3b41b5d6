"""Adaptive chains: thresholds against plain Python, and sampled chains that keep the target's
distribution.
"""

import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.models.target import Target
from spectrain_research.adaptive_stop.builder import AdaptiveStopChain
from tests.decoding.rounds import Keeping


@pytest.mark.parametrize("by", ["rate", "full"])
def test_thresholds_follow_the_rounds(shallow: Target, by: str) -> None:
    """Threshold by threshold from the lengths of drafts and rounds; chains end where the largest
    q is below it.
    """
    from spectrain.drafters.causal import Causal

    torch.manual_seed(0)
    drafter, builder = (
        Causal(shallow, num_layers=1).eval(),
        AdaptiveStopChain(4, stop=0.01, by=by, step=0.02),
    )  # type: ignore[arg-type]
    stops: list[float] = []

    class Recording(Keeping):
        def observe(self, round) -> None:  # type: ignore[no-untyped-def]
            super().observe(round)
            stops.append(builder.stop)

    recording = Recording(builder)
    prompts = [[5, 6, 7, 8]]
    generation = decode(shallow, prompts, Greedy(), 16, drafter, recording, ignore_eos=True)[0]
    assert generation.output == decode(shallow, prompts, Greedy(), 16, ignore_eos=True)[0].output
    stop = 0.01
    rate = 0.8
    expected = []
    for tree, count in zip(recording.trees, generation.round_lengths):
        drafted = int(tree.valid.sum()) - 1
        if not drafted:
            stop = stop / 2 if by == "full" else stop - 0.02
        elif by == "full":
            stop = stop / 2 if count - 1 == drafted else stop * 2
        else:
            rate = 0.5 * rate + 0.5 * (count - 1) / drafted
            stop = 0.5 * stop + 0.5 * (stop + (0.02 if rate <= 0.8 else -0.02))
        stop = min(max(stop, 1e-3), 0.95)
        expected.append(stop)
    assert (
        stops[: len(expected)] == pytest.approx(expected)
        and len({round(threshold, 6) for threshold in stops}) > 2
    )
