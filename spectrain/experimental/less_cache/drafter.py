"""The whole target drafts for itself, reading less: a part of its keys and values, or fewer bits of them or of its weights.

Shapes: B batch, N nodes, M nodes run so far in this round, F frontier nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities, DraftingCost
from spectrain.drafters.context import Context
from spectrain.drafters.layers.copies import GrowingTexts
from spectrain.errors import UserError
from spectrain.experimental.less_cache.caches import QuantizedKV, RecentQueries, SelectedCache
from spectrain.experimental.less_cache.key_selectors import KeySelector, QuestSelector, SnapKVSelector, StreamingLLMSelector
from spectrain.experimental.less_cache.quantized_kv import Bits, QuantizedWeights
from spectrain.models.features import Features
from spectrain.models.forward_override import override_forwards
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.traffic import BytesRead, key_bytes, weight_bytes
from spectrain.trees.base import Draft, Rollout, TreeBuilder
from spectrain.trees.token_tree import AcceptedPath, TokenTree

if TYPE_CHECKING:
    from spectrain.models.target import Target

Cached = Literal["full", "window", "snap", "quest", "int8", "int4"]
Weights = Literal["full", "int8", "int4"]
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}


class SelfDraftCost(DraftingCost):
    drafter: SelfDraft

    def extra_nodes(self, builder: TreeBuilder) -> int:
        return self.drafter.guesses * (1 + builder.max_drafted)

    def weights(self, target: Target) -> nn.Module:
        return self.drafter.drafting_weights(target)

    def bytes_read(self) -> BytesRead:
        return self.drafter.reads


class SelfDraft(Drafter):
    """Drafts with all of the target's layers and verifies with all that they read, so that a draft is worth what it spares.

    `cache` is what a draft reads of the text: `budget` tokens, being the first `sinks` and the newest (window: StreamingLLM),
    those that the newest `observe` tokens look at most (snap: SnapKV, by head) or pages of `page` tokens by bounds of their
    keys (quest: Quest, by head), chosen anew every `refresh` rounds, as MagicDec (Chen et al., 2025) drafts; or everything in
    few bits (int8, int4: KIVI), by groups of `group` tokens. `weights` rounds those that a draft reads and shares the cache
    (QSpec, Zhao et al., 2024). Whatever a draft computed is forgotten: verification runs every node again, with all keys
    and whole weights, and what it writes stays.

    With `guesses`, as many tokens behind a draft step are copied from the text and run along with it; where the step's choice
    is the first of them, the next step is there already (TriForce's hierarchy, Sun et al., 2024, with copies for its smallest
    model). They change no draft, only how often the target runs.
    """

    capabilities = Capabilities(nestable=False)
    _cost_type = SelfDraftCost

    def __init__(
        self,
        target: Target,
        cache: Cached = "snap",  # what of its keys and values a draft reads
        budget: int = 256,  # tokens that a draft reads of the text
        sinks: int = 4,  # first tokens of the text that a window keeps
        observe: int = 32,  # newest tokens whose queries vote
        page: int = 16,  # tokens that are chosen together
        refresh: int = 8,  # rounds between two choices
        group: int = 32,  # tokens whose keys share a scale
        weights: Weights = "full",  # in how many bits a draft reads them
        guesses: int = 0,  # tokens copied from the text that run along behind a draft step
    ) -> None:
        super().__init__()
        for key, said, known in (("cache", cache, get_args(Cached)), ("weights", weights, get_args(Weights))):
            if said not in known:
                raise UserError(f"drafter.{key}={said}: choose from {', '.join(known)}")
        if cache == weights == "full":
            raise UserError("drafter.cache=full: with drafter.weights=full a draft reads all that its check does; change one")
        least = {"window": sinks + 1, "snap": observe + 1, "quest": page}.get(cache, 1)
        for key, value, lowest in (("budget", budget, least), ("sinks", sinks, 0), ("observe", observe, 1), ("page", page, 1),
                                   ("refresh", refresh, 1), ("group", group, 1), ("guesses", guesses, 0)):  # fmt: skip
            if value < lowest:
                raise UserError(f"drafter.{key}={value}: use {lowest} or more")
        refuse_unlike(target, cache)
        self.cache, self.bits, self.refresh, self.group, self.guesses = cache, BITS.get(weights), refresh, group, guesses
        choosers = {"window": lambda: StreamingLLMSelector(budget, sinks), "snap": lambda: SnapKVSelector(budget, observe),
                    "quest": lambda: QuestSelector(budget, page)}  # fmt: skip
        self.chooser: KeySelector | None = choosers[cache]() if cache in choosers else None
        self.texts = GrowingTexts(3)
        self.reads = BytesRead()  # by drafting, since a decoding began
        self.weight_bytes = 0  # of which in every forward
        self.queries = RecentQueries(0 if self.chooser is None else self.chooser.num_queries)
        self.coded_weights: QuantizedWeights | None = None
        self.chosen: SelectedCache | None = None
        self.coded: QuantizedKV | None = None

    def drafting_weights(self, target: Target) -> nn.Module:
        """What a draft step reads."""
        if self.bits is None:
            return nn.ModuleList([target.decoder, target.head.output])
        kept = self._coded_weights(target)
        replaced_ids = {id(linear) for linear in kept.linears}
        others = [child for child in target.decoder.modules() if not [*child.children()] and id(child) not in replaced_ids]
        read = nn.ModuleList(child for child in others if not isinstance(child, nn.Embedding))
        read.append(nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in kept.tensors))
        return read

    def _coded_weights(self, target: Target) -> QuantizedWeights:
        assert self.bits is not None
        if self.coded_weights is None:
            self.coded_weights = QuantizedWeights(target.name, list(target.layers), target.head.output, self.bits)
        return self.coded_weights

    # Drafting

    def draft(self, context: Context) -> Draft:
        if context.round == 0:
            self._begin(context)
        self._choose(context)
        if self.guesses:
            self.texts.append_committed(context)

        def forget(tree: TokenTree) -> TokenTree:
            self.reading(context).roll_back()
            return tree

        return Draft(SelfSteps(self, context), add_mask_nodes=forget)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        with context.cache.observe_queries(self.queries if self.queries.num_queries else None):
            return super().verify(context, tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        self.queries.commit(accepted.path, accepted.counts)

    def reading(self, context: Context) -> TreeCache:
        """The cache that drafts are run behind."""
        return context.cache if self.chosen is None else self.chosen

    def run(self, context: Context, tokens: Tensor, depth: Tensor, visible: Tensor) -> Tensor:
        """Log-probabilities [B, N, V] after nodes [B, N] of this depth, which see these [B, N, M + N]."""
        target, cache = context.target, self.reading(context)
        positions = (context.lengths[:, None] + depth).clamp(max=target.max_length - 1)
        plan = ForwardPlan(logits=True, positions=positions, mask=visible, cache=cache)
        with self._in_few_bits(target), cache.transform_reads(self.coded):
            logits = target.run(tokens, plan).logits
        assert logits is not None
        held, nodes = self.coded or self.chosen, tokens.shape[1]
        before = context.cache.uncommitted - nodes
        whole = (key_bytes(target, length + before, nodes) for length in context.lengths.tolist())
        self.reads += BytesRead(self.weight_bytes, sum(whole) if held is None else held.bytes_read(nodes))
        return logits.log_softmax(-1)

    @contextmanager
    def _in_few_bits(self, target: Target) -> Iterator[None]:
        if self.bits is None:
            yield
            return
        with override_forwards(self._coded_weights(target).linear_overrides()):
            yield

    def _begin(self, context: Context) -> None:
        """Other texts: nothing is known of them but their keys and values."""
        self.reads, self.chosen, self.coded = BytesRead(), None, None
        coded = None if self.bits is None else self._coded_weights(context.target)
        self.weight_bytes = weight_bytes(context.target, coded)
        if self.cache in BITS:
            self.coded = QuantizedKV(context.target, context.cache, BITS[self.cache], self.group)
        if self.chooser is None:
            return
        self.chooser.reset()
        room = self._room(context) + self.refresh * (context.builder.depth + 1)
        self.chosen = SelectedCache(context.target, context.cache, self.chooser, room)
        self.queries = RecentQueries(self.chooser.num_queries)
        self._ask_again(context)

    def _ask_again(self, context: Context) -> None:
        """Run the newest tokens once more for their queries: while the prompt was read nobody listened."""
        count = min(self.queries.num_queries, int(context.lengths.min()))
        if not count:
            return
        cache, steps = context.cache, torch.arange(count, device=context.tokens.device)
        tokens = context.tokens.gather(1, context.lengths[:, None] - count + steps)
        with cache.rewind_tokens(count), cache.observe_queries(self.queries):
            context.target.run(tokens, ForwardPlan(cache=cache))
        every = steps.expand(len(tokens), -1)
        self.queries.commit(every, torch.full_like(context.lengths, count))
        keys = sum(key_bytes(context.target, length - count, count) for length in context.lengths.tolist())
        self.reads += BytesRead(weight_bytes(context.target), keys)

    def _room(self, context: Context) -> int:
        """Nodes that a round drafts."""
        return (1 + context.builder.max_drafted) * (1 + self.guesses)

    def _choose(self, context: Context) -> None:
        """Let what drafts read be that of the newest text."""
        if self.coded is not None:
            self.reads += BytesRead(0, self.coded.quantize_committed())
        if self.chosen is None:
            return
        if context.round % self.refresh and self.chosen.has_room(self._room(context)):
            self.reads += BytesRead(0, self.chosen.copy_committed())
        else:
            self.reads += BytesRead(0, self.chosen.select_tokens(self.queries))


def refuse_unlike(target: Target, cache: Cached) -> None:
    """Stop at a target that cannot draft so."""
    if target.architecture.keeps_state:
        raise UserError(
            f"target {target.name}: its layers keep a state, which drafting for itself would change; use another drafter, such "
            "as eagle3"
        )
    if target.runs_in_lockstep:
        raise UserError(
            f"target {target.name}: processes hold it together, and what each drafts from would differ; leave out "
            "target.sharding"
        )
    if target.architecture.attends_by_masks and cache != "full":
        raise UserError(
            f"target {target.name}: its layers attend by themselves, to all that is cached; use drafter.cache=full "
            "drafter.weights=int8"
        )
    chunked = any(kept.range.chunk is not None for kept in target.architecture.attention_layers.values())
    if chunked and cache != "full":
        raise UserError(
            f"target {target.name}: its layers see chunks of the text, which a part of its cache has not; use "
            "drafter.cache=full drafter.weights=int8"
        )


class SelfSteps(Rollout):
    """One round: every node that is asked for is run once, and guesses behind it where there are any."""

    def __init__(self, drafter: SelfDraft, context: Context) -> None:
        self.drafter, self.context = drafter, context
        empty = context.root[:, None][:, :0]
        self.tokens, self.parents, self.depth = empty, empty, empty  # [B, M] of nodes that were run
        self.visible = torch.zeros(len(empty), 0, 0, dtype=torch.bool, device=empty.device)
        self.log_q: Tensor | None = None  # [B, M, V]
        self.given = empty  # [B, nodes given] which of those that were run each is

    def start(self) -> Tensor:
        root = self.context.root[:, None]
        return self._answer(root, torch.full_like(root, -1))

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._answer(tokens, self.given.gather(1, parents))

    def _answer(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B, F, V] after nodes below run ones, which are run unless all of them were guessed."""
        places = self._find(tokens, parents)
        if places is None:
            places = self.tokens.shape[1] + torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            self._run(tokens, parents)
        self.given = torch.cat([self.given, places], dim=1)
        assert self.log_q is not None
        return self.log_q.gather(1, places[..., None].expand(-1, -1, self.log_q.shape[-1]))

    def _find(self, tokens: Tensor, parents: Tensor) -> Tensor | None:
        """[B, F] where such nodes were run already."""
        if not self.drafter.guesses or not self.tokens.shape[1]:
            return None
        same = (self.tokens[:, None] == tokens[..., None]) & (self.parents[:, None] == parents[..., None])  # [B, F, M]
        return same.long().argmax(-1) if bool(same.any(-1).all()) else None

    def _run(self, tokens: Tensor, parents: Tensor) -> None:
        """Run nodes and, behind a single one, what is guessed to follow it."""
        before, asked = self.tokens.shape[1], tokens.shape[1]
        if self.drafter.guesses and asked == 1:
            guessed = self._guessed(tokens, parents)
            chain = torch.arange(before, before + guessed.shape[1], device=tokens.device).expand_as(guessed)
            tokens, parents = torch.cat([tokens, guessed], dim=1), torch.cat([parents, chain], dim=1)
        self.tokens, self.parents = torch.cat([self.tokens, tokens], dim=1), torch.cat([self.parents, parents], dim=1)
        for level in parents.split(1, dim=1) if asked == 1 else (parents,):
            self._place(level)
        visible, depth = self.visible[:, before:], self.depth[:, before:]
        log_q = self.drafter.run(self.context, tokens, depth, visible)
        self.log_q = log_q if self.log_q is None else torch.cat([self.log_q, log_q], dim=1)

    def _place(self, parents: Tensor) -> None:
        """Add nodes below `parents` [B, F], -1 for the root, to what is known of depths and of what is seen."""
        count, size = parents.shape[1], self.depth.shape[1]
        if not size:
            above, depth = self.visible.new_zeros(len(parents), count, 0), torch.zeros_like(parents)
        else:
            above = self.visible.gather(1, parents[..., None].expand(-1, -1, size))
            depth = self.depth.gather(1, parents) + 1
        itself = torch.eye(count, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
        self.visible = torch.cat([F.pad(self.visible, (0, count)), torch.cat([above, itself], dim=2)], dim=1)
        self.depth = torch.cat([self.depth, depth], dim=1)

    def _guessed(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B, guesses] what followed in the text where it read like its end, the path and the node."""
        rows: list[Any] = []
        run, above = self.tokens.tolist(), self.parents.tolist()
        asked = zip(self.drafter.texts.rows, tokens[:, 0].tolist(), parents[:, 0].tolist())
        for row, (text, token, parent) in enumerate(asked):
            path = [token] if parent >= 0 else []  # the root is the text's end
            while parent > 0:
                path.insert(0, run[row][parent])
                parent = above[row][parent]
            found = text.continue_path(path, self.drafter.guesses)
            rows.append(found or [token] * self.drafter.guesses)
        return torch.tensor(rows, device=tokens.device)
