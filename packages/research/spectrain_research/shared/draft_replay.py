"""Training sequences from drafts: rejected drafts (Draft-OPD, 2026) and windows with their rewards
(PPOW, 2026). Shapes: B batch, T tokens.

A rejected draft continues after its first wrong token. The target's distribution there depends on
the drafted tokens, so the draft is replayed: the text so far and the draft become one sequence, and
each drafted token has its distance from the first wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.decoding.generation import Generation
from spectrain.drafters.layers.losses import forward_kl, reverse_kl
from spectrain.features.batch import Batch, RowLoss, collate, pad_or_pack
from spectrain.models.forward_plan import ForwardPlan
from spectrain.trees.base import RoundResult, TreeBuilder, WrappedBuilder

from .drawn_windows import WindowBatch

NOT_PAST_ERROR = -1  # the distance of a token that was accepted, or never drafted


@dataclass(frozen=True)
class Replay:
    """A sequence that ends with a draft."""

    example: Example  # the answer so far and the draft carry loss
    # distance from the first wrong token of the draft; NOT_PAST_ERROR before it
    tokens_past_error: list[int]


@dataclass(frozen=True)
class BranchedAnswer:
    """An answer, followed by the rejected part of each of its drafts, which attends to the text
    before that draft.
    """

    replay: Replay
    position_ids: list[int]  # position of every token in its text
    # tokens of each rejected part, and the number of text tokens that it attends to
    branches: list[tuple[int, int]]

    @property
    def visibility(self) -> Tensor:
        """Return the mask [T, T]: a token attends to the text before it, and in a branch to that
        branch's earlier tokens.
        """
        length = len(self.position_ids)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        end = length - sum(size for size, _ in self.branches)
        for size, num_visible in self.branches:
            mask[end : end + size, num_visible:end] = False
            end += size
        return mask


@dataclass(frozen=True)
class ReplayBatch(Batch):
    """A batch of replays, whose tokens have Draft-OPD's loss."""

    # [B, T] tokens from the first wrong token of a replayed draft to each token; NOT_PAST_ERROR
    # where the token was accepted.
    tokens_past_error: Tensor = field(kw_only=True)
    # [B, T] loss weight of every token; None weighs all tokens 1.
    weight: Tensor | None = None

    def row_loss(self, is_predicted: Tensor) -> RowLoss:
        """Return the split loss of the rows, with their weights."""
        distance, weight = (
            None if part is None else part.roll(-1, dims=1)[is_predicted]
            for part in (self.tokens_past_error, self.weight)
        )
        assert distance is not None
        return RowLoss(weight, split_loss, (distance,))

    def list_drafted_documents(self) -> list[bool]:
        """Tell of every document whether a token of it follows a wrong one."""
        return [
            bool((distances != NOT_PAST_ERROR).any())
            for distances in self.split_values(self.tokens_past_error)
        ]


def split_loss(
    log_p: Tensor, log_q: Tensor, tokens_past_error: Tensor, decay: float = 0.8
) -> Tensor:
    """Return the loss of Draft-OPD: KL(p || q) / 2 of accepted drafts, and decay^k KL(q || p) / 2
    of rejected ones.

    `tokens_past_error` [R] is k, the number of tokens from the first wrong one, and p the target's
    distribution after the drafted tokens.
    """
    rejected = decay ** tokens_past_error.clamp(min=0) * reverse_kl(log_p, log_q)
    return 0.5 * torch.where(tokens_past_error < 0, forward_kl(log_p, log_q), rejected)


@dataclass(frozen=True)
class BranchedBatch(ReplayBatch):
    """A batch of answers with side branches."""

    position_ids: Tensor = field(kw_only=True)  # [B, T] position of every token in its text
    # [B, T, T], or [1, T, T] per packed document: which tokens each token attends to.
    visible: Tensor | tuple[Tensor, ...] = field(kw_only=True)

    def plan_forward(self, plan: ForwardPlan) -> ForwardPlan:
        """Return the plan with the positions and the mask of the branches."""
        plan = super().plan_forward(plan)
        return replace(plan, positions=self.position_ids, mask=self.visible)

    def tensors_on(self, device: torch.device | str) -> dict[str, Any]:
        """Return the fields that hold tensors, with those of each document."""
        changes = super().tensors_on(device)
        if isinstance(self.visible, tuple):
            changes["visible"] = tuple(part.to(device) for part in self.visible)
        return changes


@dataclass(frozen=True)
class DraftWindow:
    """A sequence that ends with the accepted part of a sampled draft and its first rejected
    token.
    """

    example: Example  # all but the prompt carry loss
    advantage: list[float]  # reward minus baseline of each token of the draft; 0 for all others
    start: int = 0  # tokens before the draft


class DraftRecorder(WrappedBuilder):
    """Wraps a builder and records its chains with the number of tokens that each round emitted."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder)
        # of every row: drafted tokens, and tokens emitted
        self.rounds: list[list[tuple[list[int], int]]] = []

    def observe(self, round: RoundResult) -> None:
        self.builder.observe(round)
        self.rounds = self.rounds or [[] for _ in round.counts]
        for b, count in enumerate(round.counts.tolist()):
            if count:
                drafted = round.tree.tokens[b, 1:][
                    (round.tree.valid & round.tree.can_emit)[b, 1:]
                ].tolist()
                self.rounds[b].append((drafted, count))


@dataclass(frozen=True)
class DraftedRound:
    """One round of a decoding."""

    text: list[int]  # tokens before the round, the root last
    answer_length: int  # tokens of the text that belong to the answer
    draft: list[int]
    num_accepted: int  # accepted tokens of the draft

    def make_example(self, draft: list[int], draft_only: bool = False) -> Example:
        """Make an example of the text and these draft tokens; all but the prompt carry loss, or
        the draft alone.
        """
        num_unsupervised = len(self.text) - (0 if draft_only else self.answer_length)
        return Example(
            self.text + draft,
            [False] * num_unsupervised + [True] * (len(self.text) + len(draft) - num_unsupervised),
        )


def iterate_drafts(
    generation: Generation, rounds: list[tuple[list[int], int]]
) -> Iterator[DraftedRound]:
    """Yield the drafts of one decoding in order, as long as the text before them is in its
    output.
    """
    drafts = iter([drafted for drafted, _ in rounds if drafted])
    end = 1  # the answer's tokens before the round, root included
    for count, depth in zip(generation.round_lengths, generation.depths):
        drafted = next(drafts) if depth else []  # a guard may have skipped the draft
        answer = generation.output[:end]
        if drafted and len(answer) == end:
            yield DraftedRound(generation.prompt + answer, end, drafted, count - 1)
        end += count


def select_replays(
    generation: Generation,
    rounds: list[tuple[list[int], int]],
    limit: int,
    random: Random,
    draft_only: bool = False,
) -> list[Replay]:
    """Return up to `limit` drafts of one decoding as replays, rejected ones first. With
    `draft_only` only drafts carry loss.
    """
    candidates = []
    for drafted in iterate_drafts(generation, rounds):
        num_wrong = len(drafted.draft) - drafted.num_accepted
        replay = Replay(
            drafted.make_example(drafted.draft, draft_only),
            [NOT_PAST_ERROR] * (len(drafted.text) + drafted.num_accepted) + list(range(num_wrong)),
        )
        candidates.append((not num_wrong, random.random(), replay))
    return [replay for _, _, replay in sorted(candidates, key=lambda item: item[:2])[:limit]]


def join_branches(
    generation: Generation, rounds: list[tuple[list[int], int]], max_length: int
) -> BranchedAnswer:
    """Join an answer with all its rejected drafts into one sequence (Draft-OPD's error replays),
    for one forward.

    Rejected tokens are supervised where they were drafted: the first wrong token in the text, where
    the next token is the target's, and the others in a branch. The first token of a branch carries
    no loss. Texts have `max_length` tokens at most.
    """
    text = generation.prompt + generation.output
    answer = len(generation.output)
    tokens_past_error = [NOT_PAST_ERROR] * len(text)
    tokens = list(text)
    position_ids = list(range(len(text)))
    mask = [False] * (len(text) - answer) + [True] * answer
    branches = []
    for drafted in iterate_drafts(generation, rounds):
        branch_start = len(drafted.text) + drafted.num_accepted
        wrong = drafted.draft[drafted.num_accepted :][: max_length - branch_start]
        if not wrong or branch_start >= len(text):
            continue
        tokens_past_error[branch_start] = 0
        if len(wrong) > 1:
            tokens += wrong
            position_ids += range(branch_start, branch_start + len(wrong))
            mask += [False] + [True] * (len(wrong) - 1)
            tokens_past_error += [NOT_PAST_ERROR, *range(1, len(wrong))]
            branches.append((len(wrong), branch_start))
    return BranchedAnswer(Replay(Example(tokens, mask), tokens_past_error), position_ids, branches)


def make_unbranched(example: Example) -> BranchedAnswer:
    """Make an answer without branches and without rejected tokens."""
    return BranchedAnswer(
        Replay(example, [NOT_PAST_ERROR] * len(example.tokens)),
        list(range(len(example.tokens))),
        [],
    )


def balance_weights(replay: Replay) -> list[float]:
    """Return the weight of every token where accepted and rejected tokens carry half of the loss
    each, as in Draft-OPD.
    """
    num_wrong = sum(distance != NOT_PAST_ERROR for distance in replay.tokens_past_error)
    supervised = sum(replay.example.mask)
    num_right = supervised - num_wrong
    return [
        supervised / (num_wrong if distance != NOT_PAST_ERROR else num_right)
        if is_supervised
        else 0.0
        for distance, is_supervised in zip(replay.tokens_past_error, replay.example.mask)
    ]


def round_reward(num_accepted: int, num_drafted: int, draft_cost: float) -> float:
    """Return PPOW's reward: tokens emitted by a round, the bonus included, over its time in
    forwards of the target.
    """
    return (num_accepted + 1) / (1 + draft_cost * num_drafted)


def make_windows(
    generation: Generation, rounds: list[tuple[list[int], int]], draft_cost: float
) -> list[DraftWindow]:
    """Make windows of the sampled drafts of one decoding, without the first draft.

    Token d of a draft counts where the d tokens before it were accepted. Its baseline is the mean
    reward of the answer's earlier drafts that reached d, or of all of them; it does not depend on
    the draw, so the gradient stays unbiased. Tokens after the first rejected one are left out.
    """
    # The rewards of earlier drafts that reached each position.
    reached: list[list[float]] = []
    windows = []
    for drafted in iterate_drafts(generation, rounds):
        reward = round_reward(drafted.num_accepted, len(drafted.draft), draft_cost)
        sampled = drafted.draft[: drafted.num_accepted + 1]
        is_first = not reached
        reached += [[] for _ in range(len(sampled) - len(reached))]
        if not is_first:
            gains = [
                reward - mean(earlier_rewards or reached[0])
                for earlier_rewards in reached[: len(sampled)]
            ]
            windows.append(
                DraftWindow(
                    drafted.make_example(sampled),
                    [0.0] * len(drafted.text) + gains,
                    len(drafted.text),
                )
            )
        for earlier_rewards in reached[: len(sampled)]:
            earlier_rewards.append(reward)
    return windows


def collate_replays(
    replays: list[Replay], packed: bool = False, balanced: bool = False
) -> ReplayBatch:
    """Collate replays into one batch, padded on the right or packed."""
    batch = collate([replay.example for replay in replays], packed)
    weight = (
        pad_or_pack([torch.tensor(balance_weights(replay)) for replay in replays], packed)
        if balanced
        else None
    )
    tokens_past_error = pad_or_pack(
        [torch.tensor(replay.tokens_past_error) for replay in replays],
        packed,
        padding=NOT_PAST_ERROR,
    )
    return ReplayBatch(
        batch.tokens,
        batch.loss_mask,
        lengths=batch.lengths,
        tokens_past_error=tokens_past_error,
        weight=weight,
    )


def collate_branched(
    answers: list[BranchedAnswer], packed: bool = False, balanced: bool = False
) -> BranchedBatch:
    """Collate answers with their branches into one batch, padded on the right or packed."""
    batch = collate_replays([answer.replay for answer in answers], packed, balanced)
    position_ids = pad_or_pack([torch.tensor(answer.position_ids) for answer in answers], packed)
    visible: Tensor | tuple[Tensor, ...]
    if packed:
        visible = tuple(answer.visibility[None] for answer in answers)
    else:
        count = batch.tokens.shape[1]
        # padding sees anything
        visible = torch.ones(count, count, dtype=torch.bool).tril().repeat(len(answers), 1, 1)
        for row, answer in zip(visible, answers):
            row[: len(answer.position_ids), : len(answer.position_ids)] = answer.visibility
    return BranchedBatch(
        batch.tokens,
        batch.loss_mask,
        tokens_past_error=batch.tokens_past_error,
        lengths=batch.lengths,
        weight=batch.weight,
        position_ids=position_ids,
        visible=visible,
    )


def collate_windows(windows: list[DraftWindow], packed: bool = False) -> WindowBatch:
    """Collate windows into one batch, padded on the right or packed."""
    batch = collate([window.example for window in windows], packed)
    return WindowBatch(
        batch.tokens,
        batch.loss_mask,
        lengths=batch.lengths,
        advantage=pad_or_pack([torch.tensor(window.advantage) for window in windows], packed),
    )
