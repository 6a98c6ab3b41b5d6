"""The round and the loop around it: draft, verify, accept, commit. Shapes: B batch, N nodes, P path
length, V vocabulary.

Autoregressive decoding is the same loop with a tree of one node, so a speedup compares two runs of
one engine. Everything else wraps this loop: a runner times the parts of a round or captures them in
CUDA graphs, a guard and pruning wrap the drafter, a recorder wraps the tree builder, and a callback
reads the generations between rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter, Drafts, drafting_cost, prefill_prompts
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features, Layer
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.models.threads import ThreadTuner
from spectrain.trees.base import RootOnlyBuilder, RoundPlan, RoundPolicy, RoundResult, TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .acceptance import AcceptanceRule
from .generation import (
    ROUND_PARTS,
    DecodingSteps,
    Generation,
    PartTimer,
    RoundRecord,
    no_callback,
    record_seconds,
    run_to_end,
)

# Pads the stop tokens; it equals no token.
NO_TOKEN = -1


@dataclass(frozen=True)
class RoundOutcome:
    """The results of one round."""

    tree: TokenTree
    logits: Tensor  # [B, N, V]
    emitted_tokens: Tensor  # [B, P]
    num_emitted: Tensor  # [B] valid tokens of each row
    path: Tensor  # [B, P] accepted nodes


def run_round(
    context: Context, drafter: Drafts, builder: TreeBuilder, rule: AcceptanceRule
) -> Iterator[RoundOutcome | None]:
    """Run one round of speculative decoding; yield after phases 2, 3 and 5, so that a runner can
    time or capture each part.
    """
    # 1. Draft: the drafter proposes a rollout, ready continuations, or both.
    draft = drafter.draft(context)
    # 2. Grow: the builder decides which of these nodes are verified.
    tree = builder.grow(context, draft)
    yield None
    # 3. Verify: the target runs all nodes in one forward.
    verified = drafter.verify(context, tree)
    yield None
    # 4. Accept: the rule chooses a path and the token that follows it.
    # Rules that draw nothing read no positions.
    positions = context.positions(tree) + 1 if rule.is_random else tree.depths
    accepted = rule.accept(tree, verified, context.sequence_ids, positions)
    if context.cache.bound is None:
        accepted = accepted.trim_padding()
    # 5. Commit: caches, text and features keep the accepted path and drop all other nodes.
    emitted, counts = context.commit(tree, verified, accepted)
    drafter.commit(context, accepted)
    assert verified.logits is not None
    yield RoundOutcome(tree, verified.logits, emitted, counts, accepted.path)


@torch.inference_mode()
def decode_steps(runner: Runner, request: Request) -> DecodingSteps:
    """Continue every prompt round by round; yield the generations after prefill and after every
    host synchronization.
    """
    stop_ids = request.stop_ids
    limit = request.max_new_tokens
    generations = [
        Generation(prompt, batch_size=len(request.prompts)) for prompt in request.prompts
    ]
    start = time.perf_counter()
    for generation, token in zip(generations, runner.prefill(request)):
        generation.emit_tokens([token], stop_ids, limit)
    prefill_seconds = time.perf_counter() - start
    yield generations
    while not all(generation.is_done for generation in generations):
        tokens_left = max(
            limit - len(generation.output) for generation in generations if not generation.is_done
        )
        for records, seconds in runner.run_rounds(tokens_left):
            for generation, record in zip(generations, records):
                if not generation.is_done:
                    generation.record_round(record, seconds)
                    generation.emit_tokens(record.tokens, stop_ids, limit)
        yield generations
    record_seconds(generations, prefill_seconds)


class NullDrafter:
    """Drafts nothing, so that the loop decodes autoregressively."""

    def draft(self, context: Context) -> Draft:
        return Draft()

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return context.verify(tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        """Do nothing: there is no draft state."""


@dataclass(frozen=True)
class Request:
    """The prompts to continue and their limits."""

    prompts: list[list[int]]
    max_new_tokens: int
    sequence_ids: list[int]  # keys of the random draws of each text
    stop_ids: frozenset[int]  # tokens that end a text, such as EOS

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.prompts))


class Runner(Protocol):
    """Runs rounds one by one, or several between two host synchronizations."""

    def prefill(self, request: Request) -> list[int]:
        """Run the prompts and return the first new token of each, which belongs to no round."""

    def run_rounds(self, tokens_left: int) -> list[tuple[list[RoundRecord], dict[str, float]]]:
        """Run the next rounds, at least one; no text emits more than `tokens_left` further tokens.

        Returns, per round, one record per text and the seconds of each part.
        """


class EagerRunner:
    """Runs and times one round after the other, from Python."""

    def __init__(
        self,
        target: Target,
        rule: AcceptanceRule,
        drafter: Drafter | None = None,
        builder: TreeBuilder | None = None,
        threads: ThreadTuner | None = None,
    ) -> None:
        self.target, self.rule, self.drafter = target, rule, drafter
        # Chooses the number of threads of a round; null leaves it as it is.
        self.threads = threads
        self.builder = RootOnlyBuilder() if drafter is None or builder is None else builder
        self.round_drafter: Drafts = NullDrafter() if drafter is None else drafter
        self.policy: RoundPolicy = self.builder.round_policy
        # How the next round runs; rounds that nothing plans run alike.
        self.plan = RoundPlan()
        self.extra_slots = 0  # cache slots beyond those that a round needs

    def follow_plan(self, plan: RoundPlan) -> None:
        """Run the next round by this plan, and all further ones without the drafter if the plan
        does not keep it.
        """
        self.plan = plan
        if not plan.keeps_drafter:
            self.drafter = None
            self.round_drafter = NullDrafter()
            self.builder = RootOnlyBuilder()

    def prefill(self, request: Request) -> list[int]:
        self.context = prefill_context(
            self.target, self.rule, request, self.drafter, self.builder, self.extra_slots
        )
        return self.context.root.tolist()

    def run_rounds(self, tokens_left: int) -> list[tuple[list[RoundRecord], dict[str, float]]]:
        if self.threads is not None:
            self.threads.set_threads()
        clock = PartTimer(self.target.device)
        parts = run_round(self.context, self.round_drafter, self.builder, self.rule)
        for part in ROUND_PARTS[:-1]:
            with clock(part):
                outcome = next(parts)
        assert outcome is not None
        stats = outcome.tree.size_stats
        numbers = torch.cat(
            [outcome.num_emitted[:, None], stats, outcome.emitted_tokens], dim=1
        ).tolist()  # the only synchronisation
        num_stats = 1 + stats.shape[1]
        records = [
            RoundRecord(row[num_stats : num_stats + row[0]], *row[1:num_stats], plan=self.plan)
            for row in numbers
        ]
        seconds, work_seconds = clock.finish_round()
        if self.threads is not None:
            self.threads.record_step(sum(seconds.values()))
        result = RoundResult(
            outcome.tree, outcome.logits, outcome.num_emitted, work_seconds, outcome.path
        )
        self.policy.record(self.plan, result)
        if self.plan.is_observed:
            self.builder.observe(result)
        return [(records, seconds)]


def decode(
    target: Target,
    prompts: list[list[int]],
    rule: AcceptanceRule,
    max_new_tokens: int,
    drafter: Drafter | None = None,
    builder: TreeBuilder | None = None,
    sequence_ids: list[int] | None = None,
    ignore_eos: bool = False,
) -> list[Generation]:
    """Continue every prompt, without a drafter autoregressively. `sequence_ids` key the random
    draws of each text.
    """
    request = make_request(target, prompts, max_new_tokens, sequence_ids, ignore_eos)
    return run_to_end(
        decode_steps(EagerRunner(target, rule, drafter, builder), request), no_callback
    )


def make_request(
    target: Target,
    prompts: list[list[int]],
    max_new_tokens: int,
    sequence_ids: list[int] | None = None,
    ignore_eos: bool = False,
) -> Request:
    """Make a request. Without `sequence_ids`, the texts are numbered from 0."""
    stop_ids: frozenset[int] = frozenset() if ignore_eos else target.stop_ids
    return Request(
        prompts,
        max_new_tokens,
        list(range(len(prompts))) if sequence_ids is None else sequence_ids,
        stop_ids,
    )


def prefill_context(
    target: Target,
    rule: AcceptanceRule,
    request: Request,
    drafter: Drafter | None,
    builder: TreeBuilder,
    extra_slots: int = 0,
) -> Context:
    """Make a context with room for the request and run its prompts."""
    check_context_length(target, request)
    capacity = (
        request.longest_prompt
        + request.max_new_tokens
        + 3
        + slots_per_round(drafter, builder)
        + extra_slots
    )
    cache = target.new_cache(len(request.prompts), capacity)
    context = make_context(
        target, builder, cache, required_layers(drafter, rule), len(request.stop_ids)
    )
    run_prompts(context, drafter, rule, request)
    return context


def check_context_length(target: Target, request: Request) -> None:
    """Raise a UserError where a prompt and its answer exceed the target's context length."""
    if request.longest_prompt + request.max_new_tokens > target.max_length:
        raise UserError(
            f"prompt of {request.longest_prompt} tokens: with {request.max_new_tokens} new ones "
            f"it is longer than the context of {target.name} ({target.max_length} tokens); "
            "shorten it or lower eval.max_new_tokens"
        )


def slots_per_round(drafter: Drafter | None, builder: TreeBuilder) -> int:
    """Count the cache slots that a round needs after the committed tokens: a path, the tree, the
    nodes that a drafter runs in the target's cache, and mask nodes."""
    nodes = builder.depth + builder.budget + builder.max_drafted
    return nodes if drafter is None else nodes + drafting_cost(drafter).extra_nodes(builder)


def required_layers(drafter: Drafter | None, rule: AcceptanceRule) -> tuple[Layer, ...]:
    """List the features that a round needs of the target: first those of the drafter, then those
    of the rule.
    """
    return tuple(dict.fromkeys((*(() if drafter is None else drafter.layers), *rule.layers)))


def make_context(
    target: Target,
    builder: TreeBuilder,
    cache: TreeCache,
    layers: tuple[Layer, ...],
    num_stops: int,
) -> Context:
    """Make a context over an empty cache, with as many token slots as the cache has and with
    `num_stops` stop tokens.
    """
    zeros = torch.zeros_like(cache.lengths)
    tokens = zeros.new_zeros(len(zeros), cache.max_length)
    no_features = Features(tokens[:, :0], layers, torch.zeros(0, device=target.device))
    stops = zeros.new_full((num_stops,), NO_TOKEN)
    return Context(
        target=target,
        builder=builder,
        cache=cache,
        tokens=tokens,
        sequence_ids=zeros,
        layers=layers,
        new_features=no_features,
        num_new=zeros.clone(),
        active=zeros.bool(),
        tokens_left=zeros.clone(),
        stops=stops,
    )


def run_prompts(
    context: Context, drafter: Drafter | None, rule: AcceptanceRule, request: Request
) -> None:
    """Run the prompts into the empty cache and append the first new token, which the rule
    chooses from their last logits.
    """
    device = context.target.device
    width = request.longest_prompt
    context.sequence_ids.copy_(torch.tensor(request.sequence_ids))
    context.stops.copy_(
        torch.tensor(
            [*sorted(request.stop_ids), *[NO_TOKEN] * (len(context.stops) - len(request.stop_ids))]
        )
    )
    padded = torch.tensor(
        [prompt + [0] * (width - len(prompt)) for prompt in request.prompts], device=device
    )
    lengths = torch.tensor([len(prompt) for prompt in request.prompts], device=device)
    context.texts = request.prompts
    features = prefill_prompts(drafter, context, padded, lengths)
    assert features.logits is not None
    context.tokens[:, :width] = padded
    first = rule.choose_tokens(features.logits, context.sequence_ids, lengths[:, None])
    context.tokens.scatter_(1, lengths[:, None], first)
    context.new_features = features
    context.num_new = lengths
    context.tokens_left.fill_(request.max_new_tokens - 1)
    context.active.copy_(~(first == context.stops).any(-1) & (context.tokens_left > 0))
    context.temperature = 1.0 if rule.sampling_settings is None else rule.sampling_settings[0]
    context.round = 0
    context.deferred = []
    context.partial = None
