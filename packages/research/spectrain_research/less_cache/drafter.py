"""The full target drafts for itself and reads less: a part of its keys and values, or fewer bits of
them or of its weights.

Shapes: B batch, N nodes, M nodes run so far in this round, F frontier nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from spectrain.drafters.base import Drafter, drafting_cost
from spectrain.drafters.capabilities import Capabilities, DraftingCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.copies import GrowingTexts
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.forward_override import override_forwards
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.less_cache.bytes_read import BytesRead, key_bytes, weight_bytes
from spectrain_research.less_cache.caches import (
    DecodedKV,
    QuantizedKV,
    RecentQueries,
    SelectedCache,
    StepSelectedCache,
    hook_cache,
)
from spectrain_research.less_cache.codecs import KVCodec, MergingCodec, OutlierCodec, RotatingCodec
from spectrain_research.less_cache.key_selectors import (
    KeySelector,
    QuestSelector,
    SnapKVSelector,
    StreamingLLMSelector,
)
from spectrain_research.less_cache.quantized_kv import Bits, QuantizedWeights, round_inputs
from spectrain_research.less_cache.ragged_selectors import DefensiveKVSelector, KVCompressSelector
from spectrain_research.less_cache.retrieval_selectors import ClusterSelector, SignSelector
from spectrain_research.less_cache.steps import CopyGuesser, Guesser, HelperGuesser, SelfSteps
from spectrain_research.shared.copy_rollout import as_rollout
from spectrain_research.shared.nesting import LargerBuilder, build_nestable
from spectrain_research.shared.rewinding import rewind_tokens

DraftCache = Literal[
    "full",
    "window",
    "snap",
    "defensive",
    "compress",
    "quest",
    "signs",
    "clusters",
    "int8",
    "int4",
    "sink4",
    "turbo4",
    "merged",
]
WeightPrecision = Literal["full", "int8", "int4"]
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}


class SelfDraftCost(DraftingCost):
    drafter: SelfDraft

    def extra_nodes(self, builder: TreeBuilder) -> int:
        helper = self.drafter.helper
        return self.drafter.guesses * (1 + builder.max_drafted) + (
            0 if helper is None else drafting_cost(helper).extra_nodes(builder)
        )

    def weights(self, target: Target) -> nn.Module:
        return self.drafter.drafting_weights(target)

    def bytes_read(self) -> BytesRead:
        return self.drafter.bytes_read


class SelfDraft(Drafter):
    """Drafts with all layers of the target on a reduced cache, and verifies with the full cache.

    `cache` is what a draft reads of the text. A selection has `budget` tokens: the first `sinks`
    and the newest (window: StreamingLLM), those with most attention of the newest `observe` tokens
    (snap: SnapKV, by head; compress: KV-Compress, by one threshold for all heads; defensive:
    DefensiveKV, by the worst case), pages of `page` tokens by bounds of their keys (quest: Quest),
    tokens by the signs of their keys (signs: FIER) or clusters of keys (clusters: ClusterKV). It is
    made again every `refresh` rounds, as in MagicDec (Chen et al., 2025), or for quest in every
    draft step, as in its paper. Otherwise a draft reads all tokens in fewer bytes, by groups of
    `group` tokens: in few bits (int8, int4: KIVI; sink4: SinkQ, with exact outliers), rotated
    (turbo4: TurboQuant) or merged (merged: Chelsea). `weights` drafts with a rounded copy of the
    weights. `activations` rounds the inputs of linear layers: with a target of 4-bit weights
    (target=int4), drafts run these on 4-bit activations and verification the same weights on
    activations as they are (QSpec, Zhao et al., 2024). The keys and values of drafts are dropped:
    verification runs every node again, with all keys and full weights.

    With `guesses`, so many tokens after a draft step are guessed and run with it. Where the step's
    choice is the first of them, the next step is computed already: TriForce's hierarchy (Sun et
    al., 2024), in which the drafter `helper` drafts for the target on its reduced cache, or copies
    from the text do. Guesses change no draft, only how often the target runs.
    """

    capabilities = Capabilities(nestable=False, cost=SelfDraftCost)
    saved = SavedFiles(inner=("helper",))

    def __init__(
        self,
        target: Target,
        # Keys and values that a draft reads: full; window, snap, defensive, compress, quest, signs
        # or clusters for selected tokens; int8, int4, sink4, turbo4 or merged for all in fewer
        # bytes.
        cache: DraftCache = "snap",
        # Number of tokens of the text that a draft reads, with a selection.
        budget: int = 256,
        # Number of first tokens of the text that cache=window always contains.
        sinks: int = 4,
        # Number of newest tokens whose queries vote with cache=snap, defensive and compress.
        observe: int = 32,
        # Number of consecutive tokens that cache=quest selects together.
        page: int = 16,
        # Number of rounds between two selections; 0, with cache=quest, selects in every draft step
        # by the step's own queries.
        refresh: int = 8,
        # Number of tokens whose keys share a scale, with cache=int8, int4, sink4 and signs, or are
        # merged among themselves.
        group: int = 32,
        # Precision of the weights that a draft reads.
        weights: WeightPrecision = "full",
        # Precision of the activations that a draft multiplies with the weights of the decoder
        # layers.
        activations: WeightPrecision = "full",
        # Number of guessed tokens that run together with a draft step; 0 guesses none.
        guesses: int = 0,
        # Small drafter that guesses: a run folder, a drafter directory, or a choice, alone or with
        # settings; null copies from the text.
        helper: str | dict[str, Any] | None = None,
        # Number of tokens of each group and head that cache=sink4 leaves as they are.
        outliers: int = 2,
        # Share of the tokens of a group that cache=merged merges into others, at most 0.5.
        merge: float = 0.25,
    ) -> None:
        super().__init__()
        precisions = get_args(WeightPrecision)
        check_choice("cache", cache, get_args(DraftCache))
        check_choice("weights", weights, precisions)
        check_choice("activations", activations, precisions)
        if cache == weights == activations == "full":
            raise UserError(
                "drafter.cache=full: with drafter.weights=full and drafter.activations=full a "
                "draft is a step of verification; change one"
            )
        if cache == "quest" and refresh == 0 and guesses:
            raise UserError(
                f"drafter.guesses={guesses}: guesses would choose pages too; use 0, or "
                "drafter.refresh=8"
            )
        voting = dict.fromkeys(("snap", "defensive", "compress"), observe + 1)
        min_budget = {"window": sinks + 1, **voting, "quest": page}.get(cache, 1)
        for key, value, minimum in (
            ("budget", budget, min_budget),
            ("sinks", sinks, 0),
            ("observe", observe, 1),
            ("page", page, 1),
            ("refresh", refresh, int(cache != "quest")),
            ("group", group, 1),
            ("guesses", guesses, 0),
            ("outliers", outliers, 0),
            ("merge", merge, 0),
        ):
            if value < minimum:
                raise UserError(f"drafter.{key}={value}: use {minimum} or more")
        if merge > 0.5:
            raise UserError(
                f"drafter.merge={merge}: only every other token can be merged; use 0.5 or less"
            )
        if outliers > group:
            raise UserError(
                f"drafter.outliers={outliers}: a group has drafter.group={group} tokens; use as "
                "many or fewer"
            )
        if helper is not None and not guesses:
            raise UserError(
                "drafter.helper: it guesses what a draft step runs; give drafter.guesses=4 or so"
            )
        check_target(target, cache)
        self.helper: Drafter | None = None
        if helper is not None:
            self.helper, description = build_nestable(helper, "helper", target)
            self.helper.requires_grad_(False)
            self.layers = self.helper.layers
            self.saved = SavedFiles(inner=("helper",), settings={"helper": description})
        self.cache = cache
        self.bits = BITS.get(weights)
        self.refresh = refresh
        self.group = group
        self.guesses = guesses
        self.activation_bits = BITS.get(activations)
        self.codec = make_codec(cache, outliers, merge)
        self.selector = make_selector(cache, budget, sinks, observe, page, group)
        self.texts = GrowingTexts(3)
        self.bytes_read = BytesRead()  # bytes that drafting has read in this decoding
        self.weight_bytes = 0  # weight bytes of every forward
        # Queries of committed tokens that select; a selection in every draft step has its own.
        self.num_queries = 0 if self.selector is None or not refresh else self.selector.num_queries
        self.queries = RecentQueries(self.num_queries)
        self.quantized_weights: QuantizedWeights | None = None
        self.selected_cache: SelectedCache | None = None
        self.quantized_kv: QuantizedKV | None = None

    def drafting_weights(self, target: Target) -> nn.Module:
        """Return the modules whose weights a draft step reads."""
        if self.bits is None:
            return nn.ModuleList([target.decoder, target.head.output])
        quantized = self._get_quantized_weights(target)
        replaced_ids = {id(linear) for linear in quantized.linears}
        others = [
            child
            for child in target.decoder.modules()
            if not [*child.children()] and id(child) not in replaced_ids
        ]
        modules = nn.ModuleList(child for child in others if not isinstance(child, nn.Embedding))
        modules.append(
            nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in quantized.tensors)
        )
        return modules

    def _get_quantized_weights(self, target: Target) -> QuantizedWeights:
        assert self.bits is not None
        if self.quantized_weights is None:
            self.quantized_weights = QuantizedWeights(
                target.name, list(target.layers), target.head.output, self.bits
            )
        return self.quantized_weights

    # Drafting

    def draft(self, context: Context) -> Draft:
        if context.round == 0:
            self._start_texts(context)
        self._update_selection(context)
        if self.guesses and self.helper is None:
            self.texts.append_committed(context)

        def drop_drafts(tree: TokenTree) -> TokenTree:
            self.drafting_cache(context).roll_back()
            return tree

        return Draft(SelfSteps(self, context), add_mask_nodes=drop_drafts)

    def make_guesser(self, context: Context) -> Guesser:
        """Return what guesses in this round: copies from the text, or the helper."""
        if self.helper is None:
            return CopyGuesser(self.texts, context.tokens.device)
        larger = replace(context, builder=LargerBuilder(context.builder, 1 + self.guesses))
        return HelperGuesser(as_rollout(self.helper.draft(larger), larger))

    def verify(self, context: Context, tree: TokenTree) -> Features:
        with hook_cache(
            context.cache, query_observer=self.queries if self.queries.num_queries else None
        ):
            return super().verify(context, tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        self.queries.commit(accepted.path, accepted.counts)
        if self.helper is not None:
            self.helper.commit(context, accepted)

    def drafting_cache(self, context: Context) -> TreeCache:
        """Return the cache that drafts run on."""
        return context.cache if self.selected_cache is None else self.selected_cache

    def compute_log_probs(
        self, context: Context, tokens: Tensor, depth: Tensor, visible: Tensor
    ) -> Tensor:
        """Return log-probabilities [B, N, V] after nodes [B, N] of these depths, with their
        visibility [B, N, M + N].
        """
        target = context.target
        cache = self.drafting_cache(context)
        positions = (context.lengths[:, None] + depth).clamp(max=target.max_length - 1)
        plan = ForwardPlan(logits=True, positions=positions, mask=visible, cache=cache)
        with self._use_less_precision(target), hook_cache(cache, kv_transform=self.quantized_kv):
            logits = target.run(tokens, plan).logits
        assert logits is not None
        reduced = self.quantized_kv or self.selected_cache
        nodes = tokens.shape[1]
        earlier = context.cache.uncommitted - nodes
        full = (key_bytes(target, length + earlier, nodes) for length in context.lengths.tolist())
        self.bytes_read += BytesRead(
            self.weight_bytes, sum(full) if reduced is None else reduced.bytes_read(nodes)
        )
        return logits.log_softmax(-1)

    @contextmanager
    def _use_less_precision(self, target: Target) -> Iterator[None]:
        """Run the target's linear layers on rounded weights or activations, inside the context."""
        weights = (
            () if self.bits is None else self._get_quantized_weights(target).linear_overrides()
        )
        bits = self.activation_bits
        inputs = () if bits is None else round_inputs(list(target.layers), bits)
        with override_forwards(weights), override_forwards(inputs):
            yield

    def _start_texts(self, context: Context) -> None:
        """Prepare for new texts, of which only keys and values are available."""
        self.bytes_read = BytesRead()
        self.selected_cache = None
        self.quantized_kv = None
        quantized = None if self.bits is None else self._get_quantized_weights(context.target)
        self.weight_bytes = weight_bytes(context.target, quantized)
        if self.cache in BITS:
            self.quantized_kv = QuantizedKV(
                context.target, context.cache, BITS[self.cache], self.group
            )
        if self.codec is not None:
            self.quantized_kv = DecodedKV(context.target, context.cache, self.codec, self.group)
        if self.selector is None:
            return
        self.selector.reset()
        num_slots = self._max_nodes(context) + self.refresh * (context.builder.depth + 1)
        make_cache = SelectedCache if self.refresh else StepSelectedCache
        self.selected_cache = make_cache(context.target, context.cache, self.selector, num_slots)
        self.queries = RecentQueries(self.num_queries)
        self._record_queries(context)

    def _record_queries(self, context: Context) -> None:
        """Run the newest tokens once more to record their queries, which the prefill does not
        record.
        """
        count = min(self.queries.num_queries, int(context.lengths.min()))
        if not count:
            return
        cache = context.cache
        steps = torch.arange(count, device=context.tokens.device)
        tokens = context.tokens.gather(1, context.lengths[:, None] - count + steps)
        with rewind_tokens(cache, count), hook_cache(cache, query_observer=self.queries):
            context.target.run(tokens, ForwardPlan(cache=cache))
        path = steps.expand(len(tokens), -1)
        self.queries.commit(path, torch.full_like(context.lengths, count))
        keys = sum(
            key_bytes(context.target, length - count, count) for length in context.lengths.tolist()
        )
        self.bytes_read += BytesRead(weight_bytes(context.target), keys)

    def _max_nodes(self, context: Context) -> int:
        """Return the number of nodes that a round runs at most."""
        return (1 + context.builder.max_drafted) * (1 + self.guesses)

    def _update_selection(self, context: Context) -> None:
        """Update what drafts read to the newest text."""
        if self.quantized_kv is not None:
            self.bytes_read += BytesRead(0, self.quantized_kv.quantize_committed())
        if self.selected_cache is None:
            return
        if (
            self.refresh
            and context.round % self.refresh
            and self.selected_cache.has_room(self._max_nodes(context))
        ):
            self.bytes_read += BytesRead(0, self.selected_cache.copy_committed())
        else:
            self.bytes_read += BytesRead(0, self.selected_cache.select_tokens(self.queries))


def check_target(target: Target, cache: DraftCache) -> None:
    """Raise a UserError for a target that cannot draft in this way."""
    if target.architecture.keeps_state:
        raise UserError(
            f"target {target.name}: its layers are recurrent, and drafting would change their "
            "state; use another drafter, such as eagle3"
        )
    if target.runs_in_lockstep:
        raise UserError(
            f"target {target.name}: it is sharded over processes, whose drafts would differ; "
            "leave out target.sharding"
        )
    if target.architecture.attends_by_masks and cache != "full":
        raise UserError(
            f"target {target.name}: its layers have their own attention over the full cache; use "
            "drafter.cache=full drafter.weights=int8"
        )
    has_chunks = any(
        attention.range.chunk is not None
        for attention in target.architecture.attention_layers.values()
    )
    if has_chunks and cache != "full":
        raise UserError(
            f"target {target.name}: its layers attend within chunks of the text, which a "
            "selection lacks; use drafter.cache=full drafter.weights=int8"
        )


def check_choice(key: str, choice: str, allowed: tuple[str, ...]) -> None:
    """Raise a UserError for a choice that a setting does not have."""
    if choice not in allowed:
        raise UserError(f"drafter.{key}={choice}: choose from {', '.join(allowed)}")


def make_selector(
    cache: str, budget: int, sinks: int, observe: int, page: int, group: int
) -> KeySelector | None:
    """Return what selects the tokens that a draft reads; None if it reads all."""
    selectors: dict[str, Callable[[], KeySelector]] = {
        "window": lambda: StreamingLLMSelector(budget, sinks),
        "snap": lambda: SnapKVSelector(budget, observe),
        "defensive": lambda: DefensiveKVSelector(budget, observe),
        "compress": lambda: KVCompressSelector(budget, observe),
        "quest": lambda: QuestSelector(budget, page),
        "signs": lambda: SignSelector(budget, group),
        "clusters": lambda: ClusterSelector(budget),
    }
    return selectors[cache]() if cache in selectors else None


def make_codec(cache: str, outliers: int, merge: float) -> KVCodec | None:
    """Return what a draft reads keys and values through; None if they are read as they are or in
    plain codes.
    """
    codecs: dict[str, Callable[[], KVCodec]] = {
        "sink4": lambda: OutlierCodec(4, outliers),
        "turbo4": lambda: RotatingCodec(4),
        "merged": lambda: MergingCodec(merge),
    }
    return codecs[cache]() if cache in codecs else None
