"""The headline of an evaluation: what training gained, how fast decoding is with the drafter and
why, and the surveys' model of a chain. summary.json holds these sentences under `headline`;
terminal, page and card show them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from spectrain.eval.columns import (
    AUTOREGRESSIVE,
    DRAFTER,
    RECOMMENDED,
    choose_fastest,
    format_interval,
    format_number,
    format_speedup,
    format_speedup_interval,
    is_quotable,
    list_systems,
)
from spectrain.eval.fixed_trees import CHAIN, START
from spectrain.eval.noise import is_possible
from spectrain.eval.throughput_model import MAX_LENGTH

Summary = Mapping[str, Any]

OWN_SYSTEMS = (DRAFTER, "own", "auto", "chain", RECOMMENDED)
"""Names of the systems that decode with the scored drafter."""


def describe_headline(summary: Summary) -> list[str]:
    """Return what training gained, in tokens per forward, the speed of the scored drafter with
    its reason, and its chain in the surveys' symbols; less where less was measured.
    """
    models = list_throughput_models(summary)
    return [*describe_training_gain(summary), *describe_speed(summary), *models[:1]]


def describe_training_gain(summary: Summary) -> Iterator[str]:
    """Say how many tokens the target emits per forward before training and after, in one fixed
    tree on the same prompts: a count, which no other work on the machine changes.
    """
    entry = (summary.get("acceptance") or {}).get(CHAIN)
    if entry is None:
        return
    drafters = entry["drafters"]
    after = drafters[DRAFTER]["pooled"]
    where = (
        f"{entry['label']}, {count_prompts(entry.get('prompts', summary['setting']['prompts']))}"
    )
    gain = entry.get("training_gain") or entry["gain"]
    if gain is None:
        yield f"The drafter makes {format_number(after)} tokens per forward ({where})."
        return
    before = drafters[gain["over"]]["pooled"]
    yield (
        f"Training took tokens per forward from {format_number(before)} to {format_number(after)} "
        f"({where}): {format_gain(gain)}{'' if is_certain(gain) else ', which is uncertain'}"
        f"{_describe_steps(entry, gain)}."
    )


def _describe_steps(entry: Summary, gain: Summary) -> str:
    """Say which part of the gain the fit of the initial weights made, and which one the steps."""
    own = entry["gain"]
    if gain["over"] == START or own is None or own["over"] != START:
        return ""
    start = entry["drafters"][START]["pooled"]
    if own["ratio"] == 1 and start == entry["drafters"][DRAFTER]["pooled"]:
        return "; all of it is the fit of the initial weights"
    ends = own["ci95"]
    interval = format_interval(ends)
    text = (
        f"; the fit reached {format_number(start)}, and the steps after it made "
        f"{own['ratio']:.2f} times that{f' (95 % {interval})' if interval else ''}"
    )
    return text if is_certain(own) else f"{text}, which is uncertain"


def is_certain(gain: Summary) -> bool:
    """Tell whether the interval of a ratio leaves out 1."""
    ends = gain["ci95"]
    return ends is not None and (ends[0] > 1 or ends[1] < 1)


def format_gain(gain: Summary) -> str:
    """Format a ratio with its interval."""
    ends = format_interval(gain["ci95"])
    return f"{gain['ratio']:.2f} times{f' (95 % {ends})' if ends else ''}"


def describe_speed(summary: Summary) -> Iterator[str]:
    """Say how fast the scored drafter decodes in its fastest tree, with the reason, and what is
    faster still.
    """
    systems = {name: entry for name, entry in list_systems(summary).items() if entry.get("speedup")}
    own = {
        name: entry
        for name, entry in systems.items()
        if name in OWN_SYSTEMS and is_possible(entry["speedup"])
    }
    if not own or summary.get("server"):
        return
    quotable = {name: entry for name, entry in own.items() if is_quotable(entry["speedup"])}
    best = max((quotable or own).values(), key=lambda entry: float(entry["speedup"]["ratio"]))
    speedup = best["speedup"]
    interval = format_speedup_interval(speedup)
    prompts = count_prompts(summary["setting"]["prompts"])
    low, high = speedup.get("ci95") or (0.0, float("inf"))
    if not quotable:
        verdict = ", which is unreliable here"
    elif high < 1 or choose_fastest(summary) == AUTOREGRESSIVE:
        verdict = ", so use no drafter on this machine"
    else:
        verdict = "" if low > 1 else ", so whether it is faster is uncertain"
    yield (
        f"{capitalize(best['label'])}: {format_speedup(speedup)} times as fast as without a drafter"
        f"{f' (95 % {interval})' if interval else ''}, on {prompts}{verdict}{_explain_speed(best)}."
    )
    fastest = choose_fastest(summary)
    if fastest in systems and fastest not in OWN_SYSTEMS:
        other = systems[fastest]
        yield f"Faster here: {other['label']}, {format_speedup(other['speedup'])} times."


def _explain_speed(entry: Summary) -> str:
    """Say why: the time of a round in steps, and the speed where verifying costs no more than a
    step, as on a GPU with few texts.
    """
    length = entry["acceptance_length"]["pooled"]
    predicted = entry["speedup"].get("predicted")
    shares = entry.get("time_share") or {}
    timed = sum(shares.get(part, 0.0) for part in ("draft", "verify", "accept"))
    if not predicted or not timed or predicted >= length:
        # A round takes more than a step: where it was timed to take less, other work slowed the
        # steps down.
        return ""
    cost = length / predicted
    free = length / (1 + cost * shares["draft"] / timed)
    return (
        f": a round makes {length:.2f} tokens and takes as long as {cost:.2f} steps without a "
        f"drafter. If verifying took one such step, it would be {free:.2f} times"
    )


def list_throughput_models(summary: Summary) -> list[str]:
    """Say what the surveys' model makes of each chain, in its symbols, beside what was measured."""
    return [
        _describe_throughput_model(entry)
        for entry in list_systems(summary).values()
        if entry.get("throughput_model")
    ]


def _describe_throughput_model(entry: Summary) -> str:
    model = entry["throughput_model"]
    length = entry["acceptance_length"]["pooled"]
    speedup = format_speedup(entry["speedup"])
    return (
        f"In the surveys' symbols, {entry['label']}: alpha = {model['alpha']:.2f}, c = "
        f"{model['c']:.2f}, gamma = {model['gamma']:.3g}; E[N] = {model['expected_tokens']:.2f}, "
        f"{length:.2f} measured; V_SD = {model['speedup']:.2f}, {speedup} measured; "
        f"{_describe_best_length(model)}."
    )


def _describe_best_length(model: Summary) -> str:
    """Say which length of a chain has the largest speedup by the model."""
    best = model["best_gamma"]
    if best is None:
        return "its drafts have several lengths, so no gamma is the best"
    if not best:
        return "no gamma gains"
    more = " or more" if best == MAX_LENGTH else ""
    return f"best gamma = {best}{more}, V_SD = {model['best_speedup']:.2f}"


def count_prompts(number: int) -> str:
    """Format a number of prompts."""
    return f"{number} prompt{'' if number == 1 else 's'}"


def capitalize(text: str) -> str:
    """Return a sentence's first words with a capital letter, the others as they are."""
    return text[:1].upper() + text[1:]
