"""The sentences below an evaluation's table: what explains its numbers, and what limits them.
All are made of summary.json.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spectrain.decoding.acceptance.base import describe_construction, is_declared_lossless
from spectrain.decoding.acceptance.typical import lossy_warning
from spectrain.eval.columns import (
    DRAFTER,
    GROUP_COLUMNS,
    TURN_COLUMNS,
    Column,
    format_interval,
    format_number,
    list_groups,
    list_systems,
)
from spectrain.eval.context import format_length
from spectrain.eval.draft_model import describe_draft_model
from spectrain.eval.fixed_trees import START, UNTRAINED
from spectrain.eval.headline import count_prompts, format_gain, list_throughput_models
from spectrain.eval.tasks import describe_changes
from spectrain.eval.user_times import describe_user_times
from spectrain.export.trained_length import describe_trained_length

Summary = dict[str, Any]

EXTENSION_NOTES: dict[str, Callable[[Any], Iterator[str]]] = {}
"""Sentences of evaluation extensions: the key that an extension adds to summary.json -> the
sentences about its value.
"""

UNDRAFTED_REASONS = {
    "does not pay": "in which a draft would not have paid",
    "no drafter": "in answers that went on without the drafter",
    "comparison": "timed for comparison",
    "nothing proposed": "whose drafter proposed nothing",
}
"""Why a round drafted no token (`RoundReason`), in words that follow a number of rounds."""


def describe_acceptance(summary: Summary) -> Iterator[str]:
    """Say how good the drafter is in each fixed tree, beside its start, the untrained one and
    the shipped one.
    """
    for entry in (summary.get("acceptance") or {}).values():
        drafters = entry["drafters"]
        gain = entry["gain"]
        text = f"Tokens per forward in a fixed tree ({entry['label']}): "
        if gain is None:
            text += format_length_with_ends(drafters[DRAFTER])
        else:
            before, after = (
                format_length_with_ends(drafters[name]) for name in (gain["over"], DRAFTER)
            )
            is_fitted = gain["over"] == START and UNTRAINED in drafters
            name = "before training" if gain["over"] == START else UNTRAINED
            text += (
                f"{'after the fit' if is_fitted else name} {before}, this drafter {after}: "
                f"{format_gain(gain)}"
            )
            if is_fitted:
                text += f"; untrained {format_length_with_ends(drafters[UNTRAINED])}"
        if "shipped" in drafters:
            text += f"; shipped drafter {format_length_with_ends(drafters['shipped'])}"
        yield text + "."


def format_length_with_ends(length: Mapping[str, Any]) -> str:
    """Format tokens per forward with their interval, if there is one."""
    ends = format_interval(length["ci95"])
    return format_number(length["pooled"]) + (f" [{ends}]" if ends else "")


def describe_worst_category(entry: Mapping[str, Any]) -> Iterator[str]:
    """Name the category of prompts with the least speedup of a system, beside the one with the
    largest; say nothing where the system's speedup is not to be quoted.
    """
    if (entry.get("speedup") or {}).get("quotable") is False:
        return
    categories = {
        name: numbers
        for name, numbers in entry.get("by_category", {}).items()
        if numbers["speedup"]
    }
    if len(categories) < 2:
        return
    ranked = sorted(categories, key=lambda name: float(categories[name]["speedup"]))
    texts = []
    for name in (ranked[0], ranked[-1]):
        numbers = categories[name]
        ends = format_interval(numbers.get("speedup_ci95"))
        texts.append(f"{name}, {numbers['speedup']:.2f}{f' (95 % {ends})' if ends else ''}")
    ratio = categories[ranked[-1]]["speedup"] / categories[ranked[0]]["speedup"]
    title = f"Worst category of {entry['label']}" if "label" in entry else "Worst category"
    prompts = categories[ranked[0]].get("prompts", 0)
    yield (
        f"{title}: {texts[0]} on {count_prompts(prompts)}; best: {texts[1]}, {ratio:.1f} times it."
    )


def describe_disparity(entry: Mapping[str, Any]) -> Iterator[str]:
    """Say how many tokens per forward the worst category has, over the best."""
    if disparity := entry.get("disparity"):
        ends = format_interval(disparity["ci95"])
        yield (
            f"Disparity of tokens per forward: {disparity['worst']} has {disparity['ratio']:.2f} "
            f"of {disparity['best']}"
            + (f" (95 % {ends}, corrected for the choice of the pair)." if ends else ".")
        )


def is_disparity_certain(entry: Mapping[str, Any]) -> bool:
    """Tell whether the worst category surely has fewer tokens per forward than the best one."""
    ends = (entry.get("disparity") or {}).get("ci95")
    return ends is not None and bool(ends[1] < 1)


def list_findings(summary: Summary) -> Iterator[str]:
    """Say what was asked for and found: turns of conversations that differ, categories that surely
    do, how good a draft model is by itself, what drafting changed in the text, and whether the
    distribution of drawn answers is the target's.
    """
    for subject, columns in GROUP_COLUMNS:
        if columns is TURN_COLUMNS:
            yield from _describe_groups(subject, columns, summary)
    if is_disparity_certain(summary):
        yield from describe_disparity(summary)
    if draft_model := summary.get("draft_model"):
        yield describe_draft_model(draft_model)
    yield from _describe_quality(summary)
    # A different distribution is a warning.
    if is_accepted(summary["lossless"]):
        yield from describe_distribution(summary["lossless"])


def is_accepted(lossless: Summary | None) -> bool:
    """Tell whether nothing was found that makes the output another than the target's."""
    return (
        lossless is not None and lossless["lossless"] is not False and not lossless["differences"]
    )


def _describe_groups(subject: str, columns: Sequence[Column], summary: Summary) -> Iterator[str]:
    """Say how many tokens per forward the drafter has in each group of rounds that occurs."""
    if groups := list_groups(columns, [summary]):
        yield f"Tokens per forward of the drafter by {subject}: {list_lengths(groups, summary)}."


def explain_numbers(summary: Summary) -> Iterator[str]:
    """Say how good the drafter is in fixed trees, where the time went, what was accepted, and what
    the speedup compares with.
    """
    setting = summary["setting"]
    yield from describe_acceptance(summary)
    for entry in list_systems(summary).values():
        yield from describe_worst_category(entry)
    if not is_disparity_certain(summary):
        yield from describe_disparity(summary)
    # The headline has those of the first chain.
    yield from list_throughput_models(summary)[1:]
    limits = summary.get("bounds", {})
    shares = ", ".join(f"{part} {value:.0%}" for part, value in summary["time_share"].items())
    batch = (
        f" Tokens/s are of {setting['batch_size']} prompts at once."
        if setting["batch_size"] > 1
        else ""
    )
    if batch and summary["speedup"] and not summary["speedup"]["ci95"]:
        batch += " Speedups have no interval, because the prompts of a batch share its time."
    # The numbers at the top of the summary are the drafter's, without retrieval.
    if shares:
        yield f"Time of the drafter's rounds: {shares}.{batch}"
    yield (
        "Drafts of the drafter accepted by depth: "
        f"{format_rates(summary['acceptance_by_depth'])}. Device {setting['device']}, "
        f"{setting['dtype']}."
    )
    if summary.get("user_times"):
        yield describe_user_times(summary)
    yield from _describe_costs(summary)
    yield from _describe_precision(setting)
    if context := setting.get("context"):
        lengths = ", ".join(map(format_length, context["lengths"]))
        yield f"Prompts of {lengths} tokens: {context['description']}, from {context['documents']}."
    for subject, columns in GROUP_COLUMNS:
        if columns is not TURN_COLUMNS:
            yield from _describe_groups(subject, columns, summary)
    if (forwards := limits.get("forwards_per_round", 1)) > 1:
        length = summary["acceptance_length"]["pooled"]
        yield (
            f"A round takes {forwards} forwards of the target, so each gives "
            f"{length / forwards:.2f} tokens."
        )
    yield from _explain_forced(summary.get("forced"))
    if (rules := summary.get("rules")) and rules["better"] == "recursive":
        yield describe_rules(rules, is_used=summary["tree"]["children"] != "deterministic")
    yield from _explain_bounds(limits)
    for name, entry in summary.get("transformers", {}).items():
        yield (
            f"transformers {name}: {entry['tokens_per_second']:.1f} tokens/s with prefill, "
            f"{entry['speedup']:.2f} of its plain generate, {entry['tokens_per_forward']:.2f} "
            "tokens per forward."
        )
    for key, describe in EXTENSION_NOTES.items():
        if summary.get(key):
            yield from describe(summary[key])


def _describe_costs(summary: Summary) -> Iterator[str]:
    """Say what tokens cost in money and energy, and how fast another device would be."""
    if price := summary.get("price_per_million"):
        yield (
            f"Price of a million tokens: {price['autoregressive']:.4g} without the drafter, "
            f"{price['drafted']:.4g} with it."
        )
    if joules := summary.get("joules_per_token"):
        yield (
            f"Joules per token: {joules['autoregressive']:.3g} without the drafter, "
            f"{joules['drafted']:.3g} with it."
        )
    if device := summary.get("other_device"):
        listed = ", ".join(
            f"{speedup:.2f} at {size}" for size, speedup in device["by_batch"].items()
        )
        numbers = f"{device['bandwidth']:g} GB/s and {device['tflops']:g} TFLOP/s"
        yield (
            f"Predicted speedup by prompts at once on a device of {numbers}, with each "
            f"forward at its lower bound: {listed}."
        )


def list_lengths(columns: Sequence[Column], entry: Summary) -> str:
    """List the tokens per forward of groups of rounds, with the intervals that there are."""
    texts = []
    for column in columns:
        if value := column.cell(entry):
            ends = column.interval_cell(entry)
            texts.append(
                f"{column.title.removeprefix('text ')} {value}{f' [{ends}]' if ends else ''}"
            )
    return ", ".join(texts)


def _describe_precision(setting: Summary) -> Iterator[str]:
    """Say that the drafter computes in another type than it was loaded in."""
    if setting.get("drafter_dtype") not in (None, setting["dtype"]):
        yield (
            f"The drafter's large weights are in {setting['drafter_dtype']}, so other drafts may "
            f"be accepted than in another engine; eval.drafter_dtype={setting['dtype']} decodes "
            "with the drafter as it was loaded."
        )


def _explain_forced(forced: Summary | None) -> Iterator[str]:
    """Say how good the drafter is on the target's own text."""
    if not forced:
        return
    yield (
        f"Correct on the target's own text, by depth: {format_rates(forced['agreement_by_depth'])}."
    )
    if "forecast" in forced:
        forecast = forced["forecast"]
        yield (
            "There, sampled drafts would be accepted at rates "
            f"{format_rates(forced['overlap_by_depth'])} (the sum of min(p, q)) and the most "
            f"likely ones at {format_rates(forced['likeliest_by_depth'])}: "
            f"{forecast['sampled']:.2f} and {forecast['greedy']:.2f} tokens per forward of a "
            "chain of this depth."
        )


def _explain_bounds(limits: Summary) -> Iterator[str]:
    """Say what the speedup would be with perfect or free drafts."""
    if not limits.get("oracle"):
        return
    floor = limits["autoregressive_of_floor"]
    free = limits["zero_cost_draft"]
    yield (
        f"Speedup if every draft were right (chain): {limits['oracle']:.2f}"
        + ("" if free is None else f"; if drafting were free: {free:.2f}")
        + (f"; an autoregressive step takes {1 / floor:.1f} times its floor" if floor else "")
        + "."
    )


def describe_rules(rules: Summary, is_used: bool = False) -> str:
    """Say what sampling the children promises if the drafter is unsure."""
    match = rules["match"]
    recursive = rules["recursive"]
    return (
        f"With {rules['children']} children per node, acceptance=match accepts at rates "
        f"{format_rates(match['kept_by_depth'])} by depth, and acceptance=recursive "
        f"tree.children=without_replacement at {format_rates(recursive['kept_by_depth'])}: "
        + ("the latter was used." if is_used else "use the latter, or acceptance=sample.")
    )


def list_warnings(summary: Summary) -> Iterator[str]:
    """Say what cannot be quoted, what was left out, and whether the output is not the target's."""
    setting = summary["setting"]
    yield from describe_doubts(summary)
    if setting.get("skipped"):
        yield (
            "Left out: "
            + ", ".join(f"{count} {reason}" for reason, count in setting["skipped"].items())
            + "."
        )
    lossless = summary["lossless"]
    if lossless is None:
        return
    if lossless["differences"] or lossless["lossless"] is False:
        yield describe_identity(lossless)
        yield from describe_distribution(lossless)
    for entry in summary["compared"].values():
        own = entry.get("lossless") or {}
        if is_declared_lossless(own) and (own.get("distribution") or {}).get("verdict") == (
            "different"
        ):
            yield f"{entry['label']}: {' '.join(describe_distribution(own))}"


def list_caveats(summary: Summary) -> Iterator[str]:
    """Say what was decoded again, what changed the output or the drafter, and what was checked."""
    setting = summary["setting"]
    yield from describe_repeats(summary)
    yield from _describe_trained_target(summary)
    if sentence := describe_trained_length(
        setting.get("training"), summary.get("by_text_position", {})
    ):
        yield sentence
    if pruning := summary.get("pruning"):
        yield (
            f"Pruned after {pruning['layer']} layers by their top {pruning['top_k']}: "
            f"{pruning['nodes_pruned']:.1%} of the nodes, {pruning['node_layers_saved']:.1%} of "
            f"the node-layers and {pruning['work_saved']:.1%} of the work of verification, with "
            "the early head counted."
        )
    if skipped := setting["drafter"].get("skipped"):
        yield (
            f"Drafted without layers {skipped}; "
            f"drafter.skipped={str(skipped).replace(' ', '')} uses them again."
        )
    yield from _describe_plain_rounds(summary)
    if guard := summary.get("guard"):
        yield f"Guard: {guard['drafted_rounds']} rounds drafted, {guard['plain_rounds']} not."
    lossless = summary["lossless"]
    if is_accepted(lossless) and lossless["identical"] is not None:
        yield describe_identity(lossless)


def _describe_plain_rounds(summary: Summary) -> Iterator[str]:
    """Say in how many rounds the systems drafted that may decide not to."""
    deciding = [
        entry
        for entry in list_systems(summary).values()
        if (entry.get("tree") or {}).get("undrafted_share") is not None
    ]
    if parts := [
        f"{entry['label']} in {entry['drafted_rounds']} of {entry['rounds']}"
        + describe_reasons(entry["tree"].get("undrafted_because") or {})
        for entry in deciding
        if "rounds" in entry
    ]:
        yield f"Rounds that drafted: {'; '.join(parts)}. rounds.parquet has the reason of each."


def describe_reasons(counts: dict[str, int]) -> str:
    """Describe why rounds did not draft, in parentheses; "" where all drafted."""
    parts = [
        f"{counts[reason]} {words}"
        for reason, words in UNDRAFTED_REASONS.items()
        if counts.get(reason)
    ]
    return f" (the others: {', '.join(parts)})" if parts else ""


def describe_repeats(summary: Summary) -> Iterator[str]:
    """Say what was done about unsteady times."""
    noise = summary.get("noise", {})
    if noise.get("repeats", 1) > 1:
        yield (
            "Times were unsteady, so every pair of runs was decoded again, alternating round "
            "by round, and that counts."
        )
    if pairs := noise.get("repeated_pairs", 0):
        yield (
            f"Disturbed pairs of runs that were decoded again, alternating round by round: {pairs}."
        )


def describe_doubts(summary: Summary) -> Iterator[str]:
    """Say why speedups cannot be quoted."""
    entries = [
        entry for entry in (summary, *summary["compared"].values()) if entry["speedup"] is not None
    ]
    doubtful = [entry for entry in entries if not entry["speedup"].get("quotable", True)]
    for reason in dict.fromkeys(entry["speedup"]["reason"] for entry in doubtful):
        labels = [entry["label"] for entry in doubtful if entry["speedup"]["reason"] == reason]
        subject = (
            "Speedups are unreliable here"
            if len(labels) == len(entries)
            else f"Unreliable speedup of {'; '.join(labels)}"
        )
        yield f"? {subject}: {reason}."


def _describe_quality(summary: Summary) -> Iterator[str]:
    """Say what drafting changed in the text, and how many answers were right."""
    if drift := summary.get("drift"):
        before = drift["autoregressive"]
        after = drift["drafted"]
        yield (
            f"Quality by the target's own judgement: perplexity {before['perplexity']:.2f} of its "
            f"answers, {after['perplexity']:.2f} of the drafted ones; most likely tokens "
            f"{before['most_likely']:.1%} and {after['most_likely']:.1%}."
        )
        if "agreement" in drift:
            yield (
                f"Agreement with decoding without drafts: {drift['same_answers']} of "
                f"{drift['checked']} answers are the same, and {drift['agreement']:.1%} of its "
                "tokens stand before the first difference."
            )
    if task := summary.get("task"):
        if task["checked"]:
            yield (
                f"Task: {task['drafted']} of {task['checked']} drafted answers right, "
                f"{task['autoregressive']} of those without drafts{describe_changes(task)}."
            )
        if task["not_run"]:
            yield (
                f"Task: {task['not_run']} programs were not run; eval.execute=true runs the "
                "model's programs on this machine."
            )


def _describe_trained_target(summary: Summary) -> Iterator[str]:
    """Say how much training changed the target."""
    if drift := summary.get("target_drift"):
        yield (
            "Drift of the trained target, on the original's greedy answers: perplexity "
            f"{drift['original']['perplexity']:.2f} before, {drift['trained']['perplexity']:.2f} "
            f"after; KL from the original {drift['kl']:.3f} nats per token; same most likely "
            f"token {drift['agreement']:.1%}; {drift['same_answers']} of {drift['checked']} "
            "answers the same."
        )
        yield f"The output is that of the trained target in {summary['setting']['target_path']}."


def describe_identity(lossless: Summary) -> str:
    """Say whether the outputs are the target's."""
    if lossless["differences"]:
        return (
            f"NOT LOSSLESS: {len(lossless['differences'])} outputs differ from "
            f"{lossless['reference']}."
        )
    if not is_declared_lossless(lossless):
        return f"{lossy_warning(lossless['rule'])}."
    if lossless["lossless"] is False:
        return f"NOT LOSSLESS: answers under rule {lossless['rule']} differ in distribution."
    if lossless["checked"]:
        ties = len(lossless["near_ties"])
        identical = lossless["identical"]
        if identical is not None and (parted := lossless["checked"] - identical):
            return (
                f"{identical} of {lossless['checked']} outputs are identical to "
                f"{lossless['reference']}; {parted} part from it at a near tie of the target's "
                "two best logits, and what follows there was not compared."
            )
        return (
            f"The output is identical to {lossless['reference']}, rule {lossless['rule']}; "
            f"near ties: {ties}."
        )
    return f"{describe_construction(lossless['rule'])}."


def describe_distribution(lossless: Summary) -> Iterator[str]:
    """Say what the check of the distribution compared, what it found, and what it would have
    seen.
    """
    check = lossless.get("distribution")
    if not check:
        return
    compared = (
        f"{check['texts']:,} texts of {check['tokens']} tokens after {check['prompts']} prompts, "
        f"compared with {check['reference']}"
    )
    if check["verdict"] == "unknown" and not check["drafted_rounds"]:
        yield (
            "No round of these texts drafted, so this says nothing about the rule; use a tree that "
            "always drafts, as tree=chain."
        )
        return
    if check["verdict"] == "unknown":
        yield (
            f"Distribution not checked: the target leaves nothing to chance in {compared}; raise "
            "the temperature, or score other prompts."
        )
        return
    smallest = min(check["tests"], key=lambda test: test["p_value"])
    tests = (
        f"{len(check['tests'])} tests, smallest p {smallest['p_value']:.2g} ({smallest['name']})"
    )
    if check["verdict"] == "different":
        low, high = check["total_variation_ci95"]
        yield (
            f"Distribution DIFFERENT from the target's: {compared}; {tests}. Total variation of a "
            f"text at least {check['total_variation']:.3f} (95 % {low:.3f} to {high:.3f})."
        )
    else:
        power = ""
        if check["visible_distance"] is not None:
            power = (
                f"; a total variation of {check['visible_distance']:.2f} would have been seen with "
                f"a chance of {check['power']:.0%}"
            )
        yield (
            f"No difference from the target's distribution found: {compared}; {tests}{power}. "
            f"False alarms: {check['false_alarms']:.1%} of scores."
        )


def format_rates(rates: list[float]) -> str:
    """Format rates by depth."""
    return " ".join(f"{rate:.2f}" for rate in rates)
