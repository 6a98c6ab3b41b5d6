"""The tests of tests/drafters/test_block_heads.py that are about ideas."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.anchors import sample_anchors
from spectrain.drafters.layers.vocabulary import embed_as_target
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain.trees.growing import ChildDraw
from spectrain.trees.rollout import MarginalRollout
from spectrain_research.domino.drafter import Domino
from spectrain_research.jetspec.builder import OnePassTree
from spectrain_research.xpress.drafter import XPress
from tests.drafters.blocks import block_states
from tests.drafters.test_block_heads import (
    CHAIN,
    PATH,
    TEXT,
    follow_path,
    make_batch,
    make_drafter,
    make_rollout_after,
)

DOMINO = "spectrain_research.domino.drafter.Domino"
XPRESS = "spectrain_research.xpress.drafter.XPress"


@torch.no_grad()
def domino_by_formula(drafter: Domino, states: Tensor, tokens: list[int]) -> Tensor:
    """Compute log q [len(tokens), V] of drafts after these previous tokens, by the equations of
    a GRU (gates r, z, n).
    """
    state = torch.zeros(drafter.prefix_gru.hidden_size)
    log_q = []
    for d, (token, z) in enumerate(zip(tokens, states)):
        from_input = (
            drafter.prefix_gru.weight_ih_l0 @ embed_as_target(drafter, torch.tensor(token))
        ).chunk(3)
        from_state = (drafter.prefix_gru.weight_hh_l0 @ state).chunk(3)
        reset, update = ((from_input[i] + from_state[i]).sigmoid() for i in range(2))
        state = (1 - update) * (from_input[2] + reset * from_state[2]).tanh() + update * state
        inner = drafter.embed_proj[0].weight @ torch.cat([z, state])
        logits = drafter.head.output.weight[drafter.draft_ids] @ z
        if d >= drafter.uncorrected:
            logits = logits + drafter.embed_proj[2].weight @ (inner * inner.sigmoid())
        log_q.append(logits.log_softmax(-1))
    return torch.stack(log_q)


@pytest.mark.parametrize(
    "options", [{}, {"sample_from_anchor": False, "vocab_size": 512, "uncorrected": 0}]
)
@torch.no_grad()
def test_domino_steps_as_its_training_scans(shallow: Target, options: dict[str, Any]) -> None:
    """Stepping the GRU token by token equals the formulas and the scan over the block in training;
    a slot reads earlier slots only; without W2 the logits are DFlash's bit for bit."""
    drafter = make_drafter(shallow, DOMINO, gru_width=12, rank=8, **options)
    states = block_states(drafter, shallow, TEXT)[:3]
    log_q = follow_path(make_rollout_after(drafter, states, TEXT), PATH[:2])
    torch.testing.assert_close(
        log_q, domino_by_formula(drafter, states, [TEXT[-1], *PATH[:2]]), rtol=1e-4, atol=1e-5
    )
    tokens = torch.tensor([[TEXT[-1], *PATH[:2]]])
    terms = drafter.correct(
        states[None], drafter.prefix_gru(embed_as_target(drafter, tokens))[0], torch.arange(3)
    )
    scanned = drafter.corrected_log_q(drafter.compute_products(states[None]), terms)[0]
    torch.testing.assert_close(log_q, scanned, rtol=1e-4, atol=1e-5)
    other = follow_path(make_rollout_after(drafter, states, TEXT), [PATH[0], 4])
    assert torch.equal(other[:2], log_q[:2]) and not torch.allclose(other[2], log_q[2])
    drafter.readout.weight.zero_()
    assert torch.equal(
        follow_path(make_rollout_after(drafter, states, TEXT), PATH[:2])[1:],
        drafter.log_q(drafter.compute_products(states[None]))[0, 1:],
    )


def xpress_logits(drafter: XPress, slots: Tensor, tokens: list[int]) -> Tensor:
    """Compute logits [K, V] of the drafting slots after tokens [S] before all slots, with the
    mixer folded into I + tril(L).
    """
    head = drafter.refiner_head
    mean = slots.mean(0)
    a = torch.stack(
        [
            head.in_proj.weight
            @ torch.cat(
                [head.down_h.weight @ z, head.down_g.weight @ mean, head.token_embed.weight[token]]
            )
            for z, token in zip(slots, tokens)
        ]
    )
    folded = torch.eye(len(slots)) + head.mix_l.tril()
    c = torch.einsum("mkj,jm->km", folded, a)
    inner = c @ head.mlp_gate.weight.T
    c = c + (inner * inner.sigmoid() * (c @ head.mlp_up.weight.T)) @ head.mlp_down.weight.T
    rows = drafter.head.output.weight[drafter.draft_ids]
    return (slots @ rows.T + c @ head.readout.weight.T)[drafter.first_draft_slot :]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    "builder", [CHAIN, Chain(3, "sampled", 0.8, seed=3)], ids=["greedy", "drawn"]
)
@torch.no_grad()
def test_xpress_passes_reach_what_left_to_right_drafting_draws(
    shallow: Target, builder: Chain, shifted: bool
) -> None:
    """After m passes the first m drafts are those of drafting one after the other with the same
    noise. q of the last pass is that of the drafts that it read, and q of slot k does not depend on
    the noise from k on."""
    drafter = make_drafter(shallow, XPRESS, rank=8, sample_from_anchor=shifted)
    slots = block_states(drafter, shallow, TEXT, every=True)
    context: Any = SimpleNamespace(
        sequence_ids=torch.zeros(1, dtype=torch.int64), lengths=torch.tensor([len(TEXT) - 1])
    )
    draw = ChildDraw.of_round(builder, context)
    count = drafter.num_drafts
    tokens = [TEXT[-2], TEXT[-1], 0, 0, 0, 0][1 - drafter.first_draft_slot :][: len(slots)]
    expected = []
    for k in range(count):
        log_q = xpress_logits(drafter, slots, tokens)[k].log_softmax(-1)
        expected.append(log_q)
        child = int(draw.pick(log_q[None, None], torch.tensor([[k]]), 1)[0])
        if drafter.first_draft_slot + k + 1 < len(slots):
            tokens[drafter.first_draft_slot + k + 1] = child
    for passes in range(1, count + 1):
        drafter.num_passes = passes
        rollout = make_rollout_after(drafter, slots, TEXT, builder, has_anchor=True)
        torch.testing.assert_close(
            rollout.log_q[0, :passes], torch.stack(expected[:passes]), rtol=1e-4, atol=1e-4
        )
    drafter.readout.weight.zero_()
    plain = drafter.log_q(drafter.compute_products(slots[None, drafter.first_draft_slot :]))
    assert torch.equal(
        make_rollout_after(drafter, slots, TEXT, builder, has_anchor=True).log_q, plain
    )


def test_xpress_loss_has_every_pass(shallow: Target) -> None:
    """The loss of passes over the drafter's own drafts, with one projection of the refiner's
    block, equals the formulas.
    """
    drafter = make_drafter(
        shallow,
        XPRESS,
        rank=8,
        consistency_passes=2,
        decay=0.0,
        ce=0.0,
        tv=1.0,
        base_weight=0.5,
        num_anchors=1,
    )
    batch = make_batch(shallow, drafter, [0])
    losses = drafter.loss(batch, shallow, TrainingState())
    anchors = sample_anchors(batch, 1, drafter.seed, 0)
    anchor = int(anchors.token_indices)
    text = batch.tokens[0].tolist()
    log_p = shallow.head.logits(shallow.features(batch.tokens, ("final",)).at_layer("final"))[
        0
    ].softmax(-1)
    with torch.no_grad():
        slots = block_states(drafter, shallow, text[: anchor + 1], every=True)
        judged = 0
        while (
            judged < 3
            and anchor + judged + 1 < len(text)
            and batch.loss_mask[0, anchor + judged + 1]
        ):
            judged += 1
        base = drafter.head.scale_and_cap(drafter.compute_products(slots))[1:]
        drafts = text[anchor + 1 : anchor + 4]
        passes = []
        for number in range(3):
            tokens = [text[anchor - 1], text[anchor], *drafts][:4]
            passes.append(xpress_logits(drafter, slots, [*tokens, *[0] * (4 - len(tokens))]))
            drafts = (passes[-1] if number else base).argmax(-1).tolist()
        rejected = [
            float(
                sum(
                    1 - torch.minimum(log_p[anchor + d], logits[d].softmax(-1)).sum()
                    for d in range(judged)
                )
            )
            for logits in (base, *passes)
        ]
    scale = float(batch.loss_mask[0, 1:].sum()) / judged
    assert float(losses.terms["refined"].detach()) == pytest.approx(scale * rejected[1], rel=1e-3)
    assert float(losses.terms["base"].detach()) == pytest.approx(
        0.5 * scale * rejected[0], rel=1e-3
    )
    assert float(losses.terms["consistency"].detach()) == pytest.approx(
        0.3 * scale * (rejected[2] + rejected[3]) / 2, rel=1e-3
    )


def test_jetspec_trees_continue_the_most_likely_path() -> None:
    """A tree is that of a search over all nodes, and with width 1 it is the greedy chain."""
    log_q = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    prefix: Any = SimpleNamespace(root=torch.tensor([9]))
    tree = OnePassTree(depth=4, budget=12, width=3).expand(
        prefix, MarginalRollout(prefix.root, log_q)
    )
    best = log_q[0].topk(3, dim=-1)
    paths = {(): 0.0}
    opened = set()
    while len(paths) < 12:
        path = max(
            (path for path in paths if path not in opened and len(path) < 4),
            key=lambda path: paths[path],
        )
        opened.add(path)
        for score, token in zip(best.values[len(path)].tolist(), best.indices[len(path)].tolist()):
            if len(paths) < 12:
                paths[(*path, token)] = paths[path] + score
    actual: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[0, 1:].tolist(), tree.parents[0, 1:].tolist()):
        actual.append((*actual[parent], token))
    assert actual == list(paths)
    assert tree.scores is not None and tree.scores[0].tolist() == pytest.approx(
        list(paths.values()), abs=1e-5
    )
    chain = OnePassTree(depth=4, budget=9, width=1).expand(
        prefix, MarginalRollout(prefix.root, log_q)
    )
    assert chain.tokens[0].tolist() == [9, *log_q[0].argmax(-1).tolist()] and chain.is_chain


def test_domino_trains_its_head_as_the_base_fades(shallow: Target) -> None:
    """With lam = 1 the head gets a gradient of exactly zero; halfway to its end the loss is half
    of each cross-entropy.
    """
    drafter = make_drafter(shallow, DOMINO, gru_width=12, rank=8)
    batch = make_batch(shallow, drafter, [0, 1])
    drafter.loss(batch, shallow, TrainingState()).total.backward()
    assert all(
        not parameter.grad.any()
        for part in (drafter.prefix_gru, drafter.embed_proj)
        for parameter in part.parameters()
    )
    assert drafter.fc.weight.grad.any()
    terms = [
        drafter.loss(batch, shallow, TrainingState(progress=progress)).terms
        for progress in (0.0, 0.25, 0.5)
    ]
    assert "base" not in terms[2]
    assert float(terms[1]["base"].detach()) == pytest.approx(float(terms[0]["base"].detach()) / 2)
    assert float(terms[1]["corrected"].detach()) == pytest.approx(
        float(terms[2]["corrected"].detach()) / 2
    )


@torch.no_grad()
def test_xpress_q_does_not_depend_on_later_draws(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other draws from slot k on change q after slot k only, also where the passes have not
    converged.
    """
    drafter = make_drafter(shallow, XPRESS, rank=8, num_passes=2)
    pick = ChildDraw.pick
    slots = block_states(drafter, shallow, TEXT, every=True)
    builder = Chain(3, "sampled", seed=3)
    log_q = make_rollout_after(drafter, slots, TEXT, builder, has_anchor=True).log_q[0]
    for k in range(2):

        def pick_others(
            draw: ChildDraw, log_q: Tensor, nodes: Tensor, *rest: Any, k: int = k
        ) -> Any:
            ids, *others = pick(draw, log_q, nodes, *rest)
            return torch.where(nodes[..., None] >= k, (ids + 5) % log_q.shape[-1], ids), *others

        monkeypatch.setattr(ChildDraw, "pick", pick_others)
        other = make_rollout_after(drafter, slots, TEXT, builder, has_anchor=True).log_q[0]
        assert torch.equal(other[: k + 1], log_q[: k + 1]) and not torch.allclose(
            other[k + 1], log_q[k + 1]
        )


@torch.no_grad()
def test_xpress_reads_earlier_drafts_only(shallow: Target) -> None:
    """Another token before slot j changes no slot before j."""
    drafter = make_drafter(shallow, XPRESS, rank=8)
    block = drafter.refiner_head.project_block(
        block_states(drafter, shallow, TEXT, every=True)[None]
    )
    tokens = torch.tensor([[300, 7, 42, 1999]])
    terms = drafter.refiner_head(block, tokens)
    for j in range(4):
        other = drafter.refiner_head(block, tokens.scatter(1, torch.tensor([[j]]), 11))
        assert torch.equal(other[:, :j], terms[:, :j]) and not torch.allclose(
            other[:, j], terms[:, j]
        )
