"""DSpark: the Markov head along a block, its loss, and where the confidence head cuts."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import RecursiveRejection, SpeculativeSampling
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.dspark import DSpark, DSparkConfig
from spectrain.drafters.layers.anchors import sample_anchors
from spectrain.drafters.layers.judged_drafts import SlotStates
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Static, TreeBuilder
from tests.installed import load_cases

from .blocks import block_states, dataset
from .test_dflash import LIMIT, PROMPTS, RoundRecorder

HEADS = pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])


def make_drafter(target: Target, **options: Any) -> DSpark:
    torch.manual_seed(7)
    drafter = DSpark(
        target,
        DSparkConfig(**{"block_size": 4, "num_layers": 1, "num_anchors": 5, "rank": 8, **options}),
    )
    counts = torch.arange(target.head.vocab_size, 0, -1)
    counts[drafter.mask_token_id] = 0
    drafter.prepare(target, counts)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.add_(
                    torch.randn_like(parameter)
                    / (1 if "markov_w1" in name else parameter.shape[-1] ** 0.5)
                )
    return drafter.eval()


def make_batch(target: Target, drafter: DSpark, rows: list[int], packed: bool = False) -> Batch:
    return LiveSource().make_batch(
        BatchRequest(dataset()[rows], target, drafter.layers, packed=packed)
    )


@torch.no_grad()
def compute_by_formula(
    drafter: DSpark, target: Target, text: list[int], path: list[int]
) -> tuple[Tensor, list[float]]:
    """Compute log q [len(path) + 1, V] after a text and each token of a path below it, and the
    confidence, by the formulas.
    """
    states = block_states(drafter, target, text)
    head = drafter.markov
    carried = torch.zeros(head.rank)
    log_q = []
    confidence = []
    for hidden, token in zip(states, [text[-1], *path]):
        e = m = head.markov_w1.weight[token]
        if head.gate_proj is not None:
            m = torch.sigmoid(head.gate_proj(torch.cat([hidden, e]))) * e
        if head.joint_proj is not None:
            gate, candidate, output = head.joint_proj(torch.cat([carried, e, hidden])).split(
                head.rank
            )
            carried = gate.sigmoid() * carried + (1 - gate.sigmoid()) * candidate.tanh()
            m = output.tanh()
        log_q.append(
            (
                drafter.head.output.weight[drafter.draft_ids] @ hidden + head.markov_w2.weight @ m
            ).log_softmax(-1)
        )
        assert drafter.confidence_head is not None
        confidence.append(float(drafter.confidence_head.proj(torch.cat([hidden, e])).sigmoid()))
    return torch.stack(log_q), confidence


@HEADS
@pytest.mark.parametrize(
    "options",
    [{}, {"vocab_size": 512}, {"sample_from_anchor": False}],
    ids=["whole", "cropped", "unshifted"],
)
def test_loss_is_the_formula(shallow: Target, head: str, options: dict[str, Any]) -> None:
    """The loss is ce CE + 2 tv TV, weighted exp(-d / decay), and the confidence's cross-entropy
    with the acceptance.
    """
    drafter = make_drafter(shallow, markov_head=head, decay=3.0, ce=0.3, tv=0.7, **options)
    batch = make_batch(shallow, drafter, [0, 1])
    losses = drafter.loss(batch, shallow, TrainingState())
    anchors = sample_anchors(batch, drafter.num_anchors, drafter.seed, 0)
    length = batch.tokens.shape[1]
    target_probs = shallow.head.logits(
        shallow.features(batch.tokens, ("final",)).at_layer("final")
    ).softmax(-1)[..., drafter.draft_ids]
    slots = {int(token): slot for slot, token in enumerate(drafter.draft_ids)}
    totals = {"ce_tv": 0.0, "confidence": 0.0}
    for row in range(2):
        terms = {"ce_tv": 0.0, "confidence": 0.0}
        weights = 0.0
        for index, position in zip(anchors.token_indices.tolist(), anchors.positions.tolist()):
            if index // length != row:
                continue
            text = batch.tokens[row].tolist()
            log_q, confidence = compute_by_formula(
                drafter, shallow, text[: position + 1], text[position + 1 :]
            )
            for d in range(drafter.num_drafts):
                if position + d + 1 >= length or not batch.loss_mask[row, position + d + 1]:
                    break
                acceptance = float(
                    torch.minimum(log_q[d].exp(), target_probs[row, position + d]).sum()
                )
                slot = slots.get(text[position + d + 1])
                weight = math.exp(-d / 3.0)
                weights += weight
                terms["ce_tv"] += weight * (
                    1.4 * (1 - acceptance) - (0.0 if slot is None else 0.3 * float(log_q[d, slot]))
                )
                c = confidence[d]
                terms["confidence"] -= weight * (
                    acceptance * math.log(c) + (1 - acceptance) * math.log(1 - c)
                )
        for name, term in terms.items():
            totals[name] += term / weights * int(batch.loss_mask[row, 1:].sum())
    assert {name: float(term.detach()) for name, term in losses.terms.items()} == pytest.approx(
        totals, rel=1e-3
    )


@HEADS
def test_packed_equals_padded(shallow: Target, head: str) -> None:
    drafter = make_drafter(shallow, markov_head=head)
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


# Cases of installed packages.
CASES = load_cases(__name__)


@HEADS
@pytest.mark.parametrize(
    "builder",
    [
        Chain(4),
        Eagle2(4, 9, 3),
        Static(paths=[[0], [1], [0, 0], [1, 0], [0, 0, 0]]),
        *CASES.get("test_children_depend_on_their_parents", ()),
    ],
    ids=lambda builder: builder.name,
)
@pytest.mark.sweep(1)
def test_children_depend_on_their_parents(shallow: Target, head: str, builder: TreeBuilder) -> None:
    """A node's score is the sum of the formulas' log q along its path, and the output is greedy."""
    drafter = make_drafter(shallow, markov_head=head)
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
            for node in range(1, tree.tokens.shape[1]):
                if not tree.valid[row, node]:
                    continue
                path = []
                at = node
                while at:
                    path.insert(0, int(tree.tokens[row, at]))
                    at = int(tree.parents[row, at])
                log_q, _ = compute_by_formula(drafter, shallow, text, path[:-1])
                score = sum(float(log_q[depth, token]) for depth, token in enumerate(path))
                assert float(tree.scores[row, node]) == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize(
    "builder",
    [
        Chain(4),
        Eagle2(4, 9, 3),
        Static(paths=[[0], [1], [0, 0], [1, 0], [0, 0, 0]]),
        *CASES.get("test_confidence_cuts", ()),
    ],
    ids=lambda builder: builder.name,
)
@pytest.mark.sweep(2, free=("builder",))
def test_confidence_cuts(shallow: Target, builder: TreeBuilder) -> None:
    """No node is below a node whose confidence is under the threshold, some nodes are cut, and
    the output stays greedy.
    """
    drafter = make_drafter(shallow, confidence_threshold=0.5)
    assert drafter.capabilities.capture is None
    with torch.no_grad():
        assert drafter.confidence_head is not None
        drafter.confidence_head.proj.weight.mul_(4)
    plain = [
        decode(shallow, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output
        for prompt in PROMPTS[:2]
    ]
    recorder = RoundRecorder(builder)
    generations = decode(shallow, PROMPTS[:2], Greedy(), LIMIT, drafter, recorder, ignore_eos=True)
    assert [generation.output for generation in generations] == plain
    num_cut = num_expanded = 0
    for texts, tree in recorder.rounds[::2]:
        for row, text in enumerate(texts):
            parents = {
                int(tree.parents[row, n])
                for n in range(1, tree.tokens.shape[1])
                if tree.valid[row, n]
            }
            if builder.traits.drafts_by_level:
                _, confidence = compute_by_formula(drafter, shallow, text, [])
                assert (0 in parents) == (confidence[0] >= 0.5) or len(texts) > 1
            for node in parents:
                path = []
                at = node
                while at > 0:
                    path.insert(0, int(tree.tokens[row, at]))
                    at = int(tree.parents[row, at])
                _, confidence = compute_by_formula(drafter, shallow, text, path)
                assert min(confidence[: len(path) + 1]) >= 0.5
                num_expanded += 1
            num_cut += not parents
    assert num_cut and num_expanded


@pytest.mark.sweep(2)
@HEADS
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
def test_drawn_children(shallow: Target, head: str, builder: TreeBuilder, rule: Any) -> None:
    """Under rules that weigh p against q, the output is greedy where p allows one token only,
    cut or not.
    """
    plain = [
        decode(shallow, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output for prompt in PROMPTS
    ]
    for threshold in (0.0, 0.5):
        drafter = make_drafter(shallow, markov_head=head, confidence_threshold=threshold)
        generations = decode(
            shallow,
            PROMPTS,
            rule(temperature=0.7, top_k=1, seed=3),
            LIMIT,
            drafter,
            builder,
            ignore_eos=True,
        )
        assert [generation.output for generation in generations] == plain


def test_drafted_equals_matched_sampling(shallow: Target) -> None:
    rule = Match(temperature=0.3, top_k=50, seed=5)
    plain = decode(shallow, PROMPTS, rule, LIMIT, ignore_eos=True)
    generations = decode(
        shallow,
        PROMPTS,
        rule,
        LIMIT,
        make_drafter(shallow, confidence_threshold=0.4),
        Eagle2(3, 8, 3),
        ignore_eos=True,
    )
    assert [generation.output for generation in generations] == [
        generation.output for generation in plain
    ]


def test_without_its_heads_it_is_dflash(shallow: Target) -> None:
    """With a Markov head of zeros the logits are the block's own."""
    drafter = make_drafter(shallow, confidence=False)
    with torch.no_grad():
        drafter.markov.markov_w2.weight.zero_()
    states = block_states(drafter, shallow, PROMPTS[0])
    context: Any = SimpleNamespace(root=torch.tensor([PROMPTS[0][-1]]))
    rollout = drafter.make_rollout(context, SlotStates(states[None], 0))
    expected = F.log_softmax(drafter.head.logits(states), dim=-1)
    torch.testing.assert_close(rollout.start()[0, 0], expected[0])
