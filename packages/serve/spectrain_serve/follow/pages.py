"""The pages of the proxy: Prometheus text at /metrics, and a page for people at /follow. Neither
shows text of a request, and both need the key."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .ledger import describe_entry, format_number, format_time, read_ledger
from .proxy import ProxyCounters
from .watch import KindSeries, TrafficWatch

PREFIX = "spectrain_follow"
SHOWN_EVENTS = 30
WIDTH = 720
HEIGHT = 160
COLORS = ("#3f51b5", "#e65100", "#2e7d32", "#ad1457", "#00838f", "#6d4c41")
Sample = tuple[dict[str, str], float]


def format_metrics(counters: ProxyCounters, status: dict[str, Any]) -> str:
    """Return what was counted as Prometheus text."""
    lines: list[str] = []
    for name, value in vars(counters).items():
        kind = "gauge" if name == "num_open" else "counter"
        suffix = "" if kind == "gauge" else "_total"
        lines += format_metric(f"proxy_{name.removeprefix('num_')}{suffix}", kind, [({}, value)])
    kinds = status["kinds"]
    for key in ("requests", "unmeasured", "tokens", "rounds"):
        lines += format_metric(
            f"{key}_total",
            "counter",
            [({"kind": kind}, entry[key]) for kind, entry in kinds.items()],
        )
    for name in ("accepted_per_draft", "reference", "drift_sum", "drift_threshold", "alarm"):
        samples = [
            ({"kind": kind}, float(entry[name]))
            for kind, entry in kinds.items()
            if entry[name] is not None
        ]
        lines += format_metric(name, "gauge", samples)
    positions = [
        ({"kind": kind, "position": str(position)}, rate)
        for kind, entry in kinds.items()
        for position, rate in enumerate(entry["by_position"])
    ]
    lines += format_metric("acceptance_rate", "gauge", positions)
    lines += format_metric("conversations", "gauge", [({}, status["conversations"])])
    lines += format_metric("errors_total", "counter", [({}, status["errors"])])
    lines += format_metric(
        "drafter_since_seconds",
        "gauge",
        [({"digest": status["active"]["digest"][:8]}, status["active"]["since"])],
    )
    return "\n".join(lines) + "\n"


def format_metric(name: str, kind: str, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield the lines of a metric."""
    yield f"# TYPE {PREFIX}_{name} {kind}"
    for labels, value in samples:
        text = ",".join(f'{key}="{escape_label(label)}"' for key, label in labels.items())
        yield f"{PREFIX}_{name}{'{' + text + '}' if text else ''} {value:g}"


def escape_label(value: str) -> str:
    """Return a label's value as Prometheus reads it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def format_page(status: dict[str, Any], watch: TrafficWatch, ledger: Path) -> str:
    """Return the page for people: acceptance over time by kind, the active drafter, and the last
    decisions.
    """
    events = [*read_ledger(ledger)][-SHOWN_EVENTS:]
    swaps = [entry["time"] for entry in events if entry["event"] in ("promoted", "rolled back")]
    active = status["active"]
    parts = [
        "<!doctype html><meta charset=utf-8><title>spectrain follow</title>",
        "<style>body{font:14px sans-serif;max-width:760px;margin:2em auto}td,th{padding:2px "
        "8px;text-align:left}</style>",
        f"<h1>spectrain follow</h1><p>Active drafter: <code>{html.escape(active['path'])}</code> "
        f"since {format_time(active['since'])}; now: {html.escape(status['phase'])}; last checked "
        f"{format_time(status['time'])}.</p>",
        "<h2>Accepted tokens per draft over time</h2>",
        draw_series(watch.series, swaps),
        "<h2>Kinds of traffic</h2>",
        format_table(
            ("kind", "requests", "not measurable", "accepted per draft", "reference", "by position",
                "drift"),
            (
                (
                    kind, str(entry["requests"]), str(entry["unmeasured"]),
                    format_number(entry["accepted_per_draft"]), format_number(entry["reference"]),
                    " ".join(f"{rate:.2f}" for rate in entry["by_position"]),
                    "alarm" if entry["alarm"] else "none",
                )
                for kind, entry in status["kinds"].items()
            ),
        ),
        "<h2>Decisions</h2>",
        format_table(
            ("time", "event", "details"),
            ((format_time(entry["time"]), entry["event"],
                describe_entry(entry)) for entry in reversed(events)),
        ),
    ]  # fmt: skip
    return "\n".join(parts)


def draw_series(series: dict[str, KindSeries], swaps: list[float]) -> str:
    """Return an SVG of acceptance over time by kind, with a vertical line where the drafter
    changed.
    """
    points = [point for entry in [*series.values()] for point in [*entry.points]]
    if len(points) < 2:
        return "<p>There are too few requests yet.</p>"
    first = min(point.time for point in points)
    last = max(point.time for point in points)
    top = max(point.mean for point in points) or 1.0

    def scale_point(moment: float, mean: float) -> str:
        x = WIDTH * (moment - first) / max(last - first, 1e-9)
        y = HEIGHT * (1 - mean / top)
        return f"{x:.1f},{y:.1f}"

    drawn = [f'<svg viewBox="-30 -10 {WIDTH + 160} {HEIGHT + 20}" width="100%">']
    drawn += [
        f'<text x="-30" y="4" font-size="10">{top:.2f}</text><text x="-30" y="{HEIGHT}" '
        'font-size="10">0</text>'
    ]
    for moment in (moment for moment in swaps if first <= moment <= last):
        start = scale_point(moment, top)
        end = scale_point(moment, 0)
        drawn.append(
            f'<line x1="{start.split(",")[0]}" x2="{end.split(",")[0]}" y1="0" y2="{HEIGHT}" '
            'stroke="#999"/>'
        )
    for number, (kind, entry) in enumerate([*series.items()]):
        color = COLORS[number % len(COLORS)]
        line = " ".join(scale_point(point.time, point.mean) for point in [*entry.points])
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        drawn.append(
            f'<text x="{WIDTH + 6}" y="{12 + 14 * number}" font-size="11" '
            f'fill="{color}">{html.escape(kind)}</text>'
        )
    return "".join([*drawn, "</svg>"])


def format_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return an HTML table."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def make_pages(
    counters: ProxyCounters,
    describe: Callable[[], dict[str, Any]],
    watch: TrafficWatch,
    ledger: Path,
) -> dict[str, Callable[[], tuple[str, bytes]]]:
    """Return the pages by path."""
    return {
        "/metrics": lambda: (
            "text/plain; version=0.0.4",
            format_metrics(counters, describe()).encode(),
        ),
        "/follow": lambda: (
            "text/html; charset=utf-8",
            format_page(describe(), watch, ledger).encode(),
        ),
    }
