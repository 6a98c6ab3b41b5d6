"""The round, and the loop around it: draft, verify, accept, commit. Shapes: B batch, N nodes, P path length.

Autoregressive decoding is the same loop with a tree of one node, so a speedup compares like with like.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.device import wait
from spectrain.models.features import Features, Layer
from spectrain.models.kv_cache import TreeCache
from spectrain.models.partial_forward import PartialForward
from spectrain.models.target import Target
from spectrain.trees.base import Round, TreeBuilder
from spectrain.trees.token_tree import TokenTree

from .acceptance import AcceptanceRule
from .guard import Guard
from .pruning import Pruning


@dataclass
class Context:
    """What a drafter may look at when it proposes."""

    target: Target
    cache: TreeCache  # the target's, holding every committed token
    tokens: Tensor  # [B, capacity] committed tokens and, behind them, the root
    rows: Tensor  # [B] the key of each sequence's random draws
    fresh: Features  # the target's features at the positions committed since the last proposal, [B, P]
    counts: Tensor  # [B] how many of these positions are real
    round: int = 0  # proposals made so far
    waiting: list[tuple[Features, Tensor]] = field(default_factory=list)  # the same, of later rounds without a proposal
    shallow: PartialForward | None = None  # this round's nodes that a part of the target has run already

    def new_cache(self, old: TreeCache | None, num_layers: int, extra: int) -> TreeCache:
        """An empty cache for a drafter, `extra` slots longer than the target's; the old one where its place must not change."""
        batch, length = len(self.counts), self.cache.max_length + extra
        bound = None if self.cache.bound is None else self.cache.bound + 1
        if old is not None and bound is not None:
            sizes = len(old.layers), len(old.lengths), old.max_length, old.bound
            if sizes == (num_layers, batch, length, bound):
                old.empty()
                return old
        return TreeCache(num_layers, batch, length, self.tokens.device, bound)

    @property
    def root(self) -> Tensor:
        """The newest token of each row [B], chosen and not yet run."""
        return self.tokens.gather(1, self.cache.lengths[:, None])[:, 0]

    def commit(self, seen: Features, path: Tensor, counts: Tensor, emitted: Tensor, drafted: bool) -> None:
        """Move the accepted path into the cache and its tokens behind the committed ones."""
        steps = torch.arange(emitted.shape[1], device=emitted.device)
        slots = (self.cache.lengths[:, None] + 1 + steps).clamp(max=self.tokens.shape[1] - 1)
        self.tokens.scatter_(1, slots, torch.where(steps < counts[:, None], emitted, self.tokens.gather(1, slots)))
        self.keep(seen, path, counts, drafted)

    def keep(self, seen: Features, path: Tensor, counts: Tensor, drafted: bool) -> None:
        """Commit to the cache, and hold the features of what was committed for the next proposal."""
        self.cache.commit(path, counts)
        fresh = seen.gather(path)
        if drafted:
            self.fresh, self.counts = fresh, counts
            self.round += 1
        else:
            self.waiting.append((fresh, counts))

    def catch_up(self) -> None:
        """Add what rounds without a proposal committed to what the drafter will read."""
        if self.waiting:
            parts = [(self.fresh, self.counts), *self.waiting]
            self.fresh, self.counts = Features.joined(parts), sum(counts for _, counts in parts)  # type: ignore[assignment]
            self.waiting = []

    @property
    def following(self) -> Tensor:
        """The token after each fresh position, [B, P]."""
        steps = torch.arange(self.fresh.tokens.shape[1], device=self.tokens.device)
        start = self.cache.lengths - self.counts
        return self.tokens.gather(1, (start[:, None] + 1 + steps).clamp(max=self.tokens.shape[1] - 1))


@dataclass
class Generation:
    """What decoding one prompt gave."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)  # EOS included, nothing past it or the limit
    accepted: list[int] = field(default_factory=list)  # tokens emitted in each round, before trimming
    depths: list[int] = field(default_factory=list)  # depth of the proposal in each round, pruned branches included
    nodes: list[int] = field(default_factory=list)  # nodes that the target ran in each round, padding left out
    idle: list[int] = field(default_factory=list)  # how many of them only draft, such as mask tokens
    pruned: list[int] = field(default_factory=list)  # further nodes that its first layers ran only, where branches are pruned
    judged: list[int] = field(default_factory=list)  # nodes whose children an early exit judged for that
    times: list[dict[str, float]] = field(default_factory=list)  # draft, verify, accept, other of each round of the batch
    cut: bool = False  # EOS or the limit cut the last round short
    done: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # of the whole batch: the sums of all rounds, and prefill
    batch: int = 1  # prompts decoded together

    def note(
        self, accepted: int, depth: int, nodes: int, idle: int, times: dict[str, float], pruned: int = 0, judged: int = 0
    ) -> None:
        """Add a round."""
        self.accepted.append(accepted)
        self.depths.append(depth)
        self.nodes.append(nodes)
        self.idle.append(idle)
        self.pruned.append(pruned)
        self.judged.append(judged)
        self.times.append(times)

    @property
    def decode_seconds(self) -> float:
        return sum(value for key, value in self.seconds.items() if key != "prefill")

    @property
    def finish_seconds(self) -> float:
        """Decoding time until this row was done."""
        return sum(sum(times.values()) for times in self.times)

    @property
    def whole_rounds(self) -> list[int]:
        """Tokens a round, without a last round that EOS or the limit cut short."""
        return self.accepted[:-1] if self.cut else self.accepted


Watch = Callable[[list[Generation]], None]
"""Told of the generations of a batch, as they stand after prefill and after every round; what it raises ends the decoding."""

PARTS = ("draft", "verify", "accept", "other")


class Clock:
    """Wall time of a round by part; on a GPU each part ends with a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        wait(self.device)
        self.seconds[part] = time.perf_counter() - began

    def lap(self) -> dict[str, float]:
        """The seconds of the round that ends here."""
        now = time.perf_counter()
        seconds = {part: self.seconds.get(part, 0.0) for part in PARTS[:-1]}
        seconds["other"] = now - self.began - sum(seconds.values())
        self.began, self.seconds = now, {}
        return seconds


def unwatched(generations: list[Generation]) -> None:
    """Nobody watches."""


@torch.inference_mode()
def decode(
    target: Target,
    prompts: list[list[int]],
    rule: AcceptanceRule,
    max_new_tokens: int,
    drafter: Drafter | None = None,
    builder: TreeBuilder | None = None,
    rows: list[int] | None = None,
    guard: Guard | None = None,
    ignore_eos: bool = False,
    pruning: Pruning | None = None,
    watch: Watch = unwatched,
) -> list[Generation]:
    """Continue every prompt; without a drafter, autoregressively. `rows` keys each sequence's random draws."""
    if pruning is not None:
        pruning.check(rule, target)
    generations = [Generation(prompt, batch=len(prompts)) for prompt in prompts]
    clock = Clock(target.device)
    keys = torch.tensor(list(range(len(prompts))) if rows is None else rows, device=target.device)
    layers = () if drafter is None else drafter.layers
    extra_nodes = 0 if drafter is None or builder is None else drafter.extra_nodes(builder)
    if guard is not None:
        extra_nodes += max_new_tokens  # a drafter that catches up writes as many slots in every row as the furthest behind
    with clock("prefill"):
        context = prefill(target, prompts, rule, max_new_tokens, layers, builder, keys, extra_nodes)
    prefilled = clock.seconds["prefill"]
    stop_ids: frozenset[int] = frozenset() if ignore_eos else target.stop_ids
    for generation, token in zip(generations, context.root.tolist()):
        emit(generation, [token], stop_ids, max_new_tokens)
    watch(generations)
    clock.lap()
    while not all(generation.done for generation in generations):
        asked = drafter if guard is None or guard.drafts() else None
        with clock("draft"):
            tree = propose(context, asked, builder)
        pruned = judged = torch.zeros_like(keys)
        proposed = tree.depths * (tree.valid & tree.emitted)
        with clock("verify"):
            if asked is not None and pruning is not None:
                before = tree.valid.sum(1)
                tree = pruning(context, tree, layers)
                pruned, judged = before - tree.valid.sum(1), pruning.judged
            seen = target.verify(tree, context.cache, layers) if asked is None else asked.verify(context, tree)
        with clock("accept"):
            active = torch.tensor([not generation.done for generation in generations], device=target.device)
            emitted, counts = accept(context, rule, asked, tree, seen, active)
        depths, nodes = proposed.amax(1).tolist(), tree.valid.sum(1).tolist()
        idle = (tree.valid & ~tree.emitted).sum(1)
        extra = zip(idle.tolist(), pruned.tolist(), judged.tolist())
        rounds = list(zip(generations, emitted.tolist(), counts.tolist(), depths, nodes, extra))
        seconds = clock.lap()
        for generation, tokens, count, depth, size, (drafting, left, asked_of) in rounds:
            if not generation.done:
                generation.note(count, depth, size, drafting, seconds, left, asked_of)
                generation.cut = emit(generation, tokens[:count], stop_ids, max_new_tokens)
        if asked is not None and builder is not None:
            assert seen.logits is not None
            builder.observe(Round(tree, seen.logits, counts, seconds))
        if guard is not None:
            cost = sum(seconds.values()) if guard.cost is None else guard.cost(max(nodes))
            guard.record(asked is not None, float(counts.sum() / active.sum()), cost, bool((proposed.sum(1) * active).any()))
        waited = time.perf_counter()
        watch(generations)
        clock.began += time.perf_counter() - waited  # what a watcher does is no part of a round
    return timed(generations, prefilled)


def timed(generations: list[Generation], prefilled: float) -> list[Generation]:
    """The generations of a batch, with the seconds that it took as a whole."""
    longest = max((generation.times for generation in generations), key=len)
    total = {part: sum(times[part] for times in longest) for part in PARTS}
    for generation in generations:
        generation.seconds = {"prefill": prefilled, **total}
    return generations


def propose(context: Context, drafter: Drafter | None, builder: TreeBuilder | None) -> TokenTree:
    """A round's tree: what the drafter proposes, or without one the root alone."""
    if drafter is None or builder is None:
        return TokenTree.chain(context.root[:, None])
    context.catch_up()
    return drafter.propose(context, builder)


def accept(
    context: Context, rule: AcceptanceRule, drafter: Drafter | None, tree: TokenTree, seen: Features, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Judge a verified tree and commit what is kept: the tokens [B, P] and how many each row emits, none where not active."""
    assert seen.logits is not None
    positions = context.cache.lengths[:, None] + tree.depths + 1
    accepted = rule(tree, seen.logits, context.rows, positions)
    if context.cache.bound is None:
        accepted = accepted.trimmed()
    emitted, counts = accepted.emitted(tree), accepted.counts * active
    context.shallow = None
    context.commit(seen, accepted.path, counts, emitted, drafter is not None)
    if drafter is not None:
        drafter.commit(context, accepted)
    return emitted, counts


def check_room(target: Target, longest: int, max_new_tokens: int) -> None:
    """Refuse a prompt that leaves no room for its answer."""
    if longest + max_new_tokens > target.max_length:
        raise UserError(
            f"prompt of {longest} tokens: with {max_new_tokens} new ones it is longer than the context of {target.name} "
            f"({target.max_length} tokens); shorten it or lower eval.max_new_tokens"
        )


def prefill(
    target: Target,
    prompts: list[list[int]],
    rule: AcceptanceRule,
    max_new_tokens: int,
    layers: tuple[Layer, ...],
    builder: TreeBuilder | None,
    rows: Tensor,
    extra_nodes: int,
) -> Context:
    """A context for these prompts, run."""
    longest = max(map(len, prompts))
    check_room(target, longest, max_new_tokens)
    capacity = longest + max_new_tokens + 3 + nodes_a_round(builder) + extra_nodes
    tokens = torch.zeros(len(prompts), capacity, dtype=torch.int64, device=target.device)
    cache = target.new_cache(len(prompts), capacity)
    return Context(target, cache, tokens, rows, *read(target, prompts, rule, layers, rows, cache, tokens))


def nodes_a_round(builder: TreeBuilder | None) -> int:
    """Slots that a round needs behind the committed tokens: a path of them, the tree, and beside it what a drafter that
    drafts in the target's cache gives to a rollout."""
    return 1 if builder is None else builder.depth + builder.budget + builder.drafted


def read(
    target: Target,
    prompts: list[list[int]],
    rule: AcceptanceRule,
    layers: tuple[Layer, ...],
    rows: Tensor,
    cache: TreeCache,
    tokens: Tensor,
) -> tuple[Features, Tensor]:
    """Run the prompts into an empty cache, and write them to `tokens` with the first new token, which is chosen from their last
    logits and belongs to no round; their features, and their lengths [B]."""
    longest = max(map(len, prompts))
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=target.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    seen = target.prefill(padded, lengths, cache, layers)
    assert seen.logits is not None
    tokens[:, :longest] = padded
    tokens.scatter_(1, lengths[:, None], rule.choose(seen.logits, rows, lengths[:, None]))
    return seen, lengths


def emit(generation: Generation, tokens: list[int], stop_ids: frozenset[int], limit: int) -> bool:
    """Add a round's tokens, up to EOS or the limit; whether that cut the round short."""
    for position, token in enumerate(tokens, 1):
        generation.output.append(token)
        if token in stop_ids or len(generation.output) >= limit:
            generation.done = True
            return position < len(tokens)
    return False
