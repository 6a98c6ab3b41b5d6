"""Draft without some of the target's layers, untrained (Draft & Verify, Zhang et al., 2024; SWIFT, Xia et al., 2025).

Shapes: B batch, T tokens, W a window of them, L layers of the target, D its width.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from spectrain.drafters.capabilities import SavedFiles, TunableDrafter
from spectrain.drafters.context import Context
from spectrain.drafters.layers.self_speculation import SelfDrafter
from spectrain.errors import UserError
from spectrain.models.forward_plan import SUBLAYER_KINDS, ForwardPlan, LayerSpan, SkippedLayer, Sublayer, layer_index
from spectrain.trees.base import Draft

if TYPE_CHECKING:
    from spectrain.models.target import Target


Text = tuple[list[int], list[int]]  # a prompt and the target's answer


class LayerSkipping(SelfDrafter, TunableDrafter):
    """Drafts with all layers but `skipped`, which are given or, by default, searched for on the calibration prompts.

    The layers before the first skipped one are not run again to verify. The search measures a set on the target's own greedy
    answers, read in one forward (a proxy: in decoding, committed tokens keep the whole target's keys and values): a, how often
    leaving it out keeps the most likely token, gives with chains of d drafts (1 - a^(d + 1)) / (1 - a) tokens a round for
    d c + 1 forwards, c being the share of the target's weights that a draft step reads, and the set with the most tokens a
    forward wins. It starts from the layers that change their input least in direction, more and more of them, and then adds,
    removes or swaps layers at random, `search_steps` sets in all.

    With `tries`, the search goes on in the text at hand (SWIFT): a round with a draft first tries another set, a move or two
    from the best one or, one time in four, one drawn anew; attention and feed-forward are left out apart, never those of the
    first or last layer. Both sets read the last `window` verified tokens again, teacher-forced behind the whole target's keys
    and values, and the one that promises more, by how often it keeps the token that followed, is drafted with. The search
    ends when `tries` are spent, over all texts, or `patience` of them in a row brought nothing.
    """

    def __init__(
        self,
        target: Target,
        skipped: list[int | str] | None = None,  # layers, or halves of them, as in [3,attention5,mlp7]
        search_steps: int = 60,
        answer_tokens: int = 32,  # of each calibration prompt's answer, on which sets are measured
        seed: int = 0,
        tries: int = 0,  # sets that are tried while decoding
        window: int = 32,  # tokens at most on which they are
        patience: int = 24,  # tries in a row without a better set, after which there are no more
    ) -> None:
        super().__init__()
        for key, value, least in (
            ("search_steps", search_steps, 1), ("answer_tokens", answer_tokens, 2), ("tries", tries, 0), ("window", window, 2),
            ("patience", patience, 1),
        ):  # fmt: skip
            if value < least:
                raise UserError(f"drafter.{key}={value}: use {least} or more")
        given = None if skipped is None else {read(one) for one in skipped}
        if (given is not None and not len(given) > 0) or not fits(given or (), target.num_layers):
            raise UserError(
                f"drafter.skipped={list(skipped or ())}: name at least one of the layers 0 to {target.num_layers - 1} of "
                f"{target.name}, whole or as attention1 or mlp1, and not all"
            )
        self.search_steps, self.answer_tokens, self.seed = search_steps, answer_tokens, seed
        self.exit_layer = target.num_layers
        self.head = target.head
        self.needs_search = given is None
        self._use_set(joined(given or (target.num_layers // 2,)))
        self.tries, self.window, self.patience = tries, window, patience
        self.fruitless = 0  # tries since the last better set
        self.random = Random(seed)
        if tries:
            self.prompts = torch.zeros(0)  # [B] tokens before the first that was verified
            self.capabilities = replace(self.capabilities, capture=None)  # sets change on the host

    def search(self, target: Target, texts: list[Text], depth: int) -> None:
        """Search for the set to skip."""
        self.needs_search = False
        self._use_set(joined(search(target, texts, depth, self.search_steps, self.seed)))

    def _use_set(self, skipped: frozenset[SkippedLayer]) -> None:
        self.skipped: frozenset[SkippedLayer] = skipped
        self.saved = SavedFiles(settings={} if self.needs_search else {"skipped": listed(skipped)})

    def draft(self, context: Context) -> Draft:
        if self.tries:
            self._try(context)
        return super().draft(context)

    def _try(self, context: Context) -> None:
        """Measure one more set on what was verified last, beside the best one."""
        if context.round == 0:
            self.prompts = context.lengths.clone()
        size = min(self.window, int((context.lengths - self.prompts).min()))
        if size < min(8, self.window) or self.fruitless >= self.patience:
            return
        self.tries -= 1
        other, depth = moved(self.skipped, context.target.num_layers, self.random), context.builder.depth
        best, found = (promise(context.target, one, agreement(context, one, size), depth) for one in (self.skipped, other))
        self.fruitless = 0 if found > best else self.fruitless + 1
        if found > best:
            self._use_set(other)


def search(target: Target, texts: list[Text], depth: int, steps: int, seed: int = 0) -> frozenset[int]:
    """The set of layers to skip that promises the most tokens a forward with chains of `depth` drafts."""
    tokens, answers = laid_out(texts, target.device)
    states = target.features(tokens, (*range(target.num_layers + 1), "final"))
    wanted = target.head.logits(states.at_layer("final")[answers]).argmax(-1)
    found: dict[frozenset[int], float] = {}

    def measure(skipped: frozenset[int]) -> float:
        """Tokens a round over forwards a round; every set is measured once."""
        if skipped not in found:
            final = target.run(tokens, ForwardPlan(layers=("final",), span=LayerSpan(skipped=skipped))).at_layer("final")[
                answers
            ]
            kept = float((target.head.logits(final).argmax(-1) == wanted).float().mean())
            found[skipped] = promise(target, skipped, kept, depth)
        return found[skipped]

    entering, leaving = states.hidden[answers][:, : target.num_layers], states.hidden[answers][:, 1 : target.num_layers + 1]
    likest = torch.cosine_similarity(entering, leaving, dim=-1).mean(0).argsort(descending=True).tolist()
    starts = [frozenset(likest[:count]) for count in range(1, target.num_layers)]
    for start in starts[: max(1, steps // 2)]:
        measure(start)
    best = max(found, key=lambda skipped: found[skipped])
    random = Random(seed)
    for _ in range(20 * steps):  # small targets have fewer sets than steps
        if len(found) >= steps:
            break
        changed = set(best)
        for _ in range(random.choice((1, 2))):
            changed ^= {random.randrange(target.num_layers)}
        if 0 < len(changed) < target.num_layers and measure(frozenset(changed)) > found[best]:
            best = frozenset(changed)
    return best


def promise(target: Target, skipped: Collection[SkippedLayer], agreement: float, depth: int) -> float:
    """Tokens a round over forwards a round, of chains of `depth` drafts."""
    head = target.head.output.weight.numel()
    sizes = [weights(layer) for layer in target.layers]
    spared = sum(weights(target.get_sublayer(*one)) if isinstance(one, Sublayer) else sizes[one] for one in skipped)
    return sum(agreement**k for k in range(depth + 1)) / (1 + depth * (1 - spared / (head + sum(sizes))))


def weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def agreement(context: Context, skipped: Collection[SkippedLayer], size: int) -> float:
    """How often the target without these layers keeps the tokens that were verified last, `size` in every text, which it reads
    behind the whole target's keys and values; the cache is afterwards as before."""
    steps = torch.arange(size + 1, device=context.tokens.device)
    tokens = context.tokens.gather(1, context.lengths[:, None] - size + steps)  # [B, W + 1] the root the last
    with context.cache.rewind_tokens(size):
        plan = ForwardPlan(logits=True, cache=context.cache, span=LayerSpan(skipped=skipped))
        logits = context.target.run(tokens[:, :-1], plan).logits
    assert logits is not None
    return float((logits.argmax(-1) == tokens[:, 1:])[context.active].float().mean())


def moved(skipped: frozenset[SkippedLayer], num_layers: int, random: Random) -> frozenset[SkippedLayer]:
    """Another set of halves of the inner layers: one or two put in or out, or, one time in four, as many drawn anew."""
    halves = {half for one in skipped for half in ([one] if isinstance(one, Sublayer) else whole(one))}
    inner = [half for layer in range(1, num_layers - 1) for half in whole(layer)]
    if len(inner) < 2:
        return skipped
    if random.random() < 0.25:
        changed = set(random.sample(inner, min(len(halves), len(inner))))
    else:
        changed = halves ^ set(random.sample(inner, random.choice((1, 2))))
    return joined(changed) if changed else skipped


def whole(layer: int) -> list[SkippedLayer]:
    return [Sublayer(layer, part) for part in SUBLAYER_KINDS]


def joined(skipped: Collection[SkippedLayer]) -> frozenset[SkippedLayer]:
    """The same set, where both halves of a layer are the layer."""
    complete = {one if not isinstance(one, Sublayer) else one.layer for one in skipped}
    complete = {layer for layer in complete if layer in skipped or set(whole(layer)) <= set(skipped)}
    return frozenset([*complete, *(one for one in skipped if isinstance(one, Sublayer) and one.layer not in complete)])


def read(said: int | str) -> SkippedLayer:
    """A layer, or half of one, as settings say it; -1 where there is none of that name."""
    found = re.fullmatch(rf"({'|'.join(SUBLAYER_KINDS)})(\d+)", said) if isinstance(said, str) else None
    return (
        said
        if isinstance(said, int)
        else Sublayer(int(found[2]), SUBLAYER_KINDS[SUBLAYER_KINDS.index(found[1])])
        if found
        else -1
    )


def listed(skipped: Collection[SkippedLayer]) -> list[int | str]:
    """As settings say it."""
    said = sorted(skipped, key=lambda one: (one.layer, one.kind) if isinstance(one, Sublayer) else (one, ""))
    return [f"{one.kind}{one.layer}" if isinstance(one, Sublayer) else one for one in said]


def fits(skipped: Collection[SkippedLayer], num_layers: int) -> bool:
    """Whether these are layers of the target, and not all of them."""
    return (
        all(0 <= layer_index(one) < num_layers for one in skipped)
        and len(joined(skipped) & set(range(num_layers))) < num_layers
    )


def laid_out(texts: list[Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts with their answers [B, T], and [B, T] bool where the next token belongs to the answer."""
    rows, masks = [], []
    for prompt, answer in texts:
        rows.append(torch.tensor(prompt + answer, device=device))
        place = torch.arange(len(rows[-1]), device=device)
        masks.append((place >= len(prompt) - 1) & (place < len(rows[-1]) - 1))
    return pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True)
