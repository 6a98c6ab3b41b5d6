"""Sweeps over an axis as tables, sentences and plots. All are made of the entries `axis` of
summaries.

Entries of a comparison also have the name of their drafter; that of a single drafter has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spectrain.eval.columns import format_interval, format_milliseconds, known_interval
from spectrain.eval.context import format_length
from spectrain.eval.figures import COLORS, render_svg
from spectrain_studies.axes.forward_times import describe_forward_times
from spectrain_studies.axes.points import AXIS_LABELS

Axes = Sequence[dict[str, Any]]
AXIS_TITLES = (
    "tokens per forward",
    "tokens/s plain",
    "tokens/s drafted",
    "speedup",
    "95 %",
    "T(1) / T(n)",
    "draft share",
    "p95 ms plain",
    "p95 ms drafted",
)
LOAD_TITLES = (
    "requests/s",
    "texts at once",
    "tokens/s",
    "goodput",
    "p95 ms to the first",
    "p95 ms between tokens",
)
POLICY_LABELS = {
    "never": "never drafting",
    "always": "always drafting",
    "measured": "by measured time",
}


def format_axis_value(over: str, value: float) -> str:
    """Format a value of an axis."""
    return format_length(int(value)) if over == "context" else f"{value:g}"


def axis_name(axis: dict[str, Any]) -> str:
    """Return the name of an axis's drafter; "" for a single drafter."""
    return str(axis.get("name", ""))


def axis_cells(axes: Axes) -> Iterator[list[str]]:
    """Return a line of cells for each drafter and value of an axis: the drafter, the value, and
    those of `AXIS_TITLES`.
    """
    for axis in axes:
        for number, point in enumerate(axis["points"]):
            gaps = [point["user_times"][run]["between_tokens_ms"] for run in ("plain", "drafted")]
            rates = point["tokens_per_second"]
            yield [
                "" if number else axis_name(axis),
                format_axis_value(axis["over"], point["value"]),
                f"{point['acceptance_length']:.2f}",
                f"{rates['autoregressive']:.1f}",
                f"{rates['drafted']:.1f}",
                f"{point['speedup']:.2f}",
                format_interval(point["ci95"]) or "none",
                f"{point['target_efficiency']:.2f}",
                f"{point['draft_share']:.2f}",
                *("" if times is None else format_milliseconds(times["p95"]) for times in gaps),
            ]


def load_cells(load: dict[str, Any]) -> Iterator[list[str]]:
    """Return a line of cells for each rate of arrivals and policy: the policy, and those of
    `LOAD_TITLES`.
    """
    for number in range(len(load["rates"])):
        for name, points in load["policies"].items():
            point = points[number]
            yield [
                POLICY_LABELS[name],
                f"{point['rate']:.3g}",
                f"{point['texts']:.1f}",
                f"{point['throughput']:.1f}",
                f"{point['goodput']:.1f}",
                format_milliseconds(point["first_token_ms"]),
                format_milliseconds(point["between_tokens_ms"]),
            ]


def axis_headers(axes: Axes) -> list[str]:
    """Return the titles of an axis's table."""
    return ["drafter", AXIS_LABELS[axes[0]["over"]], *AXIS_TITLES]


def name_prefix(axis: dict[str, Any]) -> str:
    """Return what stands before a text about an axis: the name of its drafter, if there is one."""
    return f"{axis_name(axis)}: " if axis_name(axis) else ""


def print_axis(console: Console, axes: Axes) -> None:
    """Print the table of an axis, and those of simulated loads."""
    title = f"by {AXIS_LABELS[axes[0]['over']]}"
    print_cells(console, title, axis_headers(axes), axis_cells(axes))
    for axis in axes:
        if axis["load"]:
            requests = f"{axis['load']['requests']} requests at each rate"
            title = f"{name_prefix(axis)}simulated load, {requests}"
            print_cells(console, title, ["policy", *LOAD_TITLES], load_cells(axis["load"]))


def print_cells(
    console: Console, title: str, titles: Sequence[str], lines: Iterator[list[str]]
) -> None:
    """Print a table; a first column without content is left out."""
    rows = [*lines]
    start = 0 if any(row[0] for row in rows) else 1
    table = Table(
        title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for number, text in enumerate(titles[start:], start):
        table.add_column(
            text,
            justify="right" if number else "left",
            overflow="fold",
            min_width=max(map(len, (row[number] for row in rows))),
        )
    for row in rows:
        table.add_row(*row[start:])
    console.print(table)


def axis_markdown(axes: Axes) -> str:
    """Return the tables of an axis as Markdown, and the sentences about each drafter."""
    parts = [markdown_table(axis_headers(axes), [*axis_cells(axes)])]
    for axis in axes:
        sentences = [f"- {name_prefix(axis)}{sentence}" for sentence in describe_axis(axis)]
        parts.append("\n".join(sentences))
        if axis["load"]:
            parts.append(markdown_table(["policy", *LOAD_TITLES], [*load_cells(axis["load"])]))
    return "\n\n".join(parts)


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; a first column without content is left out."""
    start = 0 if any(row[0] for row in rows) else 1
    lines = [titles[start:], ["---:"] * (len(titles) - start), *(row[start:] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe_axis(axis: dict[str, Any]) -> Iterator[str]:
    """Say where drafting stops to pay, up to where that is certain, and what was left out."""
    yield f"{describe_crossover(axis)} ({axis['system']})."
    checked = [point for point in axis["points"] if point["identical"] is not None]
    if checked:
        identical, total = (
            sum(point[key] for point in checked) for key in ("identical", "checked")
        )
        alone = "each text alone " if axis["over"] == "batch" else ""
        yield (
            f"Identical to decoding {alone}without a drafter at all values: {identical} of "
            f"{total} answers."
        )
    if unmeasured := [
        format_axis_value(axis["over"], point["value"])
        for point in axis["points"]
        if not point["ci95"]
    ]:
        needed = (
            "; a size needs a multiple of it as prompts, at least four times it"
            if axis["over"] == "batch"
            else ""
        )
        yield (
            f"No 95 % interval at {', '.join(unmeasured)}: batches share prompts, or there "
            f"are too few{needed}."
        )
    rules = dict.fromkeys(
        f"{point['value']:g} by {point['rule']}, {point['tree']}" for point in axis["points"]
    )
    if axis["over"] == "temperature":
        yield f"Rules and trees: {'; '.join(rules)}."
    if fitted := axis.get("forward_times"):
        yield from describe_forward_times(fitted)
    if axis["load"]:
        load = axis["load"]
        yield (
            "Under simulated load, always drafting takes no more time per token than never "
            f"drafting {describe_stop(load, 'stop')}, and has no less goodput within "
            f"{load['bound_ms']:g} ms {describe_stop(load, 'stop_goodput')}."
        )
        if "schedule" in load:
            yield describe_schedule(load["schedule"])
        if "request_lengths" in load:
            yield describe_request_lengths(load["request_lengths"])
    yield from axis["left_out"]


def describe_schedule(schedule: dict[str, Any]) -> str:
    """Say how many tokens to draft with how many texts, and what that gains over a fixed length."""
    lengths = ", ".join(
        f"{length} with {first if first == last else f'{first} to {last}'} texts"
        for first, last, length in schedule["ranges"]
    )
    gains = schedule["gains"]
    return (
        f"Draft tokens by measured times: {lengths}; at the simulated rates, always "
        f"{schedule['num_tokens']} take {min(gains):.2f} to {max(gains):.2f} times the time per "
        "token of this schedule."
    )


def describe_request_lengths(lengths: dict[str, Any]) -> str:
    """Say how much texts differ in their acceptance rate, and what a length for each of them
    gains.
    """
    gains = lengths["gains"]
    return (
        f"Lengths by request, simulated: texts accept {lengths['mean_rate']:.2f} of the draft "
        f"tokens that are judged, with a standard deviation of {lengths['rate_deviation']:.2f} "
        "between texts; one length for all texts of a round takes "
        f"{min(gains):.2f} to {max(gains):.2f} times the time per token of a length for each."
    )


def describe_stop(load: dict[str, Any], key: str) -> str:
    """Say up to which rate of arrivals always drafting is no worse."""
    return {
        "always": f"at every simulated rate, up to {load['rates'][-1]:.3g} requests per second",
        "never": "at no simulated rate",
        "crosses": f"up to about {load[key]['value'] or 0:.3g} requests per second",
    }[load[key]["kind"]]


def describe_crossover(axis: dict[str, Any]) -> str:
    """Say up to which value of an axis drafting pays."""
    crossover = axis["crossover"]
    over = axis["over"]
    points = [point for point in axis["points"] if point["speedup"]] or axis["points"]
    if crossover["kind"] == "never":
        best = max(points, key=lambda point: float(point["speedup"]))
        return (
            f"Drafting pays nowhere: the best is {best['speedup']:.2f}x at "
            f"{name_value(over, best['value'])}"
        )
    if crossover["kind"] == "always":
        text = f"Drafting pays up to {name_value(over, points[-1]['value'])}, the largest measured"
    else:
        value = crossover["value"]
        text = (
            "Drafting pays up to about "
            f"{name_value(over, round(value, 2) if over == 'temperature' else round(value))}"
        )
    certain = crossover["certain"]
    return text + (
        ""
        if certain is None
        else f"; all intervals lie above 1 up to {format_axis_value(over, certain)}"
    )


def name_value(over: str, value: float) -> str:
    """Format a value of an axis with what it counts."""
    text = format_axis_value(over, value)
    if over == "temperature":
        return f"temperature {text}"
    return "1 prompt" if over == "batch" and value == 1 else f"{text} {AXIS_LABELS[over]}"


def render_axis(axes: Axes, id: str) -> Markup:
    """Plot speedup and target efficiency over an axis and, of a simulated load, goodput over the
    rate of arrivals.
    """
    over = axes[0]["over"]
    load = axes[0]["load"]

    def draw(figure: Any) -> None:
        left, *right = figure.subplots(1, 2 if load else 1, squeeze=False)[0]
        for number, axis in enumerate(axes):
            draw_points(left, axis["points"], axis_name(axis), COLORS[number % len(COLORS)])
        left.axhline(1, color="0.6", linewidth=0.8)
        values = sorted({point["value"] for axis in axes for point in axis["points"]})
        if over != "temperature":
            left.set_xscale("log", base=2)
        left.set_xticks(values, [format_axis_value(over, value) for value in values])
        left.minorticks_off()
        left.set(
            xlabel=AXIS_LABELS[over],
            ylabel="speedup, with 95 % interval; dashed T(1) / T(n)",
            ylim=(0, None),
        )
        if len(axes) > 1:
            left.legend()
        for part in right:
            for style, (name, points) in zip(("--", "-", ":"), load["policies"].items()):
                part.plot(
                    load["rates"],
                    [point["goodput"] for point in points],
                    f"o{style}",
                    label=POLICY_LABELS[name],
                )
            part.set(
                xlabel="requests per second",
                ylabel=f"tokens/s within {load['bound_ms']:g} ms",
                ylim=(0, None),
            )
            part.legend()

    return render_svg(
        draw, (9 if load else 5, 3.4), f"{id}-{over}", f"Speedup by {AXIS_LABELS[over]}"
    )


def draw_points(axes: Any, points: Sequence[dict[str, Any]], name: str, color: str) -> None:
    """Draw the speedups of a drafter, with a bar where there is an interval, and its target
    efficiency.
    """
    values = [point["value"] for point in points]
    speedups = [point["speedup"] for point in points]
    ends = [known_interval(point["ci95"]) or [float("nan")] * 2 for point in points]
    errors = [
        [abs(speedup - pair[side]) for speedup, pair in zip(speedups, ends)] for side in (0, 1)
    ]
    axes.errorbar(
        values, speedups, yerr=errors, fmt="o-", capsize=3, color=color, label=name or None
    )
    axes.plot(
        values, [point["target_efficiency"] for point in points], "--", color=color, linewidth=0.9
    )


def section_axis(axes: Axes, id: str) -> dict[str, Any]:
    """Return what a page shows of an axis: its plot, its tables as titles and rows of cells, and
    sentences.
    """
    tables = [("", axis_headers(axes), [*axis_cells(axes)])]
    for axis in axes:
        if axis["load"]:
            title = ", ".join(filter(None, ["Simulated load", axis_name(axis)]))
            tables.append((title, ["policy", *LOAD_TITLES], [*load_cells(axis["load"])]))
    return {
        "title": f"By {AXIS_LABELS[axes[0]['over']]}",
        "plot": render_axis(axes, id),
        "tables": tables,
        "notes": [
            f"{name_prefix(axis)}{sentence}" for axis in axes for sentence in describe_axis(axis)
        ],
    }
