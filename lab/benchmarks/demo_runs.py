"""How often the first sentence of `make demo` is right, from finished demos.

    python -m lab.benchmarks.demo_runs 'runs=["DIR/1","DIR/2"]'
    python -m lab.benchmarks.demo_runs 'runs=["DIR/*"]' 'busy=["1","3"]'

Each folder holds one run of a training with its score; a log beside it, DIR/1.log for DIR/1, may
hold the time of the command as bash prints it. The sentence names the gain of the training, in
tokens per forward after and before it, with an interval over prompts. The reference is the gain of
all runs together: their tokens and their rounds are added. A sentence is right if its interval
contains the reference and it claims no other direction. Nothing is decoded here.
"""

import json
import re
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from spectrain.config.plain_files import read_json_object
from spectrain.errors import UserError
from spectrain.eval.columns import DRAFTER, list_systems
from spectrain.eval.fixed_trees import CHAIN, START, UNTRAINED
from spectrain.files import write_text

from .command import run_benchmark

SCORE = "eval/heldout/summary.json"
BASH_TIME = re.compile(r"^real\s+(?P<minutes>\d+)m(?P<seconds>[\d.]+)s", re.MULTILINE)
GAINS = {UNTRAINED: "training", START: "steps"}
"""What a gain over these drafters is of: of the fit and the steps together, or of the steps."""
SETTING = ("target", "recipe", "dtype", "max_new_tokens", "threads", "versions", "hardware", "date")
"""What the setting of the first run says of all."""


class DemoRuns:
    """Compare what each demo says of its gain with the gain of all of them, and write both to a
    JSON file.
    """

    def __init__(
        self,
        # Folders of finished demos; `*` stands for any name.
        runs: tuple[str, ...],
        # Last names of the folders whose demos ran beside a busy process.
        busy: tuple[str, ...] = (),
        out: str = "lab/results/demo-runs.json",
    ) -> None:
        self.folders = [Path(path) for pattern in runs for path in sorted(glob(pattern))]
        self.folders = sorted(filter(Path.is_dir, self.folders), key=sort_key)
        if not self.folders:
            raise UserError(f"runs={json.dumps(runs)}: there is no such folder; give other ones")
        unknown = {*busy} - {folder.name for folder in self.folders}
        if unknown:
            raise UserError(f"busy: no folder of runs has the name {min(unknown)}; correct it")
        self.busy = busy
        self.out = Path(out)

    def run(self) -> None:
        """Write the results and print one line for each run."""
        rows = [read_run(folder) | {"busy": folder.name in self.busy} for folder in self.folders]
        results = compare_runs(rows)
        write_text(self.out, json.dumps(results, indent=1) + "\n")
        for row in results["runs"]:
            print(describe_run(row))
        for name, entry in results["gains"].items():
            print(f"gain of the {name}: {entry['ratio']:.3f}, in {count_right(entry)}")
        print(f"outputs identical: {results['identical']} of {len(rows)} runs")


def sort_key(folder: Path) -> tuple[int, str]:
    """Order folders by number, and by name where they have none."""
    return (int(folder.name) if folder.name.isdecimal() else 0, folder.name)


def read_run(folder: Path) -> dict[str, Any]:
    """Read the score, the steps and the minutes of a finished demo."""
    scores = [path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}{SCORE}")]
    if len(scores) != 1:
        raise UserError(
            f"{folder}: it holds {len(scores)} files {SCORE}; give folders of finished demos, with "
            "one run each"
        )
    path = scores[0]
    summary = read_json_object(path)
    chain = (summary.get("acceptance") or {}).get(CHAIN)
    if chain is None or not {DRAFTER, UNTRAINED} <= chain["drafters"].keys():
        raise UserError(
            f"{path}: it has no tokens per forward before and after training; score with "
            "eval.baselines=[untrained,fixed]"
        )
    setting = summary["setting"]
    checked = [entry["lossless"] for entry in list_systems(summary).values() if "lossless" in entry]
    gains = {"training": chain["training_gain"]}
    if START in chain["drafters"]:
        gains["steps"] = chain["gain"]
    return {
        "name": folder.name,
        "sentence": summary["headline"][0],
        "prompts": chain["prompts"],
        "drafters": {
            name: {key: entry[key] for key in ("pooled", "rounds")}
            for name, entry in chain["drafters"].items()
            if name in (DRAFTER, *GAINS)
        },
        "gains": {
            name: {key: gain[key] for key in ("ratio", "ci95")} for name, gain in gains.items()
        },
        "identical": sum(entry["identical"] for entry in checked),
        "checked": sum(entry["checked"] for entry in checked),
        "speed": {key: summary["speedup"].get(key) for key in ("ratio", "ci95", "quotable")},
        "load": (summary.get("noise") or {}).get("load"),
        "steps": setting["training"]["steps"],
        "minutes": measure_minutes(folder, path),
        "commit": setting["commit"],
        "setting": {key: setting[key] for key in SETTING if key in setting},
    }


def measure_minutes(folder: Path, summary: Path) -> float:
    """Return the minutes of a demo: those of the log beside its folder or, without one, those
    from the first file of the run to its report, which leave out the start of the command.
    """
    log = folder.with_name(f"{folder.name}.log")
    if log.is_file() and (found := BASH_TIME.search(log.read_text(errors="replace"))):
        return round(int(found["minutes"]) + float(found["seconds"]) / 60, 2)
    run = summary.parents[2]
    first = min(path.stat().st_mtime for path in run.iterdir() if path.is_file())
    last = summary.with_name("report.html")
    end = (last if last.is_file() else summary).stat().st_mtime
    return round((end - first) / 60, 2)


def compare_runs(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the gains of all runs together, how many sentences are right, and a row for each."""
    gains: dict[str, dict[str, Any]] = {}
    for before, name in GAINS.items():
        of_gain = [row for row in rows if name in row["gains"]]
        if of_gain:
            start, end = (pool_length(of_gain, drafter) for drafter in (before, DRAFTER))
            gains[name] = {
                "before": round(start, 4),
                "after": round(end, 4),
                "ratio": round(end / start, 4),
                "runs": len(of_gain),
            }
    judged = []
    for row in rows:
        verdicts = {
            name: judge_gain(gain, gains[name]["ratio"]) for name, gain in row["gains"].items()
        }
        judged.append({**{key: row[key] for key in row if key != "setting"}, "verdicts": verdicts})
    for name, entry in gains.items():
        known = [row["verdicts"][name] for row in judged if name in row["verdicts"]]
        for key in ("contains", "decided", "right"):
            entry[key] = sum(verdict[key] for verdict in known)
    return {
        "setting": {**rows[0]["setting"], "commit": rows[0]["commit"]},
        "commits": sorted({row["commit"] for row in rows}),
        "gains": gains,
        "identical": sum(row["identical"] == row["checked"] for row in rows),
        "runs": judged,
    }


def pool_length(rows: Sequence[dict[str, Any]], drafter: str) -> float:
    """Return the tokens per forward of a drafter over the rounds of all runs."""
    entries = [row["drafters"][drafter] for row in rows]
    rounds = sum(entry["rounds"] for entry in entries)
    return float(sum(entry["pooled"] * entry["rounds"] for entry in entries) / rounds)


def judge_gain(gain: dict[str, Any], reference: float) -> dict[str, bool]:
    """Tell whether the interval of a gain contains the reference, whether it claims a direction,
    and whether the sentence is right.
    """
    low, high = gain["ci95"] or (0.0, float("inf"))
    contains = low <= reference <= high
    decided = low > 1 or high < 1
    is_opposite = (low > 1 > reference) or (high < 1 < reference)
    return {"contains": contains, "decided": decided, "right": contains and not is_opposite}


def count_right(entry: dict[str, Any]) -> str:
    """Say in words how many intervals contain the gain of all runs."""
    return (
        f"{entry['contains']} of {entry['runs']} intervals; {entry['decided']} claim a direction, "
        f"{entry['right']} are right"
    )


def describe_run(row: dict[str, Any]) -> str:
    """Return the line of a run."""
    return (
        f"{row['name']}{' (busy)' if row['busy'] else ''}: {row['sentence']} "
        f"{row['steps']} steps, {row['minutes']:.1f} min, {row['identical']} of {row['checked']} "
        f"outputs identical"
    )


def demo_table(results: dict[str, Any]) -> str:
    """Return what docs/results/ shows: the gains of all runs together, and a row for each run."""
    if not results["runs"]:
        return "No finished demo is recorded yet."
    lines = [*list_totals(results), ""]
    titles = (
        *("run", "busy", "processes a core", "steps", "minutes", "prompts"),
        *("before", "after", "gain", "of the steps", "identical", "speed"),
    )
    lines += [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in results["runs"]:
        lengths = row["drafters"]
        cells = (
            row["name"],
            "yes" if row["busy"] else "",
            "" if row["load"] is None else f"{row['load']:.1f}",
            str(row["steps"]),
            f"{row['minutes']:.1f}",
            str(row["prompts"]),
            f"{lengths[UNTRAINED]['pooled']:.2f}",
            f"{lengths[DRAFTER]['pooled']:.2f}",
            format_cell(row, "training"),
            format_cell(row, "steps"),
            f"{row['identical']} of {row['checked']}",
            format_speed(row["speed"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def list_totals(results: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each gain of all runs together, and one for the outputs."""
    parts = {"training": "The fit and the steps together", "steps": "The steps alone"}
    for name, entry in results["gains"].items():
        yield (
            f"- {parts[name]}: {entry['before']:.3f} to {entry['after']:.3f}, {entry['ratio']:.3f} "
            f"times. {entry['contains']} of {entry['runs']} intervals contain it, "
            f"{entry['decided']} claim a direction, and {entry['right']} sentences are right."
        )
    yield f"- Outputs were identical in {results['identical']} of {len(results['runs'])} runs."


def format_cell(row: dict[str, Any], name: str) -> str:
    """Format a gain with its interval; one that does not contain the gain of all runs is bold."""
    if name not in row["gains"]:
        return ""
    gain = row["gains"][name]
    text = format_ratio(gain)
    return text if row["verdicts"][name]["contains"] else f"**{text}**"


def format_speed(speed: dict[str, Any]) -> str:
    """Format a speedup as a score prints it, with its interval."""
    if speed["ratio"] is None:
        return ""
    return format_ratio(speed, "" if speed["quotable"] else "?")


def format_ratio(entry: dict[str, Any], sign: str = "") -> str:
    """Format a ratio with a sign and its interval, where that is known."""
    interval = "" if entry["ci95"] is None else " [{:.2f}, {:.2f}]".format(*entry["ci95"])
    return f"{entry['ratio']:.2f}{sign}{interval}"


if __name__ == "__main__":
    run_benchmark(DemoRuns)
