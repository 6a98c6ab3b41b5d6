"""Heads on DFlash's block against their formulas: Domino, XPress, LiLiCorr; and JetSpec's trees."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.config.build import build
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.anchors import sample_anchors
from spectrain.drafters.layers.judged_drafts import SlotStates
from spectrain.experimental.domino.drafter import Domino
from spectrain.experimental.jetspec.builder import OnePassTree
from spectrain.experimental.xpress.drafter import XPress
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.trees import Chain, TreeBuilder
from spectrain.trees.growing import ChildDraw
from spectrain.trees.rollout import MarginalRollout
from tests.factories import add_noise

from .blocks import block_states, dataset

TEXT = [5, 81, 300, 7, 42, 1999]
PATH = [12, 900, 33]
CHAIN = Chain(3)
DOMINO = "spectrain.experimental.domino.drafter.Domino"
LILICORR = "spectrain.drafters.lilicorr.LiLiCorr"
XPRESS = "spectrain.experimental.xpress.drafter.XPress"


def make_drafter(target: Target, constructor: str, **options: Any) -> Any:
    """Make a drafter of blocks of four with random weights, large enough that every part matters."""
    torch.manual_seed(7)
    settings = {"_target_": constructor, "block_size": 4, "num_layers": 1, "num_anchors": 5, **options}
    drafter = build(settings, target=target)
    counts = torch.arange(target.head.vocab_size, 0, -1)
    counts[drafter.mask_token_id] = 0
    drafter.prepare(target, counts)
    add_noise(parameter for parameter in drafter.parameters() if parameter.requires_grad and parameter.dim() > 1)
    return drafter.eval()


def make_batch(target: Target, drafter: Any, rows: list[int]) -> Batch:
    return LiveSource().make_batch(BatchRequest(dataset()[rows], target, drafter.layers))


def make_rollout_after(
    drafter: Any, states: Tensor, text: list[int], builder: TreeBuilder = CHAIN, has_anchor: bool = False
) -> Any:
    """Make the rollout after a text from the states of its block: those of all slots, or of the drafting ones."""
    tokens = torch.tensor([text])
    lengths = torch.tensor([len(text) - 1])
    context = SimpleNamespace(
        root=tokens[:, -1], tokens=tokens, lengths=lengths, builder=builder, sequence_ids=torch.zeros(1, dtype=torch.int64)
    )
    return drafter.make_rollout(context, SlotStates(states[None], drafter.first_draft_slot if has_anchor else 0))


def follow_path(rollout: Any, path: list[int]) -> Tensor:
    """Compute log q [len(path) + 1, V] after the root and after each token of a path."""
    log_q = [rollout.start()[0, 0]]
    for parent, token in enumerate(path):
        log_q.append(rollout.extend(torch.tensor([[token]]), torch.tensor([[parent]]))[0, 0])
    return torch.stack(log_q)


@torch.no_grad()
def domino_by_formula(drafter: Domino, states: Tensor, tokens: list[int]) -> Tensor:
    """Compute log q [len(tokens), V] of drafts after these previous tokens, by the equations of a GRU (gates r, z, n)."""
    state, log_q = torch.zeros(drafter.prefix_gru.hidden_size), []
    for d, (token, z) in enumerate(zip(tokens, states)):
        from_input = (drafter.prefix_gru.weight_ih_l0 @ drafter.embed(torch.tensor(token))).chunk(3)
        from_state = (drafter.prefix_gru.weight_hh_l0 @ state).chunk(3)
        reset, update = ((from_input[i] + from_state[i]).sigmoid() for i in range(2))
        state = (1 - update) * (from_input[2] + reset * from_state[2]).tanh() + update * state
        inner = drafter.embed_proj[0].weight @ torch.cat([z, state])
        logits = drafter.head.output.weight[drafter.draft_ids] @ z
        if d >= drafter.uncorrected:
            logits = logits + drafter.embed_proj[2].weight @ (inner * inner.sigmoid())
        log_q.append(logits.log_softmax(-1))
    return torch.stack(log_q)


@pytest.mark.parametrize("options", [{}, {"sample_from_anchor": False, "vocab_size": 512, "uncorrected": 0}])
@torch.no_grad()
def test_domino_steps_as_its_training_scans(shallow: Target, options: dict[str, Any]) -> None:
    """Stepping the GRU token by token equals the formulas and the scan over the block in training; a slot reads earlier slots
    only; without W2 the logits are DFlash's bit for bit."""
    drafter = make_drafter(shallow, DOMINO, gru_width=12, rank=8, **options)
    states = block_states(drafter, shallow, TEXT)[:3]
    log_q = follow_path(make_rollout_after(drafter, states, TEXT), PATH[:2])
    torch.testing.assert_close(log_q, domino_by_formula(drafter, states, [TEXT[-1], *PATH[:2]]), rtol=1e-4, atol=1e-5)
    tokens = torch.tensor([[TEXT[-1], *PATH[:2]]])
    terms = drafter.correct(states[None], drafter.prefix_gru(drafter.embed(tokens))[0], torch.arange(3))
    scanned = drafter.corrected_log_q(drafter.compute_products(states[None]), terms)[0]
    torch.testing.assert_close(log_q, scanned, rtol=1e-4, atol=1e-5)
    other = follow_path(make_rollout_after(drafter, states, TEXT), [PATH[0], 4])
    assert torch.equal(other[:2], log_q[:2]) and not torch.allclose(other[2], log_q[2])
    drafter.readout.weight.zero_()
    assert torch.equal(
        follow_path(make_rollout_after(drafter, states, TEXT), PATH[:2])[1:],
        drafter.log_q(drafter.compute_products(states[None]))[0, 1:],
    )


def test_domino_trains_its_head_as_the_base_fades(shallow: Target) -> None:
    """With lam = 1 the head gets a gradient of exactly zero; halfway to its end the loss is half of each cross-entropy."""
    drafter = make_drafter(shallow, DOMINO, gru_width=12, rank=8)
    batch = make_batch(shallow, drafter, [0, 1])
    drafter.loss(batch, shallow, TrainingState()).total.backward()
    assert all(not parameter.grad.any() for part in (drafter.prefix_gru, drafter.embed_proj) for parameter in part.parameters())
    assert drafter.fc.weight.grad.any()
    terms = [drafter.loss(batch, shallow, TrainingState(progress=progress)).terms for progress in (0.0, 0.25, 0.5)]
    assert "base" not in terms[2]
    assert float(terms[1]["base"].detach()) == pytest.approx(float(terms[0]["base"].detach()) / 2)
    assert float(terms[1]["corrected"].detach()) == pytest.approx(float(terms[2]["corrected"].detach()) / 2)


def xpress_logits(drafter: XPress, slots: Tensor, tokens: list[int]) -> Tensor:
    """Compute logits [K, V] of the drafting slots after tokens [S] before all slots, with the mixer folded into I + tril(L)."""
    head, mean = drafter.refiner_head, slots.mean(0)
    a = torch.stack(
        [
            head.in_proj.weight @ torch.cat([head.down_h.weight @ z, head.down_g.weight @ mean, head.token_embed.weight[token]])
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
@pytest.mark.parametrize("builder", [CHAIN, Chain(3, "sampled", 0.8, seed=3)], ids=["greedy", "drawn"])
@torch.no_grad()
def test_xpress_passes_reach_what_left_to_right_drafting_draws(shallow: Target, builder: Chain, shifted: bool) -> None:
    """After m passes the first m drafts are those of drafting one after the other with the same noise. q of the last pass is
    that of the drafts that it read, and q of slot k does not depend on the noise from k on."""
    drafter = make_drafter(shallow, XPRESS, rank=8, sample_from_anchor=shifted)
    slots = block_states(drafter, shallow, TEXT, every=True)
    context: Any = SimpleNamespace(sequence_ids=torch.zeros(1, dtype=torch.int64), lengths=torch.tensor([len(TEXT) - 1]))
    draw, count = ChildDraw.of_round(builder, context), drafter.num_drafts
    tokens, expected = [TEXT[-2], TEXT[-1], 0, 0, 0, 0][1 - drafter.first_draft_slot :][: len(slots)], []
    for k in range(count):
        log_q = xpress_logits(drafter, slots, tokens)[k].log_softmax(-1)
        expected.append(log_q)
        child = int(draw.pick(log_q[None, None], torch.tensor([[k]]), 1)[0])
        if drafter.first_draft_slot + k + 1 < len(slots):
            tokens[drafter.first_draft_slot + k + 1] = child
    for passes in range(1, count + 1):
        drafter.num_passes = passes
        rollout = make_rollout_after(drafter, slots, TEXT, builder, has_anchor=True)
        torch.testing.assert_close(rollout.log_q[0, :passes], torch.stack(expected[:passes]), rtol=1e-4, atol=1e-4)
    drafter.readout.weight.zero_()
    plain = drafter.log_q(drafter.compute_products(slots[None, drafter.first_draft_slot :]))
    assert torch.equal(make_rollout_after(drafter, slots, TEXT, builder, has_anchor=True).log_q, plain)


@torch.no_grad()
def test_xpress_q_does_not_depend_on_later_draws(shallow: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other draws from slot k on change q after slot k only, also where the passes have not converged."""
    drafter, pick = make_drafter(shallow, XPRESS, rank=8, num_passes=2), ChildDraw.pick
    slots, builder = block_states(drafter, shallow, TEXT, every=True), Chain(3, "sampled", seed=3)
    log_q = make_rollout_after(drafter, slots, TEXT, builder, has_anchor=True).log_q[0]
    for k in range(2):

        def pick_others(draw: ChildDraw, log_q: Tensor, nodes: Tensor, *rest: Any, k: int = k) -> Any:
            ids, *others = pick(draw, log_q, nodes, *rest)
            return torch.where(nodes[..., None] >= k, (ids + 5) % log_q.shape[-1], ids), *others

        monkeypatch.setattr(ChildDraw, "pick", pick_others)
        other = make_rollout_after(drafter, slots, TEXT, builder, has_anchor=True).log_q[0]
        assert torch.equal(other[: k + 1], log_q[: k + 1]) and not torch.allclose(other[k + 1], log_q[k + 1])


@torch.no_grad()
def test_xpress_reads_earlier_drafts_only(shallow: Target) -> None:
    """Another token before slot j changes no slot before j."""
    drafter = make_drafter(shallow, XPRESS, rank=8)
    block = drafter.refiner_head.project_block(block_states(drafter, shallow, TEXT, every=True)[None])
    tokens = torch.tensor([[300, 7, 42, 1999]])
    terms = drafter.refiner_head(block, tokens)
    for j in range(4):
        other = drafter.refiner_head(block, tokens.scatter(1, torch.tensor([[j]]), 11))
        assert torch.equal(other[:, :j], terms[:, :j]) and not torch.allclose(other[:, j], terms[:, j])


def test_xpress_loss_has_every_pass(shallow: Target) -> None:
    """The loss of passes over the drafter's own drafts, with one projection of the refiner's block, equals the formulas."""
    drafter = make_drafter(
        shallow, XPRESS, rank=8, consistency_passes=2, decay=0.0, ce=0.0, tv=1.0, base_weight=0.5, num_anchors=1
    )
    batch = make_batch(shallow, drafter, [0])
    losses = drafter.loss(batch, shallow, TrainingState())
    anchors = sample_anchors(batch, 1, drafter.seed, 0)
    anchor, text = int(anchors.token_indices), batch.tokens[0].tolist()
    log_p = shallow.head.logits(shallow.features(batch.tokens, ("final",)).at_layer("final"))[0].softmax(-1)
    with torch.no_grad():
        slots = block_states(drafter, shallow, text[: anchor + 1], every=True)
        judged = 0
        while judged < 3 and anchor + judged + 1 < len(text) and batch.loss_mask[0, anchor + judged + 1]:
            judged += 1
        base = drafter.scale_and_cap(drafter.compute_products(slots))[1:]
        drafts, passes = text[anchor + 1 : anchor + 4], []
        for number in range(3):
            tokens = [text[anchor - 1], text[anchor], *drafts][:4]
            passes.append(xpress_logits(drafter, slots, [*tokens, *[0] * (4 - len(tokens))]))
            drafts = (passes[-1] if number else base).argmax(-1).tolist()
        rejected = [
            float(sum(1 - torch.minimum(log_p[anchor + d], logits[d].softmax(-1)).sum() for d in range(judged)))
            for logits in (base, *passes)
        ]
    scale = float(batch.loss_mask[0, 1:].sum()) / judged
    assert float(losses.terms["refined"].detach()) == pytest.approx(scale * rejected[1], rel=1e-3)
    assert float(losses.terms["base"].detach()) == pytest.approx(0.5 * scale * rejected[0], rel=1e-3)
    assert float(losses.terms["consistency"].detach()) == pytest.approx(0.3 * scale * (rejected[2] + rejected[3]) / 2, rel=1e-3)


SMALL_LATTICE = {"correction_width": 16, "correction_heads": 2, "factor_width": 8, "top_k": 3}


@torch.no_grad()
def lattice_by_formula(head: Any, embedded: Tensor, log_probs: Tensor, states: Tensor, context: Tensor) -> Tensor:
    """Compute the scores [K, C, C] of a lattice, with torch's own attention and one transition at a time."""
    slots, size = log_probs.shape
    nodes = []
    for s in range(slots):
        for i in range(size):
            features = torch.tensor(
                [log_probs[s, i], log_probs[s, i].exp(), log_probs[s, i] - log_probs[s].max(), i / (size - 1), float(i == 0)]
            )
            x = head.token_proj(embedded[s, i]) + head.pass_hidden_proj(states[s]) + head.feature_mlp(features)
            nodes.append(x + head.slot_embedding[0, 0, s, 0] + head.rank_embedding[0, 0, 0, i])
    x, number = torch.stack(nodes)[None], slots * size
    for layer in head.layers:
        bias = torch.empty(layer.attn.num_heads, number, number)
        for n in range(number):
            for m in range(number):
                distance = n // size - m // size
                bias[:, n, m] = head.relative_slot_bias[:, distance + slots] + (distance == 0) * head.same_slot_bias
        normed = layer.attn_norm(x)
        x = x + layer.attn(normed, normed, normed, attn_mask=bias, need_weights=False)[0]
        x = x + layer.mlp(layer.mlp_norm(x))
    h, a = head.output_norm(x)[0], head.anchor_norm(head.context_proj(context))
    f = F.silu(head.factor_input_proj(torch.cat([h, a.expand_as(h), h * a], dim=-1)))
    unit = [part / part.norm(dim=-1, keepdim=True) for part in (head.in_head(f), head.out_head(f), head.anchor_out_head(a))]
    scores = torch.empty(slots, size, size)
    for s in range(slots):
        for i in range(size):
            before = unit[1][(s - 1) * size + i] if s else unit[2]
            scores[s, i] = 8 * unit[0][s * size : (s + 1) * size] @ before
    return scores


@torch.no_grad()
def test_lilicorr_scores_every_transition(shallow: Target) -> None:
    """Scores are those of its formulas and at most 8; a walk reads its own token's row; one candidate is DFlash's argmax."""
    drafter = make_drafter(shallow, LILICORR, **SMALL_LATTICE)
    for parameter in (drafter.lilicorr.relative_slot_bias, drafter.lilicorr.same_slot_bias):
        parameter.normal_()
    log_probs, candidates = drafter.log_q(drafter.compute_products(block_states(drafter, shallow, TEXT)[None])).topk(3)
    states, context = block_states(drafter, shallow, TEXT), torch.randn(shallow.width)
    scores = drafter.score_lattice(candidates, log_probs, states[None], context[None])
    embedded = drafter.embed(drafter.draft_ids[candidates[0]])
    expected = lattice_by_formula(drafter.lilicorr, embedded, log_probs[0], states, context)
    torch.testing.assert_close(scores[0], expected, rtol=1e-4, atol=1e-4)
    assert scores.abs().max() <= 8.0001
    features = shallow.features(torch.tensor([TEXT[:-1]]), drafter.layers)
    round_context: Any = SimpleNamespace(
        root=torch.tensor(TEXT[-1:]), new_features=features, last_state=lambda states: states[:, -1:]
    )
    rollout = drafter.make_rollout(round_context, SlotStates(states[None], 0))
    path = drafter.draft_ids[candidates[0, :2, 1]].tolist()
    context = drafter.project_context(features)[0, -1]
    rows = drafter.score_lattice(candidates, log_probs, states[None], context[None])[0].log_softmax(-1)
    for depth, log_q in enumerate(follow_path(rollout, path)):
        torch.testing.assert_close(log_q[candidates[0, depth]], rows[depth, 1], rtol=1e-4, atol=1e-4)
        assert float(log_q.exp().sum()) == pytest.approx(1, abs=1e-4)
    narrow = make_drafter(shallow, LILICORR, **{**SMALL_LATTICE, "top_k": 1})
    chosen = follow_path(narrow.make_rollout(round_context, SlotStates(states[None], 0)), path).argmax(-1)
    assert torch.equal(chosen, narrow.compute_products(states).argmax(-1))


def test_lilicorr_adds_its_losses_to_dflashs(shallow: Target) -> None:
    """DFlash's term is DFlash's own; the others are scaled by their weights; without gaps between logits the penalty is 0."""
    drafter = make_drafter(shallow, LILICORR, **SMALL_LATTICE, vocab_size=8, penalty_weight=0.5)
    plain = make_drafter(shallow, "spectrain.drafters.dflash.DFlash", vocab_size=8)
    plain.load_state_dict({name: value for name, value in drafter.state_dict().items() if "lilicorr" not in name})
    batch = make_batch(shallow, drafter, [0, 1])
    # Tokens of the draft vocabulary, so that they are among the candidates.
    tokens = drafter.draft_ids[torch.randint(0, 8, batch.tokens.shape)]
    batch = Batch(tokens, batch.loss_mask, shallow.features(tokens, drafter.layers))
    drafter.top_k = 3
    terms, state = drafter.loss(batch, shallow, TrainingState()).terms, TrainingState()
    assert torch.equal(terms["cross_entropy"], plain.loss(batch, shallow, state).terms["cross_entropy"])
    assert terms["candidates"] > 0 and terms["penalty"] > 0
    drafter.penalty_weight, drafter.candidate_weight = 1.0, 0.5
    terms_again = drafter.loss(batch, shallow, state).terms
    torch.testing.assert_close(terms_again["penalty"], 2 * terms["penalty"])
    torch.testing.assert_close(terms_again["candidates"], 2 * terms["candidates"])
    drafter._logit_gaps = lambda *_: torch.zeros(())  # type: ignore[method-assign]
    assert float(drafter.loss(batch, shallow, state).terms["penalty"].detach()) == 0


def test_jetspec_trees_continue_the_most_likely_path() -> None:
    """A tree is that of a search over all nodes, and with width 1 it is the greedy chain."""
    log_q = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    prefix: Any = SimpleNamespace(root=torch.tensor([9]))
    tree = OnePassTree(depth=4, budget=12, width=3).expand(prefix, MarginalRollout(prefix.root, log_q))
    best = log_q[0].topk(3, dim=-1)
    paths, opened = {(): 0.0}, set()
    while len(paths) < 12:
        path = max((path for path in paths if path not in opened and len(path) < 4), key=lambda path: paths[path])
        opened.add(path)
        for score, token in zip(best.values[len(path)].tolist(), best.indices[len(path)].tolist()):
            if len(paths) < 12:
                paths[(*path, token)] = paths[path] + score
    actual: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[0, 1:].tolist(), tree.parents[0, 1:].tolist()):
        actual.append((*actual[parent], token))
    assert actual == list(paths)
    assert tree.scores is not None and tree.scores[0].tolist() == pytest.approx(list(paths.values()), abs=1e-5)
    chain = OnePassTree(depth=4, budget=9, width=1).expand(prefix, MarginalRollout(prefix.root, log_q))
    assert chain.tokens[0].tolist() == [9, *log_q[0].argmax(-1).tolist()] and chain.is_chain
