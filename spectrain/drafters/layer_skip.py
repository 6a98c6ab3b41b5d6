"""Draft without some of the target's layers, untrained (Draft & Verify, Zhang et al., 2024; SWIFT, Xia et al., 2025).

Shapes: B batch, T tokens, L layers of the target, D its width.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spectrain.errors import UserError
from spectrain.models.forward_plan import ForwardPlan, LayerSpan

from .abilities import SavedFiles, Tuning
from .shared.self_speculation import SelfDrafter

if TYPE_CHECKING:
    from spectrain.models.target import Target


Text = tuple[list[int], list[int]]  # a prompt and the target's answer


class LayerSkipping(SelfDrafter):
    """Drafts with all layers but `skipped`, which are given or, by default, searched for on the calibration prompts.

    The layers before the first skipped one are not run again to verify. The search measures a set on the target's own greedy
    answers, read in one forward (a proxy: in decoding, committed tokens keep the whole target's keys and values): a, how often
    leaving it out keeps the most likely token, gives with chains of d drafts (1 - a^(d + 1)) / (1 - a) tokens a round for
    d c + 1 forwards, c being the share of the target's weights that a draft step reads, and the set with the most tokens a
    forward wins. It starts from the layers that change their input least in direction, more and more of them, and then adds,
    removes or swaps layers at random, `search_steps` sets in all.
    """

    saved = SavedFiles(settings=lambda drafter: {"skipped": sorted(drafter.skipped)} if drafter.searched else {})
    abilities = replace(
        SelfDrafter.abilities,
        tuning=Tuning(
            is_open=lambda drafter: not drafter.searched,
            answer_tokens=lambda drafter: drafter.answer_tokens,
            search=lambda drafter, target, texts, depth: drafter.search(target, texts, depth),
        ),
    )

    def __init__(
        self,
        target: Target,
        skipped: list[int] | None = None,
        search_steps: int = 60,
        answer_tokens: int = 32,  # of each calibration prompt's answer, on which sets are measured
        seed: int = 0,
    ) -> None:
        super().__init__()
        for key, value, least in (("search_steps", search_steps, 1), ("answer_tokens", answer_tokens, 2)):
            if value < least:
                raise UserError(f"drafter.{key}={value}: use {least} or more")
        wrong = [layer for layer in skipped or () if not 0 <= layer < target.num_layers]
        if wrong or (skipped is not None and not 0 < len(set(skipped)) < target.num_layers):
            raise UserError(
                f"drafter.skipped={list(skipped or ())}: name at least one of the layers 0 to {target.num_layers - 1} of "
                f"{target.name}, and not all"
            )
        self.search_steps, self.answer_tokens, self.seed = search_steps, answer_tokens, seed
        self.exit_layer = target.num_layers
        self.head = target.head
        self.skipped = frozenset(skipped or (target.num_layers // 2,))
        self.searched = skipped is not None

    def search(self, target: Target, texts: list[Text], depth: int) -> None:
        """Search for the set to skip."""
        self.skipped = search(target, texts, depth, self.search_steps, self.seed)
        self.searched = True


def search(target: Target, texts: list[Text], depth: int, steps: int, seed: int = 0) -> frozenset[int]:
    """The set of layers to skip that promises the most tokens a forward with chains of `depth` drafts."""
    tokens, answers = laid_out(texts, target.device)
    states = target.features(tokens, (*range(target.num_layers + 1), "final"))
    wanted = target.head.logits(states.at("final")[answers]).argmax(-1)
    found: dict[frozenset[int], float] = {}
    head = target.head.output.weight.numel()
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in target.layers]

    def promise(skipped: frozenset[int]) -> float:
        """Tokens a round over forwards a round; every set is measured once."""
        if skipped not in found:
            final = target.run(tokens, ForwardPlan(layers=("final",), span=LayerSpan(skipped=skipped))).at("final")[answers]
            agreement = float((target.head.logits(final).argmax(-1) == wanted).float().mean())
            emitted = sum(agreement**k for k in range(depth + 1))
            spared = sum(sizes[layer] for layer in skipped) / (head + sum(sizes))
            found[skipped] = emitted / (1 + depth * (1 - spared))
        return found[skipped]

    entering, leaving = states.hidden[answers][:, : target.num_layers], states.hidden[answers][:, 1 : target.num_layers + 1]
    likest = torch.cosine_similarity(entering, leaving, dim=-1).mean(0).argsort(descending=True).tolist()
    starts = [frozenset(likest[:count]) for count in range(1, target.num_layers)]
    for start in starts[: max(1, steps // 2)]:
        promise(start)
    best = max(found, key=lambda skipped: found[skipped])
    random = Random(seed)
    for _ in range(20 * steps):  # small targets have fewer sets than steps
        if len(found) >= steps:
            break
        changed = set(best)
        for _ in range(random.choice((1, 2))):
            changed ^= {random.randrange(target.num_layers)}
        if 0 < len(changed) < target.num_layers and promise(frozenset(changed)) > found[best]:
            best = frozenset(changed)
    return best


def laid_out(texts: list[Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts with their answers [B, T], and [B, T] bool where the next token belongs to the answer."""
    rows, masks = [], []
    for prompt, answer in texts:
        rows.append(torch.tensor(prompt + answer, device=device))
        place = torch.arange(len(rows[-1]), device=device)
        masks.append((place >= len(prompt) - 1) & (place < len(rows[-1]) - 1))
    return pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True)
