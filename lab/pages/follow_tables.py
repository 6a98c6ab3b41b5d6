"""Tables of the page on following traffic."""

from typing import Any

from lab.benchmarks.follow_overhead import NUM_PARTS
from lab.pages.render import fill_paragraphs, format_table
from spectrain_serve.follow.settings import FollowSettings

RATES = {
    "first kind, before": "first kind, before the change",
    "second kind, before": "second kind, before the swap; without `follow` it stays there",
    "second kind, after": "second kind, after the swap",
    "first kind, after": "first kind, after the swap",
    "second kind, rolled back": "second kind, after a roll-back by command",
}
EVENTS = {
    "drift": "drift is noticed",
    "training": "training begins",
    "trained": "the candidate is trained",
    "promoted": "it is proven and serves",
}
SPEEDS = {
    "before training": "first drafter, before the candidate trains",
    "during training": "first drafter, while it trains",
    "after the swap": "candidate",
}


def day_tables(result: dict[str, Any]) -> str:
    """Return tokens per forward, the times of the events, the proof, and the cost of training, a
    column for each day.
    """
    days = result["days"]
    names = [f"seed {day['seed']}" for day in days]
    rates = [
        [label, *(format_number(day["tokens_per_forward"][key], 2) for day in days)]
        for key, label in RATES.items()
    ]
    seconds = [
        [label, *(format_number(day["seconds"].get(key), 0) for day in days)]
        for key, label in EVENTS.items()
    ]
    proofs = [
        ["gain on new traffic", *(format_gain(day, "new") for day in days)],
        ["gain on old traffic", *(format_gain(day, "old") for day in days)],
        ["how it was swapped", *((day["promoted"] or {}).get("way", "not") for day in days)],
        ["repeated requests, and those with another answer", *(format_shadow(day) for day in days)],
    ]
    speeds = [
        [label, *(format_number(day["tokens_per_second"].get(key), 0) for day in days)]
        for key, label in SPEEDS.items()
    ]
    return "\n\n".join(
        [
            format_table(["tokens per forward", *names], rates),
            format_table(["seconds after the change", *names], seconds),
            format_table(["the proof and the swap", *names], proofs),
            "What training costs on the same machine, in tokens per second of a request; the "
            "training has niceness 10.",
            format_table(["tokens per second", *names], speeds),
        ]
    )


def format_number(value: float | None, digits: int) -> str:
    """Return a number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def format_gain(day: dict[str, Any], kind: str) -> str:
    """Return the gain of a day's proof with its interval, in percent."""
    if day["promoted"] is None:
        return "-"
    gain = day["promoted"][kind]
    low, high = gain["interval"]
    return (
        f"{100 * gain['gain']:+.0f} % [{100 * low:+.0f}, {100 * high:+.0f}], "
        f"{gain['num_prompts']} prompts"
    )


def format_shadow(day: dict[str, Any]) -> str:
    """Return how many requests were repeated around the swap, and how many answers changed."""
    shadow = (day["promoted"] or {}).get("shadow")
    return "-" if shadow is None else f"{shadow['sent']}, {shadow['changed']}"


def quiet_text(quiet: dict[str, Any]) -> str:
    """Return what happened without a change of traffic."""
    horizon = quiet["setting"]["options"]["follow.horizon"]
    rate = FollowSettings().false_alarms
    sentences = []
    for day in quiet["days"]:
        drifts = day["events"].count("drift")
        swaps = day["events"].count("promoted")
        sentences.append(
            f"Live, with our own engine, {day['requests']} requests of the first kind alone, "
            f"{day['distinct']} of them different, at {day['tokens_per_forward']:.2f} tokens per "
            f"forward, raised {drifts} alarms and led to {swaps} swaps; that is "
            f"{day['requests'] // horizon} times the {horizon} requests within which the stated "
            f"probability of a false alarm is {100 * rate:.0f} %."
        )
    return fill_paragraphs(" ".join(sentences))


def alarm_table(alarms: dict[str, Any]) -> str:
    """Return the false alarms and delays on simulated streams."""
    rows = [
        [
            row["distribution"],
            (
                f"{row['false_alarms']} of {row['streams']} "
                f"({100 * row['false_alarms'] / row['streams']:.1f} %)"
            ),
            f"{row['median_delay']:.0f}",
            str(row["unnoticed"]),
        ]
        for row in alarms["rows"]
    ]
    titles = [
        "distribution",
        "streams with a false alarm",
        "requests until a fall is noticed, median",
        "falls not noticed",
    ]
    return format_table(titles, rows)


def overhead_table(overhead: dict[str, Any]) -> str:
    """Return the milliseconds to the first part and to the whole answer, directly and through
    the proxy.
    """
    grouped: dict[tuple[int, bool], dict[str, dict[str, Any]]] = {}
    for row in overhead["rows"]:
        grouped.setdefault((row["streams"], row["streamed"]), {})[row["way"]] = row
    rows = []
    for (streams, streamed), ways in grouped.items():
        direct = ways["direct"]
        added = [
            (
                f"{row['first_ms'] - direct['first_ms']:+.2f}, "
                f"{row['whole_ms'] - direct['whole_ms']:+.2f}"
            )
            for name, row in ways.items()
            if name != "direct"
        ]
        label = f"{'streams' if streamed else 'whole answers'}: {streams}"
        speeds = (
            ", ".join(f"{1000 * NUM_PARTS / row['whole_ms']:.1f}" for row in ways.values())
            if streamed
            else "-"
        )
        rows.append([label, f"{direct['first_ms']:.2f}, {direct['whole_ms']:.2f}", *added, speeds])
    titles = ["at once", "directly: first part, whole", "the proxy adds", "with recording it adds"]
    return format_table([*titles, "parts per second of a stream: directly, proxy, recording"], rows)


def fault_table(faults: dict[str, Any]) -> str:
    """Return how often each fault was tried and passed."""
    counts: dict[str, list[bool]] = {}
    for row in faults["rows"]:
        counts.setdefault(row["fault"], []).append(row["passed"])
    rows = [[fault, str(len(passed)), str(sum(passed))] for fault, passed in counts.items()]
    passed = sum(row["passed"] for row in faults["rows"])
    sentence = (
        f"{passed} of {len(faults['rows'])} passed. Every answer through the proxy is compared "
        "with the one that the server gives without it."
    )
    return f"{sentence}\n\n{format_table(['fault', 'times', 'passed'], rows)}"
