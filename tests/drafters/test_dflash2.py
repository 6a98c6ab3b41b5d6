"""DFlash2: convolutions that start as nothing, candidates, and the loss that teaches which of
them to take.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.acceptance.rejection import RecursiveRejection, SpeculativeSampling
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.dflash import DFlash, DFlashConfig
from spectrain.drafters.dflash2 import DFlash2, DFlash2Config
from spectrain.drafters.layers.anchors import sample_anchors
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Static, TreeBuilder

from .blocks import block_states, dataset
from .test_dflash import LIMIT, PROMPTS, RoundRecorder

CANDIDATES = 5


def make_drafter(target: Target, **options: Any) -> DFlash2:
    torch.manual_seed(7)
    sizes = {
        "block_size": 4,
        "num_layers": 1,
        "num_anchors": 5,
        "selector_rank": 8,
        "selector_top_k": CANDIDATES,
    }
    drafter = DFlash2(target, DFlash2Config(**{**sizes, **options}))
    counts = torch.arange(target.head.vocab_size, 0, -1)
    counts[drafter.mask_token_id] = 0
    drafter.prepare(target, counts)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.add_(
                    torch.randn_like(parameter)
                    / (1 if "codebook" in name else parameter.shape[-1] ** 0.5)
                )
    return drafter.eval()


def make_batch(target: Target, drafter: DFlash2, rows: list[int], packed: bool = False) -> Batch:
    return LiveSource().make_batch(
        BatchRequest(dataset()[rows], target, drafter.layers, packed=packed)
    )


@torch.no_grad()
def compute_scores(drafter: DFlash2, hidden: Tensor, before: int, candidates: list[int]) -> Tensor:
    """Compute scores [C] of candidates in target ids: their logits, and what the selector adds
    by the formula.
    """
    selector = drafter.candidate_selector
    projected = selector.hidden_projection(hidden)
    scores = []
    for token in candidates:
        pair = (
            selector.predecessor_codebook[before] * projected * selector.successor_codebook[token]
        )
        scores.append(float(drafter.head.logits(hidden)[token]) + float(pair.sum()))
    return torch.tensor(scores)


@torch.no_grad()
def list_candidates(drafter: DFlash2, hidden: Tensor) -> list[int]:
    logits = drafter.head.logits(hidden)[drafter.draft_ids]
    candidates: list[int] = drafter.draft_ids[logits.topk(CANDIDATES).indices].tolist()
    return candidates


@pytest.mark.parametrize(
    "options",
    [{}, {"vocab_size": 512, "conv_kernel_size": 3}, {"sample_from_anchor": True}],
    ids=["whole", "cropped", "shifted"],
)
def test_loss_is_the_formula(shallow: Target, options: dict[str, Any]) -> None:
    """The loss has the slots' divergence, and the cross-entropy of the target's most likely
    token among the candidates.
    """
    drafter = make_drafter(shallow, decay=3.0, selector_weight=0.5, **options)
    batch = make_batch(shallow, drafter, [0, 1])
    losses = drafter.loss(batch, shallow, TrainingState())
    anchors = sample_anchors(batch, drafter.num_anchors, drafter.seed, 0)
    length = batch.tokens.shape[1]
    target_logits = shallow.head.logits(
        shallow.features(batch.tokens, ("final",)).at_layer("final")
    )
    totals = {"forward_kl": 0.0, "selector": 0.0}
    for row in range(2):
        terms = {"forward_kl": 0.0, "selector": 0.0}
        weights = 0.0
        for index, position in zip(anchors.token_indices.tolist(), anchors.positions.tolist()):
            if index // length != row:
                continue
            text = batch.tokens[row].tolist()
            states = block_states(drafter, shallow, text[: position + 1])
            for d in range(drafter.num_drafts):
                if position + d + 1 >= length or not batch.loss_mask[row, position + d + 1]:
                    break
                weight = math.exp(-d / 3.0)
                logits = target_logits[row, position + d]
                weights += weight
                best = int(logits.argmax())
                if not drafter.t2d[best]:
                    continue
                log_p = logits[drafter.draft_ids].log_softmax(-1)
                log_q = drafter.head.logits(states[d])[drafter.draft_ids].log_softmax(-1)
                terms["forward_kl"] += weight * float((log_p.exp() * (log_p - log_q)).sum())
                candidates = list_candidates(drafter, states[d])
                if best not in candidates:
                    candidates[-1] = best
                candidate_log_q = compute_scores(
                    drafter, states[d], text[position + d], candidates
                ).log_softmax(0)
                terms["selector"] -= 0.5 * weight * float(candidate_log_q[candidates.index(best)])
        for name, term in terms.items():
            totals[name] += term / weights * int(batch.loss_mask[row, 1:].sum())
    assert {name: float(term.detach()) for name, term in losses.terms.items()} == pytest.approx(
        totals, rel=1e-3
    )


def test_packed_equals_padded(shallow: Target) -> None:
    drafter = make_drafter(shallow)
    results = []
    for packed in (False, True):
        drafter.zero_grad()
        losses = drafter.loss(
            make_batch(shallow, drafter, [0, 1, 2], packed), shallow, TrainingState()
        )
        losses.total.backward()
        results.append(
            [
                losses.total.detach(),
                losses.hits,
                *(p.grad for p in drafter.parameters() if p.grad is not None),
            ]
        )
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "builder",
    [Chain(3), Eagle2(3, 9, 3), Static(paths=[[0], [1], [0, 0], [1, 0], [0, 0, 0]])],
    ids=["chain", "eagle2", "static"],
)
def test_candidates_are_weighed_by_their_parents(shallow: Target, builder: TreeBuilder) -> None:
    """A node is one of its slot's candidates, its score that of the formulas along its path; the
    output is greedy.
    """
    drafter = make_drafter(shallow)
    plain = [
        decode(shallow, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output
        for prompt in PROMPTS[:2]
    ]
    recorder = RoundRecorder(builder)
    generations = decode(shallow, PROMPTS[:2], Greedy(), LIMIT, drafter, recorder, ignore_eos=True)
    assert [generation.output for generation in generations] == plain
    for texts, tree in recorder.rounds[::6]:
        assert tree.scores is not None
        for row, text in enumerate(texts):
            states = block_states(drafter, shallow, text)
            for node in range(1, tree.tokens.shape[1]):
                path = []
                at = node
                while at >= 0:
                    path.insert(0, int(tree.tokens[row, at]))
                    at = int(tree.parents[row, at])
                score = 0.0
                for depth, (before, token) in enumerate(zip(path, path[1:])):
                    candidates = list_candidates(drafter, states[depth])
                    assert token in candidates
                    log_q = compute_scores(drafter, states[depth], before, candidates).log_softmax(
                        0
                    )
                    score += float(log_q[candidates.index(token)])
                assert float(tree.scores[row, node]) == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize(
    "builder, rule",
    [
        (Chain(3, "sampled", 0.7), SpeculativeSampling),
        (
            Static(paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]], children="without_replacement"),
            RecursiveRejection,
        ),
    ],
    ids=["chain", "tree"],
)
def test_drawn_children(shallow: Target, builder: TreeBuilder, rule: Any) -> None:
    """Under rules that weigh p against q, the output is greedy where p allows one token only."""
    plain = [
        decode(shallow, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output for prompt in PROMPTS
    ]
    generations = decode(
        shallow,
        PROMPTS,
        rule(temperature=0.7, top_k=1, seed=3),
        LIMIT,
        make_drafter(shallow),
        builder,
        ignore_eos=True,
    )
    assert [generation.output for generation in generations] == plain


def test_convolutions_start_as_nothing(shallow: Target) -> None:
    """Before training the drafter's states are those of DFlash with the same weights."""
    torch.manual_seed(3)
    second = DFlash2(shallow, DFlash2Config(block_size=4, num_layers=2))
    first = DFlash(shallow, DFlashConfig(block_size=4, num_layers=2))
    missing, _ = first.load_state_dict(second.state_dict(), strict=False)
    assert not missing
    torch.testing.assert_close(
        block_states(second, shallow, PROMPTS[0]), block_states(first, shallow, PROMPTS[0])
    )


def test_groups_divide_the_width(shallow: Target) -> None:
    with pytest.raises(
        UserError, match="conv_group_size=7: use a divisor of the target's width, 128"
    ):
        make_drafter(shallow, conv_group_size=7)
