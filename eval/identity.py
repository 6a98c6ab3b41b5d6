"""Whether drafted outputs are the target's own, token by token."""

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.eval.metrics import Turn
from spectrain.eval.systems import Decoder, System
from spectrain.models.architectures.quantized import is_quantized
from spectrain.models.images import get_images
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target

NEAR_TIE = 1e-4  # between logits that are computed in float32


@dataclass
class Identity:
    """Whether drafted outputs equal their reference."""

    rule: str
    lossless: bool  # as the rule declares it
    reference: str
    checked: int = 0
    identical: int = 0
    near_ties: list[dict[str, Any]] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return dict(vars(self))


def check_identity(
    target: Target, systems: list[System], turns: dict[str, list[Turn]], max_new_tokens: int
) -> dict[str, Identity]:
    """Compare every output with its reference: `generate` for greedy decoding, our autoregressive run for sampling.

    A rule that weighs p against q is the target's in distribution, not token by token: nothing is compared.
    """
    found = {}
    greedy = [system.name for system in systems if system.rule.fixes_choice and not system.rule.is_random]
    plain = plain_outputs(target, turns[greedy[0]], max_new_tokens) if greedy else []
    for system in systems:
        identity = found[system.name] = Identity(system.rule.name, system.rule.lossless, reference_of(system.rule))
        if not system.rule.fixes_choice:
            continue
        drawn = [turn.autoregressive.output for turn in turns[system.name]]
        references = drawn if system.rule.is_random else plain
        for row, (turn, wanted) in enumerate(zip(turns[system.name], references), 1):
            _compare(target, system, identity, turn, wanted, row, max_new_tokens)
    return found


def reference_of(rule: AcceptanceRule) -> str:
    """What outputs under a rule are held against."""
    if rule.fixes_choice:
        return "autoregressive, same random draws" if rule.is_random else "transformers generate"
    return "the target's distribution, by proof" if rule.lossless else "none: the rule is lossy"


def plain_outputs(target: Target, turns: list[Turn], max_new_tokens: int) -> list[list[int]]:
    """What `generate` says to every turn's prompt."""
    with reference_model(target) as model:
        return [generate(model, turn.autoregressive.prompt, max_new_tokens, target.stop_ids) for turn in turns]


def _compare(
    target: Target, system: System, found: Identity, turn: Turn, wanted: list[int], row: int, max_new_tokens: int
) -> None:
    """Count a turn as identical; where two logits are nearly equal, go on from the reference's token."""
    found.checked += 1
    output = list(turn.drafted.output)
    while (position := first_difference(output, wanted)) is not None:
        where = {"id": turn.id, "turn": turn.turn, "position": position}
        prefix = wanted[:position]
        tied = not system.rule.is_random  # a sampled token is decided by noise as well: equal logits excuse nothing
        gap = logit_gap(target, turn.drafted.prompt + prefix) if tied else None
        if gap is None or not gap.is_tie or position >= len(wanted):
            found.differences.append({**where, "gap": None if gap is None else gap.size})
            return
        found.near_ties.append({**where, "gap": gap.size, "rounding": gap.rounding})
        prefix = wanted[: position + 1]
        left = max_new_tokens - len(prefix)
        if left < 1 or prefix[-1] in target.stop_ids:
            output = prefix
            continue
        context = turn.drafted.prompt + prefix
        output = prefix + Decoder(target, system.rule)(system, [context], left, [row])[0].output
    found.identical += 1


def first_difference(left: list[int], right: list[int]) -> int | None:
    """The first position at which two outputs differ; None where they are equal."""
    for position, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


class LogitGap(NamedTuple):
    """How far apart the two best logits are, and below what distance the target's own arithmetic tells them apart by chance."""

    size: float
    rounding: float

    @property
    def is_tie(self) -> bool:
        return self.size < self.rounding


def logit_gap(target: Target, context: list[int]) -> LogitGap:
    """The target's best logit minus its second best after `context`, computed in float64. Two logits are told apart by chance
    within twice the largest error that the target's own have there, which in bfloat16 is a few tenths."""
    with reference_model(target) as model, torch.inference_mode():
        images = get_images(context)
        told = {} if images is None else images.model_inputs(len(context), model)
        rounded = model(torch.tensor([context], device=target.device), **told).logits[0, -1].double().cpu()
        if is_quantized(model):  # its products are of its kernels' own kind, and have no float64
            best = rounded.topk(2).values
            return LogitGap(float(best[0] - best[1]), NEAR_TIE)
        exact = copy.deepcopy(model)
        exact.set_experts_implementation("eager")  # the faster ones have no float64
        exact.to("cpu", torch.float64)
        told = {} if images is None else images.model_inputs(len(context), exact)
        logits = exact(torch.tensor([context]), **told).logits[0, -1].double()
    best = logits.topk(2).values
    return LogitGap(float(best[0] - best[1]), max(NEAR_TIE, 2 * float((rounded - logits).abs().max())))
