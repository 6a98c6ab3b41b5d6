"""`python -m lab.benchmarks.report`: the results in the JSON files of a folder as markdown, against
lab/results/goals.json.

A file takes part if its "setting" names a GPU and is not "toy", and if it has "rows", as
`lab.benchmarks.kernels` writes them, or "lines": numbers by the name of a goal. A line without data
in any file is printed as not measured.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spectrain.errors import UserError
from spectrain.kernels import linear_divergence, tree_attention

from .attention import H200_CEILINGS, AttentionCell, TimeBounds, time_bounds
from .command import run_benchmark
from .correctness import CHECKS, iterate_cases
from .kernels import KernelSizes
from .steps import source_digest

GOALS_PATH = Path(__file__).parents[2] / "lab" / "results" / "goals.json"
GOAL_SIGNS = {"at least": ">=", "above": ">", "at most": "<="}
NOT_MEASURED = "not measured"
BASELINE_TITLES = {
    "sdpa": "SDPA",
    "sdpa_repeated": "SDPA, heads repeated",
    "flex": "FlexAttention",
    "flashinfer": "FlashInfer",
    "unmasked": "flash, no mask",
}
RowsByName = dict[str, dict[str, Any]]


@dataclass
class Report:
    """Print the results in a folder."""

    # Folder of the JSON files that the benchmarks wrote.
    results: str = "lab/results"

    def run(self) -> None:
        if not Path(self.results).is_dir():
            raise UserError(f"results={self.results}: there is no such folder")
        print(render_markdown(Path(self.results)))


@dataclass
class Evidence:
    """The results of one GPU from all files; of two rows with the same name the later file's
    counts.
    """

    gpu: str
    settings: list[dict[str, Any]] = field(default_factory=list)
    rows: RowsByName = field(default_factory=dict)
    goal_values: dict[str, float] = field(default_factory=dict)

    def measured_row(self, name: str) -> dict[str, Any] | None:
        row = self.rows.get(name)
        return None if row is None or "failed" in row else row

    def read_number(self, name: str, *keys: str) -> float | None:
        """Return an entry of a row, or None where it is missing."""
        entry: Any = self.measured_row(name)
        for key in keys:
            entry = None if entry is None else entry.get(key)
        return entry


def gather_evidence(folder: Path) -> list[Evidence]:
    """Return the results of a folder's files by GPU, in the order of the files' dates."""
    evidence_by_gpu: dict[str, Evidence] = {}
    contents = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"{path}: it is not JSON ({error})") from error
        setting = content.get("setting", {}) if isinstance(content, dict) else {}
        if (
            isinstance(setting, dict)
            and setting.get("gpu")
            and not setting.get("toy")
            and {"rows", "lines"} & set(content)
        ):
            contents.append(content)
    for content in sorted(contents, key=lambda content: content["setting"].get("date", "")):
        evidence = evidence_by_gpu.setdefault(
            content["setting"]["gpu"], Evidence(content["setting"]["gpu"])
        )
        evidence.settings.append(content["setting"])
        evidence.rows |= content.get("rows", {})
        evidence.goal_values |= content.get("lines", {})
    return list(evidence_by_gpu.values())


def line_values(evidence: Evidence) -> dict[str, float | None]:
    """Return the number of every line that has one."""
    bandwidth = evidence.read_number("ceilings/copy", "bytes_per_second")
    rate = evidence.read_number("ceilings/product", "flops_per_second")
    values = {
        "copy bandwidth": bandwidth and bandwidth / 1e12,
        "bf16 product, 8192 wide": rate and rate / 1e12,
        **{
            f"{kernel}: cases beyond tolerance in float64, or not run by the kernel": count_faults(
                evidence, kernel
            )
            for kernel in CHECKS
        },
        **attention_values(evidence),
    }
    for loss in KernelSizes().loss_shapes():
        name = f"fused loss, {loss.rows} rows, vocabulary {loss.vocab}"
        values[f"{name}: peak memory over unfused"] = evidence.read_number(
            loss.name, "memory_ratio"
        )
        values[f"{name}: time over unfused"] = evidence.read_number(loss.name, "time_ratio")
    return values | evidence.goal_values


def count_faults(evidence: Evidence, kernel: str) -> int | None:
    """Count a kernel's cases that failed, were wrong, or were not run by it; return None while a
    case is missing.
    """
    rows = [
        evidence.rows.get(name) for name, check, _, _ in iterate_cases() if check is CHECKS[kernel]
    ]
    if any(row is None for row in rows):
        return None
    return sum(row is not None and not (row.get("within") and row.get("by_kernel")) for row in rows)


def attention_values(evidence: Evidence) -> dict[str, float | None]:
    """Return shares of the floor, and the ratio of the faster of torch's two masked ways to tree
    attention.
    """
    values: dict[str, float | None] = {}
    for cell in KernelSizes().table_cells():
        title = f"tree attention, {cell.name.removeprefix('table/')}"
        values[f"{title}: share of its floor"] = evidence.read_number(cell.name, "share_of_floor")
        times = [
            evidence.read_number(cell.name, "times_ours", name)
            for name in ("sdpa", "sdpa_repeated")
        ]
        values[f"{title}: time of SDPA with a dense mask over ours"] = min(
            filter(None, times), default=None
        )
    # FlexAttention may refuse other heads than the table's.
    table_heads = [cell for cell in KernelSizes().table_cells() if cell.heads is None]
    flex = [evidence.read_number(cell.name, "times_ours", "flex") for cell in table_heads]
    measured = [ratio for ratio in flex if ratio is not None]
    least = min(measured) if len(measured) == len(flex) else None
    values["tree attention, the least of all rows: time of FlexAttention over ours"] = least
    return values


def meets_goal(value: float, goal: dict[str, Any]) -> bool:
    limit = goal["goal"]
    return {"at least": value >= limit, "above": value > limit, "at most": value <= limit}[
        goal["sense"]
    ]


def render_markdown(folder: Path) -> str:
    """Return a section for every measured GPU, or an empty one where none was measured."""
    return "\n\n".join(
        render_section(evidence) for evidence in gather_evidence(folder) or [Evidence("no GPU yet")]
    )


def render_goals(folder: Path) -> str:
    """Return, for every GPU, what has a goal and every missed goal by name;
    docs/results/speed.md contains it.
    """
    return "\n\n".join(
        "\n\n".join(render_verdicts(evidence))
        for evidence in gather_evidence(folder) or [Evidence("no GPU yet")]
    )


def render_section(evidence: Evidence) -> str:
    """Return the results of one GPU under its name and its software."""
    software = dict.fromkeys(
        ", ".join(f"{name} {setting.get(name)}" for name in ("torch", "triton", "driver"))
        for setting in evidence.settings
    )
    title = f"## {evidence.gpu}" + (f" ({'; '.join(software)})" if software else "")
    return "\n\n".join(
        [
            title,
            *render_verdicts(evidence),
            divergence_table(evidence),
            rounds_table(evidence),
            *collect_notes(evidence),
        ]
    )


def render_verdicts(evidence: Evidence) -> list[str]:
    """Return the tables of what has a goal, and a sentence for every missed goal."""
    goals = goal_lines(evidence)
    cells = attention_lines(evidence)
    missed = [
        f"Missed: {name}, {shown} for {goal}."
        for name, goal, shown, verdict in goals
        if verdict == "missed"
    ]
    missed += [
        f"Missed: tree attention, {line[0]} (B / prefix / N), {line[3]} us for {line[2]}."
        for line in cells
        if line[4] == "missed"
    ]
    titles = [
        "tree attention, B / prefix / N",
        "floor us",
        "goal us",
        "us",
        "",
        "p10 to p90",
        "of the floor",
        "of 4.3 TB/s, 790 TFLOP/s",
        *BASELINE_TITLES.values(),
    ]
    return [
        markdown_table(["line", "goal", "measured", ""], goals),
        markdown_table(titles, cells),
        *missed,
    ]


def markdown_table(titles: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    titles = list(titles)
    rule = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, rule, *lines))


def goal_lines(evidence: Evidence) -> list[list[str]]:
    """Return every line of the goals: its name, its goal, what was measured, and the verdict."""
    values = line_values(evidence)
    lines = []
    for goal in json.loads(GOALS_PATH.read_text()):
        value = values.get(goal["name"])
        unit = f" {goal['unit']}" if goal["unit"] else ""
        limit = "" if goal["goal"] is None else f"{GOAL_SIGNS[goal['sense']]} {goal['goal']}{unit}"
        shown = NOT_MEASURED if value is None else f"{value:.3g}{unit}"
        verdict = (
            "" if value is None or goal["goal"] is None else verdict_word(meets_goal(value, goal))
        )
        lines.append([goal["name"], limit, shown, verdict])
    return lines


def verdict_word(is_met: bool) -> str:
    return "met" if is_met else "missed"


def attention_lines(evidence: Evidence) -> list[list[str]]:
    """Return tree attention in every cell: its floor, its goal, its time, and the ratios of the
    alternatives.
    """
    lines = []
    for cell in KernelSizes().table_cells():
        row = evidence.measured_row(cell.name)
        name = cell.title
        if row is None:
            limits = expected_bounds(evidence, cell)
            lines.append(
                [
                    name,
                    f"{limits.floor:.1f}",
                    f"{limits.goal:.1f}",
                    NOT_MEASURED,
                    *[""] * (4 + len(BASELINE_TITLES)),
                ]
            )
            continue
        us = row["us"]["ours"]
        ratios = row["times_ours"]
        times = [f"{row['floor_us']:.1f}", f"{row['goal_us']:.1f}", f"{us['median']:.1f}"]
        shares = f"{row['share_of_floor']:.0%}", f"{row['share_of_constant_floor']:.0%}"
        ratio_cells = [
            f"{ratios[baseline]:.2f}x" if baseline in ratios else "not run"
            for baseline in BASELINE_TITLES
        ]
        verdict = verdict_word(us["median"] <= row["goal_us"])
        lines.append(
            [name, *times, verdict, f"{us['p10']:.1f} to {us['p90']:.1f}", *shares, *ratio_cells]
        )
    return lines


def expected_bounds(evidence: Evidence, cell: AttentionCell) -> TimeBounds:
    """Return floor and goal of a cell without a row, from the GPU's measured ceilings or else
    from an H200's.
    """
    ceilings = {
        rate: evidence.read_number(f"ceilings/{name}", rate) or H200_CEILINGS[rate]
        for name, rate in (("copy", "bytes_per_second"), ("product", "flops_per_second"))
    }
    return time_bounds(
        cell, KernelSizes().cell_geometry(cell, torch.bfloat16, torch.device("cuda")), ceilings
    )


def divergence_table(evidence: Evidence) -> str:
    """Return the table of the fused loss and its gradients next to torch's, eager and compiled."""
    lines = []
    for loss in KernelSizes().loss_shapes():
        row = evidence.measured_row(loss.name)
        name = f"{loss.rows} / {loss.vocab}"
        cells = (
            [NOT_MEASURED, "", ""]
            if row is None
            else [format_system(row, system) for system in ("fused", "unfused", "unfused_compiled")]
        )
        lines.append([name, *cells])
    return markdown_table(
        ["fused loss, rows / vocabulary", "fused", "unfused", "unfused, compiled"], lines
    )


def rounds_table(evidence: Evidence) -> str:
    """Return the table of the measured EAGLE-3 rounds with scripted acceptance."""
    titles = [
        "engine, 8B geometry, random weights",
        "tau",
        "tokens/s",
        "speedup",
        "model of its parts",
    ]
    titles += ["speedup / tau", "roofline"]
    lines = []
    for name in sorted(name for name in evidence.rows if name.startswith("engine/")):
        row = evidence.measured_row(name) or {}
        for script, speedup in row.get("speedup", {}).items():
            cells = [f"{row['tau'][script]:.2f}", f"{row['tokens_per_second'][script]:.0f}"]
            cells += [f"{speedup[source]:.2f}x" for source in ("measured", "model")]
            cells += [f"{row['eta'][script]:.2f}", f"{row['eta_roofline']:.2f}"]
            lines.append([f"{name.removeprefix('engine/')}, {script}", *cells])
    return markdown_table(titles, lines)


def format_system(row: dict[str, Any], system: str) -> str:
    if system not in row["us"]:
        return "not run"
    peak = row["peak_bytes"].get(system)
    return f"{row['us'][system]['median'] / 1e3:.1f} ms" + (
        "" if peak is None else f", {peak / 1e9:.1f} GB"
    )


def collect_notes(evidence: Evidence) -> list[str]:
    """Return why systems were not run, what failed, and how many rows measured code that has
    changed since.
    """
    reasons: dict[str, int] = {}
    for row in evidence.rows.values():
        for name, cause in row.get("not_run", {}).items():
            reasons[f"{name}: {cause}"] = reasons.get(f"{name}: {cause}", 0) + 1
    notes = [f"Not run in {count} rows: {text}." for text, count in reasons.items()]
    notes += [
        f"Failed: {name}: {row['failed']}."
        for name, row in evidence.rows.items()
        if "failed" in row
    ]
    current = {
        "table": source_digest(tree_attention),
        "divergence": source_digest(linear_divergence),
    }
    current |= {
        f"correctness/{kernel}": source_digest(*check.modules) for kernel, check in CHECKS.items()
    }
    outdated = [
        name
        for name, row in evidence.rows.items()
        for part, source in current.items()
        if name.startswith(f"{part}/") and row.get("source") != source
    ]
    return [
        *notes,
        *(
            [f"{len(outdated)} rows were measured before their kernel's file changed last."]
            if outdated
            else []
        ),
    ]


if __name__ == "__main__":
    run_benchmark(Report)
