"""Several evaluations in one table: one row per drafter, and what differs between them.

A row is an evaluation's folder. Evaluations are comparable if the same prompts were answered by the
same target under the same settings; each further difference is a sentence among the caveats.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from spectrain.config.build import GroupSpec
from spectrain.config.choices import choice_name
from spectrain.config.plain_files import read_json_object
from spectrain.decoding.acceptance.base import is_declared_lossless
from spectrain.errors import UserError, describe_error
from spectrain.eval.columns import (
    DRAFTER,
    RECOMMENDED,
    SYSTEM_COLUMNS,
    TEXT_POSITION_COLUMNS,
    choose_fastest,
    is_quotable,
    order_systems,
)
from spectrain.eval.noise import is_possible
from spectrain.eval.pipeline import UNKNOWN_DTYPE
from spectrain.files import read_text, require_regular_file

Entry = dict[str, Any]

SAME = ("max_new_tokens", "batch_size", "dtype", "rule")  # keys of the setting that must agree
SAME_OF_TARGETS = tuple(key for key in SAME if key != "dtype")
# Keys of the setting whose difference is a caveat, and what they are called.
DIFFERENT = {
    "device": "devices",
    "threads": "numbers of threads",
    "commit": "commits",
    "versions": "versions of packages",
}
OTHER_ENGINES = {
    "eager": "Decoded in the eager loop, with a slower baseline than captured rounds have",
    "server": "Scored on a server",
}
"""What is said of runs that another engine decoded than the one that drafters are ranked by."""
SAME_DRAFTER = ("own", "auto", RECOMMENDED, "chain")  # systems that are the drafter itself
SETTING = ("prompts", "max_new_tokens", "batch_size", "dtype", "device", "threads", "rule")
PROVENANCE = ("commit", "versions", "hardware", "date")
TRAINED_SUFFIX = ", trained"  # at the end of the name of a target that was trained with its drafter
# Keys of the setting that every score has.
REQUIRED_SETTING = {"target", "dtype"}
SPEED_COLUMNS = ("tokens", "seconds", "autoregressive_tokens", "autoregressive_seconds")


@dataclass(frozen=True)
class ScoredRun:
    """One drafter's evaluation, and the one with more prompts at once if that was measured."""

    name: str
    folder: Path
    summary: Entry
    # The run's provenance.
    facts: Entry
    batched: Entry | None = None

    @classmethod
    def read(cls, name: str, folder: Path, batched: Path | None = None) -> "ScoredRun":
        """Read the folder of an evaluation; raise UserError if it holds none."""
        if not (folder / "summary.json").exists():
            raise UserError(
                f"{folder}: there is no score in it; make one with spectrain eval run=RUN"
            )
        summary = read_json_object(folder / "summary.json")
        setting = summary.get("setting")
        if not isinstance(setting, dict) or not setting.keys() >= REQUIRED_SETTING:
            raise UserError(describe_damage(folder / "summary.json", "it names no setting"))
        if not isinstance(summary.get("compared"), dict):
            raise UserError(describe_damage(folder / "summary.json", "it names no systems"))
        if not (folder / "prompts.parquet").exists():
            raise UserError(
                f"{folder}: its prompts.parquet is missing; score it again with spectrain eval "
                f"run={folder.parents[1]}"
            )
        facts = folder.parents[1] / "provenance.json"
        batch_summary = None if batched is None else batched / "summary.json"
        return cls(
            name,
            folder,
            summary,
            read_json_object(facts) if facts.exists() else {},
            read_json_object(batch_summary)
            if batch_summary is not None and batch_summary.exists()
            else None,
        )

    @property
    def eval_setting(self) -> Entry:
        return dict(self.summary["setting"])

    @property
    def target(self) -> str:
        """The target's name before any training."""
        return str(self.eval_setting["target"]).removesuffix(TRAINED_SUFFIX)

    def compared_setting(self, key: str) -> Any:
        """Return a setting that must agree."""
        if key == "acceptance":
            rule = self.eval_setting.get("acceptance")
            path = str(self.folder / "summary.json")
            return GroupSpec.from_saved(key, rule, path).with_defaults() if rule else None
        return self.target if key == "target" else self.eval_setting.get(key)

    @property
    def engine(self) -> str:
        return str(self.summary.get("engine", "eager"))

    @property
    def changes_target(self) -> bool:
        """Whether the target was trained with its drafter."""
        return str(self.eval_setting["target"]).endswith(TRAINED_SUFFIX)

    @property
    def is_noisy(self) -> bool:
        """Whether its speedup is not to be quoted."""
        return not (self.summary.get("speedup") or {}).get("quotable", True)

    @property
    def forwards(self) -> int:
        """Forwards of the target per round: the verification, and those that draft."""
        return int(self.summary.get("bounds", {}).get("forwards_per_round", 1))

    @property
    def is_trained(self) -> bool:
        return bool(self.eval_setting.get("trained", True))

    def prompts(self) -> dict[str, list[int]]:
        """Return the first turn's tokens of every prompt; later turns hold the target's own
        answers.
        """
        path = self.folder / "samples.jsonl"
        try:
            lines = map(json.loads, read_text(path).splitlines())
            return {line["id"]: line["prompt_tokens"] for line in lines if line["turn"] == 0}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(describe_damage(path, describe_error(error))) from error

    def columns(self, system: str) -> dict[str, NDArray[np.float64]]:
        """Return a system's sums over each prompt [P], in the order of ids."""
        path = self.folder / "prompts.parquet"
        require_regular_file(path)
        try:
            rows = [row for row in pq.read_table(path).to_pylist() if row["system"] == system]
            return {
                key: np.array([row[key] for row in rows], dtype=np.float64) for key in SPEED_COLUMNS
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(describe_damage(path, describe_error(error))) from error

    def axes(self) -> dict[str, Entry]:
        """Return the newest sweep of every axis among the run's scores of this target in this
        type.
        """
        found: dict[str, tuple[float, Entry]] = {}
        for path in self.folder.parent.glob("*/summary.json"):
            summary = read_json_object(path)
            same = all(
                summary.get("setting", {}).get(key) == self.eval_setting.get(key)
                for key in ("target", "dtype")
            )
            if (axis := summary.get("axis")) and same:
                newest = max(
                    found.get(axis["over"], (0.0, axis)),
                    (path.stat().st_mtime, axis),
                    key=lambda item: item[0],
                )
                found[axis["over"]] = newest
        return {over: axis for over, (_, axis) in found.items()}

    def systems(self) -> dict[str, Entry]:
        """Return the entries of the drafter with all its trees, and of the run's fastest system
        if that is another one.
        """
        return list_rows(self.summary)


def describe_damage(path: Path, reason: str) -> str:
    """Return the sentence for a file of a score that cannot be read."""
    return f"{path}: it cannot be read ({reason}); score it again with spectrain eval"


def list_rows(summary: Entry) -> dict[str, Entry]:
    """Return the entries of `list_same_drafter` and, if another system is the fastest of the
    evaluation, that one too.

    A comparison thus recommends what the evaluation's own table does.
    """
    systems = list_same_drafter(summary)
    fastest = choose_fastest(summary)
    if fastest is None or fastest in systems or fastest not in summary["compared"]:
        return systems
    return {**systems, fastest: summary["compared"][fastest]}


def list_same_drafter(summary: Entry) -> dict[str, Entry]:
    """Return the entries of the systems that are the drafter itself, by name, with short labels."""
    entries = {
        DRAFTER: summary,
        **{name: summary["compared"][name] for name in SAME_DRAFTER if name in summary["compared"]},
    }
    short = {}
    for name in order_systems([*entries]):
        entry = entries[name]
        label = f"chain of {entry['tree']['depth']}" if name == "chain" else str(entry["label"])
        short[name] = {**entry, "label": label.removeprefix("drafter, ")}
    return short


def check_same(runs: Sequence[ScoredRun], has_one_target: bool = True) -> None:
    """Refuse evaluations that must not be compared. Those of several targets differ in the type of
    their weights, and answered the same questions in tokens of their own.
    """
    first = runs[0]
    prompts = first.prompts()
    keys = ("target", *SAME, "acceptance") if has_one_target else SAME_OF_TARGETS
    for other in runs[1:]:
        for key in keys:
            expected, actual = (run.compared_setting(key) for run in (first, other))
            if expected != actual and UNKNOWN_DTYPE not in (expected, actual):
                raise UserError(
                    f"{other.folder}: it was scored with {key} {actual}, and {first.folder} with "
                    f"{expected}; score both alike with spectrain eval"
                )
        answered = other.prompts()
        if answered != prompts if has_one_target else answered.keys() != prompts.keys():
            raise UserError(
                f"{other.folder}: its prompts are not those of {first.folder}; score both with "
                "the same eval.prompts, eval.limit and eval.categories"
            )


def list_differences(runs: Sequence[ScoredRun]) -> list[str]:
    """Return sentences about what differs, and about what cannot be quoted."""
    caveats = [
        f"Scored with different {name}: times are not to be compared where that matters."
        for key, name in DIFFERENT.items()
        if len({json.dumps(run.eval_setting.get(key), sort_keys=True) for run in runs}) > 1
    ]
    by_dtype: dict[str, list[str]] = {}
    for run in runs:
        if dtype := run.eval_setting.get("drafter_dtype"):
            by_dtype.setdefault(str(dtype), []).append(run.name)
    if len(by_dtype) > 1:
        listed = "; ".join(
            f"{', '.join(names)} in {dtype}" for dtype, names in sorted(by_dtype.items())
        )
        caveats.append(
            f"Drafters compute in different types: {listed}; acceptance differs by that rounding, "
            "too."
        )
    if len({run.facts["data"]["fingerprint"] for run in runs if run.facts.get("data")}) > 1:
        caveats.append("Trained on different data.")
    others = [run for run in runs if run.engine != ranking_engine(runs)]
    for engine, what in OTHER_ENGINES.items():
        if names := ", ".join(run.name for run in others if run.engine == engine):
            caveats.append(f"{what}: {names}; not ranked with the others.")
    for run in runs:
        lossless = run.summary["lossless"]
        if lossless and lossless["differences"] and run.eval_setting["dtype"] != "float32":
            count = len(lossless["differences"])
            caveats.append(
                f"{run.name}: {count} answers differ by the rounding of "
                f"{run.eval_setting['dtype']}."
            )
    training = [run.eval_setting["training"] for run in runs if run.eval_setting.get("training")]
    if len(training) > 1 and not any(
        are_similar([facts[key] for facts in training]) for key in ("seconds", "tokens")
    ):
        caveats.append("Trained with unequal budgets: both their seconds and their tokens differ.")
    caveats += [
        f"{run.name} drafts with the target itself: its tokens per forward are those of "
        f"{run.forwards} forwards."
        for run in runs
        if run.forwards > 1
    ]
    caveats += [
        f"{run.name}: no speedup to be quoted: {run.summary['speedup']['reason']}."
        for run in runs
        if run.is_noisy
    ]
    return caveats + [describe_target_drift(run) for run in runs if run.summary.get("target_drift")]


def ranking_engine(runs: Sequence[ScoredRun]) -> str:
    """Return the engine that drafters are ranked by: captured rounds if any run used them, else
    our loop, else a server.
    """
    return next(
        engine
        for engine in ("captured", "eager", "server")
        if any(run.engine == engine for run in runs)
    )


def describe_data(runs: Sequence[ScoredRun]) -> str | None:
    """Describe the training data in words."""
    data = {
        (run.facts["data"]["tokens"], run.facts["data"]["fingerprint"])
        for run in runs
        if run.facts.get("data")
    }
    return (
        "; ".join(f"{tokens:,} tokens, fingerprint {name}" for tokens, name in sorted(data)) or None
    )


def describe_target_drift(run: ScoredRun) -> str:
    """Say what training changed in a target."""
    drift = run.summary["target_drift"]
    before, after = (drift[model]["perplexity"] for model in ("original", "trained"))
    return (
        f"{run.name} changed the target: perplexity {before:.2f} to {after:.2f} on the original's "
        f"greedy answers, the same most likely token in {drift['agreement']:.0%} of the positions."
    )


def are_similar(values: Sequence[float]) -> bool:
    """Tell whether budgets are equal, up to the error of an estimate of a step's time."""
    return max(values) <= 1.35 * min(values)


def describe_setting(runs: Sequence[ScoredRun], budget: str | None) -> Entry:
    """Return the setting that all runs share."""
    setting = runs[0].eval_setting
    return {
        "target": runs[0].target,
        "data": describe_data(runs),
        "budget": budget,
        **{key: setting.get(key) for key in (*SETTING, *PROVENANCE)},
    }


def collect_axes(runs: Sequence[ScoredRun]) -> dict[str, list[Entry]]:
    """Return the sweeps of all runs by axis, each with its run's name."""
    axes: dict[str, list[Entry]] = {}
    for run in runs:
        for over, axis in sorted(run.axes().items()):
            axes.setdefault(over, []).append({"name": run.name, **axis})
    return axes


def make_row(run: ScoredRun, folder: Path) -> Entry:
    """Return one drafter's row of comparison.json; its evaluation's path is relative to
    `folder`.
    """
    setting = run.eval_setting
    summary = run.summary
    training = setting.get("training") or {}
    lossless = summary["lossless"]
    keys = dict.fromkeys(
        [
            "label",
            "tree",
            "acceptance_length",
            "acceptance_by_depth",
            "drafted_rounds",
            "rounds",
            "speedup",
            "tokens_per_second",
            "lossless",
            "time_share",
        ]
    )
    keys |= dict.fromkeys(
        column.key.split(".")[0] for column in (*SYSTEM_COLUMNS, *TEXT_POSITION_COLUMNS)
    )
    differs = lossless and (lossless.get("distribution") or {}).get("verdict") == "different"
    # In half precision rounding may decide between tokens.
    same = not lossless or not lossless["differences"] or setting["dtype"] != "float32"
    is_exact = same and (lossless is None or (is_declared_lossless(lossless) and not differs))
    return {
        "name": run.name,
        "label": run.name,
        "family": choice_name("drafter", setting["drafter"]),
        "evaluation": os.path.relpath(run.folder.resolve(), folder.resolve()),
        "trained": run.is_trained,
        "systems": [{key: entry.get(key) for key in keys} for entry in run.systems().values()],
        "batched": None if run.batched is None else summarize_batched(run.batched),
        "trained_parameters": training.get("parameters", 0),
        "training_seconds": training.get("seconds"),
        "training_tokens": training.get("tokens"),
        "extra_memory": summary.get("memory", {}).get("extra"),
        "lossless_to": ("trained target" if run.changes_target else "target")
        if is_exact
        else "nothing",
        "drift": summary.get("target_drift"),
    }


def summarize_batched(summary: Entry) -> Entry:
    """Return the fastest system of an evaluation of several prompts at once."""
    entries = list(list_same_drafter(summary).values())
    entries = [entry for entry in entries if entry["speedup"] is not None]
    possible = [entry for entry in entries if is_possible(entry["speedup"])]
    quotable = [entry for entry in entries if is_quotable(entry["speedup"])]
    best = max(quotable or possible or entries, key=lambda entry: entry["speedup"]["ratio"])
    return {
        "batch_size": summary["setting"]["batch_size"],
        "label": best["label"],
        # No interval: the prompts of a batch share its time.
        "speedup": {
            **{key: best["speedup"][key] for key in ("ratio", "predicted")},
            "quotable": is_quotable(best["speedup"]),
        },
        "tokens_per_second": best["tokens_per_second"],
    }
