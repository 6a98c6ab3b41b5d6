"""The page docs/systems.md, from lab/benchmarks/systems.yaml, lab/benchmarks/survey_names.yaml and
lab/results/systems.json.
"""

import json
from collections.abc import Callable
from typing import Any

from lab.benchmarks.systems import read_survey_names, read_systems
from lab.pages.render import (
    RESULTS,
    describe_setting,
    format_interval,
    format_length,
    format_speed,
    format_table,
    load_results,
)
from lab.pages.survey_tables import coder_tables, describe_measurements
from spectrain.config.choices import conf_folders

TITLES = (
    "system",
    "paper",
    "settings or command",
    "as in the paper",
    "what differs",
    "proof",
    "measured",
)
SURVEY_TITLES = ("proof", "tokens and speed on tiny", "on the 1.5B coder")
INTRODUCTION = """# Papers by name

What papers call a method, the command that runs it here, what is the same as in the paper and what
differs, the proof (an enumeration, an equation, or a comparison with another implementation; each
is a test), and what was measured. A row that starts with *after* does less than the paper, or
something else; its name says what it does.

The last column holds tokens per forward and the speed relative to decoding without a drafter, both
with 95 % intervals over prompts. Drafted and plain decoding ran in turn, on tiny with one thread:
16 held-out prompts of 48 tokens unless a row says otherwise. On a target of 1.7 million parameters
drafting often takes longer than verifying, so few methods gain. One other measurement ran on the
second core. Every greedy row gave the text of `generate` for all prompts. Drafters were trained for
a minute or two, so rows do not rank the methods. Rows of `lab/benchmarks/measure_ways.py` were
measured earlier, some with eight prompts at once. The page is written by `python -m
lab.pages.make_pages` from `systems.yaml`, `survey_names.yaml`, `survey_systems.yaml` and
`coder_systems.yaml` in `lab/benchmarks/` and, in `lab/results/`, from `systems.json`,
`ways-tiny.json`, `phrases.json`, `heads-tiny.json`, `equal-data.json`, `claims.json`,
`vision-drafting.json`, `diffusion.json` and `coder-systems.json`; the commands that measured it:

```sh
python -m lab.benchmarks.systems
python -m lab.benchmarks.measure_ways
python -m lab.benchmarks.equal_data
```"""
NAMES = """The surveys behind this project name {count} systems. {works} of them work here, {part}
work in part, and {absent} that belong here are missing. The other {out} do not belong in a project
that trains and scores drafters: hardware, schedules of servers, models of other kinds, surveys. A
name that works in part says what is missing. The tables stand in the surveys' order and words.
Their last columns hold tokens per forward and the speed relative to decoding without a drafter, on
tiny and on [a 1.5B coder](#on-a-target-on-which-drafting-can-pay), or why nothing was measured
there; tokens alone are of a chain of 4 after the same training. *Its row* is in the tables
above."""
OTHERS = """Names that the surveys do not have."""
EQUAL_DATA = "[at equal data](results/families.md#{})"
STATES = {
    "works": "works",
    "part": "works in part",
    "absent": "not built",
    "out": "does not belong",
}
LEFT_OUT = "Methods that surveys name and that are not built here, with the reason."
CLAIMS = """An audit compared names with code. The table says what each name stood for, what it
stands for now, and what was measured since."""


def render_systems_page() -> str:
    """Return docs/systems.md."""
    results = load_results("systems.json")
    systems = read_systems()
    parts = [INTRODUCTION, describe_setting(results)]
    for group in systems["groups"]:
        rows = [describe_system(system, results["rows"]) for system in group["systems"]]
        parts += [f"## {group['title']}", group["text"], format_table(TITLES, rows)]
        parts += [group["note"]] if "note" in group else []
    left_out = format_table(
        ("name", "reason"), ([entry["name"], entry["reason"]] for entry in systems["left_out"])
    )
    claims = [describe_claim(entry, results["rows"]) for entry in systems["claims"]]
    parts += ["## On a target on which drafting can pay", *coder_tables()]
    parts += ["## Research that stays out", LEFT_OUT, left_out]
    parts += ["## Names of the surveys", *describe_surveys(read_survey_names())]
    parts += [
        "## Names before and after",
        CLAIMS,
        format_table(("name", "before", "now", "measured"), claims),
    ]
    return "\n\n".join(parts) + "\n"


def describe_system(system: dict[str, Any], rows: dict[str, Any]) -> list[str]:
    """Return the cells of a system."""
    command = system["command"]
    command = (
        f"spectrain {command}" if command.split()[0] in ("eval", "train", "export") else command
    )
    names = system.get("measured", [])
    measured = [describe_row(name, rows, is_named=len(names) > 1) for name in names]
    measured += [system["link"]] if "link" in system else []
    measured += [describe_reads(name) for name in system.get("reads", [])]
    measured += [describe_limit(rows[name]) for name in system.get("limits", []) if name in rows]
    measured += [describe_equal(name) for name in system.get("equal", [])]
    measured += [describe_diffusion(name) for name in system.get("diffusion", [])]
    measured += [describe_vision(name) for name in system.get("vision", [])]
    cells = [
        system["name"],
        system["paper"],
        f"`{command}`",
        *(system[key] for key in ("same", "differs", "proof")),
    ]
    return [*cells, "<br>".join(measured)]


def describe_surveys(names: dict[str, Any]) -> list[str]:
    """Return the counts of the surveys' names by state, the table of each group, and that of
    other names.
    """
    states = [state for group in names["surveys"].values() for state, *_ in group.values()]
    counts = {state: states.count(state) for state in STATES}
    parts = [NAMES.format(count=len(states), **counts)]
    for title, group in names["surveys"].items():
        table = names_table(group, describe_measurements, SURVEY_TITLES)
        parts += [f"### {title[0].upper()}{title[1:]}", table]
    return [*parts, "### Other names", OTHERS, names_table(names["others"])]


def names_table(
    group: dict[str, list[str]],
    describe: Callable[[str], list[str]] = lambda name: [],
    titles: tuple[str, ...] = (),
) -> str:
    """Return the table of a group of names, with further cells that `describe` returns for a name
    and their titles.
    """
    rows = []
    for name, (state, text, *choices) in group.items():
        missing = [choice for choice in choices if not is_installed(choice)]
        assert not missing, f"survey_names.yaml: {name}: there is no {missing}"
        rows.append([name, STATES[state], text, *describe(name)])
    return format_table(("name", "state", "command or reason", *titles), rows)


def is_installed(choice: str) -> bool:
    """Tell whether a folder of conf/ has a choice, given as GROUP/NAME."""
    return any((folder / f"{choice}.yaml").exists() for folder in conf_folders())


def describe_equal(name: str) -> str:
    """Return tokens and speed of the row GROUP/NAME of lab/results/equal-data.json, or of
    claims.json there, relative to the base of its group.
    """
    group, _, label = name.partition("/")
    is_claim = group in ("claims", "claims, trees")
    rows = load_results("claims.json" if is_claim else "equal-data.json")["groups"].get(group, [])
    row = next((row for row in rows if row["name"] == label), None)
    if row is None:
        return "not compared at equal data"
    tokens, speed = (
        f"{row[key]['ratio']:.2f} {format_interval(row[key]['ci95'])}"
        for key in ("tokens_ratio", "speed_ratio")
    )
    base = rows[0]["name"]
    if is_claim:
        # The machine was too busy for speeds.
        tree = "16 nodes" if group.endswith("trees") else "chain of 3"
        section = "recipes-that-claim-more"
        return f"{tree}: {tokens} of the tokens of `{base}` {EQUAL_DATA.format(section)}"
    section = "drafters-beside-their-bases-after-the-same-tokens"
    return (
        f"{label}: {tokens} of the tokens of `{base}`, {speed} of its speed "
        f"{EQUAL_DATA.format(section)}"
    )


def describe_limit(row: dict[str, Any]) -> str:
    """Return the speed that a measured row would have if drafting took no time, from its share
    of the time.
    """
    return (
        "if drafting took no time: "
        f"{row['speedup']['ratio'] / (1 - row['time_share']['draft']):.2f}x"
    )


def describe_vision(name: str) -> str:
    """Return tokens per forward and speed of a drafter for a target of text and images."""
    path = RESULTS / "vision-drafting.json"
    row = json.loads(path.read_text())["rows"].get(name) if path.exists() else None
    return (
        f"{name}: not measured"
        if row is None
        else f"{name}: {format_measured(row['acceptance_length'], row['speedup'])}"
    )


def format_measured(tokens: list[float], speed: list[float]) -> str:
    """Return tokens per forward and speed, each given as the value and the ends of its interval."""
    return (
        f"{tokens[0]:.2f} {format_interval(tokens[1:])} tokens, {speed[0]:.2f}x "
        f"{format_interval(speed[1:])}"
    )


def describe_diffusion(name: str) -> str:
    """Return tokens per forward, speed and agreement of a way to decode a masked language model."""
    path = RESULTS / "diffusion.json"
    if not path.exists():
        return f"{name}: not measured"
    row = json.loads(path.read_text())["diffusion"][name]
    rates = format_measured(row["tokens_per_forward"], row["speedup"])
    return f"{name}: {rates}, {row['agreement']:.2f} of the tokens as one per forward"


def describe_claim(entry: dict[str, str], rows: dict[str, Any]) -> list[str]:
    """Return the cells of a name whose meaning changed."""
    if "memory" in entry:
        memory = rows.get(entry["memory"], {}).get("memory")
        measured = (
            "not measured" if memory is None else f"`memory.weights` {memory['weights']:,} bytes"
        )
    else:
        measured = describe_row(entry["measured"], rows, is_named=False)
    return [entry["claim"], entry["before"], entry["now"], measured]


def describe_row(name: str, rows: dict[str, Any], is_named: bool) -> str:
    """Return the tokens per forward and the speed of a measured row; GROUP/NAME is one of
    `measure_ways`.
    """
    group, slash, label = name.partition("/")
    row = find_way(group, label) if slash else rows.get(name)
    label = f"{label if slash else name}: " if is_named else ""
    if row is None:
        return f"{label}not measured"
    beams = row.get("beams")
    tokens = f"{format_length(beams or row)} {'tokens' if beams is None else 'steps of all beams'}"
    together = " with 8 prompts at once" if "eval.batch_size=8" in row["command"] else ""
    return f"{label}{tokens}, {format_speed(beams or row)}{together}"


def find_way(group: str, name: str) -> dict[str, Any]:
    """Return a row of lab/results/ways-tiny.json or phrases.json."""
    ways: list[dict[str, Any]] = [
        *load_results("ways-tiny.json")["rows"],
        *load_results("phrases.json")["rows"],
    ]
    return next(row for row in ways if (row["group"], row["name"]) == (group, name))


def describe_reads(name: str) -> str:
    """Return the tokens per round and the bytes per token of a reduced cache behind the longest
    text.
    """
    last = load_results("context-tiny.json")["rows"][-1]
    entry = last["drafters"][name]
    return (
        f"{name}, behind {last['length']:,} tokens: {entry['acceptance_length']:.2f} tokens, "
        f"{entry['ratio']:.2f} of the "
        "[bytes](results/scale.md#self-drafting-with-less-of-the-cache)"
    )
