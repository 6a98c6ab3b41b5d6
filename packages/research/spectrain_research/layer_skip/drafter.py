"""Draft without some of the target's layers, untrained (Draft & Verify, Zhang et al., 2024; SWIFT,
Xia et al., 2025).

Shapes: B batch, T tokens, W a window of them, L layers of the target, D its width.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from random import Random
from typing import Literal

import torch

from spectrain.drafters.capabilities import SavedFiles, SettingsSearch
from spectrain.drafters.context import Context
from spectrain.drafters.layers.self_speculation import SelfDrafter
from spectrain.errors import UserError
from spectrain.models.forward_plan import ForwardPlan, LayerSpan, SkippedLayer, Sublayer
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft
from spectrain_research.shared.rewinding import rewind_tokens

from .gaussian import search_halves
from .sets import (
    LayerSet,
    SetScorer,
    Text,
    format_layers,
    is_valid,
    merge_halves,
    parse_layer,
    split_layer,
    tokens_per_forward,
)


class LayerSkipping(SelfDrafter):
    """Drafts with all layers but `skipped`, which are given or, by default, searched for on the
    calibration prompts.

    Verification does not run the layers before the first skipped one again. The search scores a set
    on the target's greedy answers, in one forward (a proxy: in decoding, committed tokens have the
    full target's keys and values). With an agreement a of the most likely token, chains of d drafts
    have (1 - a^(d + 1)) / (1 - a) tokens per round for d c + 1 forwards, c being the share of the
    target's weights that a draft step reads. The set with the most tokens per forward wins. The
    search starts from the layers that change the direction of their input least, in growing number,
    and then adds, removes or swaps layers at random, `search_steps` sets in total. With
    search_by=bayes it is Draft & Verify's: a Gaussian process over the bits of all halves of layers
    predicts the score of a set, and the next set is the one with the largest expected improvement.

    With `tries`, the search continues during decoding (SWIFT): a round with a draft first tries
    another set, one or two moves from the best one or, one time in four, a random one. Attention
    and feed-forward are skipped separately, but not those of the first and last layer. Both sets
    read the last `window` verified tokens again, teacher-forced after the full target's keys and
    values, and the set with more tokens per forward drafts. The search ends after `tries` sets,
    over all texts, or after `patience` sets in a row without an improvement.
    """

    def __init__(
        self,
        target: Target,
        # Layers to skip, or halves of layers, as in [3,attention5,mlp7]; null searches for them.
        skipped: list[int | str] | None = None,
        # How the search before decoding moves: at random from the best set of layers (moves), or by
        # Bayesian optimisation over halves of layers (bayes).
        search_by: Literal["moves", "bayes"] = "moves",
        # Number of sets that the search before decoding scores.
        search_steps: int = 60,
        # Tokens of each calibration prompt's answer on which sets are scored.
        answer_tokens: int = 32,
        # Seed of the random search.
        seed: int = 0,
        # Number of further sets that are tried while decoding; 0 tries none.
        tries: int = 0,
        # Largest number of verified tokens on which a set is scored while decoding.
        window: int = 32,
        # Number of tries in a row without a better set after which the search during decoding ends.
        patience: int = 24,
    ) -> None:
        super().__init__()
        for key, value, minimum in (
            ("search_steps", search_steps, 1),
            ("answer_tokens", answer_tokens, 2),
            ("tries", tries, 0),
            ("window", window, 2),
            ("patience", patience, 1),
        ):
            if value < minimum:
                raise UserError(f"drafter.{key}={value}: use {minimum} or more")
        layers = None if skipped is None else {parse_layer(name) for name in skipped}
        if (layers is not None and not len(layers) > 0) or not is_valid(
            layers or (), target.num_layers
        ):
            raise UserError(
                f"drafter.skipped={list(skipped or ())}: name at least one of the layers 0 to "
                f"{target.num_layers - 1} of {target.name}, whole or as attention1 or mlp1, and "
                "not all"
            )
        self.search_by = search_by
        self.search_steps = search_steps
        self.seed = seed
        self.exit_layer = target.num_layers
        self.head = target.head
        if layers is None:
            search = SettingsSearch(answer_tokens, type(self).search)
            self.capabilities = replace(self.capabilities, search=search)
        self._use_set(merge_halves(layers or (target.num_layers // 2,)))
        self.tries, self.window, self.patience = tries, window, patience
        self.fruitless = 0  # tries since the last better set
        self.random = Random(seed)
        if tries:
            self.prompts = torch.zeros(0)  # [B] tokens before the first that was verified
            self.capabilities = replace(self.capabilities, capture=None)  # sets change on the host

    def search(self, target: Target, texts: list[Text], depth: int) -> None:
        """Search for the set to skip."""
        self.capabilities = replace(self.capabilities, search=None)
        search = search_halves if self.search_by == "bayes" else search_layers
        self._use_set(merge_halves(search(target, texts, depth, self.search_steps, self.seed)))

    def _use_set(self, skipped: frozenset[SkippedLayer]) -> None:
        self.skipped: frozenset[SkippedLayer] = skipped
        is_open = self.capabilities.search is not None
        self.saved = SavedFiles(settings={} if is_open else {"skipped": format_layers(skipped)})

    def draft(self, context: Context) -> Draft:
        if self.tries:
            self._try_candidate(context)
        return super().draft(context)

    def _try_candidate(self, context: Context) -> None:
        """Score another set and the best one on the tokens verified last; draft with the better
        one.
        """
        if context.round == 0:
            self.prompts = context.lengths.clone()
        size = min(self.window, int((context.lengths - self.prompts).min()))
        if size < min(8, self.window) or self.fruitless >= self.patience:
            return
        self.tries -= 1
        other = mutate_layers(self.skipped, context.target.num_layers, self.random)
        depth = context.builder.depth
        best_score, score = (
            tokens_per_forward(
                context.target, layers, measure_agreement(context, layers, size), depth
            )
            for layers in (self.skipped, other)
        )
        self.fruitless = 0 if score > best_score else self.fruitless + 1
        if score > best_score:
            self._use_set(other)


def search_layers(
    target: Target, texts: list[Text], depth: int, steps: int, seed: int = 0
) -> LayerSet:
    """Return the set of layers to skip with the most expected tokens per forward, for chains of
    `depth` drafts.
    """
    scorer = SetScorer(target, texts, depth)
    starts = [frozenset(scorer.least_changing[:count]) for count in range(1, target.num_layers)]
    for start in starts[: max(1, steps // 2)]:
        scorer.score_set(start)
    best = scorer.best
    random = Random(seed)
    for _ in range(20 * steps):  # small targets have fewer sets than steps
        if len(scorer.scores) >= steps:
            break
        changed = set(best)
        for _ in range(random.choice((1, 2))):
            changed ^= {random.randrange(target.num_layers)}
        if (
            0 < len(changed) < target.num_layers
            and scorer.score_set(frozenset(changed)) > scorer.scores[best]
        ):
            best = frozenset(changed)
    return best


def measure_agreement(context: Context, skipped: Collection[SkippedLayer], size: int) -> float:
    """Return how often the target without these layers predicts the last `size` verified tokens of
    every text.

    It reads them after the full target's keys and values; the cache is restored.
    """
    steps = torch.arange(size + 1, device=context.tokens.device)
    # [B, W + 1] the root the last
    tokens = context.tokens.gather(1, context.lengths[:, None] - size + steps)
    with rewind_tokens(context.cache, size):
        plan = ForwardPlan(logits=True, cache=context.cache, span=LayerSpan(skipped=skipped))
        logits = context.target.run(tokens[:, :-1], plan).logits
    assert logits is not None
    return float((logits.argmax(-1) == tokens[:, 1:])[context.active].float().mean())


def mutate_layers(
    skipped: frozenset[SkippedLayer], num_layers: int, random: Random
) -> frozenset[SkippedLayer]:
    """Return another set of halves of the inner layers: one or two changed or, one time in four,
    as many drawn at random.
    """
    halves = {
        half
        for layer in skipped
        for half in ([layer] if isinstance(layer, Sublayer) else split_layer(layer))
    }
    inner = [half for layer in range(1, num_layers - 1) for half in split_layer(layer)]
    if len(inner) < 2:
        return skipped
    if random.random() < 0.25:
        changed = set(random.sample(inner, min(len(halves), len(inner))))
    else:
        changed = halves ^ set(random.sample(inner, random.choice((1, 2))))
    return merge_halves(changed) if changed else skipped
