"""What a tree builder is given and gives. Shapes: B batch, F frontier nodes, K children of a node, V draft vocabulary.

A drafter hands over a `Draft`: how to go on drafting, as a `Rollout`, or ready continuations. A builder makes a TokenTree of
it and knows no family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.errors import UserError
from spectrain.kernels import counter
from spectrain.kernels.counter import fold_key, gumbel_noise
from spectrain.randomness import DRAFT

from .measurements import Calibration
from .token_tree import Children, TokenTree
from .trie import Trie

NEG_INF = float("-inf")
MIN_PROB = 1e-20  # chance of a token that can be drawn; far below what a draw meets, far above where float32 ends


class Prefix(Protocol):
    """The committed texts that trees hang below, as a builder sees them."""

    @property
    def root(self) -> Tensor:
        """The newest token of each text [B], chosen and not yet run."""

    @property
    def lengths(self) -> Tensor:
        """Committed tokens of each text [B], the root left out."""

    @property
    def longest(self) -> int:
        """The largest of them, or its bound, known without a host-device synchronisation."""

    @property
    def tokens(self) -> Tensor:
        """[B, capacity] the committed tokens and, behind them, the root."""

    @property
    def sequence_ids(self) -> Tensor:
        """[B] the key of each text's random draws."""

    @property
    def round(self) -> int:
        """Drafts made so far."""


class Rollout(ABC):
    """One round of a drafter that drafts step by step."""

    draft_ids: Tensor | None = None  # [V] the target id of every draft id; None where they are the same
    depth_limit: int | None = None  # how deep the drafter can draft, such as its number of heads; None for any depth
    stop_mask: Tensor | None = None  # [B, F] of the nodes given last, those below which it advises to draft nothing
    accept_probs: Tensor | None = (
        None  # [B, F] of the nodes given last, the chance that a token drawn below is kept, if it knows
    )

    @abstractmethod
    def start(self) -> Tensor:
        """Log-probabilities [B, 1, V] of the token after the root."""

    @abstractmethod
    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Log-probabilities [B, F, V] after new nodes: their tokens [B, F] in target ids, and their parents [B, F] by
        the order in which nodes were given, the root being 0."""

    def extend_path(self, tokens: Tensor, parents: Tensor, num_given: int) -> Tensor:
        """The same [B, F, V] of nodes that hang below each other, `tokens` [B, F], the first of them below `parents` [B], where
        `given` nodes were given before, the root one of them. Some drafters run them in one step."""
        found, kept = [], []
        for place, column in enumerate(tokens.split(1, dim=1)):
            found.append(self.extend(column, parents[:, None]))
            kept.append((self.accept_probs, self.stop_mask))
            parents = torch.full_like(parents, num_given + place)
        survival, closed = zip(*kept)
        self.accept_probs = None if self.accept_probs is None else torch.cat(survival, dim=1)
        self.stop_mask = None if self.stop_mask is None else torch.cat(closed, dim=1)
        return torch.cat(found, dim=1)

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return ids if self.draft_ids is None else self.draft_ids[ids]


@dataclass(frozen=True)
class Draft:
    """What a drafter hands over in a round: how to draft from here, or continuations that are ready."""

    rollout: Rollout | None = None
    continuations: list[Trie] | None = None  # of every text, below its root: what may follow it, by weight
    merge_copies: Callable[[TokenTree], list[Trie]] | None = (
        None  # what a rollout drafted and what else is known, by calibrated chance
    )
    copies_after: Callable[[int, list[int]], Trie] | None = (
        None  # what may follow a row's text and further tokens behind its root
    )
    add_mask_nodes: Callable[[TokenTree], TokenTree] | None = None  # adds to the tree what only drafts, such as mask tokens


class BranchVisibility:
    """Nodes that a drafter runs behind a cache which holds the root: of each its depth, and which nodes it sees, in the order
    in which they were given."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.depths = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # [B, nodes given so far]
        self.visible = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # [B, nodes, nodes without the root]

    def add_nodes(self, parents: Tensor) -> tuple[Tensor, Tensor]:
        """The depth [B, F] of new nodes below `parents` [B, F], and which nodes they see, [B, F, M], themselves the last."""
        batch, num_new = parents.shape
        depth = self.depths.gather(1, parents) + 1
        above = self.visible.gather(1, parents[..., None].expand(-1, -1, self.visible.shape[-1]))
        itself = torch.eye(num_new, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
        return depth, self._append_nodes(depth, torch.cat([above, itself], dim=2))

    def add_path(self, parents: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The same of `count` nodes that hang below each other, the first of them below `parents` [B]."""
        batch, steps = len(parents), torch.arange(1, count + 1, device=parents.device)
        depth = self.depths.gather(1, parents[:, None]) + steps
        above = self.visible.gather(1, parents[:, None, None].expand(-1, 1, self.visible.shape[-1])).expand(-1, count, -1)
        path = (steps[:, None] >= steps).expand(batch, -1, -1)
        return depth, self._append_nodes(depth, torch.cat([above, path], dim=2))

    def _append_nodes(self, depth: Tensor, visible: Tensor) -> Tensor:
        self.visible = torch.cat([F.pad(self.visible, (0, depth.shape[1])), visible], dim=1)
        self.depths = torch.cat([self.depths, depth], dim=1)
        return visible


class DepthRollout(Rollout):
    """One round of a drafter for which a node's depth and own token say all: what came before them makes no difference."""

    def __init__(self, root: Tensor, depth_limit: int) -> None:
        self.root, self.depth_limit = root, depth_limit  # [B]
        self.depths = torch.zeros(len(root), 1, dtype=torch.int64, device=root.device)  # of every node given so far
        self.max_level = 0  # no node is deeper: as often something was given below the root

    @abstractmethod
    def log_probs_at(self, depth: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities [B, F, V] after nodes of a depth [B, F], which is below the limit, and with these tokens [B, F]."""

    def start(self) -> Tensor:
        return self._clamped_log_probs(self.depths, self.root[:, None])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        depth = self.depths.gather(1, parents) + 1
        self.depths = torch.cat([self.depths, depth], dim=1)
        self.max_level += 1
        return self._clamped_log_probs(depth, tokens)

    def _clamped_log_probs(self, depth: Tensor, tokens: Tensor) -> Tensor:
        assert self.depth_limit is not None
        return self.log_probs_at(
            depth.clamp(max=self.depth_limit - 1), tokens
        )  # below it nothing is asked, and nothing will be used


class MarginalRollout(DepthRollout):
    """One round of a drafter that has said all before it is asked: a node's distribution is that of its depth."""

    def __init__(self, root: Tensor, log_q: Tensor, draft_ids: Tensor | None = None) -> None:
        super().__init__(root, log_q.shape[1])
        self.log_q, self.draft_ids = log_q, draft_ids  # [B, K, V]

    def log_probs_at(self, depth: Tensor, tokens: Tensor) -> Tensor:
        return gather_by_depth(self.log_q, depth)


def gather_by_depth(values: Tensor, depth: Tensor) -> Tensor:
    """What is said of each depth, [B, K, ..], for nodes of these depths [B, F]."""
    return values.gather(1, depth[..., None].expand(-1, -1, values.shape[-1]))


@dataclass(frozen=True)
class RoundResult:
    """What a round cost and gave, for builders that learn from it."""

    tree: TokenTree
    logits: Tensor  # [B, N, target vocabulary]
    counts: Tensor  # [B] tokens emitted, 0 in rows that were done before
    seconds: dict[str, float]  # draft, verify, accept, other
    path: Tensor | None = None  # [B, P] the nodes that were kept, the root first, padded with the last one


MAX_NODES = 4096  # nodes, and so levels, of a tree: many times what any kernel or any drafter has a use for


class TreeBuilder(ABC):
    """How much to draft, and where."""

    name: str
    depth: int  # longest path below the root: the most tokens a round can accept before its bonus
    budget: int  # nodes that the target verifies at most, the root included
    max_drafted: int  # nodes at most that are given to a rollout, which its cache must hold
    children: Children = "deterministic"  # how a node's children are chosen; acceptance rules depend on it
    temperature: float = 1.0  # of the distribution that drawn children are drawn from
    seed: int = 0
    is_chain: bool = False
    drafts_by_level: bool = True  # nodes that are given to a rollout together are equally deep
    verifies_all: bool = False  # every node that it gives to a rollout is in its tree
    is_fixed: bool = False  # its trees have one size and depth, found without a host-device synchronisation
    uses_latency: bool = False  # what it drafts depends on measured times
    learns_from_trees: bool = False  # it learns from the trees that were verified, so pruned ones mislead it
    requirements: tuple[str, ...] = ()  # what it must be prepared with: "hits", "latency", "rehearsal" (rounds to learn from)

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        """A round's tree: grown along a rollout, made of ready continuations, or the best of both."""
        if draft.rollout is None:
            tree = merge_tries(prefix, draft.continuations or [], self)
        else:
            tree = self.expand(prefix, draft.rollout)
            if draft.merge_copies is not None:
                tree = merge_tries(prefix, draft.merge_copies(tree), self)
        return tree if draft.add_mask_nodes is None else draft.add_mask_nodes(tree)

    @abstractmethod
    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        """Draft a tree below `prefix.root`, step by step."""

    def wants_drafter(self, prefix: Prefix, tries: list[Trie]) -> bool:
        """Whether a drafter is to be asked where so much is known without it."""
        return True

    def copy_budget(self, prefix: Prefix, tries: list[Trie]) -> int:
        """How many nodes of ready continuations are verified, the root included."""
        return self.budget

    def prepare(self, calibration: Calibration) -> None:
        """Called once before decoding, with what was measured of this target and drafter."""

    def observe(self, round: RoundResult) -> None:
        """Called after every drafted round."""

    def max_depth(self, rollout: Rollout) -> int:
        """How deep to draft: the builder's depth, or less where the drafter cannot."""
        return self.depth if rollout.depth_limit is None else min(self.depth, rollout.depth_limit)

    def sampled_variant(self, temperature: float) -> TreeBuilder | None:
        """The same trees, not prepared yet, whose children are drawn at this temperature; None where which nodes stay depends
        on what was drawn."""
        return None

    def report_settings(self) -> dict[str, object]:
        """What a report says about the tree."""
        return {"name": self.name, "depth": self.depth, "budget": self.budget, "children": self.children}

    def _check_settings(self, **least: tuple[float, float]) -> None:
        """Refuse settings below their least value, key=(value, least), and trees that no memory would hold."""
        for key, (value, lowest) in least.items():
            if not value >= lowest:
                raise UserError(f"tree.{key}={value}: use {lowest} or more")
            if value > MAX_NODES:
                raise UserError(f"tree.{key}={value}: use {MAX_NODES} or less")
        if not self.temperature > 0:
            raise UserError(f"tree.temperature={self.temperature}: use more than 0, or tree.children=deterministic")


class WrappedBuilder(TreeBuilder):
    """Another builder, and something around it: what it grows is the same unless a subclass says otherwise."""

    def __init__(self, builder: TreeBuilder) -> None:
        self.builder = builder
        for name in TreeBuilder.__annotations__:  # what a builder says of itself
            setattr(self, name, getattr(builder, name))
        self.is_fixed = False  # what is around it may look at numbers

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        return self.builder.grow(prefix, draft)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        return self.builder.expand(prefix, rollout)

    def wants_drafter(self, prefix: Prefix, tries: list[Trie]) -> bool:
        return self.builder.wants_drafter(prefix, tries)

    def copy_budget(self, prefix: Prefix, tries: list[Trie]) -> int:
        return self.builder.copy_budget(prefix, tries)

    def prepare(self, calibration: Calibration) -> None:
        self.builder.prepare(calibration)

    def observe(self, round: RoundResult) -> None:
        self.builder.observe(round)

    def report_settings(self) -> dict[str, object]:
        return self.builder.report_settings()


class RootOnlyBuilder(TreeBuilder):
    """No draft: a round is a step of autoregressive decoding."""

    name = "root"
    depth, budget, max_drafted = 0, 1, 0
    is_chain = is_fixed = verifies_all = True

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        return merge_tries(prefix, [], self)


def merge_tries(prefix: Prefix, tries: list[Trie], builder: TreeBuilder) -> TokenTree:
    """Of the trie of every text what the builder has room for, by weight; padded to the longest row. Where there is nothing
    at all, the root alone."""
    room = builder.copy_budget(prefix, tries)
    chosen = [trie.heaviest_path(builder.depth) if builder.is_chain else trie.best_nodes(builder.depth, room) for trie in tries]
    roots, width = prefix.root, max(map(len, chosen), default=1)
    if width == 1:
        return TokenTree.from_chain(roots[:, None])
    rows = []
    for root, trie, nodes in zip(roots.tolist(), tries, chosen):
        place = {node: at for at, node in enumerate(nodes)} | {-1: -1}
        padding = [0] * (width - len(nodes))
        tokens = [root, *(trie.tokens[node] for node in nodes[1:]), *padding]
        parents = [*(place[trie.parents[node]] for node in nodes), *padding]
        rows.append((tokens, parents, [at < len(nodes) for at in range(width)]))
    columns = [torch.tensor(list(part), device=roots.device) for part in zip(*rows)]  # tokens, parents, valid
    return TokenTree.from_chain(columns[0], columns[2]) if builder.is_chain else TokenTree.from_parents(*columns)


def sampling_probs(log_q: Tensor, temperature: float) -> Tensor:
    """What children are drawn from: q at a temperature, without what is all but impossible. A rule divides by what is left
    of q once likelier children are rejected, in float32, and a child that q never offers would always be kept."""
    q = (log_q / temperature).softmax(-1)
    return q.masked_fill(q < MIN_PROB, 0)


def pick_top_and_sampled(q: Tensor, width: int, noise: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each node the likeliest children, then one drawn by Gumbel `noise` [.., V] from the rest of q [.., V].

    Gives their draft ids and log q [.., K], and what the last one was drawn from [.., V]: q without the others, normalised; all
    zeros, and its log q -inf, where nothing is left. Nodes of `counts` [F] children have theirs first, and padding behind them.
    """
    best = q.topk(width, dim=-1)
    last = torch.full(q.shape[:-1], width - 1, device=q.device) if counts is None else (counts - 1).expand(q.shape[:-1])
    taken = torch.arange(width, device=q.device) < last[..., None]  # [.., K]
    rest = q.scatter(-1, best.indices, best.values.masked_fill(taken, 0))
    rest = rest / rest.sum(-1, keepdim=True).clamp(min=MIN_PROB)
    drawn = (rest.log() + noise).argmax(-1, keepdim=True)
    ids = best.indices.scatter(-1, last[..., None], drawn)
    return ids, best.values.scatter(-1, last[..., None], rest.gather(-1, drawn)).log(), rest


class GrowingTree:
    """A tree while it grows, level by level; the nodes whose distribution is known and unused are the frontier.

    A node's score is the sum of log q along its path: the drafter's own estimate that the path is kept.
    """

    def __init__(self, builder: TreeBuilder, prefix: Prefix, rollout: Rollout) -> None:
        self.builder, self.rollout = builder, rollout
        root = prefix.root
        self.tokens = root[:, None]  # [B, nodes]
        self.parents = torch.full_like(self.tokens, -1)
        self.scores = torch.zeros(self.tokens.shape, device=root.device)
        self.frontier = torch.zeros_like(self.tokens)  # [B, F] index of each frontier node
        self.rollout_index = torch.zeros_like(self.tokens)  # the same nodes, in the order given to the rollout
        self.num_rollout_nodes = 1
        self.level_start = 0  # where the newest level begins
        self.log_q = rollout.start()
        self.num_levels = self.max_width = 0
        self.draft_probs: list[tuple[Tensor, Tensor]] = []  # frontier nodes and the q that their children were drawn from
        self.key = counter.make_key(DRAFT, builder.seed, prefix.sequence_ids, prefix.lengths)  # [B] of this round's draws

    def add_children(self, width: int, allowed: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
        """Add `width` children to every frontier node; where `allowed` [B, F, K] is False they stay padding.

        counts [F]: how many of them a node will keep, its first ones, where that is less. Returns the scores [B, F * K] of this
        new level.
        """
        width = min(width, self.log_q.shape[-1])
        ids, log_q = self._pick_children(width, counts)
        scores = self.scores.gather(1, self.frontier)[..., None] + log_q
        if allowed is not None:
            scores = scores.masked_fill(~allowed[..., :width], NEG_INF)
        if self.rollout.stop_mask is not None:
            scores = scores.masked_fill(self.rollout.stop_mask[..., None], NEG_INF)
        self.num_levels, self.max_width = self.num_levels + 1, max(self.max_width, width)
        self.level_start = self.tokens.shape[1]
        self.tokens = torch.cat([self.tokens, self.rollout.to_target_ids(ids.flatten(1))], dim=1)
        self.parents = torch.cat([self.parents, self.frontier.repeat_interleave(width, dim=1)], dim=1)
        self.scores = torch.cat([self.scores, scores.flatten(1)], dim=1)
        return scores.flatten(1)

    def extend_frontier(self, keep: Tensor) -> None:
        """Make nodes `keep` [B, F] of the newest level the frontier: the drafter runs them."""
        width = (self.tokens.shape[1] - self.level_start) // self.frontier.shape[1]
        nodes = self.level_start + keep
        self.log_q = self.rollout.extend(self.tokens.gather(1, nodes), self.rollout_index.gather(1, keep // width))
        self.frontier = nodes
        new = torch.arange(self.num_rollout_nodes, self.num_rollout_nodes + keep.shape[1], device=keep.device)
        self.rollout_index = new.expand_as(keep)
        self.num_rollout_nodes += keep.shape[1]

    def select_best(self, budget: int) -> TokenTree:
        """The `budget` best-scored nodes. A path's score never rises and ties go to the shallower node, so every kept
        node has its parent."""
        return self.select_nodes(self.scores.sort(dim=1, descending=True, stable=True).indices[:, :budget].sort(dim=1).values)

    def select_nodes(self, keep: Tensor) -> TokenTree:
        """The tree of nodes `keep` [B, N], ascending and closed under parents; never-scored ones are padding."""
        renumber = torch.full_like(self.tokens, -1)
        renumber.scatter_(1, keep, torch.arange(keep.shape[1], device=keep.device).expand_as(keep))
        old = self.parents.gather(1, keep)
        parents = torch.where(old < 0, -1, renumber.gather(1, old.clamp(min=0)))
        valid = self.scores.gather(1, keep) > NEG_INF
        tokens = self.tokens.gather(1, keep)
        q = None
        if self.builder.children != "deterministic":
            batch, count = keep.shape
            q = self.log_q.new_zeros(batch, count + 1, self.log_q.shape[-1])  # the last row takes what is not kept
            rows = torch.arange(batch, device=keep.device)[:, None]
            for nodes, drawn_from in self.draft_probs:
                slots = renumber.gather(1, nodes)
                q[rows, torch.where(slots < 0, count, slots)] = drawn_from
            q = q[:, :count]
        every = torch.ones_like(valid)
        drawn = self.builder.children, q, self.rollout.draft_ids
        scores = self.scores.gather(1, keep)
        return TokenTree(tokens, parents, valid, every, *drawn, self.num_levels, self.max_width, scores=scores)

    def _pick_children(self, width: int, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draft ids [B, F, K] of children and their log q; drawn ones in the order of the draw."""
        if self.builder.children == "deterministic":
            best = self.log_q.topk(width, dim=-1)
            return best.indices, best.values
        q = sampling_probs(self.log_q, self.builder.temperature)
        keys, size = fold_key(self.key[:, None], self.frontier), q.shape[-1]  # a node's own
        if self.builder.children == "top_and_sampled":
            ids, log_q, q = pick_top_and_sampled(q, width, gumbel_noise(keys, size), counts)
            self.draft_probs.append((self.frontier, q))
            return ids, log_q
        self.draft_probs.append((self.frontier, q))
        log_q = q.log()
        if self.builder.children == "without_replacement":
            ids = (log_q + gumbel_noise(keys, size)).topk(width, dim=-1).indices
        else:
            ids = torch.stack(
                [(log_q + gumbel_noise(fold_key(keys, number), size)).argmax(-1) for number in range(width)], dim=-1
            )
        return ids, log_q.gather(-1, ids)
