"""PARD-2: the weights of drafts, and the target's features added to the embeddings, equal their
equations.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.config.build import GroupSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.context import Context
from spectrain.drafters.layers.losses import forward_kl
from spectrain.drafters.layers.mask_blocks import add_blocks
from spectrain.drafters.pard import FEATURE_SCALE, Pard
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.reference_model import reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain.trees.rollout import Draft

DRAFTS = 4
PROMPTS = [[5, 6, 7, 8, 9], [40, 41], [100, 3, 44, 8, 12, 90, 1500]]


def make_drafter(target: Target, **options: Any) -> Pard:
    """Make a drafter of two target layers whose projection of features is large enough to
    matter.
    """
    torch.manual_seed(3)
    drafter = Pard(
        target,
        **{"num_drafts": DRAFTS, "num_layers": 2, "loss": "forward_kl", "without": 0.0, **options},
    )
    drafter.prepare(target, torch.zeros(target.head.vocab_size))
    if drafter.features is not None:
        torch.nn.init.normal_(drafter.features.weight, std=0.5)
    return drafter.eval()


def batch_of(
    target: Target, drafter: Pard, lengths: tuple[int, ...] = (21, 16), packed: bool = False
) -> Batch:
    torch.manual_seed(5)
    rows = [
        Example(torch.randint(3, 2000, (n,)).tolist(), [i >= 6 for i in range(n)]) for n in lengths
    ]
    dataset = Dataset(rows, len(rows), 0, 0)
    request = BatchRequest(dataset[list(range(len(rows)))], target, drafter.stages[0].layers)
    batch = LiveSource().make_batch(request)
    if not packed:
        return batch
    assert batch.features is not None
    parts = [
        (batch.tokens[row, :n], batch.loss_mask[row, :n], batch.features.hidden[row, :n])
        for row, n in enumerate(lengths)
    ]
    tokens, mask, hidden = (torch.cat(part)[None] for part in zip(*parts))
    return Batch(
        tokens, mask, type(batch.features)(tokens, batch.features.layers, hidden), lengths=lengths
    )


def logits_of(drafter: Pard, target: Target, text: list[int], num_masks: int) -> Tensor:
    """Return [M + 1, V] after a text and after each mask behind it. A token's embedding has
    FEATURE_SCALE W f of the position before it added, a mask's that of the text's last token."""
    with reference_model(drafter.model) as model:
        embedded = torch.cat(
            [model.get_input_embeddings()(torch.tensor(text)), drafter.mask.expand(num_masks, -1)]
        )
        if drafter.features is not None:
            f = target.features(torch.tensor([text]), drafter.layers).fuse_layers(drafter.layers)[0]
            shifted = torch.cat([torch.zeros_like(f[:1]), f[:-1]])
            embedded = (
                embedded
                + FEATURE_SCALE
                * torch.cat([shifted, shifted[-1:].expand(num_masks, -1)])
                @ drafter.features.weight.T
            )
        logits: Tensor = model(inputs_embeds=embedded[None], use_cache=False).logits[
            0, len(text) - 1 :
        ]
    return logits


def independent_loss(
    target: Target, drafter: Pard, batch: Batch, lengths: tuple[int, ...]
) -> Tensor:
    """Sum prod_{s=1..b} p(x_{t-s}) KL over drafts b with label x_t, block by block, over the sum of
    these weights, times the tokens that carry loss."""
    total = torch.zeros(())
    for (tokens, mask), prefixes, length in zip(
        batch.split_documents(), drafter.prefixes(batch, 0), lengths
    ):
        text = tokens[:length].tolist()
        log_p = target.head.logits(
            target.features(torch.tensor([text]), ("final",)).at_layer("final")
        )[0].log_softmax(-1)
        drafts = [
            (logits_of(drafter, target, text[: end + 1], 0)[0], end + 1, 1.0)
            for end in range(length - 1)
        ]
        for end, size in prefixes:
            logits = logits_of(drafter, target, text[: end + 1], size)
            weight = 1.0
            for b in range(1, size + 1):
                previous = end + b  # the label of the draft before
                if drafter.confidence and previous < length and mask[previous]:
                    weight *= float(log_p[previous - 1, text[previous]].exp())
                drafts.append((logits[b], end + 1 + b, weight))
        drafts = [
            (draft_logits, answer, weight)
            for draft_logits, answer, weight in drafts
            if answer < length and mask[answer]
        ]
        terms = [
            weight * forward_kl(log_p[answer - 1], draft_logits.log_softmax(-1))
            for draft_logits, answer, weight in drafts
        ]
        total = total + sum(terms) / sum(weight for *_, weight in drafts) * mask.sum()
    return total


@pytest.mark.sweep(1)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"confidence": True}, {"layers": [1, 3]}, {"confidence": True, "layers": [2]}],
    ids=["weights", "features", "both"],
)
def test_loss_is_that_of_every_block_alone(
    shallow: Target, options: dict[str, Any], packed: bool
) -> None:
    """The loss equals the sum over forwards of every prefix and its masks; so do the gradients
    of mask and projection.
    """
    lengths = (21, 16)
    drafter = make_drafter(shallow, **options)
    batch = batch_of(shallow, drafter, lengths, packed)
    actual = drafter.loss(batch, shallow, TrainingState()).total
    expected = independent_loss(shallow, drafter, batch, lengths)
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=1e-3)
    learning = [drafter.mask, *([drafter.features.weight] if drafter.features is not None else [])]
    for gradient, reference in zip(
        torch.autograd.grad(actual, learning), torch.autograd.grad(expected, learning)
    ):
        torch.testing.assert_close(
            gradient, reference, rtol=2e-3, atol=1e-3 * float(reference.abs().max())
        )


def test_a_share_of_the_sequences_trains_without_features(shallow: Target) -> None:
    """A share `without` of the sequences, drawn by text and step, has no features; the others have
    them at all tokens but the first."""
    drafter = make_drafter(shallow, layers=[1], without=0.25)

    def find_features(batch: Batch, step: int) -> Tensor:
        """Return [B, T] whether a token has features."""
        blocks = add_blocks(batch, drafter.prefixes(batch, step))
        return (
            drafter.trained_features(batch, blocks, step)[:, : batch.tokens.shape[1]].abs().sum(-1)
            > 0
        )

    padded = batch_of(shallow, drafter)
    packed = batch_of(shallow, drafter, packed=True)
    has_features = torch.stack([find_features(padded, step)[:, :16] for step in range(200)])
    assert (
        not has_features[..., 0].any()
        and (has_features[..., 1:].all(-1) == has_features[..., 1:].any(-1)).all()
    )
    assert 0.18 < 1 - float(has_features[..., 1].float().mean()) < 0.32
    for step in range(9):
        blocks = add_blocks(packed, drafter.prefixes(packed, step))
        ordinary = (
            drafter.trained_features(packed, blocks, step)[0][blocks.is_batch_token[0]]
            .abs()
            .sum(-1)
            > 0
        )
        assert torch.equal(ordinary[:21], find_features(padded, step)[0]) and torch.equal(
            ordinary[21:], find_features(padded, step)[1, :16]
        )


@pytest.mark.parametrize("builder", [Chain(DRAFTS), Eagle2(4, 10, 3)], ids=["chain", "eagle2"])
def test_drafted_equals_greedy(shallow: Target, builder: Any) -> None:
    """Drafted output equals greedy decoding, alone and in a batch of ragged prompts."""
    plain = [row.output for row in decode(shallow, PROMPTS, Greedy(), 14, ignore_eos=True)]
    for count in (1, 3):
        generations = decode(
            shallow,
            PROMPTS[:count],
            Greedy(),
            14,
            make_drafter(shallow, layers=[1, 3]),
            builder,
            ignore_eos=True,
        )
        assert [row.output for row in generations] == plain[:count]


def test_captured_rounds_are_the_loops(shallow: Target) -> None:
    """Captured rounds give the eager loop's tokens and rounds, with the features that one round
    leaves to the next.
    """
    drafter = make_drafter(shallow, layers=[1, 3])
    builder = Chain(DRAFTS)
    plain = decode(shallow, PROMPTS, Greedy(), 14, drafter, builder, ignore_eos=True)
    captured = CapturedRunner(shallow, Greedy(), drafter, builder).decode(
        PROMPTS, 14, ignore_eos=True
    )
    assert [(row.output, row.round_lengths) for row in captured] == [
        (row.output, row.round_lengths) for row in plain
    ]


@torch.no_grad()
def test_drafts_are_those_of_a_forward_of_the_full_text(shallow: Target) -> None:
    """In every round log q equals that of transformers' own model over text, masks and features."""
    drafter = make_drafter(shallow, layers=[1, 3])
    rounds = 0
    draft = drafter.draft

    def check_draft(context: Context) -> Draft:
        nonlocal rounds
        drafted = draft(context)
        rounds = rounds + 1
        text = context.tokens[0, : int(context.cache.lengths[0]) + 1].tolist()
        expected = logits_of(drafter, shallow, text, DRAFTS - 1).log_softmax(-1)
        torch.testing.assert_close(drafted.rollout.log_q[0], expected, rtol=1e-3, atol=1e-3)  # type: ignore[union-attr]
        return drafted

    drafter.draft = check_draft  # type: ignore[method-assign]
    decode(shallow, PROMPTS[:1], Greedy(), 14, drafter, Chain(DRAFTS), ignore_eos=True)
    assert rounds > 3


@pytest.mark.parametrize(
    "options, message",
    [({"without": 1.0}, r"drafter\.without=1\.0"), ({"layers": [9]}, r"layers: 9 is")],
)
def test_wrong_settings_are_refused(shallow: Target, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GroupSpec("drafter", "pard", {"num_layers": 2, **options}).build(target=shallow)
