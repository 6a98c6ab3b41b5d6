"""Any small model as drafter, whatever its tokenizer.

Token-level intersection (TLI) and string-level exact match (SLEM, which is transformers' universal
assisted decoding) are by Timor et al., 2025 (arXiv 2502.05202), dynamic time warping by
TokenTiming, 2025 (arXiv 2510.15545).

Shapes: B batch, T tokens, F nodes, V drafter's vocabulary, U tokens that both vocabularies have, D
width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import Literal

import torch
from torch import Tensor

from spectrain.copying.trie import Trie
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities, SavedFiles
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain.trees.chain import Chain
from spectrain.trees.dynamic import Eagle2
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.cross_vocabulary.model import ModelRollout, load_foreign_model

from .spelling import (
    ByteTokenizer,
    RetokenizedText,
    map_shared_tokens,
    map_special_tokens,
    trim_partial_character,
)
from .warping import align_tokens, carry_probabilities, uncovered_bytes


class Universal(Drafter):
    """An unchanged small causal LM. Every round encodes the target's text in its tokens; its cache
    keeps the unchanged part.

    match=intersection (TLI): it drafts only tokens that both vocabularies have, with q restricted
    to them and renormalised. Children are drawn from this q, so every rule is as valid as for other
    drafters. match=text (SLEM): it drafts any of its tokens, and the drafted text is encoded in the
    target's tokens. A chain is one text, another tree has one text per node. match=timewarp: the
    same texts; the probabilities of the drafted tokens are carried over to the target's tokens by
    warping one encoding onto the other, for builders that compare probabilities. The target's
    tokens were not drawn from them (several texts begin with the same token), so no rule may weigh
    p against them: use greedy or match.

    It is not trained. A small model with the target's vocabulary that recipe=gkd trained can draft
    for another target: give the directory that spectrain export format=hf wrote as `model`.
    """

    shared_target_ids: Tensor
    shared_drafter_ids: Tensor
    drafter_id_of: Tensor

    def __init__(
        self,
        target: Target,
        # The small model: a directory, a name on the hub, tiny or smollm2.
        model: str = "tiny",
        # How drafts reach the target's vocabulary: common tokens (intersection), text (text), or
        # text with probabilities (timewarp).
        match: Literal["intersection", "text", "timewarp"] = "intersection",
        # Largest number of its own tokens that it drafts in a round; null uses the depth of the
        # tree.
        tokens: int | None = None,
        # Largest number of drafts after each token, for trees other than chains with match=text and
        # timewarp.
        width: int = 4,
    ) -> None:
        super().__init__()
        for key, value in (("tokens", tokens), ("width", width)):
            if value is not None and value < 1:
                raise UserError(f"drafter.{key}={value}: use 1 or more")
        if match not in ("intersection", "text", "timewarp"):
            raise UserError(f"drafter.match={match}: choose from intersection, text, timewarp")
        self.name = model
        self.match = match
        self.max_drafted = tokens
        self.width = width
        self.model = load_foreign_model(model)
        self.drafter_tokenizer = ByteTokenizer(self.model.tokenizer, f"drafter.model={model}")
        self.target_tokenizer = ByteTokenizer(target.tokenizer, f"target {target.name}")
        self.special_map = map_special_tokens(self.drafter_tokenizer, self.target_tokenizer)
        self.inverse_special_map = {
            drafter_token: target_token for target_token, drafter_token in self.special_map.items()
        }
        if match == "intersection":
            self._add_shared(target)
        self.saved = SavedFiles(settings={"model": model})
        self.capabilities = Capabilities(has_no_q=match != "intersection", rewind=type(self).rewind)
        self.texts: list[RetokenizedText] = []
        self.cache: TreeCache | None = None
        self.cached: list[list[int]] = []  # the tokens of each text that the cache holds

    def _add_shared(self, target: Target) -> None:
        """Add buffers of the tokens that both vocabularies have: the target's ids, ascending,
        and the drafter's, [U] each.
        """
        pairs = sorted(map_shared_tokens(self.drafter_tokenizer, self.target_tokenizer).items())
        num_rows = self.model.head.vocab_size
        pairs = [
            (token, own)
            for token, own in pairs
            if token < target.head.vocab_size and own < num_rows
        ]
        if not pairs:
            raise UserError(
                f"drafter.model={self.name}: it shares no token with the target; use "
                "drafter.match=text"
            )
        target_ids, drafter_ids = torch.tensor(pairs).T
        # others are never drafted
        drafter_id_of = torch.zeros(target.head.vocab_size, dtype=torch.int64)
        drafter_id_of[target_ids] = drafter_ids
        self.register_buffer("shared_target_ids", target_ids, persistent=False)
        self.register_buffer("shared_drafter_ids", drafter_ids, persistent=False)
        self.register_buffer("drafter_id_of", drafter_id_of, persistent=False)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the target's new text in the drafter's tokens, and draft after it."""
        state = self._catch_up(context)
        assert self.cache is not None
        if self.match == "intersection":
            return Draft(_Intersection(self, self.cache, state))
        rollout = ModelRollout(self.model, self.cache, self.log_q(state), self.log_q)
        tree = self._drafting_builder(context.builder).expand(context, rollout)
        rows = zip(
            self.texts, context.active.tolist(), list_paths(tree, context.builder.traits.is_chain)
        )
        depth = context.builder.depth
        return Draft(
            continuations=[
                self._make_trie(text, paths if on else [], depth) for text, on, paths in rows
            ]
        )

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        assert self.cache is not None
        self.cache.roll_back()

    def log_q(self, final: Tensor) -> Tensor:
        """Compute log q of states, [B, F, D] -> [B, F, V], over the tokens that the drafter's
        tokenizer has.
        """
        return self.model.head.logits(final)[..., : len(self.drafter_tokenizer.pieces)].log_softmax(
            -1
        )

    def shared_log_q(self, final: Tensor) -> Tensor:
        """Compute log q, [B, F, D] -> [B, F, U], restricted to the common tokens and
        renormalised (TLI).
        """
        return self.model.head.logits(final)[..., self.shared_drafter_ids].log_softmax(-1)

    def _drafting_builder(self, builder: TreeBuilder) -> TreeBuilder:
        """Return the builder of the drafts whose texts are matched."""
        depth = builder.depth if self.max_drafted is None else self.max_drafted
        return (
            Chain(depth) if builder.traits.is_chain else Eagle2(depth, builder.budget, self.width)
        )

    def rewind(self, lengths: Tensor) -> None:
        """Read the texts from their beginning again; the cache keeps its tokens."""
        self.texts = [
            RetokenizedText(self.drafter_tokenizer, self.target_tokenizer, self.special_map)
            for _ in self.texts
        ]

    def _catch_up(self, context: Context) -> Tensor:
        """Run the new tokens of every text; return the final states [B, 1, D] at their ends."""
        rows = self._encode_texts(context)
        num_slots = 1 + context.builder.max_drafted
        if self.match != "intersection":
            num_slots = 1 + self._drafting_builder(context.builder).max_drafted
        if self.cache is None or context.round == 0:
            self.cached = [[] for _ in rows]
        num_cached = [
            min(common_prefix_length(cached, text), len(text) - 1)
            for cached, text in zip(self.cached, rows)
        ]
        width = max(len(text) - count for text, count in zip(rows, num_cached))
        needed = max(num_cached) + width + num_slots
        if self.cache is None or context.round == 0 or needed > self.cache.max_length:
            slots = 2 * needed + context.builder.depth + int(context.tokens_left.max())
            self.cache = TreeCache(
                self.model.num_layers,
                len(rows),
                slots,
                context.tokens.device,
                None,
                self.model.architecture.kv_shapes,
            )
            num_cached = [0] * len(rows)
            width = max(map(len, rows))
        device = context.tokens.device
        self.cache.crop(torch.tensor(num_cached, device=device))
        new_tokens = [text[count:] for text, count in zip(rows, num_cached)]
        counts = torch.tensor([len(text) for text in new_tokens], device=device)
        tokens = torch.tensor(
            [text + [0] * (width - len(text)) for text in new_tokens], device=device
        )
        states = self.model.run(tokens, ForwardPlan(layers=("final",), cache=self.cache)).at_layer(
            "final"
        )
        self.cache.commit(None, counts)
        self.cached = rows
        return states.gather(1, (counts - 1)[:, None, None].expand(-1, 1, states.shape[-1]))

    def _encode_texts(self, context: Context) -> list[list[int]]:
        """Return every text, its root included, in the drafter's tokens; of texts past its
        context length the newest part.
        """
        if context.round == 0:
            self.texts = [
                RetokenizedText(self.drafter_tokenizer, self.target_tokenizer, self.special_map)
                for _ in context.num_new
            ]
        first = min(text.num_read for text in self.texts)
        ends = (context.lengths + 1 - first).tolist()
        for text, tokens, end in zip(self.texts, context.tokens[:, first:].tolist(), ends):
            text.append_tokens(tokens[text.num_read - first : end])
        longest = self.model.max_length - 2 * (1 + context.builder.depth)
        return [
            text.encode_text(longest) or [self.drafter_tokenizer.eos_token or 0]
            for text in self.texts
        ]

    def _make_trie(self, text: RetokenizedText, paths: Sequence[DraftPath], depth: int) -> Trie:
        """Make the trie of drafts below a text's root in the target's tokens, at most `depth`
        deep.
        """
        trie = Trie()
        trie.weights[0], trie.is_calibrated = 1.0, self.match == "timewarp"
        for path in paths:
            tokens, probabilities = self._to_target_tokens(text, path)
            if self.match == "text":
                trie.add_continuation(tokens[:depth], path.share)
                continue
            path_probability = 1.0
            for node, probability in zip(trie.add_continuation(tokens[:depth], 0.0), probabilities):
                path_probability *= probability
                trie.weights[node] = max(trie.weights[node], path_probability)
        return trie

    def _to_target_tokens(
        self, text: RetokenizedText, path: DraftPath
    ) -> tuple[list[int], list[float]]:
        """Return the target's tokens that spell a draft after a text, and their probabilities.

        They end before a special token that the target lacks, and before an incomplete character,
        whose encoding is unknown.
        """
        pieces = [self.drafter_tokenizer.pieces[token] for token in path.tokens]
        num_pieces = pieces.index(None) if None in pieces else len(pieces)
        special = (
            self.inverse_special_map.get(path.tokens[num_pieces])
            if num_pieces < len(pieces)
            else None
        )
        text_bytes = b"".join(text.recent_pieces)
        draft_bytes = b"".join(piece or b"" for piece in pieces[:num_pieces])
        if num_pieces == len(pieces):
            draft_bytes = trim_partial_character(text_bytes, draft_bytes)
        tokens = self.target_tokenizer.encode_after(text_bytes, draft_bytes)
        sizes = [len(piece or b"") for piece in pieces[:num_pieces]]
        probabilities = [1.0] * len(tokens)
        if self.match == "timewarp" and sizes and tokens:
            pairs = align_tokens(
                uncovered_bytes(
                    sizes, [len(self.target_tokenizer.pieces[token] or b"") for token in tokens]
                )
            )
            probabilities = carry_probabilities(path.probabilities, pairs, len(tokens))
        return (
            (tokens, probabilities)
            if special is None
            else ([*tokens, special], [*probabilities, path.probabilities[num_pieces]])
        )


class _Intersection(ModelRollout):
    """One round in the tokens that both vocabularies have."""

    def __init__(self, drafter: Universal, cache: TreeCache, state: Tensor) -> None:
        super().__init__(drafter.model, cache, drafter.shared_log_q(state), drafter.shared_log_q)
        self.draft_ids = drafter.shared_target_ids
        self.depth_limit = drafter.max_drafted
        self.drafter_id_of = drafter.drafter_id_of

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return super().extend(self.drafter_id_of[tokens], parents)


@dataclass(frozen=True)
class DraftPath:
    """A draft from the root on, in the drafter's tokens."""

    tokens: list[int]
    probabilities: list[float]  # of each token after those before it
    share: float  # probability that the text follows this path and none of the drafts below it


def list_paths(tree: TokenTree, leaves_alone: bool) -> list[list[DraftPath]]:
    """List the paths to all nodes of every row, or to its leaves alone."""
    assert tree.scores is not None
    rows = zip(*(part.tolist() for part in (tree.tokens, tree.parents, tree.scores, tree.valid)))
    return [list(_iterate_paths(row, leaves_alone)) for row in rows]


def _iterate_paths(
    row: tuple[list[int], list[int], list[float], list[bool]], leaves_alone: bool
) -> Iterator[DraftPath]:
    tokens, parents, scores, valid = row
    reach_probability = [exp(min(0.0, score)) for score in scores]
    end_probability = list(reach_probability)
    steps: dict[int, tuple[list[int], list[float]]] = {0: ([], [])}
    nodes = [node for node in range(1, len(tokens)) if valid[node]]
    for node in nodes:
        earlier, probabilities = steps[parents[node]]
        steps[node] = (
            [*earlier, tokens[node]],
            [*probabilities, exp(min(0.0, scores[node] - scores[parents[node]]))],
        )
        end_probability[parents[node]] -= reach_probability[node]
    inner = {parents[node] for node in nodes}
    for node in nodes:
        if not (leaves_alone and node in inner):
            yield DraftPath(*steps[node], max(0.0, end_probability[node]))


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens that two texts begin with in common."""
    return next(
        (index for index, pair in enumerate(zip(first, second)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )
