"""The figures of report.html, each from the values of a run's files."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from spectrain.eval.columns import DRAFTER, known_interval
from spectrain.eval.figures import COLORS, INK, render_svg
from spectrain.eval.fixed_trees import START, UNTRAINED
from spectrain.eval.noise import is_possible

MAX_POINTS = 300  # points of a training curve
# Below two validations there is no curve.
MIN_VALIDATIONS = 2
FIGURE_SIZE = (4.6, 3.1)  # inches; two of them fit beside each other, and one on a phone
BAR_NAMES = {
    START: "before training",
    UNTRAINED: "untrained",
    DRAFTER: "this drafter",
    "shipped": "shipped drafter",
}
"""Names of the systems that are decoded in fixed trees, in the order of their bars."""


class HeldOutPoint(NamedTuple):
    """The tokens per forward that a validation forecasts after a step, with its 95 % interval."""

    step: int
    forecast: float
    interval: tuple[float, float]


def held_out_points(metrics: Sequence[Mapping[str, Any]]) -> list[HeldOutPoint]:
    """Return the validations of a run in the order of their steps; step 0 is the start."""
    found = []
    for line in metrics:
        for step, key in ((0, "held_out_at_start"), (line.get("step", 0), "held_out")):
            forecast = (line.get(key) or {}).get("forecast")
            if forecast is not None:
                ends = line[key].get("forecast_interval") or (forecast, forecast)
                found.append(HeldOutPoint(step, forecast, (ends[0], ends[1])))
    return found


def learning_curve(points: Sequence[HeldOutPoint], id: str) -> Markup | None:
    """Plot what training added on held-out text, from step 0 on; None without two validations."""
    if len(points) < MIN_VALIDATIONS:
        return None
    return render_svg(
        lambda figure: draw_learning_curve(figure.add_subplot(), points),
        FIGURE_SIZE,
        f"{id}-learning",
        "Tokens per forward on held-out text by training step, with the start marked",
    )


def draw_learning_curve(axes: Any, points: Sequence[HeldOutPoint]) -> None:
    """Draw validations by step, with their intervals and the start."""
    steps = [point.step for point in points]
    forecasts = [point.forecast for point in points]
    lows, highs = zip(*(point.interval for point in points))
    axes.fill_between(steps, lows, highs, color=COLORS[0], alpha=0.18, linewidth=0)
    axes.plot(steps, forecasts, "-", color=COLORS[0], marker="o", markersize=3)
    first = points[0]
    last = points[-1]
    if first.step == 0:
        axes.plot([0], [first.forecast], "D", color=COLORS[1], markersize=7, gid="start")
        axes.axhline(first.forecast, color=COLORS[1], linewidth=0.8, linestyle=":")
        # Below the point where the curve rises from it.
        rises = last.forecast >= first.forecast
        offset = (9, -12 if rises else 7)
        label_point(axes, first, f"start {first.forecast:.2f}", offset, COLORS[1], "left")
    label_point(axes, last, f"{last.forecast:.2f}", (0, 8), COLORS[0], "right")
    axes.set(
        xlabel="training step",
        ylabel="tokens per forward",
        title="On held-out text, by training step",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))


def label_point(
    axes: Any,
    point: HeldOutPoint,
    text: str,
    offset: tuple[float, float],
    color: str,
    side: str,
) -> None:
    """Write a text beside a point, `offset` points of the figure away from it."""
    axes.annotate(
        text,
        (point.step, point.forecast),
        offset,
        textcoords="offset points",
        ha=side,
        color=color,
        weight="bold",
    )


def list_gain_bars(acceptance: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return the bars of each fixed tree: the tree's label, and names with tokens per forward.

    acceptance: the entry of summary.json, by tree. The first one is untrained; where the training
    fitted its first weights, its start is the drafter after the fit.
    """
    groups = []
    for entry in acceptance.values():
        drafters = entry["drafters"]
        names = BAR_NAMES | ({START: "after the fit"} if UNTRAINED in drafters else {})
        order = (UNTRAINED, START, DRAFTER, "shipped")
        bars = [(names[name], drafters[name]) for name in order if name in drafters]
        groups.append((entry["label"], bars))
    return groups


def gain_chart(acceptance: Mapping[str, Any], id: str) -> Markup | None:
    """Plot tokens per forward before and after training in each fixed tree; None without any."""
    groups = list_gain_bars(acceptance)
    if not groups:
        return None
    num_lines = sum(len(bars) + 1 for _, bars in groups)
    return render_svg(
        lambda figure: draw_gain(figure.add_subplot(), groups),
        (FIGURE_SIZE[0], max(FIGURE_SIZE[1], 0.9 + 0.27 * num_lines)),
        f"{id}-gain",
        "Tokens per forward before and after training, with 95 % intervals",
    )


def draw_gain(axes: Any, groups: Sequence[tuple[str, Sequence[tuple[str, Any]]]]) -> None:
    """Draw a bar for each drafter, from the one token of plain decoding on."""
    ticks: dict[float, str] = {}
    position = 0.0
    for label, bars in groups:
        ticks[position] = label
        for name, length in bars:
            position -= 1
            ticks[position] = name
            value = length["pooled"]
            low, high = known_interval(length["ci95"]) or (value, value)
            is_own = name == BAR_NAMES[DRAFTER]
            axes.barh(
                position, value - 1, 0.72, left=1, color=COLORS[0], alpha=1 if is_own else 0.4
            )
            axes.plot([low, high], [position, position], color=INK, linewidth=1.2)
            axes.annotate(
                f"{value:.2f}",
                (max(high, value), position),
                (5, 0),
                textcoords="offset points",
                va="center",
                weight="bold" if is_own else "normal",
            )
        position -= 1.2
    axes.set_yticks([*ticks], [*ticks.values()])
    for tick, text in zip(axes.get_yticklabels(), ticks.values()):
        if text in {label for label, _ in groups}:
            tick.set_weight("bold")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.axvline(1, color=INK, linewidth=0.8)
    left, right = axes.get_xlim()
    axes.set(
        xlim=(min(left, 1), right + 0.14 * (right - left)),
        ylim=(position + 0.6, 0.6),
        xlabel="1 is plain decoding; lines are 95 % intervals",
        title="Tokens per forward in a fixed tree",
    )


def thin_out(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return evenly spaced lines of metrics, at most `MAX_POINTS` and the last one."""
    points = [*metrics[:: max(1, -(-len(metrics) // MAX_POINTS))]]
    return points if points[-1] is metrics[-1] else [*points, metrics[-1]]


def training_curves(metrics: Sequence[Mapping[str, Any]], id: str) -> list[Markup]:
    """Plot loss and, if the drafter reports it, agreement by depth over the steps."""
    points = thin_out(metrics)
    agreeing = [point for point in points if isinstance(point.get("agreement"), list)]
    curves = [
        render_svg(
            lambda figure: draw_loss(figure.add_subplot(), points),
            FIGURE_SIZE,
            f"{id}-loss",
            "Loss on training text over the steps",
        )
    ]
    if agreeing:
        curves.append(
            render_svg(
                lambda figure: draw_agreement(figure.add_subplot(), agreeing),
                FIGURE_SIZE,
                f"{id}-agreement",
                "Agreement by depth on training text over the steps",
            )
        )
    return curves


def draw_loss(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    """Draw the loss over the steps."""
    steps = [point["step"] for point in points]
    axes.plot(steps, [point["loss"] for point in points], color=COLORS[0])
    axes.set(xlabel="training step", ylabel="loss", title="On training text")


def draw_agreement(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    """Draw the share of correct drafts over the steps, a line for each depth."""
    depths = max(len(point["agreement"]) for point in points)
    for depth in range(depths):
        curve = [
            (point["step"], point["agreement"][depth])
            for point in points
            if depth < len(point["agreement"])
        ]
        style = ("-", "--", "-.", ":")[depth % 4]
        color = COLORS[depth % len(COLORS)]
        axes.plot(*zip(*curve), style, color=color, label=f"depth {depth + 1}")
    axes.set(xlabel="training step", ylabel="share of drafts right", ylim=(0, 1), title="By depth")
    axes.legend(ncols=-(-depths // 4), frameon=False)


def speedup_chart(speedups: list[dict[str, Any]], id: str) -> Markup | None:
    """Plot a server's speedup over the same server without a drafter, with intervals, by
    concurrency.
    """
    speedups = [point for point in speedups if is_possible(point)]
    if not speedups:
        return None

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        points = sorted(speedups, key=lambda point: int(point["concurrency"]))
        levels = [point["concurrency"] for point in points]
        ratios = [point["ratio"] for point in points]
        ends = [known_interval(point["ci95"]) or [point["ratio"]] * 2 for point in points]
        below = [ratio - low for ratio, (low, _) in zip(ratios, ends)]
        above = [high - ratio for ratio, (_, high) in zip(ratios, ends)]
        axes.errorbar(levels, ratios, yerr=[below, above], fmt="o-", capsize=3, color=COLORS[0])
        axes.axhline(1, color="0.6", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, list(map(str, levels)))
        axes.set(xlabel="requests at once", ylabel="speedup, with 95 % interval")

    return render_svg(
        draw, FIGURE_SIZE, f"{id}-speedups", "Speedup by the number of requests at once"
    )


def comparison_chart(rows: list[dict[str, Any]]) -> Markup | None:
    """Plot tokens per forward with intervals of every row's systems."""
    bars = [
        (row.get("label") or row.get("name", ""), index, system)
        for row in rows
        for index, system in enumerate(row.get("systems", []))
        if system.get("acceptance_length")
    ]
    if not bars:
        return None

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        ticks: dict[str, float] = {}
        for number, (label, index, system) in enumerate(bars):
            length = system["acceptance_length"]
            low, high = known_interval(length.get("ci95")) or [length["pooled"]] * 2
            error = [[length["pooled"] - low], [high - length["pooled"]]]
            axes.errorbar(
                length["pooled"],
                -number,
                xerr=error,
                fmt="os^Dv"[index % 5],
                capsize=3,
                color=COLORS[index % 6],
            )
            words = f"{length['pooled']:.2f}  {system.get('label', '')}"
            axes.annotate(
                words, (high, -number), (6, 0), textcoords="offset points", va="center", fontsize=8
            )
            # A dollar sign would begin mathematics.
            ticks.setdefault(label.replace("$", r"\$"), -number)
        axes.set_yticks(list(ticks.values()), list(ticks))
        axes.set(xlabel="tokens per forward, with 95 % interval", ylim=(0.4 - len(bars), 0.6))
        axes.axvline(1, color="0.6", linewidth=0.8)
        axes.set_xlim(0.9, axes.get_xlim()[1] + 0.35 * (axes.get_xlim()[1] - 0.9))

    title = "Tokens per forward of every family with 95 % intervals"
    return render_svg(draw, (8, 1 + 0.3 * len(bars)), "compared", title)
