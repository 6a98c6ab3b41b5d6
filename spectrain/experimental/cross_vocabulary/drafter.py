"""Any small model as drafter, whatever its tokenizer.

Token-level intersection (TLI) and string-level exact match (SLEM, which is transformers' universal assisted decoding) are of
Timor et al., 2025 (arXiv 2502.05202), dynamic time warping of TokenTiming, 2025 (arXiv 2510.15545).

Shapes: B batch, T tokens, F places, V drafter's vocabulary, U tokens that both vocabularies have, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities, RewindableDrafter, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.small_models import ModelRollout, load_foreign_model
from spectrain.errors import UserError
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.trees.base import Draft, TreeBuilder
from spectrain.trees.chain import Chain
from spectrain.trees.dynamic import Eagle2
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain.trees.trie import Trie

from .spelling import ByteTokenizer, RetokenizedText, map_shared_tokens, map_special_tokens, trim_partial_character
from .warping import align_tokens, carry_probabilities, uncovered_bytes

if TYPE_CHECKING:
    from spectrain.models.target import Target


class Universal(Drafter, RewindableDrafter):
    """A small causal LM as it is, `model`: a directory, a name on the hub, or tiny or smollm2. What the target says is encoded
    anew for it, round by round; its cache keeps what of that encoding has not changed.

    match=intersection (TLI): it drafts only tokens that both vocabularies have, q restricted to them and renormalised. Children
    are drawn from just that, so every rule is what it is for other drafters.
    match=text (SLEM): it drafts what it likes, `tokens` of its own at most; the drafted text is encoded in the target's tokens.
    Of a chain that is one text, of other trees as many as it has nodes.
    match=timewarp: the same texts; the chances of the drafted tokens are carried over to the target's by warping one encoding
    onto the other, so builders that weigh chances know how sure each is. What is carried over is not what the target's tokens
    were drawn from (several texts begin with the same token), so no rule may weigh p against it: greedy or match only.

    Nothing of it is trained. A small model of the target's own vocabulary that recipe=gkd trained serves another target once
    spectrain export format=hf has written it: give that directory as `model`.
    """

    shared_theirs: Tensor
    shared_mine: Tensor
    translated: Tensor

    def __init__(
        self,
        target: Target,
        model: str = "tiny",
        match: Literal["intersection", "text", "timewarp"] = "intersection",
        tokens: int | None = None,  # of its own that it drafts in a round at most; null: as many as the tree is deep
        width: int = 4,  # drafts that follow each token at most, where the tree is no chain and texts are matched
    ) -> None:
        super().__init__()
        for key, value in (("tokens", tokens), ("width", width)):
            if value is not None and value < 1:
                raise UserError(f"drafter.{key}={value}: use 1 or more")
        if match not in ("intersection", "text", "timewarp"):
            raise UserError(f"drafter.match={match}: choose from intersection, text, timewarp")
        self.name, self.match, self.num_tokens, self.width = model, match, tokens, width
        self.model = load_foreign_model(model)
        self.mine = ByteTokenizer(self.model.tokenizer, f"drafter.model={model}")
        self.theirs = ByteTokenizer(target.tokenizer, f"target {target.name}")
        self.special = map_special_tokens(self.mine, self.theirs)
        self.heard = {mine: theirs for theirs, mine in self.special.items()}
        if match == "intersection":
            self._add_shared(target)
        self.saved = SavedFiles(settings={"model": model})
        self.capabilities = Capabilities(has_no_q=match != "intersection")
        self.texts: list[RetokenizedText] = []  # of every text
        self.cache: TreeCache | None = None
        self.cached: list[list[int]] = []  # what it holds

    def _add_shared(self, target: Target) -> None:
        """Buffers of the tokens that both vocabularies have: ids of the target's, ascending, and of its own, [U]."""
        pairs = sorted(map_shared_tokens(self.mine, self.theirs).items())
        rows = self.model.head.vocab_size
        pairs = [(theirs, mine) for theirs, mine in pairs if theirs < target.head.vocab_size and mine < rows]
        if not pairs:
            raise UserError(f"drafter.model={self.name}: it shares no token with the target; use drafter.match=text")
        theirs, mine = torch.tensor(pairs).T
        translated = torch.zeros(target.head.vocab_size, dtype=torch.int64)  # others are never drafted
        translated[theirs] = mine
        for name, ids in (("shared_theirs", theirs), ("shared_mine", mine), ("translated", translated)):
            self.register_buffer(name, ids, persistent=False)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read what the target has said since, in its own tokens, and draft from there on."""
        state = self._catch_up(context)
        assert self.cache is not None
        if self.match == "intersection":
            return Draft(_Intersection(self, self.cache, state))
        rollout = ModelRollout(self.model, self.cache, self.log_q(state), self.log_q)
        tree = self._own_builder(context.builder).expand(context, rollout)
        rows = zip(self.texts, context.active.tolist(), drafted_paths(tree, context.builder.is_chain))
        depth = context.builder.depth
        return Draft(continuations=[self._trie(text, paths if on else [], depth) for text, on, paths in rows])

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        assert self.cache is not None
        self.cache.roll_back()

    def log_q(self, final: Tensor) -> Tensor:
        """[B, F, D] -> [B, F, V], over the tokens that its tokenizer has."""
        return self.model.head.logits(final)[..., : len(self.mine.pieces)].log_softmax(-1)

    def shared_log_q(self, final: Tensor) -> Tensor:
        """[B, F, D] -> [B, F, U], q restricted to what both vocabularies have and renormalised (TLI)."""
        return self.model.head.logits(final)[..., self.shared_mine].log_softmax(-1)

    def _own_builder(self, builder: TreeBuilder) -> TreeBuilder:
        """What grows the drafts whose texts are matched."""
        depth = builder.depth if self.num_tokens is None else self.num_tokens
        return Chain(depth) if builder.is_chain else Eagle2(depth, builder.budget, self.width)

    def rewind(self, lengths: Tensor) -> None:
        """Read the texts from their beginning again; what the cache holds of them stays."""
        self.texts = [RetokenizedText(self.mine, self.theirs, self.special) for _ in self.texts]

    def _catch_up(self, context: Context) -> Tensor:
        """Run what is new of every text; the final states [B, 1, D] after their ends."""
        rows, room = self._read(context), 1 + context.builder.max_drafted
        if self.match != "intersection":
            room = 1 + self._own_builder(context.builder).max_drafted
        if self.cache is None or context.round == 0:
            self.cached = [[] for _ in rows]
        kept = [min(common(old, new), len(new) - 1) for old, new in zip(self.cached, rows)]
        width = max(len(text) - keep for text, keep in zip(rows, kept))
        needed = max(kept) + width + room
        if self.cache is None or context.round == 0 or needed > self.cache.max_length:
            slots = 2 * needed + context.builder.depth + int(context.left.max())
            self.cache = TreeCache(
                self.model.num_layers, len(rows), slots, context.tokens.device, None, self.model.architecture.kv_shapes
            )
            kept, width = [0] * len(rows), max(map(len, rows))
        device = context.tokens.device
        self.cache.crop(torch.tensor(kept, device=device))
        news = [text[keep:] for text, keep in zip(rows, kept)]
        counts = torch.tensor([len(new) for new in news], device=device)
        tokens = torch.tensor([new + [0] * (width - len(new)) for new in news], device=device)
        seen = self.model.run(tokens, ForwardPlan(layers=("final",), cache=self.cache)).at_layer("final")
        self.cache.commit(None, counts)
        self.cached = rows
        return seen.gather(1, (counts - 1)[:, None, None].expand(-1, 1, seen.shape[-1]))

    def _read(self, context: Context) -> list[list[int]]:
        """Every text, its root included, in the drafter's tokens; of texts longer than it can see the newest part."""
        if context.round == 0:
            self.texts = [RetokenizedText(self.mine, self.theirs, self.special) for _ in context.counts]
        first = min(text.num_read for text in self.texts)
        ends = (context.lengths + 1 - first).tolist()
        for text, tokens, end in zip(self.texts, context.tokens[:, first:].tolist(), ends):
            text.append_tokens(tokens[text.num_read - first : end])
        longest = self.model.max_length - 2 * (1 + context.builder.depth)
        return [text.encode_text(longest) or [self.mine.eos_token or 0] for text in self.texts]

    def _trie(self, text: RetokenizedText, paths: Sequence[Path], depth: int) -> Trie:
        """What drafts below a text's root are in the target's tokens, that many of them at most."""
        trie = Trie()
        trie.weights[0], trie.is_calibrated = 1.0, self.match == "timewarp"
        for path in paths:
            tokens, chances = self._in_target_tokens(text, path)
            if self.match == "text":
                trie.add_continuation(tokens[:depth], path.share)
                continue
            reached = 1.0
            for node, chance in zip(trie.add_continuation(tokens[:depth], 0.0), chances):
                reached *= chance
                trie.weights[node] = max(trie.weights[node], reached)
        return trie

    def _in_target_tokens(self, text: RetokenizedText, path: Path) -> tuple[list[int], list[float]]:
        """The target's tokens that a draft spells behind a text, up to a special token that it lacks, and the chance of each.
        A character that is not complete is left out: how the target encodes it is not known yet."""
        pieces = [self.mine.pieces[token] for token in path.tokens]
        end = pieces.index(None) if None in pieces else len(pieces)
        special = self.heard.get(path.tokens[end]) if end < len(pieces) else None
        before, data = b"".join(text.recent_pieces), b"".join(piece or b"" for piece in pieces[:end])
        if end == len(pieces):
            data = trim_partial_character(before, data)
        tokens = self.theirs.encode_after(before, data)
        sizes = [len(piece or b"") for piece in pieces[:end]]
        chances = [1.0] * len(tokens)
        if self.match == "timewarp" and sizes and tokens:
            pairs = align_tokens(uncovered_bytes(sizes, [len(self.theirs.pieces[token] or b"") for token in tokens]))
            chances = carry_probabilities(path.chances, pairs, len(tokens))
        return (tokens, chances) if special is None else ([*tokens, special], [*chances, path.chances[end]])


class _Intersection(ModelRollout):
    """A round in the tokens that both vocabularies have."""

    def __init__(self, drafter: Universal, cache: TreeCache, state: Tensor) -> None:
        super().__init__(drafter.model, cache, drafter.shared_log_q(state), drafter.shared_log_q)
        self.draft_ids, self.depth_limit, self.translated = drafter.shared_theirs, drafter.num_tokens, drafter.translated

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return super().extend(self.translated[tokens], parents)


@dataclass(frozen=True)
class Path:
    """A draft from the root on, in the drafter's tokens."""

    tokens: list[int]
    chances: list[float]  # of each after those before it
    share: float  # how likely the draft goes so far and, by what else was drafted, no further


def drafted_paths(tree: TokenTree, leaves_alone: bool) -> list[list[Path]]:
    """Of every row the paths to its nodes, or to its leaves alone."""
    assert tree.scores is not None
    rows = zip(*(part.tolist() for part in (tree.tokens, tree.parents, tree.scores, tree.valid)))
    return [list(_paths(row, leaves_alone)) for row in rows]


def _paths(row: tuple[list[int], list[int], list[float], list[bool]], leaves_alone: bool) -> Iterator[Path]:
    tokens, parents, scores, valid = row
    reached = [exp(min(0.0, score)) for score in scores]
    left = list(reached)
    steps: dict[int, tuple[list[int], list[float]]] = {0: ([], [])}
    nodes = [node for node in range(1, len(tokens)) if valid[node]]
    for node in nodes:
        above, chances = steps[parents[node]]
        steps[node] = [*above, tokens[node]], [*chances, exp(min(0.0, scores[node] - scores[parents[node]]))]
        left[parents[node]] -= reached[node]
    inner = {parents[node] for node in nodes}
    for node in nodes:
        if not (leaves_alone and node in inner):
            yield Path(*steps[node], max(0.0, left[node]))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((place for place, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
