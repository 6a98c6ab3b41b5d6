"""Whether drafted outputs are the target's own, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from spectrain.data.image_processor import get_images
from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.eval.metrics import Turn
from spectrain.eval.systems import Decoder, System
from spectrain.eval.time_limit import ScoreProgress
from spectrain.models.architectures.quantized import is_quantized
from spectrain.models.reference_model import compute_in_float64, generate, reference_model
from spectrain.models.target import Target

NEAR_TIE = 1e-4  # largest gap between float32 logits that counts as a tie

Evidence = Literal["checked", "distribution", "by construction", "none"]
"""What a claim that outputs are the target's rests on: answers that were compared here token by
token, texts whose distribution was compared here, the rule alone, or nothing.
"""


@dataclass
class Identity:
    """Whether drafted outputs equal their reference."""

    rule: str
    # As the rule declares it, whatever was checked.
    declared: bool
    reference: str
    checked: int = 0
    identical: int = 0
    # What the check of the distribution found; None without one.
    distribution: dict[str, Any] | None = None
    near_ties: list[dict[str, Any]] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)

    def record_difference(
        self, turn: Turn, position: int, gap: "LogitGap | None", has_token: bool
    ) -> bool:
        """Record where an output parts from its reference: as a near tie, and then return True,
        where rounding decides between the target's two best logits and the reference has a token
        there; otherwise, and where the gap is unknown, as a difference.
        """
        location = {"id": turn.id, "turn": turn.turn, "position": position}
        if gap is not None and gap.is_tie and has_token:
            self.near_ties.append({**location, "gap": gap.size, "rounding": gap.rounding})
            return True
        self.differences.append({**location, "gap": None if gap is None else gap.size})
        return False

    @property
    def verdict(self) -> str | None:
        """Return what the check of the distribution says; None without one."""
        return None if self.distribution is None else str(self.distribution["verdict"])

    @property
    def evidence(self) -> Evidence:
        if not self.declared:
            return "none"
        if self.checked:
            return "checked"
        return "distribution" if self.verdict in ("same", "different") else "by construction"

    @property
    def lossless(self) -> bool | None:
        """Return whether outputs are the target's; None if the rule says so and nothing was
        compared.
        """
        if not self.declared or self.verdict == "different" or self.differences:
            return False
        return None if self.evidence == "by construction" else True

    def summary(self) -> dict[str, Any]:
        """Return the entry `lossless` of summary.json. Where only a distribution was compared,
        `checked` counts its texts and `identical` is null.
        """
        entry = {"lossless": self.lossless, **vars(self), "evidence": self.evidence}
        if self.distribution is not None and not self.checked:
            entry |= {"checked": self.distribution["texts"], "identical": None}
        return entry


def check_identity(
    target: Target,
    systems: list[System],
    turns: dict[str, list[Turn]],
    max_new_tokens: int,
    progress: ScoreProgress | None = None,
) -> dict[str, Identity]:
    """Compare every output with its reference: `generate` for greedy decoding, our autoregressive
    run for sampling.

    A rule that weighs p against q is lossless in distribution, not token by token, so nothing is
    compared here; `DistributionCheck` compares the distribution.
    """
    identities = {}
    greedy = [
        system.name for system in systems if system.rule.fixes_choice and not system.rule.is_random
    ]
    plain = []
    if greedy:
        answers = turns[greedy[0]]
        progress = progress or ScoreProgress()
        progress.begin("comparing with the target's own answer", len(answers))
        for done, output in enumerate(plain_outputs(target, answers, max_new_tokens), 1):
            plain.append(output)
            progress.show(done)
    for system in systems:
        identity = identities[system.name] = Identity(
            system.rule.name, system.rule.lossless, reference_of(system.rule)
        )
        if not system.rule.fixes_choice:
            continue
        sampled = [turn.autoregressive.output for turn in turns[system.name]]
        references = sampled if system.rule.is_random else plain
        for row, (turn, reference) in enumerate(zip(turns[system.name], references), 1):
            _compare_turn(target, system, identity, turn, reference, row, max_new_tokens)
    return identities


def reference_of(rule: AcceptanceRule) -> str:
    """Name the reference of outputs under a rule."""
    if rule.fixes_choice:
        return "autoregressive, same random draws" if rule.is_random else "transformers generate"
    return "the target's distribution" if rule.lossless else "none: the rule is lossy"


def plain_outputs(target: Target, turns: list[Turn], max_new_tokens: int) -> Iterator[list[int]]:
    """Yield the answer of `generate` to every turn's prompt."""
    with reference_model(target) as model:
        for turn in turns:
            yield generate(model, turn.autoregressive.prompt, max_new_tokens, target.stop_ids)


def _compare_turn(
    target: Target,
    system: System,
    identity: Identity,
    turn: Turn,
    reference: list[int],
    row: int,
    max_new_tokens: int,
) -> None:
    """Count a turn as identical or different; at a near tie of two logits, go on from the
    reference's token.
    """
    identity.checked += 1
    output = list(turn.drafted.output)
    while (position := first_difference(output, reference)) is not None:
        # Noise decides a sampled token as well, so equal logits excuse no difference.
        gap = (
            None
            if system.rule.is_random
            else logit_gap(target, turn.drafted.prompt + reference[:position])
        )
        if not identity.record_difference(turn, position, gap, position < len(reference)):
            return
        prefix = reference[: position + 1]
        remaining = max_new_tokens - len(prefix)
        if remaining < 1 or prefix[-1] in target.stop_ids:
            output = prefix
            continue
        context = turn.drafted.prompt + prefix
        output = (
            prefix + Decoder(target, system.rule)(system, [context], remaining, [row])[0].output
        )
    identity.identical += 1


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Return the first position at which two outputs differ; None if they are equal."""
    for position, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


class LogitGap(NamedTuple):
    """The distance of the two best logits, and the distance below which the target's own
    rounding decides between them.
    """

    size: float
    rounding: float

    @property
    def is_tie(self) -> bool:
        return self.size < self.rounding


def logit_gap(target: Target, context: list[int]) -> LogitGap:
    """Compute the target's best logit minus its second best after `context`, in float64.

    Rounding decides between two logits within twice the largest error of the target's own logits, a
    few tenths in bfloat16.
    """
    with reference_model(target) as model, torch.inference_mode():
        images = get_images(context)
        inputs = {} if images is None else images.model_inputs(len(context), model)
        rounded = (
            model(torch.tensor([context], device=target.device), **inputs)
            .logits[0, -1]
            .double()
            .cpu()
        )
        if is_quantized(model):
            # Quantized kernels have no float64.
            best = rounded.topk(2).values
            return LogitGap(float(best[0] - best[1]), NEAR_TIE)
        # The parts of a model of images read each other's types.
        with compute_in_float64(model, layer_by_layer=images is None):
            inputs = {} if images is None else images.model_inputs(len(context), model)
            logits = model(torch.tensor([context], device=target.device), **inputs).logits[0, -1]
        logits = logits.double().cpu()
    best = logits.topk(2).values
    return LogitGap(
        float(best[0] - best[1]), max(NEAR_TIE, 2 * float((rounded - logits).abs().max()))
    )
