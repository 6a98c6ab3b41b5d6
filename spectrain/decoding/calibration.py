"""What tree builders are prepared with, measured on this machine with this target and drafter: what is kept, what it costs.

Shapes: B batch, D depth, K children of a node, V vocabulary. Both are measured by builders that decode like any other one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.device import wait
from spectrain.models.target import Target
from spectrain.randomness import DRAFT, generator, gumbel
from spectrain.trees.base import Draft, Prefix, Rollout, Round, TreeBuilder, top_and_sampled
from spectrain.trees.measurements import Calibration, Latency, RuleForecast
from spectrain.trees.token_tree import Children, TokenTree

from .acceptance import AcceptanceRule, Greedy, Recursive, Siblings, Transport
from .generation import Generation
from .loop import decode

SIZES = (1, 2, 4, 8, 16, 32, 64)
LONG = 512  # tokens of a text behind which trees are timed too, where it is not known how long texts will be
SETTLED_BY, SETTLED_TOKENS = 6, 32  # prompts and tokens of each by which a rule is chosen
Drawing = tuple[Children, float]  # how children are chosen, and the temperature of what they are drawn from
BRANCHES = 4  # children of a node by which rules are compared, where the tree branches


def calibrate(
    target: Target,
    drafter: Drafter,
    builders: list[TreeBuilder],
    rule: AcceptanceRule,
    prompts: list[list[int]],
    max_new_tokens: int = 64,
    *,
    longest: int = LONG,
) -> Calibration | None:
    """Measure what builders need, on prompts that are not those of the evaluation, and prepare them. None: they need nothing.

    They share the measurement, so they must choose children in the same way. `longest` is how many tokens the longest text
    has that they are to decode behind.
    """
    needs = {need for builder in builders for need in builder.needs}
    if not needs:
        return None
    hits, counts, latency, rules = [], [], None, None
    if "hits" in needs:
        deepest = max((builder for builder in builders if "hits" in builder.needs), key=lambda builder: builder.depth)
        forced = run_forced(target, drafter, deepest, rule, prompts, max_new_tokens)
        hits, counts, rules = forced.hits, [count for count in forced.counts if count], forced.rules
        _check_rolled_out(deepest, any(counts))
    if "latency" in needs:
        largest = max((builder for builder in builders if "latency" in builder.needs), key=lambda builder: builder.budget)
        latency = measure_latency(target, drafter, prompts, largest, longest)
    calibration = Calibration(hits, counts, latency, rules)
    for builder in builders:
        builder.prepare(calibration)
        for row, prompt in enumerate(prompts if "rehearsal" in builder.needs else []):
            decode(target, [prompt], rule, max_new_tokens, drafter, builder, sequence_ids=[row])
    return calibration


def settle(
    target: Target, drafter: Drafter, builder: TreeBuilder, rule: AcceptanceRule, prompts: Callable[[], list[list[int]]]
) -> tuple[AcceptanceRule, TreeBuilder, RuleForecast | None]:
    """The rule and builder to decode with; where the rule leaves that open, what would be kept of the target's own answers."""
    if not rule.is_open:
        return rule, builder, None
    assert rule.shaping is not None, "a rule that is open samples"
    for weighing in (Recursive, Transport):
        if builder.children in weighing.children:
            return weighing(*rule.shaping), builder, None
    drawn = builder.drawn(rule.shaping[0])
    if drawn is None or drafter.abilities.copies_text or drafter.abilities.undrawn:
        return rule.matched(), builder, None
    forecast = run_forced(target, drafter, builder, rule.matched(), prompts()[:SETTLED_BY], SETTLED_TOKENS).rules
    if forecast is None or not forecast.weighing_pays:
        return rule.matched(), builder, forecast
    return Recursive(*rule.shaping), drawn, forecast


def run_forced(
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    rule: AcceptanceRule,
    prompts: list[list[int]],
    max_new_tokens: int,
    answers: list[Generation] | None = None,
) -> Forced:
    """Decode prompts with every draft right: by the target's `answers`, which are otherwise decoded autoregressively first."""
    forced = Forced({}, builder, rule)
    for row, prompt in enumerate(prompts):
        if answers is None:
            (answer,) = decode(target, [prompt], rule.matched(), max_new_tokens, sequence_ids=[row])
        else:
            answer = answers[row]
        forced.sequences = {row: answer.prompt + answer.output}
        decode(target, [prompt], rule.matched(), max_new_tokens, drafter, forced, sequence_ids=[row])
    return forced


class Forced(TreeBuilder):
    """Proposes a chain of what is known to follow, running the drafter over it, and notes what it would have proposed.

    All of it is kept, so its speed is the ceiling that a better drafter could reach with this depth.
    """

    name = "forced"
    is_chain = True

    def __init__(self, sequences: dict[int, list[int]], builder: TreeBuilder, rule: AcceptanceRule, width: int = 10) -> None:
        self.sequences, self.builder, self.width = sequences, builder, width
        self.rule = rule if builder.children in rule.children else rule.matched()  # what children chosen so are judged by
        self.depth, self.budget, self.drafted = builder.depth, builder.depth + 1, builder.depth - 1
        self.sums = torch.zeros(self.depth, width, dtype=torch.float64)
        self.counts = [0] * self.depth
        matches = self.rule.fixes_choice and builder.children == "deterministic"
        self.drawing: Drawing = builder.children, builder.temperature
        self.branches = 1 if builder.is_chain else BRANCHES
        self.weighing = None if self.rule.shaping is None or not matches else Recursive(*self.rule.shaping)
        self.weighed = [0.0] * self.depth  # the same of `weighing`, over the places of each depth
        self.overlaps, self.firsts = [0.0] * self.depth, [0] * self.depth  # sums over the places of each depth
        self.levels: list[Tensor] = []  # log q [B, V] after each node of this round's chain
        self.rollout: Rollout | None = None

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        return super().grow(prefix, replace(draft, join=None))  # the drafter alone is measured

    @property
    def hits(self) -> list[list[float]]:
        return [(self.sums[d] / count).tolist() for d, count in enumerate(self.counts) if count]

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        self.levels, self.rollout = [], rollout
        known = [
            self.sequences[row][length + 1 : length + 1 + self.depth]
            for row, length in zip(prefix.sequence_ids.tolist(), prefix.lengths.tolist())
        ]
        width = min(self.reach(rollout), max(1, max(map(len, known))))
        known = [tokens[:width] for tokens in known]
        device = prefix.root.device
        tokens = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in known], device=device)
        valid = torch.tensor([[True] + [n < len(tokens) for n in range(width)] for tokens in known], device=device)
        log_q = rollout.start()
        for level in range(width):
            self.levels.append(log_q[:, 0])
            if level + 1 < width:
                log_q = rollout.extend(tokens[:, level : level + 1], torch.full_like(tokens[:, :1], level))
        return TokenTree.chain(torch.cat([prefix.root[:, None], tokens], dim=1), valid)

    @property
    def overlap(self) -> list[float]:
        """The mean sum of min(p, q) at each depth: how often a drawn token is kept; p and q at the rule's and the builder's
        temperatures, p at 1 where the rule draws nothing."""
        return [total / count for total, count in zip(self.overlaps, self.counts) if count]

    @property
    def first(self) -> list[float]:
        """How often the drafter's most likely token is the target's most likely one, at each depth."""
        return [hits / count for hits, count in zip(self.firsts, self.counts) if count]

    @property
    def rules(self) -> RuleForecast | None:
        """Sample-and-match beside weighing drawn children."""
        if self.weighing is None or not any(self.counts):
            return None
        weighed = [total / count for total, count in zip(self.weighed, self.counts) if count]
        return RuleForecast(self.branches, [sum(hits[: self.branches]) for hits in self.hits], weighed)

    def observe(self, round: Round) -> None:
        """Add each child's chance of being kept at every place that was really reached."""
        for b in range(len(round.counts) if self.rollout is not None else 0):  # None: the drafter drafts by itself
            drafted = int((round.tree.valid & round.tree.emitted)[b].sum()) > 1  # else nothing was ready to draft
            rate: Any = 1
            for level in range(min(int(round.counts[b]), len(self.levels)) if drafted else 0):
                logits = round.logits[b, level]
                siblings, q = self._siblings(logits, self.levels[level][b], level, self.drawing)
                self._judge(siblings, q, logits, level, rate)
                if level + 1 < len(self.levels):
                    rate = self.rule.rate_after(siblings.p, q, int(round.tree.tokens[b, level + 1]), rate)
                if self.weighing is not None:
                    how: Drawing = "without_replacement", self.weighing.temperature
                    drawn, _ = self._siblings(logits, self.levels[level][b], level, how)
                    drawn = replace(drawn, tokens=drawn.tokens[: self.branches])
                    self.weighed[level] += sum(map(float, self.weighing.chances(drawn)))
                self.counts[level] += 1

    def _judge(self, siblings: Siblings, q: Tensor, logits: Tensor, level: int, rate: Any) -> None:
        """Add what the rule says of siblings, and how alike p and q are."""
        chances = [float(chance) for chance in self.rule.chances(siblings, rate)]
        self.sums[level, : len(chances)] += torch.tensor(chances, dtype=torch.float64)
        p = siblings.p if self.rule.is_random else logits.double().softmax(-1)
        self.overlaps[level] += float(torch.minimum(p, q).sum())
        self.firsts[level] += int(q.argmax() == logits.argmax())

    def _siblings(self, logits: Tensor, log_q: Tensor, level: int, drawing: Drawing) -> tuple[Siblings, Tensor]:
        """Children as a builder would choose or draw them, and the drafter's whole distribution over target ids."""
        assert self.rollout is not None
        children, temperature = drawing
        p = self.rule.distribution(logits)
        width = min(self.width, len(log_q))
        scores, log_q = log_q, (log_q.double() / temperature).log_softmax(-1)
        every = self.rollout.to_target(torch.arange(len(log_q), device=log_q.device))
        q = torch.zeros_like(p).scatter(0, every, log_q.exp())
        if children == "deterministic":
            return Siblings(self.rollout.to_target(scores.topk(width).indices).tolist(), p, None), q
        source = generator(DRAFT, self.builder.seed, level, self.counts[level])
        if children == "top_and_sampled":
            noise = gumbel((len(log_q),), source).to(log_q.device)
            ids, _, rest = top_and_sampled(log_q.exp(), width, noise)
            return Siblings(self.rollout.to_target(ids).tolist(), p, torch.zeros_like(p).scatter(0, every, rest)), q
        drop = children == "without_replacement"
        if drop:
            drawn = (log_q + gumbel((len(log_q),), source).to(log_q.device)).topk(width).indices
        else:
            drawn = torch.multinomial(log_q.exp().cpu(), width, replacement=True, generator=source).to(log_q.device)
        return Siblings(self.rollout.to_target(drawn).tolist(), p, q, drop), q


class Known(TreeBuilder):
    """The same chain for rounds that ask the device nothing: what is known is there beforehand, and nothing is noted."""

    name = "known"
    is_chain = True
    is_fixed = True
    keeps_drafted = True

    def __init__(self, forced: Forced) -> None:
        self.forced, self.depth, self.budget, self.drafted = forced, forced.depth, forced.budget, forced.drafted
        self.texts: dict[tuple[int, int], Tensor] = {}  # by size, always in one place; beyond a text's end there are zeros

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        batch, length = prefix.tokens.shape
        if not prefix.round:
            texts = [self.forced.sequences[row][:length] for row in prefix.sequence_ids.tolist()]
            text = torch.tensor([text + [0] * (length - len(text)) for text in texts], device=prefix.tokens.device)
            self.texts.setdefault((batch, length), torch.empty_like(text)).copy_(text)
        depth = self.reach(rollout)
        places = prefix.lengths[:, None] + 1 + torch.arange(depth, device=prefix.tokens.device)
        tokens = self.texts[batch, length].gather(1, places.clamp(max=length - 1))
        rollout.start()
        for level in range(depth - 1):
            rollout.extend(tokens[:, level : level + 1], torch.full_like(tokens[:, :1], level))
        return TokenTree.chain(torch.cat([prefix.root[:, None], tokens], dim=1))


def measure_latency(
    target: Target, drafter: Drafter, prompts: list[list[int]], builder: TreeBuilder, longest: int, repeats: int = 5
) -> Latency:
    """Time verification and draft steps over up to the builder's budget of nodes, behind the shortest prompt, and behind the
    longest one said again and again until it has `longest` tokens: attention over a long text costs more for every node."""
    sizes = [size for size in SIZES if size < builder.budget] + [builder.budget]
    verify: dict[int, dict[int, float]] = {}
    step: dict[int, dict[int, float]] = {}
    starts: list[float] = []
    limit = 2 * len(sizes) * (repeats + 1)  # rounds that emit one token, and as many again for lucky ones or empty drafts
    most = max(prompts, key=len)
    long = (most * -(-longest // len(most)))[: max(longest, len(most))]
    fitting = [prompt[: max(1, target.max_length - limit)] for prompt in (min(prompts, key=len), long)]
    for prompt in {len(prompt): prompt for prompt in fitting}.values():
        probe = Probe(sizes, builder.depth, target.head.vocab_size)
        decode(target, [prompt], Greedy(), limit, drafter, probe, ignore_eos=True)
        _check_rolled_out(builder, probe.number > 0)
        length = len(prompt) + limit // 2
        verify[length] = {size: float(np.median(times[1:] or times)) for size, times in probe.verify.items() if times}
        step[length] = {size: float(np.median(times[1:] or times)) for size, times in probe.step.items() if times} or {1: 0.0}
        starts += probe.start[1:]
    return Latency(verify, step, float(np.median(starts)), time_levels(target, min(prompts, key=len), builder.depth, repeats))


@torch.inference_mode()
def time_levels(target: Target, prompt: list[int], depth: int, repeats: int = 5) -> float:
    """Seconds that each level below the first adds to verifying a tree: a chain against as many nodes below the root. Nothing
    but where layers keep a state, which they bring up to date level by level."""
    if not target.attending.recurrent or depth < 2:
        return 0.0
    nodes = torch.zeros(1, depth + 1, dtype=torch.int64, device=target.device)
    parents = torch.zeros_like(nodes)
    parents[:, 0] = -1
    trees = TokenTree.chain(nodes), TokenTree.of(nodes, parents)
    cache = target.new_cache(1, len(prompt) + depth + 1)
    lengths = torch.tensor([len(prompt)], device=target.device)
    target.prefill(torch.tensor([prompt], device=target.device), lengths, cache, ())
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for tree, taken in zip(trees, seconds):
            wait(target.device)
            began = time.perf_counter()
            target.verify(tree, cache)
            wait(target.device)
            taken.append(time.perf_counter() - began)
            cache.forget()
    deep, flat = (float(np.median(taken)) for taken in seconds)
    return max(0.0, deep - flat) / (depth - 1)


class Probe(TreeBuilder):
    """Proposes random tokens after the root, one number of them after another, to time them. Of a drafter that copies, the
    copying is timed with them."""

    name = "probe"

    def __init__(self, sizes: list[int], depth: int, vocab_size: int) -> None:
        self.sizes, self.depth, self.vocab_size, self.number, self.asked = sizes, depth, vocab_size, 0, False
        self.budget = self.drafted = max(sizes)
        self.verify: dict[int, list[float]] = {size: [] for size in sizes}
        self.step: dict[int, list[float]] = {size: [] for size in sizes}
        self.start: list[float] = []
        self.in_steps, self.size = 0.0, 1

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        self.size = self.sizes[self.number % len(self.sizes)]
        if draft.rollout is not None or draft.continuations is None:
            return super().grow(prefix, replace(draft, join=None))
        self.in_steps, self.asked = 0.0, True
        tree = self._tree(prefix, self._random(prefix, self.vocab_size))
        return tree if draft.complete is None else draft.complete(tree)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        tokens = rollout.to_target(self._random(prefix, rollout.start().shape[-1]))
        wait(tokens.device)
        began = time.perf_counter()
        rollout.extend(tokens, torch.zeros_like(tokens))
        wait(tokens.device)
        self.in_steps = time.perf_counter() - began
        self.step[self.size].append(self.in_steps)
        self.asked = True
        return self._tree(prefix, tokens)

    def _random(self, prefix: Prefix, vocab_size: int) -> Tensor:
        source = torch.Generator().manual_seed(self.number)
        ids = [torch.randperm(vocab_size, generator=source)[: self.size] for _ in prefix.root]
        return torch.stack(ids).to(prefix.root.device)

    def _tree(self, prefix: Prefix, tokens: Tensor) -> TokenTree:
        """All of them below the root."""
        nodes = torch.cat([prefix.root[:, None], tokens[:, : self.size - 1]], dim=1)
        parents = torch.zeros_like(nodes)
        parents[:, 0] = -1
        return TokenTree.of(nodes, parents)

    def observe(self, round: Round) -> None:
        if not self.asked:
            return  # the drafter drafts by itself
        self.asked = False
        if int((round.tree.valid & round.tree.emitted)[0].sum()) < self.size:
            return  # it had nothing ready: the size comes again
        self.number += 1
        self.start.append(round.seconds["draft"] - self.in_steps)
        self.verify[self.size].append(round.seconds["verify"] + round.seconds["accept"])


def _check_rolled_out(builder: TreeBuilder, rolled_out: bool) -> None:
    if not rolled_out:
        raise UserError(
            f"tree={builder.name}: it is prepared by watching the drafter draft step by step, and this drafter copies text; "
            "use tree=chain"
        )
