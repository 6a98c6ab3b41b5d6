"""Falcon: what is trained is what is decoded, blocks below the first, and what the second pass
glances at.
"""

from dataclasses import replace

import pytest
import torch

from spectrain.drafters.base import TrainingState
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_research.falcon.drafter import Blocks, Falcon
from tests.decoding.rounds import begun, proposed
from tests.drafters.forced import Probe, shaken, walk
from tests.factories import random_batch


def make_drafter(target: Target, size: int) -> Falcon:
    drafter: Falcon = shaken(
        Falcon(target, block_size=size, num_lstm_layers=1, first_pass=0.5), target, 0.1
    )
    return drafter


def cut_blocks(size: int, offset: int, length: int) -> Blocks:
    shifted = torch.arange(length)[None] + offset
    return Blocks(torch.arange(length)[None], shifted // size, shifted % size)


@pytest.mark.parametrize("size", [1, 3])
def test_training_equals_decoding_along_the_true_path(shallow: Target, size: int) -> None:
    """The features of a block that ends at the newest entry, from a forward over the text, give
    the log q of drafting.
    """
    drafter = make_drafter(shallow, size)
    batch = random_batch(shallow, ("final",))
    assert batch.features is not None
    final = batch.features.at_layer("final")
    tokens = batch.tokens.roll(-1, dims=1)
    count = 0
    with torch.no_grad():
        features = [
            drafter.predict_features(final, tokens, batch, cut_blocks(size, offset, 32))
            for offset in range(size)
        ]
    for row, index, log_q in walk(drafter, shallow, batch.tokens, size):
        if index + 1 >= size:
            block = features[(size - 1 - index) % size][row, index + 1 - size : index + 1]
            torch.testing.assert_close(log_q, drafter.log_q(block), rtol=1e-3, atol=1e-3)
            count += 1
    assert count >= 8


def test_deeper_blocks_equal_a_forward_over_the_path(shallow: Target) -> None:
    """Below two branches, nodes of the second and third block have the features of a forward
    over text and path.
    """
    drafter = make_drafter(shallow, 2)
    prompt = [5, 6, 7, 8, 9]
    size = 2
    probe = Probe(
        ([[20, 30]], [[0, 0]]),
        ([[21, 31]], [[1, 2]]),
        ([[22, 32]], [[3, 4]]),
        ([[23, 33]], [[5, 6]]),
    )
    context = begun(shallow, [prompt], drafter, Chain(8), 40)
    with torch.inference_mode():
        root = int(context.root)
        proposed(drafter, context, probe)
        final = shallow.features(torch.tensor([prompt]), ("final",)).at_layer("final")
        for branch, path in enumerate(([20, 21, 22, 23], [30, 31, 32, 33])):
            features = final
            text = [*prompt[1:], root]
            for number in range(3):
                batch = Batch(torch.tensor([text]), torch.ones(1, len(text), dtype=torch.bool))
                blocks = cut_blocks(size, -len(text) % size, len(text))
                predicted = drafter.predict_features(features, batch.tokens, batch, blocks)[
                    :, -size:
                ]
                for slot in range(size):
                    depth = number * size + slot
                    if depth < 5:
                        log_q = probe.log_q[depth][0, min(branch, probe.log_q[depth].shape[1] - 1)]
                        torch.testing.assert_close(
                            log_q, drafter.log_q(predicted[0, slot]), rtol=2e-3, atol=2e-3
                        )
                features = torch.cat([features, predicted], dim=1)
                text = text + path[number * size : number * size + size]


def test_the_second_pass_glances(shallow: Target) -> None:
    """It has as many true entries as a share of the wrong tokens, predictions elsewhere; packed
    = padded.
    """
    drafter = make_drafter(shallow, 2)
    padded = random_batch(shallow, ("final",), (2, 20))
    assert padded.features is not None
    final = padded.features.at_layer("final")
    tokens = padded.tokens.roll(-1, dims=1)
    torch.manual_seed(2)
    first = torch.randn_like(final)
    features, drafted = drafter.mix_predictions(first, final, tokens, padded, 0)
    wrong = (drafter.log_q(first[:, :18]).argmax(-1) != tokens[:, 2:]).sum(1)
    is_true = (features == final).all(-1)
    assert bool(is_true[:, :2].all()) and torch.equal(
        features[:, 2:][~is_true[:, 2:]], first[:, :18][~is_true[:, 2:]]
    )
    assert bool(
        ((wrong // 2 - 2 <= is_true[:, 2:].sum(1)) & (is_true[:, 2:].sum(1) <= wrong // 2)).all()
    )
    assert torch.equal(drafted[is_true], tokens[is_true])
    packed = Batch(
        padded.tokens.flatten()[None], padded.loss_mask.flatten()[None], lengths=(20, 20)
    )
    packed = replace(packed, features=shallow.features(packed.tokens, ("final",), packed.lengths))
    with torch.no_grad():
        losses = [drafter.loss(batch, shallow, TrainingState(step=3)) for batch in (padded, packed)]
    torch.testing.assert_close(losses[0].total, losses[1].total, rtol=1e-3, atol=1e-3)
    assert torch.equal(losses[0].counts, losses[1].counts)
    assert set(losses[0].terms) == {"feature", "forward_kl", "first_feature", "first_forward_kl"}
