"""Sets of layers to skip: their names, their cost, and their score on the target's own answers.

Shapes: B batch, T tokens, L layers of the target, D its width.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from spectrain.models.forward_plan import (
    SUBLAYER_KINDS,
    ForwardPlan,
    LayerSpan,
    SkippedLayer,
    Sublayer,
    layer_index,
)
from spectrain.models.target import Target

Text = tuple[list[int], list[int]]  # a prompt and the target's answer
LayerSet = frozenset[SkippedLayer]


class SetScorer:
    """Scores sets by their expected tokens per forward on the target's greedy answers, in one
    forward each.

    Every set is measured once.
    """

    def __init__(self, target: Target, texts: list[Text], depth: int) -> None:
        self.target, self.depth = target, depth
        self.tokens, self.answers = pad_texts(texts, target.device)  # [B, T]
        states = target.features(self.tokens, (*range(target.num_layers + 1), "final"))
        # [R, D] at the positions before the answer's tokens
        self.final = states.at_layer("final")[self.answers]
        self.labels = target.head.logits(self.final).argmax(-1)  # [R]
        self.hidden = states.hidden[self.answers][:, : target.num_layers + 1]  # [R, L + 1, D]
        self.scores: dict[LayerSet, float] = {}

    @property
    def least_changing(self) -> list[int]:
        """The layers, first those that change the direction of their input least."""
        return rank_layers(self.hidden)

    def predict_answers(self, skipped: Collection[SkippedLayer]) -> Tensor:
        """Return the tokens [R] that the target without these layers predicts."""
        plan = ForwardPlan(layers=("final",), span=LayerSpan(skipped=skipped))
        return self.target.head.logits(
            self.target.run(self.tokens, plan).at_layer("final")[self.answers]
        ).argmax(-1)

    def score_set(self, skipped: LayerSet) -> float:
        """Return the expected tokens per forward of a set."""
        if skipped not in self.scores:
            rate = float((self.predict_answers(skipped) == self.labels).float().mean())
            self.scores[skipped] = tokens_per_forward(self.target, skipped, rate, self.depth)
        return self.scores[skipped]

    @property
    def best(self) -> LayerSet:
        """The best set so far."""
        return max(self.scores, key=lambda skipped: self.scores[skipped])


def rank_layers(hidden: Tensor) -> list[int]:
    """Return the layers by descending cosine between what enters and what leaves them, from
    states [R, L + 1, D].
    """
    cosines = torch.cosine_similarity(hidden[:, :-1].float(), hidden[:, 1:].float(), dim=-1)
    ranked: list[int] = cosines.mean(0).argsort(descending=True).tolist()
    return ranked


def tokens_per_forward(
    target: Target, skipped: Collection[SkippedLayer], agreement: float, depth: int
) -> float:
    """Return the expected tokens of a round over its forwards, for chains of `depth` drafts."""
    head = target.head.output.weight.numel()
    sizes = [count_weights(layer) for layer in target.layers]
    skipped_weights = sum(
        count_weights(target.get_sublayer(*layer)) if isinstance(layer, Sublayer) else sizes[layer]
        for layer in skipped
    )
    return sum(agreement**k for k in range(depth + 1)) / (
        1 + depth * (1 - skipped_weights / (head + sum(sizes)))
    )


def count_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def split_layer(layer: int) -> list[Sublayer]:
    """Return the two halves of a layer, attention and feed-forward."""
    return [Sublayer(layer, part) for part in SUBLAYER_KINDS]


def merge_halves(skipped: Collection[SkippedLayer]) -> frozenset[SkippedLayer]:
    """Replace both halves of a layer by the layer."""
    complete = {layer if not isinstance(layer, Sublayer) else layer.layer for layer in skipped}
    complete = {
        layer for layer in complete if layer in skipped or set(split_layer(layer)) <= set(skipped)
    }
    return frozenset(
        [
            *complete,
            *(
                layer
                for layer in skipped
                if isinstance(layer, Sublayer) and layer.layer not in complete
            ),
        ]
    )


def parse_layer(name: int | str) -> SkippedLayer:
    """Parse a layer number, or the name of half of a layer; return -1 for an unknown name."""
    if isinstance(name, int):
        return name
    match = re.fullmatch(rf"({'|'.join(SUBLAYER_KINDS)})(\d+)", name)
    return Sublayer(int(match[2]), SUBLAYER_KINDS[SUBLAYER_KINDS.index(match[1])]) if match else -1


def format_layers(skipped: Collection[SkippedLayer]) -> list[int | str]:
    """Format layers as settings name them, in order."""
    ordered = sorted(
        skipped,
        key=lambda layer: (layer.layer, layer.kind) if isinstance(layer, Sublayer) else (layer, ""),
    )
    return [
        f"{layer.kind}{layer.layer}" if isinstance(layer, Sublayer) else layer for layer in ordered
    ]


def is_valid(skipped: Collection[SkippedLayer], num_layers: int) -> bool:
    """Tell whether these are layers of the target, and not all of them."""
    return (
        all(0 <= layer_index(layer) < num_layers for layer in skipped)
        and len(merge_halves(skipped) & set(range(num_layers))) < num_layers
    )


def pad_texts(texts: list[Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return prompts with their answers [B, T], and a mask [B, T] of positions whose next token
    belongs to the answer.
    """
    rows = []
    masks = []
    for prompt, answer in texts:
        rows.append(torch.tensor(prompt + answer, device=device))
        position = torch.arange(len(rows[-1]), device=device)
        masks.append((position >= len(prompt) - 1) & (position < len(rows[-1]) - 1))
    return pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True)
