"""The round, and the loop around it: draft, verify, accept, commit. Shapes: B batch, N nodes, P path length.

Autoregressive decoding is the same loop with a tree of one node, so a speedup compares like with like.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .acceptance import AcceptanceRule
from .cache import TreeCache
from .drafters.base import Drafter
from .errors import UserError
from .features import Features, Layer
from .guard import Guard
from .machine import wait
from .pruning import Pruning
from .shallow import Shallow
from .shapes.base import Round, TreeBuilder
from .target import Target
from .tree import TokenTree


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
    shallow: Shallow | None = None  # this round's nodes that a part of the target has run already

    @property
    def root(self) -> Tensor:
        """The newest token of each row [B], chosen and not yet run."""
        return self.tokens.gather(1, self.cache.lengths[:, None])[:, 0]

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
        context = _prefill(target, prompts, rule, max_new_tokens, layers, builder, keys, extra_nodes)
    prefill = clock.seconds["prefill"]
    stop_ids: frozenset[int] = frozenset() if ignore_eos else target.stop_ids
    for generation, token in zip(generations, context.root.tolist()):
        _emit(generation, [token], stop_ids, max_new_tokens)
    clock.lap()
    while not all(generation.done for generation in generations):
        asked = drafter if guard is None or guard.drafts() else None
        with clock("draft"):
            if asked is None or builder is None:
                tree = TokenTree.chain(context.root[:, None])
            else:
                context.catch_up()
                tree = asked.propose(context, builder)
        pruned = judged = torch.zeros_like(keys)
        proposed = tree.depths * (tree.valid & tree.emitted)
        with clock("verify"):
            if asked is not None and pruning is not None:
                before = tree.valid.sum(1)
                tree = pruning(context, tree, layers)
                pruned, judged = before - tree.valid.sum(1), pruning.judged
            seen = target.verify(tree, context.cache, layers) if asked is None else asked.verify(context, tree)
        with clock("accept"):
            assert seen.logits is not None
            positions = context.cache.lengths[:, None] + tree.depths + 1
            accepted = rule(tree, seen.logits, keys, positions)
            emitted = accepted.emitted(tree)
            context.shallow = None
            active = torch.tensor([not generation.done for generation in generations], device=target.device)
            counts = accepted.counts * active
            _commit(context, seen, accepted.path, counts, emitted, asked is not None)
            if asked is not None:
                asked.commit(context, accepted)
        depths, nodes = proposed.amax(1).tolist(), tree.valid.sum(1).tolist()
        idle = (tree.valid & ~tree.emitted).sum(1)
        extra = zip(idle.tolist(), pruned.tolist(), judged.tolist())
        rounds = list(zip(generations, emitted.tolist(), counts.tolist(), depths, nodes, extra))
        seconds = clock.lap()
        for generation, tokens, count, depth, size, (drafting, left, asked_of) in rounds:
            if not generation.done:
                generation.accepted.append(count)
                generation.depths.append(depth)
                generation.nodes.append(size)
                generation.idle.append(drafting)
                generation.pruned.append(left)
                generation.judged.append(asked_of)
                generation.times.append(seconds)
                generation.cut = _emit(generation, tokens[:count], stop_ids, max_new_tokens)
        if asked is not None and builder is not None:
            builder.observe(Round(tree, seen.logits, counts, seconds))
        if guard is not None:
            cost = sum(seconds.values()) if guard.cost is None else guard.cost(max(nodes))
            guard.record(asked is not None, float(counts.sum() / active.sum()), cost, bool((proposed.sum(1) * active).any()))
    longest = max((generation.times for generation in generations), key=len)
    total = {part: sum(times[part] for times in longest) for part in PARTS}
    for generation in generations:
        generation.seconds = {"prefill": prefill, **total}
    return generations


def _prefill(
    target: Target,
    prompts: list[list[int]],
    rule: AcceptanceRule,
    max_new_tokens: int,
    layers: tuple[Layer, ...],
    builder: TreeBuilder | None,
    rows: Tensor,
    extra_nodes: int,
) -> Context:
    """Run the prompts; the first token is chosen from their last logits and belongs to no round."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    longest = int(lengths.max())
    if longest + max_new_tokens > target.max_length:
        raise UserError(
            f"prompt of {longest} tokens: with {max_new_tokens} new ones it is longer than the context of {target.name} "
            f"({target.max_length} tokens); shorten it or lower eval.max_new_tokens"
        )
    depth, budget, drafted = (0, 1, 0) if builder is None else (builder.depth, builder.budget, builder.drafted)
    # A drafter may draft in the target's cache, so what it gives to a rollout counts beside the tree.
    capacity = longest + max_new_tokens + depth + budget + drafted + extra_nodes + 3
    tokens = torch.zeros(len(prompts), capacity, dtype=torch.int64, device=target.device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=target.device)
    cache = target.new_cache(len(prompts), capacity)
    seen = target.prefill(tokens[:, :longest], lengths, cache, layers)
    assert seen.logits is not None
    first = rule.choose(seen.logits, rows, lengths[:, None])
    tokens.scatter_(1, lengths[:, None], first)
    return Context(target, cache, tokens, rows, seen, lengths)


def _commit(context: Context, seen: Features, path: Tensor, counts: Tensor, emitted: Tensor, drafted: bool) -> None:
    """Move the accepted path into the cache and its tokens behind the committed ones."""
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    slots = context.cache.lengths[:, None] + 1 + steps
    keep = steps < counts[:, None]
    slots = slots.clamp(max=context.tokens.shape[1] - 1)
    context.tokens.scatter_(1, slots, torch.where(keep, emitted, context.tokens.gather(1, slots)))
    context.cache.commit(path, counts)
    fresh = seen.gather(path)
    if drafted:
        context.fresh, context.counts = fresh, counts
        context.round += 1
    else:
        context.waiting.append((fresh, counts))


def _emit(generation: Generation, tokens: list[int], stop_ids: frozenset[int], limit: int) -> bool:
    """Add a round's tokens, up to EOS or the limit; whether that cut the round short."""
    for position, token in enumerate(tokens, 1):
        generation.output.append(token)
        if token in stop_ids or len(generation.output) >= limit:
            generation.done = True
            return position < len(tokens)
    return False
