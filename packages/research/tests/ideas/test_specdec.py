"""SpecDec: drafts of one anchor or of several, its rule by plain Python, and decoding over a
target with an encoder.
"""

import pytest
import torch
from torch import Tensor

from packages.research.tests.ideas.encoder_models import save_model
from spectrain.data.chat import Example
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.live_source import LiveSource
from spectrain.trees import Chain, Eagle2
from spectrain.trees.token_tree import TokenTree
from spectrain_research.encoder_decoder.loading import load_encoder_decoder
from spectrain_research.encoder_decoder.target import EncoderDecoderTarget
from spectrain_research.specdec.drafter import SpecDec, SpecDecConfig
from spectrain_research.specdec.network import QueryNetwork
from spectrain_research.specdec.rule import TopCandidates

PROMPTS = [[5, 7, 9, 11, 9, 2, 0], [40, 50, 60, 2, 0], [70, 71, 2, 0, 30, 31]]
LIMIT = 16
SMALL = SpecDecConfig(num_drafts=3, num_encoder_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> EncoderDecoderTarget:
    return load_encoder_decoder(str(save_model("t5", tmp_path_factory.mktemp("t5"))))


def test_anchors_together_equal_each_alone() -> None:
    """A block sees neither later tokens of the text nor other blocks, and padded sources change
    nothing.
    """
    network = QueryNetwork(12, 16, 2, 1, 2, 3).eval()
    prefix = torch.randn(1, 7, 12)
    source = torch.randn(1, 4, 12)
    is_real = torch.ones(1, 4, dtype=torch.bool)
    padded = (
        torch.cat([source, torch.randn(1, 2, 12)], dim=1),
        torch.tensor([[True] * 4 + [False] * 2]),
    )
    states = network.encode(source, is_real)
    assert torch.allclose(network.encode(*padded)[:, :4], states, atol=1e-5)
    together = network.draft_states(
        prefix, torch.tensor([[1, 4, 6]]), network.encode(*padded), padded[1]
    )
    for number, anchor in enumerate((1, 4, 6)):
        alone = network.draft_states(
            prefix[:, : anchor + 1], torch.tensor([[anchor]]), states, is_real
        )
        assert torch.allclose(together[0, number], alone[0, 0], atol=1e-5)


def test_drafted_equals_greedy_and_training_learns(target: EncoderDecoderTarget) -> None:
    """Chains and trees, in a ragged batch; after some steps on the target's own answers drafts
    are accepted.
    """
    drafter = SpecDec(target, SMALL)
    plain = [row.output for row in decode(target, PROMPTS, Greedy(), LIMIT)]
    examples = [Example(a + b, [False] * len(a) + [True] * len(b)) for a, b in zip(PROMPTS, plain)]
    batch = LiveSource().make_batch(BatchRequest(examples, target, ("final",), packed=False))
    optimizer = torch.optim.Adam(drafter.parameters(), 1e-2)
    losses = []
    for step in range(25):
        result = drafter.loss(batch, target, TrainingState(step))
        optimizer.zero_grad()
        result.total.backward()
        optimizer.step()
        losses.append(float(result.total.detach()))
    packed = LiveSource().make_batch(BatchRequest(examples, target, ("final",), packed=True))
    both = [
        float(drafter.loss(rows, target, TrainingState()).total.detach())
        for rows in (batch, packed)
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-4) and losses[-1] < 0.7 * losses[0]
    for builder in (Chain(3), Eagle2(3, 8, 3)):
        decoded = decode(target, PROMPTS, Greedy(), LIMIT, drafter.eval(), builder)
        assert [row.output for row in decoded] == plain
    assert sum(sum(row.round_lengths) for row in decoded) > 1.3 * sum(
        len(row.round_lengths) for row in decoded
    )


def plain_path(
    tokens: list[int], parents: list[int], logits: Tensor, rule: TopCandidates
) -> list[int]:
    """The accepted nodes, by trying each child."""
    path = [0]
    while True:
        log_p = logits[path[-1]].log_softmax(-1)
        order = log_p.argsort(descending=True).tolist()
        children = [node for node, parent in enumerate(parents) if parent == path[-1]]
        close = [
            node
            for node in children
            if tokens[node] in order[: rule.candidates]
            and log_p[order[0]] - log_p[tokens[node]] <= rule.tolerance
        ]
        if not close:
            return path
        path.append(max(close, key=lambda node: float(log_p[tokens[node]])))


def test_rule_equals_plain_python() -> None:
    parents = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6]
    num_accepted = 0
    for seed in range(40):
        torch.manual_seed(seed)
        tokens = torch.randperm(10)[None]
        logits = torch.randn(1, 10, 10)
        tree = TokenTree.from_parents(tokens, torch.tensor([parents]))
        rule = TopCandidates(candidates=4, tolerance=1.5)
        sequences = torch.zeros(1, dtype=torch.int64)
        positions = torch.zeros(1, 10, dtype=torch.int64)
        accepted = rule(tree, logits, sequences, positions)
        path = plain_path(tokens[0].tolist(), parents, logits[0], rule)
        assert accepted.path[0, : int(accepted.counts[0])].tolist() == path
        assert int(accepted.bonus[0]) == int(logits[0, path[-1]].argmax())
        num_accepted += len(path) - 1
        greedy = Greedy()(tree, logits, sequences, positions)
        for same in (TopCandidates(1, 9.0), TopCandidates(4, 0.0)):
            strict = same(tree, logits, sequences, positions)
            assert torch.equal(strict.counts, greedy.counts) and torch.equal(
                strict.bonus, greedy.bonus
            )
    assert num_accepted > 20
    with pytest.raises(UserError, match="nats"):
        TopCandidates(tolerance=-1)
