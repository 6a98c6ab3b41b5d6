"""A drafter for every text of a batch: groups draft as each drafter alone does, and every text
finds its drafter.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Rollout
from spectrain.trees.rollout import Draft
from spectrain_research.router.arms import Stopwatch
from spectrain_research.router.groups import GroupedRollout, GroupPart
from spectrain_research.router.rows import RowRouter

PROMPTS = [[5, 7, 9, 5, 7, 9, 5], [40, 50, 60, 40], [300, 2, 300], [9, 9, 9, 9, 31]]
LIMIT = 20


def make_router(target: Target, inner: list[Any], **settings: Any) -> RowRouter:
    torch.manual_seed(0)
    return RowRouter(target, inner, **settings).eval()


class FixedRouter(RowRouter):
    """Assigns given drafters, a list for each choice."""

    plan: list[list[int]]

    def _assign_drafters(self, context: Context) -> None:
        self.assigned = [
            number if active else -1
            for number, active in zip(
                self.plan[self.num_rounds // self.switch_every % len(self.plan)],
                context.active.tolist(),
            )
        ]


@pytest.mark.parametrize("builder", [Chain(3), Eagle2(3, 8, 3)], ids=["chain", "tree"])
def test_groups_draft_as_each_drafter_alone(shallow: Target, builder: Chain) -> None:
    """The output of every text is the greedy one, and its rounds are those of its drafter on
    this text alone.
    """
    inner = [
        "ngram",
        {"choice": "causal", "num_layers": 1},
        {"choice": "eagle3", "vocab_size": 512},
    ]
    torch.manual_seed(0)
    router = FixedRouter(shallow, inner).eval()
    router.plan = [[1, 2, 0, 1]]
    plain = decode(shallow, PROMPTS, Greedy(), LIMIT)
    generations = decode(shallow, PROMPTS, Greedy(), LIMIT, router, builder)
    assert [row.output for row in generations] == [row.output for row in plain]
    assert router.num_switches == 0
    for row, number in enumerate(router.plan[0]):
        alone = decode(shallow, [PROMPTS[row]], Greedy(), LIMIT, router.inner[number], builder)[0]  # type: ignore[arg-type]
        assert generations[row].round_lengths == alone.round_lengths


def test_a_drafter_reads_the_texts_that_come_to_it(shallow: Target, shallow_folder: Path) -> None:
    """A drafter that is the target has every draft accepted in the texts that come to it,
    whenever they come.
    """
    inner = ["ngram", {"choice": "causal", "model": str(shallow_folder)}]
    router = FixedRouter(shallow, inner, switch_every=2).eval()
    router.plan = [[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 1]]
    generations = decode(shallow, PROMPTS, Greedy(), 40, router, Chain(3), ignore_eos=True)
    assert [row.output for row in generations] == [
        row.output for row in decode(shallow, PROMPTS, Greedy(), 40, ignore_eos=True)
    ]
    judged = 0
    for row, generation in enumerate(generations):
        for number, length in enumerate(generation.complete_round_lengths):
            if router.plan[number // 2 % 3][row] == 1:
                assert length == 4
                judged += 1
    assert judged > 15


class Expert(Drafter):
    """A drafter that has the continuations of some texts; elsewhere it always proposes the same
    token.
    """

    def __init__(
        self, texts: list[list[int]], vocab_size: int, seconds: float, now: list[float]
    ) -> None:
        super().__init__()
        self.texts = texts
        self.vocab_size = vocab_size
        self.seconds = seconds
        self.now = now

    def draft(self, context: Context) -> Draft:
        self.now[0] += self.seconds
        return Draft(Recital(self, context))


class Recital(Rollout):
    def __init__(self, expert: Expert, context: Context) -> None:
        self.expert = expert
        self.paths = [
            [tokens[: end + 1]]
            for tokens, end in zip(context.tokens.tolist(), context.lengths.tolist())
        ]

    def start(self) -> Tensor:
        return self._recite_texts(range(1))

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        first = len(self.paths[0])
        for paths, row_tokens, row_parents in zip(self.paths, tokens.tolist(), parents.tolist()):
            paths += [[*paths[parent], token] for token, parent in zip(row_tokens, row_parents)]
        return self._recite_texts(range(first, len(self.paths[0])))

    def _recite_texts(self, nodes: range) -> Tensor:
        log_q = torch.full((len(self.paths), len(nodes), self.expert.vocab_size), -20.0)
        for row, paths in enumerate(self.paths):
            for at, node in enumerate(nodes):
                path = paths[node]
                continuations = [
                    text[len(path)]
                    for text in self.expert.texts
                    if text[: len(path)] == path and len(text) > len(path)
                ]
                log_q[row, at, continuations[0] if continuations else 7] = 0.0
        return log_q.log_softmax(-1)


@pytest.mark.parametrize("costs", [(1.0, 1.0), (1.0, 1.2)])
def test_every_text_finds_its_drafter(shallow: Target, costs: tuple[float, float]) -> None:
    """Two experts know two texts each; after the first rounds the texts have the expert that
    knows them.
    """
    answers = decode(shallow, PROMPTS, Greedy(), 90, ignore_eos=True)
    texts = [prompt + answer.output for prompt, answer in zip(PROMPTS, answers)]
    router = make_router(shallow, ["ngram", "ngram"], switch_every=2)
    now = [0.0]
    router.clock = lambda: now[0]
    owners = [0, 1, 1, 0]
    for number, cost in enumerate(costs):
        expert_texts = [text for text, owner in zip(texts, owners) if owner == number]
        router.inner[number] = Expert(expert_texts, shallow.head.vocab_size, cost, now)
    picks: list[list[int]] = []
    assign = router._assign_drafters

    def record_picks(context: Context) -> None:
        assign(context)
        picks.append(router.assigned)

    router._assign_drafters = record_picks  # type: ignore[method-assign]
    generations = decode(shallow, PROMPTS, Greedy(), 90, router, Chain(3), ignore_eos=True)
    assert [row.output for row in generations] == [row.output for row in answers]
    late = [
        (pick, owner)
        for assigned in picks[4:]
        for pick, owner in zip(assigned, owners)
        if pick >= 0
    ]
    assert len(late) > 12 and sum(pick == owner for pick, owner in late) / len(late) > 0.85


class TableRollout(Rollout):
    def __init__(
        self, log_q: Tensor, draft_ids: Tensor | None = None, limit: int | None = None
    ) -> None:
        self.log_q = log_q
        self.draft_ids = draft_ids
        self.depth_limit = limit

    def start(self) -> Tensor:
        return self.log_q

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.log_q * tokens[..., None]


def test_grouped_log_q_is_that_of_each_group() -> None:
    """Rows are put where they belong, over target ids; a text without a group is closed; the
    depth is the smallest limit.
    """
    first = torch.randn(2, 1, 6).log_softmax(-1)
    second = torch.randn(1, 1, 2).log_softmax(-1)
    ids = torch.tensor([4, 1])
    watch = Stopwatch(lambda: 0.0, torch.device("cpu"))
    parts = [
        GroupPart(0, torch.tensor([0, 3]), TableRollout(first), watch),
        GroupPart(1, torch.tensor([2]), TableRollout(second, ids, 2), watch),
    ]
    rollout = GroupedRollout(parts, 4, 6)
    log_q = rollout.start()
    assert torch.equal(log_q[[0, 3]], first) and torch.equal(log_q[2:3, :, ids], second)
    assert log_q[2, 0].exp().sum().item() == pytest.approx(1.0) and log_q[
        1
    ].exp().sum().item() == pytest.approx(1.0)
    assert rollout.stop_mask is not None and rollout.stop_mask[:, 0].tolist() == [
        False,
        True,
        False,
        False,
    ]
    tokens = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    assert (
        torch.equal(rollout.extend(tokens, torch.zeros_like(tokens))[3:], first[1:] * 4)
        and rollout.depth_limit == 2
    )


def test_a_single_drafter_is_refused(shallow: Target) -> None:
    with pytest.raises(UserError, match="name two drafters or more to choose from"):
        make_router(shallow, ["ngram"])
