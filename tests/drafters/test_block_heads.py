"""Heads on DFlash's block against their formulas: Domino, XPress, LiLiCorr; and JetSpec's trees."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.config.build import build
from spectrain.drafters import lilicorr
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.judged_drafts import SlotStates
from spectrain.drafters.layers.vocabulary import embed_as_target
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.trees import Chain, TreeBuilder
from tests.factories import add_noise

from .blocks import block_states, dataset

TEXT = [5, 81, 300, 7, 42, 1999]
PATH = [12, 900, 33]
CHAIN = Chain(3)
LILICORR = "spectrain.drafters.lilicorr.LiLiCorr"


def make_drafter(target: Target, constructor: str, **options: Any) -> Any:
    """Make a drafter of blocks of four with random weights, large enough that every part
    matters.
    """
    torch.manual_seed(7)
    settings = {
        "_target_": constructor,
        "block_size": 4,
        "num_layers": 1,
        "num_anchors": 5,
        **options,
    }
    drafter = build(settings, target=target)
    counts = torch.arange(target.head.vocab_size, 0, -1)
    counts[drafter.mask_token_id] = 0
    drafter.prepare(target, counts)
    add_noise(
        parameter
        for parameter in drafter.parameters()
        if parameter.requires_grad and parameter.dim() > 1
    )
    return drafter.eval()


def make_batch(target: Target, drafter: Any, rows: list[int]) -> Batch:
    return LiveSource().make_batch(BatchRequest(dataset()[rows], target, drafter.layers))


def make_rollout_after(
    drafter: Any,
    states: Tensor,
    text: list[int],
    builder: TreeBuilder = CHAIN,
    has_anchor: bool = False,
) -> Any:
    """Make the rollout after a text from the states of its block: those of all slots, or of the
    drafting ones.
    """
    tokens = torch.tensor([text])
    lengths = torch.tensor([len(text) - 1])
    context = SimpleNamespace(
        root=tokens[:, -1],
        tokens=tokens,
        lengths=lengths,
        builder=builder,
        sequence_ids=torch.zeros(1, dtype=torch.int64),
    )
    return drafter.make_rollout(
        context, SlotStates(states[None], drafter.first_draft_slot if has_anchor else 0)
    )


def follow_path(rollout: Any, path: list[int]) -> Tensor:
    """Compute log q [len(path) + 1, V] after the root and after each token of a path."""
    log_q = [rollout.start()[0, 0]]
    for parent, token in enumerate(path):
        log_q.append(rollout.extend(torch.tensor([[token]]), torch.tensor([[parent]]))[0, 0])
    return torch.stack(log_q)


SMALL_LATTICE = {"correction_width": 16, "correction_heads": 2, "factor_width": 8, "top_k": 3}


@torch.no_grad()
def lattice_by_formula(
    head: Any, embedded: Tensor, log_probs: Tensor, states: Tensor, context: Tensor
) -> Tensor:
    """Compute the scores [K, C, C] of a lattice, with torch's own attention and one transition
    at a time.
    """
    slots, size = log_probs.shape
    nodes = []
    for s in range(slots):
        for i in range(size):
            features = torch.tensor(
                [
                    log_probs[s, i],
                    log_probs[s, i].exp(),
                    log_probs[s, i] - log_probs[s].max(),
                    i / (size - 1),
                    float(i == 0),
                ]
            )
            x = (
                head.token_proj(embedded[s, i])
                + head.pass_hidden_proj(states[s])
                + head.feature_mlp(features)
            )
            nodes.append(x + head.slot_embedding[0, 0, s, 0] + head.rank_embedding[0, 0, 0, i])
    x = torch.stack(nodes)[None]
    number = slots * size
    for layer in head.layers:
        bias = torch.empty(layer.attn.num_heads, number, number)
        for n in range(number):
            for m in range(number):
                distance = n // size - m // size
                bias[:, n, m] = (
                    head.relative_slot_bias[:, distance + slots]
                    + (distance == 0) * head.same_slot_bias
                )
        normed = layer.attn_norm(x)
        x = x + layer.attn(normed, normed, normed, attn_mask=bias, need_weights=False)[0]
        x = x + layer.mlp(layer.mlp_norm(x))
    h = head.output_norm(x)[0]
    a = head.anchor_norm(head.context_proj(context))
    f = F.silu(head.factor_input_proj(torch.cat([h, a.expand_as(h), h * a], dim=-1)))
    unit = [
        part / part.norm(dim=-1, keepdim=True)
        for part in (head.in_head(f), head.out_head(f), head.anchor_out_head(a))
    ]
    scores = torch.empty(slots, size, size)
    for s in range(slots):
        for i in range(size):
            before = unit[1][(s - 1) * size + i] if s else unit[2]
            scores[s, i] = 8 * unit[0][s * size : (s + 1) * size] @ before
    return scores


@torch.no_grad()
def test_lilicorr_scores_every_transition(shallow: Target) -> None:
    """Scores are those of its formulas and at most 8; a walk reads its own token's row; one
    candidate is DFlash's argmax.
    """
    drafter = make_drafter(shallow, LILICORR, **SMALL_LATTICE)
    for parameter in (drafter.lilicorr.relative_slot_bias, drafter.lilicorr.same_slot_bias):
        parameter.normal_()
    log_probs, candidates = drafter.log_q(
        drafter.compute_products(block_states(drafter, shallow, TEXT)[None])
    ).topk(3)
    states = block_states(drafter, shallow, TEXT)
    context = torch.randn(shallow.width)
    scores = drafter.score_lattice(candidates, log_probs, states[None], context[None])
    embedded = embed_as_target(drafter, drafter.draft_ids[candidates[0]])
    expected = lattice_by_formula(drafter.lilicorr, embedded, log_probs[0], states, context)
    torch.testing.assert_close(scores[0], expected, rtol=1e-4, atol=1e-4)
    assert scores.abs().max() <= 8.0001
    features = shallow.features(torch.tensor([TEXT[:-1]]), drafter.layers)
    round_context: Any = SimpleNamespace(
        root=torch.tensor(TEXT[-1:]),
        new_features=features,
        last_state=lambda states: states[:, -1:],
    )
    rollout = drafter.make_rollout(round_context, SlotStates(states[None], 0))
    path = drafter.draft_ids[candidates[0, :2, 1]].tolist()
    context = drafter.fuse_features(features)[0, -1]
    rows = drafter.score_lattice(candidates, log_probs, states[None], context[None])[0].log_softmax(
        -1
    )
    for depth, log_q in enumerate(follow_path(rollout, path)):
        torch.testing.assert_close(
            log_q[candidates[0, depth]], rows[depth, 1], rtol=1e-4, atol=1e-4
        )
        assert float(log_q.exp().sum()) == pytest.approx(1, abs=1e-4)
    narrow = make_drafter(shallow, LILICORR, **{**SMALL_LATTICE, "top_k": 1})
    chosen = follow_path(
        narrow.make_rollout(round_context, SlotStates(states[None], 0)), path
    ).argmax(-1)
    assert torch.equal(chosen, narrow.compute_products(states).argmax(-1))


def test_lilicorr_adds_its_losses_to_dflashs(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DFlash's term is DFlash's own; the others are scaled by their weights; without gaps
    between logits the penalty is 0.
    """
    drafter = make_drafter(shallow, LILICORR, **SMALL_LATTICE, vocab_size=8, penalty_weight=0.5)
    plain = make_drafter(shallow, "spectrain.drafters.dflash.DFlash", vocab_size=8)
    plain.load_state_dict(
        {name: value for name, value in drafter.state_dict().items() if "lilicorr" not in name}
    )
    batch = make_batch(shallow, drafter, [0, 1])
    # Tokens of the draft vocabulary, so that they are among the candidates.
    tokens = drafter.draft_ids[torch.randint(0, 8, batch.tokens.shape)]
    batch = Batch(tokens, batch.loss_mask, shallow.features(tokens, drafter.layers))
    drafter.top_k = 3
    terms = drafter.loss(batch, shallow, TrainingState()).terms
    state = TrainingState()
    assert torch.equal(
        terms["cross_entropy"], plain.loss(batch, shallow, state).terms["cross_entropy"]
    )
    assert terms["candidates"] > 0 and terms["penalty"] > 0
    drafter.penalty_weight = 1.0
    drafter.candidate_weight = 0.5
    terms_again = drafter.loss(batch, shallow, state).terms
    torch.testing.assert_close(terms_again["penalty"], 2 * terms["penalty"])
    torch.testing.assert_close(terms_again["candidates"], 2 * terms["candidates"])
    monkeypatch.setattr(lilicorr, "logit_gaps", lambda *_: torch.zeros(()))
    assert float(drafter.loss(batch, shallow, state).terms["penalty"].detach()) == 0
