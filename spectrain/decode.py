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
from .features import Features
from .shapes import TreeBuilder
from .target import Target
from .tree import TokenTree


@dataclass
class Context:
    """What a drafter may look at when it proposes."""

    target: Target
    cache: TreeCache  # the target's, holding every committed token
    tokens: Tensor  # [B, capacity] committed tokens and, behind them, the root
    fresh: Features  # the target's features at the positions committed since the last round, [B, P]
    counts: Tensor  # [B] how many of these positions are real
    round: int = 0

    @property
    def root(self) -> Tensor:
        """The newest token of each row [B], chosen and not yet run."""
        return self.tokens.gather(1, self.cache.lengths[:, None])[:, 0]

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
    nodes: list[int] = field(default_factory=list)  # depth of the proposal in each round
    cut: bool = False  # EOS or the limit cut the last round short
    done: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # draft, verify, accept, other, prefill; shared by a batch

    @property
    def decode_seconds(self) -> float:
        return sum(value for key, value in self.seconds.items() if key != "prefill")

    @property
    def whole_rounds(self) -> list[int]:
        """Tokens a round, without a last round that EOS or the limit cut short."""
        return self.accepted[:-1] if self.cut else self.accepted


class Clock:
    """Wall time by part; on a GPU each part ends with a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(("prefill", "draft", "verify", "accept", "other"), 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[part] += time.perf_counter() - began


@torch.inference_mode()
def decode(
    target: Target,
    prompts: list[list[int]],
    rule: AcceptanceRule,
    max_new_tokens: int,
    drafter: Drafter | None = None,
    builder: TreeBuilder | None = None,
    rows: list[int] | None = None,
) -> list[Generation]:
    """Continue every prompt; without a drafter, autoregressively. `rows` keys each sequence's random draws."""
    generations = [Generation(prompt) for prompt in prompts]
    clock = Clock(target.device)
    row_keys = torch.tensor(list(range(len(prompts))) if rows is None else rows)
    began = time.perf_counter()
    with clock("prefill"):
        context = _prefill(target, prompts, rule, max_new_tokens, drafter, builder, row_keys)
    stop_ids = target.stop_ids
    _record(generations, context.root[:, None].tolist(), None, stop_ids, max_new_tokens, 0)
    while not all(generation.done for generation in generations):
        with clock("draft"):
            if drafter is None or builder is None:
                tree = TokenTree.chain(context.root[:, None])
            else:
                tree = drafter.propose(context, builder)
        with clock("verify"):
            seen = target.verify(tree, context.cache) if drafter is None else drafter.verify(context, tree)
        with clock("accept"):
            assert seen.logits is not None
            positions = context.cache.lengths[:, None] + tree.depths + 1
            accepted = rule(tree, seen.logits, row_keys, positions)
            emitted = accepted.emitted(tree)
            active = torch.tensor([not generation.done for generation in generations], device=target.device)
            counts = accepted.counts * active
            _commit(context, seen, accepted.path, counts, emitted)
            if drafter is not None:
                drafter.commit(context, accepted)
        depth = (tree.depths * tree.valid).amax(1).tolist()
        _record(generations, emitted.tolist(), counts.tolist(), stop_ids, max_new_tokens, depth)
    total = time.perf_counter() - began
    clock.seconds["other"] = total - sum(clock.seconds.values())
    for generation in generations:
        generation.seconds = dict(clock.seconds)
    return generations


def _prefill(
    target: Target,
    prompts: list[list[int]],
    rule: AcceptanceRule,
    max_new_tokens: int,
    drafter: Drafter | None,
    builder: TreeBuilder | None,
    rows: Tensor,
) -> Context:
    """Run the prompts; the first token is chosen from their last logits and belongs to no round."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    longest = int(lengths.max())
    if longest + max_new_tokens > target.max_length:
        raise UserError(
            f"prompt of {longest} tokens: with {max_new_tokens} new ones it is longer than the context of {target.name} "
            f"({target.max_length} tokens); shorten it or lower eval.max_new_tokens"
        )
    depth, budget = (0, 1) if builder is None else (builder.depth, builder.budget)
    capacity = longest + max_new_tokens + depth + budget + 2
    tokens = torch.zeros(len(prompts), capacity, dtype=torch.int64, device=target.device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=target.device)
    cache = target.new_cache(len(prompts), capacity)
    seen = target.prefill(tokens[:, :longest], lengths, cache, () if drafter is None else drafter.layers)
    assert seen.logits is not None
    first = rule.choose(seen.logits, rows, lengths[:, None])
    tokens.scatter_(1, lengths[:, None], first)
    return Context(target, cache, tokens, seen, lengths)


def _commit(context: Context, seen: Features, path: Tensor, counts: Tensor, emitted: Tensor) -> None:
    """Move the accepted path into the cache and its tokens behind the committed ones."""
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    slots = context.cache.lengths[:, None] + 1 + steps
    keep = steps < counts[:, None]
    slots = slots.clamp(max=context.tokens.shape[1] - 1)
    context.tokens.scatter_(1, slots, torch.where(keep, emitted, context.tokens.gather(1, slots)))
    context.cache.commit(path, counts)
    context.fresh, context.counts = seen.gather(path), counts
    context.round += 1


def _record(
    generations: list[Generation],
    emitted: list[list[int]],
    counts: list[int] | None,
    stop_ids: frozenset[int],
    limit: int,
    depth: list[int] | int,
) -> None:
    """Add a round's tokens, up to EOS or the limit; without counts, the token of the prefill."""
    for row, generation in enumerate(generations):
        if generation.done:
            continue
        tokens = emitted[row] if counts is None else emitted[row][: counts[row]]
        if counts is not None and isinstance(depth, list):
            generation.accepted.append(len(tokens))
            generation.nodes.append(depth[row])
        for position, token in enumerate(tokens):
            generation.output.append(token)
            if token in stop_ids or len(generation.output) >= limit:
                generation.done = True
                generation.cut = counts is not None and position + 1 < len(tokens)
                break
