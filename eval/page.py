"""report.html: the results of an evaluation or a comparison, as one file without scripts that also
prints well.

It is made from the files of a run alone; a part whose file is missing is left out, and the page
says so.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from spectrain.decoding.generation import ROUND_PARTS
from spectrain.eval.axes.tables import section_axes, section_axis
from spectrain.eval.columns import (
    GROUP_COLUMNS,
    RUN_COLUMNS,
    SERVING_COLUMNS,
    SYSTEM_COLUMNS,
    autoregressive_entries,
    format_interval,
    format_speedup,
    format_speedup_interval,
    get_value,
    known_interval,
    label_row,
    list_groups,
    list_serving_rows,
    list_systems,
)
from spectrain.eval.figures import COLORS, render_svg
from spectrain.eval.headline import describe_headline
from spectrain.eval.noise import is_possible
from spectrain.eval.notes import explain_numbers, list_caveats, list_warnings
from spectrain.eval.user_times import USER_TIME_COLUMNS, list_user_time_rows
from spectrain.files import write_text

# positions of a drawn tree, the most often drafted ones: a dynamic tree has many rare ones
MAX_POSITIONS = 128
MAX_POINTS = 300  # points of a training curve


def write_report(
    path: Path, evaluations: Sequence[Path], comparison: dict[str, Any] | None = None
) -> None:
    """Write a page about evaluation folders, and before them about their comparison.

    comparison: the content of comparison.json; a missing key leaves out what it describes. Without
    `evaluations`, the page shows those that the comparison's rows name.
    """
    rows: list[dict[str, Any]] = [dict(row) for row in (comparison or {}).get("rows", [])]
    rows_by_folder = {
        (path.parent / row["evaluation"]).resolve(): row for row in rows if row.get("evaluation")
    }
    sections = []
    for number, folder in enumerate(evaluations or rows_by_folder, 1):
        section = read_section(folder, f"s{number}", prompts=1 if rows else None)
        if (row := rows_by_folder.get(folder.resolve())) is not None:
            row["section"] = section["id"]
            section["title"] = row.get("label") or row.get("name") or section["title"]
        own_report = folder / "report.html"
        if own_report.exists() and folder.resolve() != path.parent.resolve():
            section["link"] = os.path.relpath(own_report, path.parent)
        sections.append(section)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number_text,
        "interval": format_interval,
        "percent": percent_text,
        "speedup": format_speedup,
        "speedup_interval": format_speedup_interval,
        "label_row": label_row,
    }
    page = environment.get_template("page.html").render(
        sections=sections,
        comparison=None if comparison is None else {**comparison, "rows": rows},
        chart=comparison_chart(rows),
        axes=[
            section_axes([(axis["name"], axis) for axis in axes], "compared")
            for axes in (comparison or {}).get("axes", {}).values()
        ],
        parts=ROUND_PARTS,
        system_columns=SYSTEM_COLUMNS,
        serving_columns=SERVING_COLUMNS,
        user_time_columns=USER_TIME_COLUMNS,
        run_columns=RUN_COLUMNS,
    )
    write_text(path, page.strip() + "\n")


def read_section(folder: Path, id: str, prompts: int | None) -> dict[str, Any]:
    """Read everything that the page shows about one evaluation."""
    run = folder.parent.parent if folder.parent.name == "eval" else None
    missing = [
        name
        for name in ("summary.json", "samples.jsonl", "drafts.jsonl")
        if not (folder / name).exists()
    ]
    summary = (
        json.loads((folder / "summary.json").read_text()) if "summary.json" not in missing else {}
    )
    if "server" in summary:
        # A server does not say what it drafted.
        missing = [name for name in missing if name != "drafts.jsonl"]
    lines = read_lines(folder / "drafts.jsonl")
    metrics = [] if run is None else read_lines(run / "metrics.jsonl")
    setting = summary.get("setting", {})
    turns = [line for line in lines if "rounds" in line]
    systems = list(list_systems(summary).values()) if summary else []
    return {
        "id": id,
        "title": f"{setting.get('recipe') or 'drafter'} on {setting.get('target', 'its target')}",
        "summary": summary,
        "setting": setting,
        "answers": len(read_lines(folder / "samples.jsonl")),
        "autoregressive": autoregressive_entries(summary),
        "serving": list_serving_rows(summary) if summary else [],
        "user_times": list_user_time_rows(summary) if summary else [],
        "axis": section_axis(summary.get("axis"), id),
        "speedups": speedup_chart(get_value(summary, "server.speedups") or [], id),
        "systems": systems,
        "groups": [
            column for _, columns in GROUP_COLUMNS for column in list_groups(columns, systems)
        ],
        "recommendation": describe_headline(summary) if summary else [],
        "notes": [*list_warnings(summary), *explain_numbers(summary), *list_caveats(summary)]
        if summary
        else [],
        "texts": [split_by_round(turn) for turn in turns[:prompts]],
        "tree": next((draw_tree(line["tree"]) for line in lines if "tree" in line), None),
        "training": training_curves(metrics, id) if metrics else None,
        "config": (run / "config.yaml").read_text()
        if run is not None and (run / "config.yaml").exists()
        else None,
        "missing": missing + ([] if metrics else ["metrics.jsonl"]),
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file: no lines if there is no file, and without a line that a kill cut short."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def split_by_round(turn: dict[str, Any]) -> dict[str, Any]:
    """Split a turn's answer into rounds of tokens, each with its depth (None: the target's own)
    and its rejected siblings.
    """
    pieces = turn["pieces"]
    runs = []
    start = 1
    for number, round in enumerate(turn["rounds"], 1):
        path = [0, *round["kept"]]
        tokens = []
        for piece, depth in zip(
            pieces[start : start + round["emitted"]], range(1, round["emitted"] + 1)
        ):
            node = path[depth] if depth < len(path) else None
            above = path[min(depth, len(path)) - 1]
            rejected = [
                text
                for text, parent, other in zip(
                    round["tokens"], round["parents"], range(len(round["tokens"]))
                )
                if parent == above and other != node
            ]
            tokens.append(
                {
                    "text": piece,
                    "depth": None if node is None else round["depths"][node],
                    "rejected": rejected,
                }
            )
        runs.append({"number": number, "tokens": tokens, "nodes": len(round["tokens"]) - 1})
        start += round["emitted"]
    return {**turn, "first": pieces[0] if pieces else "", "runs": runs}


def draw_tree(tree: dict[str, Any]) -> dict[str, Any] | None:
    """Lay out the positions of a tree from left to right by depth, with shades and widths of the
    lines to them.
    """
    counts = {tuple(map(int, name.split("."))): pair for name, pair in tree["places"].items()}
    if not counts:
        return None
    # Parents are drafted at least as often as their children.
    frequent = sorted(counts, key=lambda position: (-counts[position][0], len(position), position))[
        :MAX_POSITIONS
    ]
    positions = sorted(frequent)
    rounds = tree["rounds"]
    small = len(positions) > 48
    across, down, radius = (84, 13, 5) if small else (84, 28, 12)
    inner = {position[:end] for position in positions for end in range(len(position))}
    leaves = [position for position in positions if position not in inner]
    y: dict[tuple[int, ...], float] = {
        leaf: down * (number + 0.7) for number, leaf in enumerate(leaves)
    }
    for parent in sorted(inner, key=len, reverse=True):
        heights = [y[position] for position in positions if position[:-1] == parent]
        y[parent] = (min(heights) + max(heights)) / 2
    nodes = []
    for position in positions:
        drafted, accepted = counts[position]
        rate = accepted / drafted
        depth = len(position)
        line = {
            "x": 24 + across * depth,
            "y": round(y[position], 1),
            "from_x": 24 + across * (depth - 1),
            "from_y": round(y[position[:-1]], 1),
            "width": round(0.6 + 2.6 * drafted / max(rounds, 1), 2),
        }
        words = ", then ".join(f"choice {rank + 1}" for rank in position)
        nodes.append(
            {
                **line,
                "depth": depth,
                "position": words,
                "drafted": drafted,
                "accepted": accepted,
                "rate": rate,
                "fill": shade(rate),
                "ink": "#fff" if rate > 0.45 else "#111",
            }
        )
    return {
        "nodes": nodes,
        "root_y": round(y[()], 1),
        "radius": radius,
        "small": small,
        "rounds": rounds,
        "width": 48 + across * max(map(len, positions)),
        "height": round(down * (len(leaves) + 0.4)),
        "left_out": len(counts) - len(positions),
        "legend": [(rate, shade(rate)) for rate in (0.0, 0.25, 0.5, 0.75, 1.0)],
    }


def shade(rate: float) -> str:
    """Return a color from almost white, never accepted, to dark blue, always accepted."""
    stops = ((240, 244, 249), (107, 165, 207), (8, 48, 107))
    low, high, part = (
        (stops[0], stops[1], 2 * rate) if rate < 0.5 else (stops[1], stops[2], 2 * rate - 1)
    )
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high))


def training_curves(metrics: list[dict[str, Any]], id: str) -> Markup:
    """Plot loss and, if the drafter reports it, agreement by depth over the steps."""
    points = metrics[:: max(1, -(-len(metrics) // MAX_POINTS))]
    points = points if points[-1] is metrics[-1] else [*points, metrics[-1]]
    agreeing = [point for point in points if isinstance(point.get("agreement"), list)]
    columns = 2 if agreeing else 1

    def draw(figure: Any) -> None:
        left, *right = figure.subplots(1, columns, squeeze=False)[0]
        left.plot(
            [point["step"] for point in points],
            [point["loss"] for point in points],
            color=COLORS[0],
        )
        left.set(xlabel="step", ylabel="loss on training text")
        for axes in right:
            depths = max(len(point["agreement"]) for point in agreeing)
            for depth in range(depths):
                curve = [
                    (point["step"], point["agreement"][depth])
                    for point in agreeing
                    if depth < len(point["agreement"])
                ]
                style = ("-", "--", "-.", ":")[depth % 4]
                axes.plot(
                    *zip(*curve),
                    style,
                    color=COLORS[depth % len(COLORS)],
                    label=f"depth {depth + 1}",
                )
            axes.set(xlabel="step", ylabel="agreement on training text", ylim=(0, 1))
            axes.legend(ncols=-(-depths // 4))

    return render_svg(
        draw,
        (4.5 * columns, 3.2),
        f"{id}-training",
        "Training curves: loss and agreement by depth over the steps",
    )


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

    return render_svg(draw, (5, 3.2), f"{id}-speedups", "Speedup by the number of requests at once")


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


def number_text(value: Any, digits: int = 2) -> str:
    """Format a number as the tables show it, or return "" if there is none."""
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) else ""


def percent_text(value: Any) -> str:
    """Format a share as a percentage, or return "" if there is none."""
    return f"{value:.0%}" if isinstance(value, (int, float)) else ""
