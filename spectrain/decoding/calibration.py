"""Calibration of tree builders on this machine with this target and drafter: acceptance by
depth, and latency by size.
"""

from __future__ import annotations

from collections.abc import Callable

from spectrain.config.installed import load_entry_points
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain.trees.measurements import Calibration, RuleForecast

from .acceptance import AcceptanceRule
from .latency import check_rollout, measure_latency
from .loop import decode
from .teacher_forcing import run_teacher_forced

# length of the longest text that trees are timed after, where the texts are not known
LONG_TEXT_TOKENS = 512
# prompts and tokens of each by which a rule is chosen
RULE_TRIAL_PROMPTS = 6
RULE_TRIAL_TOKENS = 32


def calibrate_builders(
    target: Target,
    drafter: Drafter,
    builders: list[TreeBuilder],
    rule: AcceptanceRule,
    prompts: list[list[int]],
    max_new_tokens: int = 64,
    *,
    max_text_tokens: int = LONG_TEXT_TOKENS,
) -> Calibration | None:
    """Measure what builders need, on prompts outside of the evaluation, and prepare them. Returns
    None if they need nothing.

    The builders share the measurement, so they must choose children in the same way.
    `max_text_tokens` is the length of the longest text that they will decode after.
    """
    needs = {need for builder in builders for need in builder.requirements}
    if not needs:
        return None
    hits = []
    counts = []
    latency = None
    rules = None
    if "hits" in needs:
        deepest = max(
            (builder for builder in builders if "hits" in builder.requirements),
            key=lambda builder: builder.depth,
        )
        forced = run_teacher_forced(target, drafter, deepest, rule, prompts, max_new_tokens)
        hits = forced.hit_rates
        counts = [count for count in forced.counts if count]
        rules = forced.rule_forecast
        check_rollout(deepest, any(counts))
    if "latency" in needs:
        largest = max(
            (builder for builder in builders if "latency" in builder.requirements),
            key=lambda builder: builder.budget,
        )
        latency = measure_latency(target, drafter, prompts, largest, max_text_tokens)
    calibration = Calibration(hits, counts, latency, rules)
    for builder in builders:
        builder.prepare(calibration)
        for row, prompt in enumerate(prompts if "rehearsal" in builder.requirements else []):
            decode(target, [prompt], rule, max_new_tokens, drafter, builder, sequence_ids=[row])
    return calibration


def resolve_rule(
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    rule: AcceptanceRule,
    prompts: Callable[[], list[list[int]]],
) -> tuple[AcceptanceRule, TreeBuilder, RuleForecast | None]:
    """Return the rule and builder to decode with. For an unresolved rule, also return the
    forecast that decided.
    """
    if not rule.is_unresolved:
        return rule, builder, None
    assert rule.sampling_settings is not None, "an unresolved rule samples"
    # Rules that weigh p against q, in order of preference; installed packages may add some for
    # other kinds of children.
    for rule_class in (RecursiveRejection, *load_entry_points("rules")):
        if builder.children in rule_class.children:
            return rule_class(*rule.sampling_settings), builder, None
    sampled = builder.sampled_variant(rule.sampling_settings[0])
    if sampled is None or drafter.capabilities.is_copier or drafter.capabilities.has_no_q:
        return rule.matching_rule(), builder, None
    forecast = run_teacher_forced(
        target,
        drafter,
        builder,
        rule.matching_rule(),
        prompts()[:RULE_TRIAL_PROMPTS],
        RULE_TRIAL_TOKENS,
    ).rule_forecast
    if forecast is None or not forecast.prefers_rejection:
        return rule.matching_rule(), builder, forecast
    return RecursiveRejection(*rule.sampling_settings), sampled, forecast
