"""What docs/systems.md says of the surveys' names: the proof of each, and what was measured on tiny
and on a target on which drafting can pay.
"""

from functools import cache
from typing import Any

import yaml

from lab.benchmarks.coder_systems import read_rows
from lab.benchmarks.systems import SURVEY_SYSTEMS, read_systems
from lab.pages.render import (
    RESULTS,
    describe_setting,
    format_length,
    format_speed,
    format_table,
    load_results,
)

CODER_FILE = "coder-systems.json"
CODER = """The systems that need no training, or have a drafter that ships, on Qwen2.5-Coder-1.5B in
the 4 bits of its file. A step without a drafter takes {step:.0f} ms of one core there, so what
drafting adds to it weighs less than on tiny. `EAGLE3` is the drafter of `packages/coder`
(`qwen2.5-coder-1.5b`); `CAUSAL`, or `SMALL` inside another drafter, is the 0.5B in 4 bits (`causal
drafter.model=qwen2.5-coder-0.5b drafter.quantization=q4_0`).

{prompts} coding questions of {tokens} tokens, one thread; all rows of a table and plain decoding
took turns on every question. Tokens per forward are exact for these questions. Speeds are of
processor time, while other work shared both cores, so they are no timings of an idle machine. The
last column counts answers that equal plain decoding; those of sampled and of lossy rows need not.
A row that says *not measured* waits for a training or for a mend; `python -m
lab.benchmarks.coder_systems` goes on where it stopped."""
CODER_TITLES = ("system", "arguments of `spectrain eval`", "tokens per forward", "speed", "equal")


@cache
def read_survey_systems() -> dict[str, Any]:
    """Return what stands beside the surveys' names, and the reasons for which a name has no
    number on the coder.
    """
    content: dict[str, Any] = yaml.safe_load(SURVEY_SYSTEMS.read_text())
    return content


@cache
def load_coder_results() -> dict[str, Any]:
    """Return what was measured on the coder; nothing where nothing was."""
    path = RESULTS / CODER_FILE
    return load_results(CODER_FILE) if path.exists() else {"rows": {}}


def link_title(title: str) -> str:
    """Return the anchor of a heading."""
    kept = "".join(sign for sign in title.lower() if sign.isalnum() or sign in " -")
    return "#" + kept.replace(" ", "-")


@cache
def list_systems() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the heading and the row of every system of systems.yaml, by its name."""
    return {
        system["name"]: (group["title"], system)
        for group in read_systems()["groups"]
        for system in group["systems"]
    }


@cache
def load_rows(name: str) -> Any:
    """Return the rows of a file of lab/results."""
    return load_results(name)["rows"]


def describe_measurements(name: str) -> list[str]:
    """Return the cells of a survey's name: its proof, and what was measured on tiny and on the
    coder. A name that does not belong here, or is not built, has none.
    """
    content = read_survey_systems()
    entry = content["systems"].get(name)
    if entry is None:
        return ["", "", ""]
    title, system = list_systems()[entry["row"]] if "row" in entry else ("", {})
    proof = f"`{entry['proof']}`" if "proof" in entry else f"[its row]({link_title(title)})"
    return [proof, describe_tiny(entry, title, system), describe_coder(entry, content["reasons"])]


def describe_tiny(entry: dict[str, Any], title: str, system: dict[str, Any]) -> str:
    """Return tokens per forward and speed on tiny, or where they stand."""
    rows = load_rows("systems.json")
    measured = [name for name in system.get("measured", []) if "/" in name or name in rows]
    names = entry.get("tiny", measured[:1])
    numbers = [format_numbers(find_tiny(name)) for name in names]
    if not numbers and system:
        return f"[its row]({link_title(title)})"
    return "<br>".join(numbers) or "not measured"


def find_tiny(name: str) -> dict[str, Any]:
    """Return a row of lab/results: of systems.json, or as GROUP/NAME of a file of ways or of
    recipes (`heads`), whose trees are chains of 4.
    """
    group, slash, label = name.partition("/")
    if not slash:
        row: dict[str, Any] = load_rows("systems.json")[name]
        return row
    if group == "heads":
        rows = load_rows("heads-tiny.json")
        chain: dict[str, Any] = next(row["chain"] for row in rows if row["name"] == label)
        return chain
    rows = [*load_rows("ways-tiny.json"), *load_rows("phrases.json")]
    way: dict[str, Any] = next(row for row in rows if (row["group"], row["name"]) == (group, label))
    return way


def format_numbers(row: dict[str, Any]) -> str:
    """Return tokens per forward and, where times were measured, the speed; beams count steps."""
    row = row.get("beams") or row
    length = row["acceptance_length"]
    tokens = f"{length['pooled'] if isinstance(length, dict) else length:.2f}"
    return f"{tokens}, {row['speedup']['ratio']:.2f}x" if "speedup" in row else tokens


def describe_coder(entry: dict[str, Any], reasons: dict[str, str]) -> str:
    """Return tokens per forward and speed on the coder, or the reason why there are none."""
    names = entry["coder"]
    if isinstance(names, str):
        return reasons.get(names, names)
    rows = load_coder_results()["rows"]
    return "<br>".join(
        f"{name}: {format_numbers(rows[name]) if is_measured(rows, name) else 'not measured'}"
        for name in names
    )


def is_measured(rows: dict[str, Any], name: str) -> bool:
    return "acceptance_length" in rows.get(name, {})


def is_batched(row: dict[str, Any]) -> bool:
    return "eval.batch_size=" in row["command"]


def coder_tables() -> list[str]:
    """Return the text and the tables of what was measured on the coder, by group."""
    results = load_coder_results()
    rows = results["rows"]
    measured = [row for row in rows.values() if "acceptance_length" in row]
    if not measured:
        return []
    rates = [
        row["tokens_per_second"]["autoregressive"]
        for row in measured
        if "speedup" in row and not is_batched(row)
    ]
    setting = results["setting"]
    text = CODER.format(
        step=1000 * len(rates) / sum(rates),
        prompts=setting["prompts"],
        tokens=setting["max_new_tokens"],
    )
    parts = [text, describe_setting(results)]
    for group, names in read_rows(fill=False).items():
        cells = [describe_coder_row(name, text, rows.get(name)) for name, text in names.items()]
        parts += [f"### {group[0].upper()}{group[1:]}", format_table(CODER_TITLES, cells)]
    return parts


def describe_coder_row(name: str, arguments: str, row: dict[str, Any] | None) -> list[str]:
    """Return the cells of a row on the coder."""
    cells = [name, f"`{arguments}`"]
    if row is None:
        return [*cells, "not measured", "", ""]
    if "refused" in row:
        return [*cells, f"refused: {row['refused']}", "", ""]
    lossy = "" if row["lossless"] else ", LOSSY"
    together = " with several prompts at once" if is_batched(row) else ""
    speed = row.get("speedup")
    if speed is None:
        shown = "not timed"
    else:
        shown = f"{speed['ratio']:.2f}x" if speed["ci95"] is None else format_speed(row)
    return [
        *cells,
        format_length(row) + lossy,
        shown + together,
        f"{row['identical']} of {row['prompts']}",
    ]
