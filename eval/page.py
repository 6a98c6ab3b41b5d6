"""report.html: the results of an evaluation or a comparison, as one file without scripts that also
prints well.

It is made from the files of a run alone; a part whose file is missing is left out, and the page
says so.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from jinja2 import Environment, FileSystemLoader
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from spectrain.config.installed import load_entry_points
from spectrain.decoding.generation import ROUND_PARTS
from spectrain.eval.charts import (
    MIN_VALIDATIONS,
    HeldOutPoint,
    comparison_chart,
    gain_chart,
    held_out_points,
    learning_curve,
    speedup_chart,
    training_curves,
)
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
    label_row,
    list_groups,
    list_serving_rows,
    list_systems,
)
from spectrain.eval.figures import COLORS, DARK_COLORS, make_color_style
from spectrain.eval.headline import describe_headline
from spectrain.eval.notes import explain_numbers, list_caveats, list_findings, list_warnings
from spectrain.eval.user_times import USER_TIME_COLUMNS, list_user_time_rows
from spectrain.files import iterate_lines, require_regular_file, write_text


class HeldOutNumbers(BaseModel):
    """What the page shows of a validation."""

    forecast: FiniteFloat | None = None
    forecast_interval: tuple[FiniteFloat, FiniteFloat] | None = None


class MetricsLine(BaseModel):
    """What the page shows of a line of metrics.jsonl. Of a drafter's directory that somebody else
    made, that file may hold anything.
    """

    step: Annotated[int, Field(ge=0, le=10**12)]
    loss: FiniteFloat
    agreement: list[FiniteFloat] | None = None
    held_out: HeldOutNumbers | None = None
    held_out_at_start: HeldOutNumbers | None = None


# positions of a drawn tree, the most often drafted ones: a dynamic tree has many rare ones
MAX_POSITIONS = 128


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
        plot_colors=make_color_style(COLORS),
        dark_plot_colors=make_color_style(DARK_COLORS),
        axes=[
            drawn
            for axes in (comparison or {}).get("axes", {}).values()
            if (drawn := draw_axis(axes, "compared")) is not None
        ],
        parts=ROUND_PARTS,
        system_columns=SYSTEM_COLUMNS,
        serving_columns=SERVING_COLUMNS,
        user_time_columns=USER_TIME_COLUMNS,
        run_columns=RUN_COLUMNS,
    )
    write_text(path, page.strip() + "\n")


def draw_axis(axes: Sequence[dict[str, Any]], id: str) -> dict[str, Any] | None:
    """Return what an installed package shows of an axis that it sweeps; None without it."""
    drawn = (part.draw_axis(axes, id) for part in load_entry_points("eval"))
    return next((section for section in drawn if section is not None), None)


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
    metrics = [] if run is None else read_metrics(run / "metrics.jsonl")
    held_out = held_out_points(metrics)
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
        "axis": draw_axis([summary["axis"]], id) if "axis" in summary else None,
        "speedups": speedup_chart(get_value(summary, "server.speedups") or [], id),
        "systems": systems,
        "groups": [
            column for _, columns in GROUP_COLUMNS for column in list_groups(columns, systems)
        ],
        "headlines": describe_headline(summary) if summary else [],
        "gain": gain_chart(summary.get("acceptance") or {}, id),
        "learning": learning_curve(held_out, id),
        "learned": describe_learning(held_out),
        "caveats": [*list_warnings(summary), *list_caveats(summary)] if summary else [],
        "notes": [*list_findings(summary), *explain_numbers(summary)] if summary else [],
        "texts": [split_by_round(turn) for turn in turns[:prompts]],
        "tree": next((draw_tree(line["tree"]) for line in lines if "tree" in line), None),
        "tree_label": next((line["tree"].get("label") for line in lines if "tree" in line), None),
        "training": training_curves(metrics, id) if metrics else [],
        "config": (run / "config.yaml").read_text()
        if run is not None and (run / "config.yaml").exists()
        else None,
        "missing": missing + ([] if metrics else ["metrics.jsonl"]),
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file: no lines if there is no file, and without a line that a kill cut short or
    that is no object.
    """
    if not path.exists():
        return []
    require_regular_file(path)
    lines = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in iterate_lines(file, path):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                lines.append(line)
    return lines


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics.jsonl whose numbers are numbers."""
    lines = []
    for line in read_lines(path):
        with suppress(ValidationError):
            MetricsLine.model_validate_json(json.dumps(line), strict=True)
            lines.append(line)
    return lines


def split_by_round(turn: dict[str, Any]) -> dict[str, Any]:
    """Split a turn's answer into rounds of tokens, each with its depth (None: the target's own)
    and its rejected siblings.

    `rest` is what comes after the recorded rounds, so that the answer is always whole.
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
    rest = "".join(pieces[start:])
    return {**turn, "first": pieces[0] if pieces else "", "runs": runs, "rest": rest}


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


def describe_learning(points: Sequence[HeldOutPoint]) -> str:
    """Return a sentence on what the steps added on held-out text; "" without two validations."""
    if len(points) < MIN_VALIDATIONS:
        return ""
    first = points[0]
    best = max(points, key=lambda point: point.forecast)
    last = points[-1]
    start = "before step 1" if first.step == 0 else f"after step {first.step}"
    sentence = (
        f"On held-out text, a chain would emit {first.forecast:.2f} tokens per forward {start} "
        f"and {last.forecast:.2f} after step {last.step}"
    )
    if best.forecast > last.forecast:
        at = "before step 1" if best.step == 0 else f"after step {best.step}"
        sentence += f"; the most was {best.forecast:.2f}, {at}"
    return sentence + "."


def number_text(value: Any, digits: int = 2) -> str:
    """Format a number as the tables show it, or return "" if there is none."""
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) else ""


def percent_text(value: Any) -> str:
    """Format a share as a percentage, or return "" if there is none."""
    return f"{value:.0%}" if isinstance(value, (int, float)) else ""
