"""report.html: what an evaluation or a comparison found, as one file without scripts that reads on paper too.

It is made from the files of a run alone; where one is missing, its part is left out and the page says so.
"""

import io
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from spectrain.eval.noise import is_possible
from spectrain.eval.report import caveats, explanation, shown, speed_text
from spectrain.files import write_text

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # told apart by the colour-blind (Okabe and Ito)
PLACES = 128  # of a tree's picture at most, the most often drafted ones: beyond it a dynamic tree's places are rare and many
POINTS = 300  # of a training curve at most
PARTS = ("draft", "verify", "accept", "other")


def write_report(path: Path, evaluations: Sequence[Path], comparison: dict[str, Any] | None = None) -> None:
    """Write a page about evaluation folders, and before them about their comparison.

    comparison: {"setting": {..}, "rows": [{"label", "family", "evaluation", "systems": [..], ..}], "recommendations": [..],
    "caveats": [..]}, where a missing key leaves out what it says; without `evaluations`, those that its rows name are shown.
    """
    rows: list[dict[str, Any]] = [dict(row) for row in (comparison or {}).get("rows", [])]
    named = {(path.parent / row["evaluation"]).resolve(): row for row in rows if row.get("evaluation")}
    sections = []
    for number, folder in enumerate(evaluations or named, 1):
        found = section(folder, f"s{number}", prompts=1 if rows else None)
        if (row := named.get(folder.resolve())) is not None:
            row["section"] = found["id"]
            found["title"] = row.get("label") or row.get("name") or found["title"]
        there = folder / "report.html"
        if there.exists() and folder.resolve() != path.parent.resolve():
            found["link"] = os.path.relpath(there, path.parent)
        sections.append(found)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number_text, "range": range_text, "percent": percent_text, "size": size_text,
                            "time": time_text, "speed": speed_text, "is_possible": is_possible}  # fmt: skip
    page = environment.get_template("page.html").render(
        sections=sections,
        comparison=None if comparison is None else {**comparison, "rows": rows},
        chart=compared_chart(rows),
        parts=PARTS,
    )
    write_text(path, page.strip() + "\n")


def section(folder: Path, id: str, prompts: int | None) -> dict[str, Any]:
    """Everything that the page says about one evaluation."""
    run = folder.parent.parent if folder.parent.name == "eval" else None
    missing = [name for name in ("summary.json", "samples.jsonl", "drafts.jsonl") if not (folder / name).exists()]
    summary = json.loads((folder / "summary.json").read_text()) if "summary.json" not in missing else {}
    lines = read_lines(folder / "drafts.jsonl")
    metrics = [] if run is None else read_lines(run / "metrics.jsonl")
    setting = summary.get("setting", {})
    turns = [line for line in lines if "rounds" in line]
    return {
        "id": id,
        "title": f"{setting.get('recipe') or 'drafter'} on {setting.get('target', 'its target')}",
        "summary": summary,
        "setting": setting,
        "answers": len(read_lines(folder / "samples.jsonl")),
        "systems": [summary, *shown(summary)] if summary else [],
        "notes": [*explanation(summary), *caveats(summary)] if summary else [],
        "texts": [text_of(turn) for turn in turns[:prompts]],
        "tree": next((tree_picture(line["tree"]) for line in lines if "tree" in line), None),
        "training": training_curves(metrics, id) if metrics else None,
        "config": (run / "config.yaml").read_text() if run is not None and (run / "config.yaml").exists() else None,
        "missing": missing + ([] if metrics else ["metrics.jsonl"]),
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file, none where there is no file; one that a kill cut short is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def text_of(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn's answer as tokens that know their round, who proposed them, and what was rejected in their place."""
    pieces, runs, start = turn["pieces"], [], 1
    for number, round in enumerate(turn["rounds"], 1):
        path = [0, *round["kept"]]
        tokens = []
        for piece, depth in zip(pieces[start : start + round["emitted"]], range(1, round["emitted"] + 1)):
            node = path[depth] if depth < len(path) else None
            above = path[min(depth, len(path)) - 1]
            rejected = [text for text, parent, other in zip(round["tokens"], round["parents"], range(len(round["tokens"])))
                        if parent == above and other != node]  # fmt: skip
            tokens.append({"text": piece, "depth": None if node is None else round["depths"][node], "rejected": rejected})
        runs.append({"number": number, "tokens": tokens, "nodes": len(round["tokens"]) - 1})
        start += round["emitted"]
    return {**turn, "first": pieces[0] if pieces else "", "runs": runs}


def tree_picture(tree: dict[str, Any]) -> dict[str, Any] | None:
    """Where every place of the tree is drawn, from left to right by depth, its shade and the width of the line to it."""
    every = {tuple(map(int, name.split("."))): counts for name, counts in tree["places"].items()}
    if not every:
        return None
    often = sorted(every, key=lambda place: (-every[place][0], len(place), place))[:PLACES]  # parents are drafted as often
    places, rounds = sorted(often), tree["rounds"]
    small = len(places) > 48
    across, down, radius = (84, 13, 5) if small else (84, 28, 12)
    inner = {place[:end] for place in places for end in range(len(place))}
    leaves = [place for place in places if place not in inner]
    y: dict[tuple[int, ...], float] = {leaf: down * (number + 0.7) for number, leaf in enumerate(leaves)}
    for above in sorted(inner, key=len, reverse=True):
        below = [y[place] for place in places if place[:-1] == above]
        y[above] = (min(below) + max(below)) / 2
    nodes = []
    for place in places:
        drafted, kept = every[place]
        rate, depth = kept / drafted, len(place)
        line = {"x": 24 + across * depth, "y": round(y[place], 1), "from_x": 24 + across * (depth - 1),
                "from_y": round(y[place[:-1]], 1), "width": round(0.6 + 2.6 * drafted / max(rounds, 1), 2)}  # fmt: skip
        words = ", then ".join(f"choice {rank + 1}" for rank in place)
        nodes.append({**line, "depth": depth, "place": words, "drafted": drafted, "kept": kept, "rate": rate,
                      "fill": shade(rate), "ink": "#fff" if rate > 0.45 else "#111"})  # fmt: skip
    return {
        "nodes": nodes,
        "root_y": round(y[()], 1),
        "radius": radius,
        "small": small,
        "rounds": rounds,
        "width": 48 + across * max(map(len, places)),
        "height": round(down * (len(leaves) + 0.4)),
        "left_out": len(every) - len(places),
        "legend": [(rate, shade(rate)) for rate in (0.0, 0.25, 0.5, 0.75, 1.0)],
    }


def shade(rate: float) -> str:
    """From almost white, never kept, to dark blue, always kept."""
    stops = ((240, 244, 249), (107, 165, 207), (8, 48, 107))
    low, high, part = (stops[0], stops[1], 2 * rate) if rate < 0.5 else (stops[1], stops[2], 2 * rate - 1)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high))


def training_curves(metrics: list[dict[str, Any]], id: str) -> Markup:
    """Loss and, where the drafter has it, agreement by depth over the steps."""
    points = metrics[:: max(1, -(-len(metrics) // POINTS))]
    points = points if points[-1] is metrics[-1] else [*points, metrics[-1]]
    agreeing = [point for point in points if isinstance(point.get("agreement"), list)]
    columns = 2 if agreeing else 1

    def draw(figure: Any) -> None:
        left, *right = figure.subplots(1, columns, squeeze=False)[0]
        left.plot([point["step"] for point in points], [point["loss"] for point in points], color=COLORS[0])
        left.set(xlabel="step", ylabel="loss on training text")
        for axes in right:
            depths = max(len(point["agreement"]) for point in agreeing)
            for depth in range(depths):
                found = [(point["step"], point["agreement"][depth]) for point in agreeing if depth < len(point["agreement"])]
                style = ("-", "--", "-.", ":")[depth % 4]
                axes.plot(*zip(*found), style, color=COLORS[depth % len(COLORS)], label=f"depth {depth + 1}")
            axes.set(xlabel="step", ylabel="agreement on training text", ylim=(0, 1))
            axes.legend(ncols=-(-depths // 4))

    return drawing(draw, (4.5 * columns, 3.2), f"{id}-training", "Training curves: loss and agreement by depth over the steps")


def compared_chart(rows: list[dict[str, Any]]) -> Markup | None:
    """Tokens per forward with intervals of every row's systems."""
    bars = [(row.get("label") or row.get("name", ""), place, system) for row in rows
            for place, system in enumerate(row.get("systems", [])) if system.get("acceptance_length")]  # fmt: skip
    if not bars:
        return None

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        ticks: dict[str, float] = {}
        for number, (label, place, system) in enumerate(bars):
            length = system["acceptance_length"]
            low, high = length.get("ci95") or [length["pooled"]] * 2
            error = [[length["pooled"] - low], [high - length["pooled"]]]
            axes.errorbar(length["pooled"], -number, xerr=error, fmt="os^Dv"[place % 5], capsize=3, color=COLORS[place % 6])
            words = f"{length['pooled']:.2f}  {system.get('label', '')}"
            axes.annotate(words, (high, -number), (6, 0), textcoords="offset points", va="center", fontsize=8)
            ticks.setdefault(label.replace("$", r"\$"), -number)  # no mathematics
        axes.set_yticks(list(ticks.values()), list(ticks))
        axes.set(xlabel="tokens per forward, with 95 % interval", ylim=(0.4 - len(bars), 0.6))
        axes.axvline(1, color="0.6", linewidth=0.8)
        axes.set_xlim(0.9, axes.get_xlim()[1] + 0.35 * (axes.get_xlim()[1] - 0.9))

    title = "Tokens per forward of every family with 95 % intervals"
    return drawing(draw, (8, 1 + 0.3 * len(bars)), "compared", title)


def drawing(draw: Callable[[Any], None], size: tuple[float, float], id: str, title: str) -> Markup:
    """A figure as SVG to stand in a page: the same for the same data, and its ids its own."""
    import matplotlib
    from matplotlib.figure import Figure

    rc = {"svg.hashsalt": id, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    with matplotlib.rc_context(rc):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\1{id}-", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    width = 72 * size[0]  # below it letters would be too small to read, far above it they would be large
    style = f"min-width:{width:.0f}px;max-width:{1.3 * width:.0f}px"
    svg = re.sub(r"<svg[^>]*>", f'<svg class="plot" style="{style}" role="img" aria-label="{title}" {box[0]}>', svg, count=1)
    return Markup(svg)


def number_text(value: Any, digits: int = 2) -> str:
    """A number as the tables show it, or nothing."""
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) else ""


def range_text(interval: Any) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else ""


def percent_text(value: Any) -> str:
    return f"{value:.0%}" if isinstance(value, (int, float)) else ""


def size_text(value: Any) -> str:
    """Bytes."""
    return f"{value / 1e6:,.1f} MB" if isinstance(value, (int, float)) else ""


def time_text(value: Any) -> str:
    """Seconds, or minutes where they are many."""
    return "" if not isinstance(value, (int, float)) else f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"
