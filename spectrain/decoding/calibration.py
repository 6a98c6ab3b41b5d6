"""Calibration of tree builders on this machine with this target and drafter: acceptance by depth, and latency by size.

Shapes: B batch, D depth, K children of a node, V vocabulary. Both are measured by special builders during ordinary decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectrain.config.choices import find_constructor
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.device import synchronize_device
from spectrain.models.target import Target
from spectrain.randomness import DRAFT, gumbel_noise, keyed_generator
from spectrain.trees.base import Draft, Prefix, Rollout, RoundResult, TreeBuilder
from spectrain.trees.growing import pick_top_and_sampled
from spectrain.trees.measurements import Calibration, Latency, RuleForecast
from spectrain.trees.token_tree import Children, TokenTree

from .acceptance import AcceptanceRule, Greedy, Siblings
from .generation import Generation
from .loop import decode

TIMED_TREE_SIZES = (1, 2, 4, 8, 16, 32, 64)
LONG_TEXT_TOKENS = 512  # tokens of a text behind which trees are timed too, where it is not known how long texts will be
REJECTION_RULES = ("recursive", "transport")  # choices of `acceptance` that weigh p against q, in order of preference
RULE_TRIAL_PROMPTS, RULE_TRIAL_TOKENS = 6, 32  # prompts and tokens of each by which a rule is chosen
DrawMethod = tuple[Children, float]  # how children are chosen, and the temperature of what they are drawn from
COMPARED_CHILDREN = 4  # children of a node by which rules are compared, where the tree branches


def calibrate_builders(
    target: Target,
    drafter: Drafter,
    builders: list[TreeBuilder],
    rule: AcceptanceRule,
    prompts: list[list[int]],
    max_new_tokens: int = 64,
    *,
    max_text_tokens: int = LONG_TEXT_TOKENS,
) -> Calibration | None:
    """Measure what builders need, on prompts outside of the evaluation, and prepare them. Returns None if they need nothing.

    The builders share the measurement, so they must choose children in the same way. `max_text_tokens` is the length of the
    longest text that they will decode after.
    """
    needs = {need for builder in builders for need in builder.requirements}
    if not needs:
        return None
    hits, counts, latency, rules = [], [], None, None
    if "hits" in needs:
        deepest = max((builder for builder in builders if "hits" in builder.requirements), key=lambda builder: builder.depth)
        forced = run_teacher_forced(target, drafter, deepest, rule, prompts, max_new_tokens)
        hits, counts, rules = forced.hit_rates, [count for count in forced.counts if count], forced.rule_forecast
        _check_rollout(deepest, any(counts))
    if "latency" in needs:
        largest = max(
            (builder for builder in builders if "latency" in builder.requirements), key=lambda builder: builder.budget
        )
        latency = measure_latency(target, drafter, prompts, largest, max_text_tokens)
    calibration = Calibration(hits, counts, latency, rules)
    for builder in builders:
        builder.prepare(calibration)
        for row, prompt in enumerate(prompts if "rehearsal" in builder.requirements else []):
            decode(target, [prompt], rule, max_new_tokens, drafter, builder, sequence_ids=[row])
    return calibration


def resolve_rule(
    target: Target, drafter: Drafter, builder: TreeBuilder, rule: AcceptanceRule, prompts: Callable[[], list[list[int]]]
) -> tuple[AcceptanceRule, TreeBuilder, RuleForecast | None]:
    """Return the rule and builder to decode with. For an unresolved rule, also return the forecast that decided."""
    if not rule.is_unresolved:
        return rule, builder, None
    assert rule.sampling_settings is not None, "an unresolved rule samples"
    for rule_class in filter(None, (find_constructor("acceptance", name) for name in REJECTION_RULES)):
        if builder.children in rule_class.children:
            return rule_class(*rule.sampling_settings), builder, None
    sampled = builder.sampled_variant(rule.sampling_settings[0])
    if sampled is None or drafter.capabilities.is_copier or drafter.capabilities.has_no_q:
        return rule.matching_rule(), builder, None
    forecast = run_teacher_forced(
        target, drafter, builder, rule.matching_rule(), prompts()[:RULE_TRIAL_PROMPTS], RULE_TRIAL_TOKENS
    ).rule_forecast
    if forecast is None or not forecast.prefers_rejection:
        return rule.matching_rule(), builder, forecast
    return RecursiveRejection(*rule.sampling_settings), sampled, forecast


def run_teacher_forced(
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    rule: AcceptanceRule,
    prompts: list[list[int]],
    max_new_tokens: int,
    answers: list[Generation] | None = None,
) -> TeacherForcedBuilder:
    """Decode prompts with every draft correct: taken from `answers`, which are otherwise decoded autoregressively first."""
    forced = TeacherForcedBuilder({}, builder, rule)
    for row, prompt in enumerate(prompts):
        if answers is None:
            (answer,) = decode(target, [prompt], rule.matching_rule(), max_new_tokens, sequence_ids=[row])
        else:
            answer = answers[row]
        forced.sequences = {row: answer.prompt + answer.output}
        decode(target, [prompt], rule.matching_rule(), max_new_tokens, drafter, forced, sequence_ids=[row])
    return forced


class TeacherForcedBuilder(TreeBuilder):
    """Proposes the correct tokens as a chain, runs the drafter over them and records what the drafter would have proposed.

    All drafts are accepted, so its speed is the upper bound for any drafter at this depth.
    """

    name = "forced"
    is_chain = True

    def __init__(self, sequences: dict[int, list[int]], builder: TreeBuilder, rule: AcceptanceRule, width: int = 10) -> None:
        self.sequences, self.builder, self.width = sequences, builder, width
        self.rule = rule if builder.children in rule.children else rule.matching_rule()
        self.depth, self.budget, self.max_drafted = builder.depth, builder.depth + 1, builder.depth - 1
        self.hit_sums = torch.zeros(self.depth, width, dtype=torch.float64)
        self.counts = [0] * self.depth
        matches = self.rule.fixes_choice and builder.children == "deterministic"
        self.draw_method: DrawMethod = builder.children, builder.temperature
        self.num_siblings = 1 if builder.is_chain else COMPARED_CHILDREN
        self.rejection_rule = (
            None if self.rule.sampling_settings is None or not matches else RecursiveRejection(*self.rule.sampling_settings)
        )
        # Sums over the positions of each depth.
        self.rejection_sums = [0.0] * self.depth
        self.overlap_sums, self.top1_sums = [0.0] * self.depth, [0] * self.depth
        self.level_log_probs: list[Tensor] = []  # log q [B, V] after each node of this round's chain
        self.rollout: Rollout | None = None

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        return super().grow(prefix, replace(draft, merge_copies=None))  # the drafter alone is measured

    @property
    def hit_rates(self) -> list[list[float]]:
        return [(self.hit_sums[d] / count).tolist() for d, count in enumerate(self.counts) if count]

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        self.level_log_probs, self.rollout = [], rollout
        answers = [
            self.sequences[row][length + 1 : length + 1 + self.depth]
            for row, length in zip(prefix.sequence_ids.tolist(), prefix.lengths.tolist())
        ]
        width = min(self.max_depth(rollout), max(1, max(map(len, answers))))
        answers = [tokens[:width] for tokens in answers]
        device = prefix.root.device
        tokens = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in answers], device=device)
        valid = torch.tensor([[True] + [n < len(tokens) for n in range(width)] for tokens in answers], device=device)
        log_q = rollout.start()
        for level in range(width):
            self.level_log_probs.append(log_q[:, 0])
            if level + 1 < width:
                log_q = rollout.extend(tokens[:, level : level + 1], torch.full_like(tokens[:, :1], level))
        return TokenTree.from_chain(torch.cat([prefix.root[:, None], tokens], dim=1), valid)

    @property
    def mean_overlap(self) -> list[float]:
        """The mean sum of min(p, q) at each depth: the acceptance rate of a drawn token.

        p and q have the temperatures of the rule and the builder; p has temperature 1 where the rule draws nothing.
        """
        return [total / count for total, count in zip(self.overlap_sums, self.counts) if count]

    @property
    def top1_agreement(self) -> list[float]:
        """Return the share of positions, by depth, where drafter and target have the same most likely token."""
        return [hits / count for hits, count in zip(self.top1_sums, self.counts) if count]

    @property
    def rule_forecast(self) -> RuleForecast | None:
        """Compare sample-and-match with rejection sampling of drawn children; None where nothing was measured."""
        if self.rejection_rule is None or not any(self.counts):
            return None
        weighed = [total / count for total, count in zip(self.rejection_sums, self.counts) if count]
        return RuleForecast(self.num_siblings, [sum(hits[: self.num_siblings]) for hits in self.hit_rates], weighed)

    def observe(self, round: RoundResult) -> None:
        """Add the acceptance chance of each child at every position that was reached."""
        for b in range(len(round.counts) if self.rollout is not None else 0):  # None: the drafter drafts by itself
            has_drafts = int((round.tree.valid & round.tree.can_emit)[b].sum()) > 1
            rate: Any = 1
            for level in range(min(int(round.counts[b]), len(self.level_log_probs)) if has_drafts else 0):
                logits = round.logits[b, level]
                siblings, q = self._make_siblings(logits, self.level_log_probs[level][b], level, self.draw_method)
                self._add_chances(siblings, q, logits, level, rate)
                if level + 1 < len(self.level_log_probs):
                    rate = self.rule.child_rate(siblings.p, q, int(round.tree.tokens[b, level + 1]), rate)
                if self.rejection_rule is not None:
                    how: DrawMethod = "without_replacement", self.rejection_rule.temperature
                    drawn, _ = self._make_siblings(logits, self.level_log_probs[level][b], level, how)
                    drawn = replace(drawn, tokens=drawn.tokens[: self.num_siblings])
                    self.rejection_sums[level] += sum(map(float, self.rejection_rule.acceptance_chances(drawn)))
                self.counts[level] += 1

    def _add_chances(self, siblings: Siblings, q: Tensor, logits: Tensor, level: int, rate: Any) -> None:
        """Add the rule's acceptance chances of siblings and the overlap of p and q."""
        chances = [float(chance) for chance in self.rule.acceptance_chances(siblings, rate)]
        self.hit_sums[level, : len(chances)] += torch.tensor(chances, dtype=torch.float64)
        p = siblings.p if self.rule.is_random else logits.double().softmax(-1)
        self.overlap_sums[level] += float(torch.minimum(p, q).sum())
        self.top1_sums[level] += int(q.argmax() == logits.argmax())

    def _make_siblings(self, logits: Tensor, log_q: Tensor, level: int, draw_method: DrawMethod) -> tuple[Siblings, Tensor]:
        """Return children as a builder would choose or draw them, and q [V] over target ids."""
        assert self.rollout is not None
        children, temperature = draw_method
        p = self.rule.target_distribution(logits)
        width = min(self.width, len(log_q))
        scores, log_q = log_q, (log_q.double() / temperature).log_softmax(-1)
        every = self.rollout.to_target_ids(torch.arange(len(log_q), device=log_q.device))
        q = torch.zeros_like(p).scatter(0, every, log_q.exp())
        if children == "deterministic":
            return Siblings(self.rollout.to_target_ids(scores.topk(width).indices).tolist(), p, None), q
        source = keyed_generator(DRAFT, self.builder.seed, level, self.counts[level])
        if children == "top_and_sampled":
            noise = gumbel_noise((len(log_q),), source).to(log_q.device)
            ids, _, rest = pick_top_and_sampled(log_q.exp(), width, noise)
            return Siblings(self.rollout.to_target_ids(ids).tolist(), p, torch.zeros_like(p).scatter(0, every, rest)), q
        drop = children == "without_replacement"
        if drop:
            drawn = (log_q + gumbel_noise((len(log_q),), source).to(log_q.device)).topk(width).indices
        else:
            drawn = torch.multinomial(log_q.exp().cpu(), width, replacement=True, generator=source).to(log_q.device)
        return Siblings(self.rollout.to_target_ids(drawn).tolist(), p, q, drop), q


class PresetChainBuilder(TreeBuilder):
    """Proposes the correct tokens as a chain without a host synchronization: they are loaded in advance, and nothing is
    recorded."""

    name = "known"
    is_chain = True
    is_fixed = True
    verifies_all = True

    def __init__(self, teacher_forced: TeacherForcedBuilder) -> None:
        self.teacher_forced, self.depth, self.budget, self.max_drafted = (
            teacher_forced,
            teacher_forced.depth,
            teacher_forced.budget,
            teacher_forced.max_drafted,
        )
        # Texts by batch size and length, padded with zeros; each tensor keeps its address.
        self.static_texts: dict[tuple[int, int], Tensor] = {}

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        batch, length = prefix.tokens.shape
        if not prefix.round:
            texts = [self.teacher_forced.sequences[row][:length] for row in prefix.sequence_ids.tolist()]
            text = torch.tensor([text + [0] * (length - len(text)) for text in texts], device=prefix.tokens.device)
            self.static_texts.setdefault((batch, length), torch.empty_like(text)).copy_(text)
        depth = self.max_depth(rollout)
        positions = prefix.lengths[:, None] + 1 + torch.arange(depth, device=prefix.tokens.device)
        tokens = self.static_texts[batch, length].gather(1, positions.clamp(max=length - 1))
        rollout.start()
        for level in range(depth - 1):
            rollout.extend(tokens[:, level : level + 1], torch.full_like(tokens[:, :1], level))
        return TokenTree.from_chain(torch.cat([prefix.root[:, None], tokens], dim=1))


def measure_latency(
    target: Target, drafter: Drafter, prompts: list[list[int]], builder: TreeBuilder, max_text_tokens: int, repeats: int = 5
) -> Latency:
    """Time verification and draft steps over up to the builder's budget of nodes.

    They are timed after the shortest prompt and after the longest one, repeated up to `max_text_tokens` tokens, because
    attention over a long text costs more for every node.
    """
    sizes = [size for size in TIMED_TREE_SIZES if size < builder.budget] + [builder.budget]
    verify: dict[int, dict[int, float]] = {}
    step: dict[int, dict[int, float]] = {}
    starts: list[float] = []
    limit = 2 * len(sizes) * (repeats + 1)  # rounds that emit one token, and as many again for lucky ones or empty drafts
    longest = max(prompts, key=len)
    long_prompt = (longest * -(-max_text_tokens // len(longest)))[: max(max_text_tokens, len(longest))]
    timed_prompts = [prompt[: max(1, target.max_length - limit)] for prompt in (min(prompts, key=len), long_prompt)]
    for prompt in {len(prompt): prompt for prompt in timed_prompts}.values():
        probe = LatencyProbe(sizes, builder.depth, target.head.vocab_size)
        decode(target, [prompt], Greedy(), limit, drafter, probe, ignore_eos=True)
        _check_rollout(builder, probe.num_measured > 0)
        length = len(prompt) + limit // 2
        verify[length] = {size: float(np.median(times[1:] or times)) for size, times in probe.verify_seconds.items() if times}
        step[length] = {size: float(np.median(times[1:] or times)) for size, times in probe.step_seconds.items() if times} or {
            1: 0.0
        }
        starts += probe.start_seconds[1:]
    return Latency(verify, step, float(np.median(starts)), time_levels(target, min(prompts, key=len), builder.depth, repeats))


@torch.inference_mode()
def time_levels(target: Target, prompt: list[int], depth: int, repeats: int = 5) -> float:
    """Return the seconds that each level after the first adds to verifying a tree: a chain minus as many children of the root.

    It is 0 but for targets with recurrent layers, which update their state level by level.
    """
    if not target.architecture.keeps_state or depth < 2:
        return 0.0
    nodes = torch.zeros(1, depth + 1, dtype=torch.int64, device=target.device)
    parents = torch.zeros_like(nodes)
    parents[:, 0] = -1
    trees = TokenTree.from_chain(nodes), TokenTree.from_parents(nodes, parents)
    cache = target.new_cache(1, len(prompt) + depth + 1)
    lengths = torch.tensor([len(prompt)], device=target.device)
    target.prefill(torch.tensor([prompt], device=target.device), lengths, cache, ())
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for tree, times in zip(trees, seconds):
            synchronize_device(target.device)
            start = time.perf_counter()
            target.verify(tree, cache)
            synchronize_device(target.device)
            times.append(time.perf_counter() - start)
            cache.roll_back()
    chain_seconds, star_seconds = (float(np.median(times)) for times in seconds)
    return max(0.0, chain_seconds - star_seconds) / (depth - 1)


class LatencyProbe(TreeBuilder):
    """Proposes random tokens after the root, in trees of each size in turn, to time them; copying is timed with them."""

    name = "probe"

    def __init__(self, sizes: list[int], depth: int, vocab_size: int) -> None:
        self.sizes, self.depth, self.vocab_size, self.num_measured, self.was_expanded = sizes, depth, vocab_size, 0, False
        self.budget = self.max_drafted = max(sizes)
        self.verify_seconds: dict[int, list[float]] = {size: [] for size in sizes}
        self.step_seconds: dict[int, list[float]] = {size: [] for size in sizes}
        self.start_seconds: list[float] = []
        self.extend_seconds, self.tree_size = 0.0, 1

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        self.tree_size = self.sizes[self.num_measured % len(self.sizes)]
        if draft.rollout is not None or draft.continuations is None:
            return super().grow(prefix, replace(draft, merge_copies=None))
        self.extend_seconds, self.was_expanded = 0.0, True
        tree = self._make_tree(prefix, self._random_tokens(prefix, self.vocab_size))
        return tree if draft.add_mask_nodes is None else draft.add_mask_nodes(tree)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        tokens = rollout.to_target_ids(self._random_tokens(prefix, rollout.start().shape[-1]))
        synchronize_device(tokens.device)
        start = time.perf_counter()
        rollout.extend(tokens, torch.zeros_like(tokens))
        synchronize_device(tokens.device)
        self.extend_seconds = time.perf_counter() - start
        self.step_seconds[self.tree_size].append(self.extend_seconds)
        self.was_expanded = True
        return self._make_tree(prefix, tokens)

    def _random_tokens(self, prefix: Prefix, vocab_size: int) -> Tensor:
        source = torch.Generator().manual_seed(self.num_measured)
        ids = [torch.randperm(vocab_size, generator=source)[: self.tree_size] for _ in prefix.root]
        return torch.stack(ids).to(prefix.root.device)

    def _make_tree(self, prefix: Prefix, tokens: Tensor) -> TokenTree:
        """Make a tree with all tokens as children of the root."""
        nodes = torch.cat([prefix.root[:, None], tokens[:, : self.tree_size - 1]], dim=1)
        parents = torch.zeros_like(nodes)
        parents[:, 0] = -1
        return TokenTree.from_parents(nodes, parents)

    def observe(self, round: RoundResult) -> None:
        if not self.was_expanded:
            return  # the drafter drafts by itself
        self.was_expanded = False
        if int((round.tree.valid & round.tree.can_emit)[0].sum()) < self.tree_size:
            return  # it had nothing ready: the size comes again
        self.num_measured += 1
        self.start_seconds.append(round.seconds["draft"] - self.extend_seconds)
        self.verify_seconds[self.tree_size].append(round.seconds["verify"] + round.seconds["accept"])


def _check_rollout(builder: TreeBuilder, has_rollout: bool) -> None:
    if not has_rollout:
        raise UserError(
            f"tree={builder.name}: it is calibrated while the drafter drafts step by step, and this drafter copies text; use "
            "tree=chain"
        )
