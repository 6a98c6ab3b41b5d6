"""Decoding with every draft correct, which measures what a drafter would have proposed at every
position.

Shapes: B batch, D depth, K children of a node, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.randomness import DRAFT, gumbel_noise, keyed_generator
from spectrain.trees.base import Prefix, RoundResult, TreeBuilder, TreeTraits
from spectrain.trees.growing import pick_top_and_sampled
from spectrain.trees.measurements import RuleForecast
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import Children, TokenTree

from .acceptance import AcceptanceRule, Siblings
from .generation import Generation
from .loop import decode

# how children are chosen, and the temperature of their distribution
DrawMethod = tuple[Children, float]
COMPARED_CHILDREN = 4  # children of a node by which rules are compared, where the tree branches


def run_teacher_forced(
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    rule: AcceptanceRule,
    prompts: list[list[int]],
    max_new_tokens: int,
    answers: list[Generation] | None = None,
) -> TeacherForcedBuilder:
    """Decode prompts with every draft correct: taken from `answers`, which are otherwise decoded
    autoregressively first.
    """
    forced = TeacherForcedBuilder({}, builder, rule)
    for row, prompt in enumerate(prompts):
        if answers is None:
            (answer,) = decode(
                target, [prompt], rule.matching_rule(), max_new_tokens, sequence_ids=[row]
            )
        else:
            answer = answers[row]
        forced.sequences = {row: answer.prompt + answer.output}
        decode(
            target,
            [prompt],
            rule.matching_rule(),
            max_new_tokens,
            drafter,
            forced,
            sequence_ids=[row],
        )
    return forced


class TeacherForcedBuilder(TreeBuilder):
    """Proposes the correct tokens as a chain, runs the drafter over them and records what the
    drafter would have proposed.

    All drafts are accepted, so its speed is the upper bound for any drafter at this depth.
    """

    name = "forced"
    traits = TreeTraits(is_chain=True)

    def __init__(
        self,
        sequences: dict[int, list[int]],
        builder: TreeBuilder,
        rule: AcceptanceRule,
        width: int = 10,
    ) -> None:
        self.sequences, self.builder, self.width = sequences, builder, width
        self.rule = rule if builder.children in rule.children else rule.matching_rule()
        self.depth, self.budget, self.max_drafted = (
            builder.depth,
            builder.depth + 1,
            builder.depth - 1,
        )
        self.hit_sums = torch.zeros(self.depth, width, dtype=torch.float64)
        self.counts = [0] * self.depth
        matches = self.rule.fixes_choice and builder.children == "deterministic"
        self.draw_method: DrawMethod = builder.children, builder.temperature
        self.num_siblings = 1 if builder.traits.is_chain else COMPARED_CHILDREN
        self.rejection_rule = (
            None
            if self.rule.sampling_settings is None or not matches
            else RecursiveRejection(*self.rule.sampling_settings)
        )
        # Sums over the positions of each depth.
        self.rejection_sums = [0.0] * self.depth
        self.overlap_sums = [0.0] * self.depth
        self.top1_sums = [0] * self.depth
        # log q [B, V] after each node of this round's chain
        self.level_log_probs: list[Tensor] = []
        self.rollout: Rollout | None = None

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        # the drafter alone is measured
        return super().grow(prefix, replace(draft, merge_copies=None))

    @property
    def hit_rates(self) -> list[list[float]]:
        return [(self.hit_sums[d] / count).tolist() for d, count in enumerate(self.counts) if count]

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        self.rollout = rollout
        answers = [
            self.sequences[row][length + 1 : length + 1 + self.depth]
            for row, length in zip(prefix.sequence_ids.tolist(), prefix.lengths.tolist())
        ]
        width = min(rollout.limit_depth(self.depth), max(1, max(map(len, answers))))
        answers = [tokens[:width] for tokens in answers]
        device = prefix.root.device
        tokens = torch.tensor(
            [tokens + [0] * (width - len(tokens)) for tokens in answers], device=device
        )
        valid = torch.tensor(
            [[True] + [n < len(tokens) for n in range(width)] for tokens in answers], device=device
        )
        self.level_log_probs = rollout.draft_along(tokens, width)
        return TokenTree.from_chain(torch.cat([prefix.root[:, None], tokens], dim=1), valid)

    @property
    def mean_overlap(self) -> list[float]:
        """The mean sum of min(p, q) at each depth: the acceptance rate of a drawn token.

        p and q have the temperatures of the rule and the builder; p has temperature 1 where the
        rule draws nothing.
        """
        return [total / count for total, count in zip(self.overlap_sums, self.counts) if count]

    @property
    def top1_agreement(self) -> list[float]:
        """Return the share of positions, by depth, where drafter and target have the same most
        likely token.
        """
        return [hits / count for hits, count in zip(self.top1_sums, self.counts) if count]

    @property
    def rule_forecast(self) -> RuleForecast | None:
        """Compare sample-and-match with rejection sampling of drawn children; None where nothing
        was measured.
        """
        if self.rejection_rule is None or not any(self.counts):
            return None
        weighed = [total / count for total, count in zip(self.rejection_sums, self.counts) if count]
        return RuleForecast(
            self.num_siblings, [sum(hits[: self.num_siblings]) for hits in self.hit_rates], weighed
        )

    def observe(self, round: RoundResult) -> None:
        """Add the acceptance chance of each child at every position that was reached."""
        # None: the drafter drafts by itself
        for b in range(len(round.counts) if self.rollout is not None else 0):
            has_drafts = int((round.tree.valid & round.tree.can_emit)[b].sum()) > 1
            rate: Any = 1
            for level in range(
                min(int(round.counts[b]), len(self.level_log_probs)) if has_drafts else 0
            ):
                logits = round.logits[b, level]
                siblings, q = self._make_siblings(
                    logits, self.level_log_probs[level][b], level, self.draw_method
                )
                self._add_chances(siblings, q, logits, level, rate)
                if level + 1 < len(self.level_log_probs):
                    rate = self.rule.child_rate(
                        siblings.p, q, int(round.tree.tokens[b, level + 1]), rate
                    )
                if self.rejection_rule is not None:
                    how: DrawMethod = "without_replacement", self.rejection_rule.temperature
                    drawn, _ = self._make_siblings(
                        logits, self.level_log_probs[level][b], level, how
                    )
                    drawn = replace(drawn, tokens=drawn.tokens[: self.num_siblings])
                    self.rejection_sums[level] += sum(
                        map(float, self.rejection_rule.acceptance_chances(drawn))
                    )
                self.counts[level] += 1

    def _add_chances(
        self, siblings: Siblings, q: Tensor, logits: Tensor, level: int, rate: Any
    ) -> None:
        """Add the rule's acceptance chances of siblings and the overlap of p and q."""
        chances = [float(chance) for chance in self.rule.acceptance_chances(siblings, rate)]
        self.hit_sums[level, : len(chances)] += torch.tensor(chances, dtype=torch.float64)
        p = siblings.p if self.rule.is_random else logits.double().softmax(-1)
        self.overlap_sums[level] += float(torch.minimum(p, q).sum())
        self.top1_sums[level] += int(q.argmax() == logits.argmax())

    def _make_siblings(
        self, logits: Tensor, log_q: Tensor, level: int, draw_method: DrawMethod
    ) -> tuple[Siblings, Tensor]:
        """Return children as a builder would choose or draw them, and q [V] over target ids."""
        assert self.rollout is not None
        children, temperature = draw_method
        p = self.rule.target_distribution(logits)
        width = min(self.width, len(log_q))
        scores = log_q
        log_q = (log_q.double() / temperature).log_softmax(-1)
        every = self.rollout.to_target_ids(torch.arange(len(log_q), device=log_q.device))
        q = torch.zeros_like(p).scatter(0, every, log_q.exp())
        if children == "deterministic":
            return Siblings(
                self.rollout.to_target_ids(scores.topk(width).indices).tolist(), p, None
            ), q
        source = keyed_generator(DRAFT, self.builder.seed, level, self.counts[level])
        if children == "top_and_sampled":
            noise = gumbel_noise((len(log_q),), source).to(log_q.device)
            ids, _, rest = pick_top_and_sampled(log_q.exp(), width, noise)
            return Siblings(
                self.rollout.to_target_ids(ids).tolist(),
                p,
                torch.zeros_like(p).scatter(0, every, rest),
            ), q
        drop = children == "without_replacement"
        if drop:
            drawn = (
                (log_q + gumbel_noise((len(log_q),), source).to(log_q.device)).topk(width).indices
            )
        else:
            drawn = torch.multinomial(
                log_q.exp().cpu(), width, replacement=True, generator=source
            ).to(log_q.device)
        return Siblings(self.rollout.to_target_ids(drawn).tolist(), p, q, drop), q


class PresetChainBuilder(TreeBuilder):
    """Proposes the correct tokens as a chain without a host synchronization: they are loaded in
    advance, and nothing is recorded."""

    name = "known"
    traits = TreeTraits(is_chain=True, verifies_all=True, is_fixed=True)

    def __init__(self, teacher_forced: TeacherForcedBuilder) -> None:
        self.teacher_forced = teacher_forced
        self.depth = teacher_forced.depth
        self.budget = teacher_forced.budget
        self.max_drafted = teacher_forced.max_drafted
        # Texts by batch size and length, padded with zeros; each tensor keeps its address.
        self.static_texts: dict[tuple[int, int], Tensor] = {}

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        batch, length = prefix.tokens.shape
        if not prefix.round:
            texts = [
                self.teacher_forced.sequences[row][:length] for row in prefix.sequence_ids.tolist()
            ]
            text = torch.tensor(
                [text + [0] * (length - len(text)) for text in texts], device=prefix.tokens.device
            )
            self.static_texts.setdefault((batch, length), torch.empty_like(text)).copy_(text)
        depth = rollout.limit_depth(self.depth)
        positions = prefix.lengths[:, None] + 1 + torch.arange(depth, device=prefix.tokens.device)
        tokens = self.static_texts[batch, length].gather(1, positions.clamp(max=length - 1))
        rollout.draft_along(tokens, depth)
        return TokenTree.from_chain(torch.cat([prefix.root[:, None], tokens], dim=1))
