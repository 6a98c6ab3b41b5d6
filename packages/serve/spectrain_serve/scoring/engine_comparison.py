"""One drafter in several engines: the scores of one run side by side, and in which engine the
drafter pays.

A row is a score, by our own loop or by an engine that served the drafter. Each speedup is paired
with plain decoding of the same engine. Rows are ranked if they share prompts, number of tokens,
requests at once, rule and machine; types and threads are each engine's own setting, which the table
states.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from spectrain.errors import UserError
from spectrain.eval.columns import SYSTEM_COLUMNS
from spectrain.eval.intervals import interval
from spectrain.eval.report import open_console
from spectrain.models.threads import format_threads
from spectrain.runs.folder import find_results_folder
from spectrain.servers.engines import ENGINES
from spectrain_studies.comparison.recommendations import (
    Variant,
    format_ends,
    make_advice,
    refuse_noisy,
)
from spectrain_studies.comparison.scored_runs import ScoredRun, describe_setting, make_row
from spectrain_studies.comparison.table import print_advice

OWN = "spectrain"  # the engine of this project
# Settings of a score -> what a difference in them is called. Rows that differ in one of the first
# kind are not ranked.
RANKED = {
    "prompts": "prompts",
    "max_new_tokens": "numbers of tokens",
    "batch_size": "requests at once",
    "rule": "rules",
    "machine": "machines",
}
STATED = {
    "dtype": "type of computation",
    "weights": "type of weights",
    "drafter_dtype": "type of the drafter",
    "threads": "threads",
}
MARKS = {"#": RANKED, "~": STATED}  # after the label of a row that differs


def read_scores(run: Path, names: str | Sequence[str]) -> list[ScoredRun]:
    """Read the scores of a run by name; "all" reads every one but those that a later score of
    the same name replaced.
    """
    folder = find_results_folder(run) / "eval"
    present = sorted(path.parent.name for path in folder.glob("*/prompts.parquet"))
    newest = [name for name in present if re.sub(r"\.\d+$", "", name) not in {*present} - {name}]
    selected = newest if names == "all" else [names] if isinstance(names, str) else [*names]
    if not selected:
        raise UserError(
            f"{folder}: there is no score in it; make some with spectrain eval run={run}, and "
            "with server=NAME"
        )
    scores = [ScoredRun.read(name, folder / name) for name in selected]
    return sorted(scores, key=lambda score: (score.engine == "server", selected.index(score.name)))


def describe_engine(score: ScoredRun) -> dict[str, Any]:
    """Return what decoded a score, with its types and threads; None where the score does not say
    it.
    """
    setting = score.eval_setting
    if (server := setting.get("server")) is None:
        types = {"dtype": setting["dtype"], "weights": setting["dtype"]}
        drafter = setting.get("drafter_dtype") or setting["dtype"]
        return {
            "engine": OWN,
            **types,
            "drafter_dtype": drafter,
            "threads": setting["threads"],
            "machine": setting["device"],
        }
    name = str(server["name"])
    return {
        "engine": ENGINES[name].title if name in ENGINES else name,
        "dtype": server.get("dtype"),
        "weights": server.get("weight_type"),
        "drafter_dtype": server.get("drafter_dtype"),
        "threads": server.get("threads"),
        "machine": server.get("machine"),
    }


def describe_drafts(score: ScoredRun, label: str) -> str:
    """Describe what a score drafts: our own trees by their label, those of an engine by its
    settings.
    """
    server = score.eval_setting.get("server")
    if server is None:
        return label
    if server.get("branching_factor"):
        return (
            f"tree of {server['draft_tokens']}, depth {server['tree_depth']}, branching "
            f"{server['branching_factor']}"
        )
    return f"chain of {server.get('draft_tokens') or score.summary['tree']['depth']}"


def compare_engines(run: Path, names: str | Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the content of comparison.json about the scores of a run that `names` lists, as in
    `read_scores`; paths in it are relative to `folder`.
    """
    scores = read_scores(run, names)
    rows = [make_engine_row(score, folder) for score in scores]
    compared = [
        {**score.eval_setting, **row["engine"], "prompts": score.prompts()}
        for score, row in zip(scores, rows)
    ]
    for row, differences in zip(rows, list_marked(compared)):
        row["differs_in"] = differences
        marks = [mark for mark, names in MARKS.items() if names.keys() & {*differences}]
        row["label"] = " ".join([row["label"], *marks])
    variants = [
        Variant(score, system, entry, row)
        for score, row in zip(scores, rows)
        for system, entry in zip(score.systems(), row["systems"])
    ]
    return {
        "setting": describe_setting(scores, None),
        "rows": rows,
        "recommendations": recommend_engine(variants),
        "caveats": list_engine_caveats(scores, rows),
    }


def make_engine_row(score: ScoredRun, folder: Path) -> dict[str, Any]:
    """Return one score's row of comparison.json."""
    row = make_row(score, folder)
    engine = describe_engine(score)
    systems = [
        {**entry, "label": describe_drafts(score, entry["label"])} for entry in row["systems"]
    ]
    return {
        **row,
        "label": f"{engine['engine']} ({score.name})",
        "engine": engine,
        "systems": systems,
    }


def list_marked(compared: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return, for each score, the settings in which it differs from the first of the largest
    group that can be ranked.
    """
    groups = [json.dumps([entry.get(key) for key in RANKED], sort_keys=True) for entry in compared]
    most, _ = Counter(groups).most_common(1)[0]
    usual = compared[groups.index(most)]
    ranked = [[key for key in RANKED if entry.get(key) != usual.get(key)] for entry in compared]
    stated = [[key for key in STATED if entry.get(key) != usual.get(key)] for entry in compared]
    return [[*first, *second] for first, second in zip(ranked, stated)]


def is_ranked(row: dict[str, Any]) -> bool:
    """Tell whether the times of a row may be compared with those of the others."""
    return not RANKED.keys() & {*row["differs_in"]}


def list_engine_caveats(scores: Sequence[ScoredRun], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences about what differs between rows, and about what cannot be quoted."""
    caveats = [
        "Each speedup is paired with plain decoding of the same engine. Engines were measured one "
        "after another."
    ]
    for mark, names in MARKS.items():
        keys = [key for key in names if any(key in row["differs_in"] for row in rows)]
        if keys:
            ranking = "; these rows are not ranked" if names is RANKED else ""
            caveats.append(
                f"{mark} Differs from the other rows in "
                f"{', '.join(names[key] for key in keys)}{ranking}."
            )
    caveats += [
        f"{score.name}: no speedup to be quoted: {score.summary['speedup']['reason']}."
        for score in scores
        if score.is_noisy
    ]
    for score, row in zip(scores, rows):
        lossless = score.summary["lossless"]
        if lossless and lossless["differences"]:
            count = len(lossless["differences"])
            checked = lossless["checked"]
            dtype = row["engine"]["dtype"] or "an unknown type"
            caveats.append(
                f"{score.name}: {count} of {checked} texts differ from those without a drafter. "
                f"It computes in {dtype}, whose rounding can decide between tokens."
            )
    return caveats


# Recommendation


def recommend_engine(variants: Sequence[Variant]) -> list[dict[str, str]]:
    """Say which engine and setting is fastest for this drafter on this machine, and in which
    engines the drafter pays.
    """
    measured = [each for each in variants if is_ranked(each.row) and each.entry["speedup"]]
    ranked = [each for each in measured if each.is_quotable]
    if measured and not ranked:
        return [make_advice("fastest", refuse_noisy(measured))]
    if not ranked:
        return [
            make_advice(
                "fastest", ("unknown", "No ranked row has a speedup over its own plain decoding.")
            )
        ]
    return [
        make_advice("fastest", choose_engine(ranked)),
        make_advice("where the drafter pays", list_paying_engines(ranked)),
    ]


def choose_engine(ranked: Sequence[Variant]) -> tuple[str, str]:
    """Choose the engine and the setting with most tokens per second, with or without the
    drafter.
    """
    best = max(ranked, key=drafted_rate)
    plain = max(ranked, key=plain_rate)
    gain = (
        f"{best.speedup:.2f} times its own decoding without a "
        f"drafter{format_ends(best.entry['speedup']['ci95'])}"
    )
    if plain_rate(plain) > drafted_rate(best):
        return f"{describe_variant(plain, drafts=False)}, without a drafter", (
            f"{plain_rate(plain):.1f} tokens/s. With the drafter, the fastest is "
            f"{describe_variant(best)}: {drafted_rate(best):.1f} tokens/s, {gain}."
        )
    low, _ = best.entry["speedup"]["ci95"] or [0.0, 0.0]
    verdict = (
        "the drafter pays there"
        if low > 1
        else "whether the drafter pays there is uncertain on these prompts"
    )
    text = f"{drafted_rate(best):.1f} tokens/s, {gain}; {verdict}."
    rivals = [
        describe_variant(each)
        for each in ranked
        if each.run is not best.run and not is_slower(each, best)
    ]
    return describe_variant(best), text + (
        f" Not significantly slower: {'; '.join(rivals)}." if rivals else ""
    )


def list_paying_engines(ranked: Sequence[Variant]) -> tuple[str, str]:
    """List the engines in which the drafter's speedup has an interval above 1, each with its
    best setting.
    """
    best: dict[str, Variant] = {}
    for variant in sorted(ranked, key=lambda variant: variant.speedup):
        best[variant.row["engine"]["engine"]] = variant
    ordered = sorted(best.values(), key=lambda variant: -variant.speedup)
    paying = [variant for variant in ordered if (variant.entry["speedup"]["ci95"] or [0.0])[0] > 1]
    speedups = "; ".join(
        f"{describe_variant(variant)} "
        f"{variant.speedup:.2f}{format_ends(variant.entry['speedup']['ci95'])}"
        for variant in ordered
    )
    choice = (
        ", ".join(variant.row["engine"]["engine"] for variant in paying)
        or "in none of these engines"
    )
    return choice, f"Best speedup over its own plain decoding, by engine: {speedups}."


def describe_variant(variant: Variant, drafts: bool = True) -> str:
    """Describe an engine and its setting in a few words."""
    engine = variant.row["engine"]
    details = [variant.entry["label"] if drafts else "", engine["weights"] or engine["dtype"] or ""]
    details.append("" if engine["threads"] is None else format_threads(engine["threads"]))
    return f"{engine['engine']} ({', '.join(filter(None, details))})"


def drafted_rate(variant: Variant) -> float:
    return float(variant.entry["tokens_per_second"]["drafted"])


def plain_rate(variant: Variant) -> float:
    return float(variant.entry["tokens_per_second"]["autoregressive"])


def is_slower(variant: Variant, best: Variant) -> bool:
    """Tell whether a variant decodes fewer tokens per second than another beyond chance, prompt
    by prompt.
    """
    first, second = (each.run.columns(each.system) for each in (variant, best))
    columns = np.stack(
        [part[key] for part in (first, second) for key in ("tokens", "seconds")], axis=-1
    )
    ends = interval(columns, (1, -1, -1, 1))
    return ends is not None and ends[1] < 1


# Table


def print_engines(comparison: dict[str, Any]) -> None:
    """Print one line for each engine and its drafts, then which of them to take."""
    setting = comparison["setting"]
    console = open_console()
    table = Table(
        title=f"{setting['target']}: {setting['max_new_tokens']} tokens per prompt",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for title in ("engine", "drafts", "types, threads"):
        table.add_column(title, overflow="fold")
    for title in ENGINE_TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for row in comparison["rows"]:
        for cells in engine_cells(row):
            table.add_row(*cells)
    console.print(table)
    for sentence in comparison["caveats"]:
        console.print(sentence, markup=False)
    print_advice(console, comparison)


ENGINE_TITLES = (
    "tokens per\nforward",
    "tokens/s\nplain",
    "tokens/s\ndrafted",
    "speedup",
    "identical",
)


def engine_cells(row: dict[str, Any]) -> Iterator[list[str]]:
    """Return one line of cells for each system of an engine's row."""
    columns = {column.title: column for column in SYSTEM_COLUMNS}
    engine = row["engine"]
    types = f"{engine['weights'] or 'unknown'}, drafter {engine['drafter_dtype'] or 'unknown'}, "
    types += format_threads(engine["threads"])
    for number, entry in enumerate(row["systems"]):
        stacked = {
            name: f"{column.cell(entry)}\n{column.interval_cell(entry)}"
            for name, column in columns.items()
        }
        plain = (entry["tokens_per_second"] or {}).get("autoregressive")
        yield [
            *([row["label"], entry["label"], types] if number == 0 else ["", entry["label"], ""]),
            stacked["tokens per forward"],
            "" if plain is None else f"{plain:.1f}",
            columns["tokens/s"].cell(entry),
            stacked["speedup"],
            columns["identical"].cell(entry),
        ]
