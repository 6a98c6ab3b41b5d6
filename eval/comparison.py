"""Several evaluations side by side: one row a drafter, what tells them apart, and which to take for what.

A row is an evaluation's folder. They are comparable where the same prompts were answered by the same target under the same
settings; anything else that differs is said in a sentence.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from spectrain.config.build import settings_with_defaults
from spectrain.config.choices import choice_name, resolve_choice
from spectrain.config.saved import read_json_object
from spectrain.errors import UserError
from spectrain.eval.metrics import Interval, interval
from spectrain.eval.noise import is_possible

SAME = ("max_new_tokens", "batch_size", "dtype", "rule")  # of the setting, without which numbers say nothing of each other
OTHERS = ("own", "auto", "copies", "chain")  # systems that are the same drafter
TRAINED = ", trained"  # behind the name of a target that was trained with its drafter
SPEED_COLUMNS = ("tokens", "seconds", "autoregressive_tokens", "autoregressive_seconds")
SPEED_SIGNS = (1, -1, -1, 1)  # drafted tokens a second over autoregressive ones


@dataclass(frozen=True)
class Scored:
    """One drafter's evaluation, and the same with more prompts at once where that was measured."""

    name: str
    folder: Path
    summary: dict[str, Any]
    facts: dict[str, Any]  # of the run: its provenance
    batched: dict[str, Any] | None = None

    @classmethod
    def read(cls, name: str, folder: Path, batched: Path | None = None) -> "Scored":
        """What an evaluation left in its folder."""
        if not (folder / "summary.json").exists():
            raise UserError(f"{folder}: there is no score in it; make one with spectrain eval run=RUN")
        summary = read_json_object(folder / "summary.json")
        if not (folder / "prompts.parquet").exists():
            raise UserError(
                f"{folder}: it was scored by an earlier version; score it again with spectrain eval run={folder.parents[1]}"
            )
        facts = folder.parents[1] / "provenance.json"
        more = None if batched is None else batched / "summary.json"
        return cls(
            name, folder, summary, read_json_object(facts) if facts.exists() else {},
            read_json_object(more) if more is not None and more.exists() else None,
        )  # fmt: skip

    @property
    def setting(self) -> dict[str, Any]:
        return dict(self.summary["setting"])

    @property
    def target(self) -> str:
        """The target's name, as it was before it was trained where it was."""
        return str(self.setting["target"]).removesuffix(TRAINED)

    def told(self, key: str) -> Any:
        """A setting that must agree."""
        if key == "acceptance":
            rule = self.setting.get("acceptance")
            return settings_with_defaults(resolve_choice(key, rule, str(self.folder / "summary.json"))) if rule else None
        return self.target if key == "target" else self.setting.get(key)

    @property
    def engine(self) -> str:
        return str(self.summary.get("engine", "eager"))

    @property
    def changes_target(self) -> bool:
        return str(self.setting["target"]).endswith(TRAINED)

    @property
    def is_noisy(self) -> bool:
        """Whether its speedup is not to be quoted."""
        return not self.summary["speedup"].get("quotable", True)

    @property
    def forwards(self) -> int:
        """Of the target in a round: the verification, and those that draft."""
        return int(self.summary.get("bounds", {}).get("forwards_per_round", 1))

    @property
    def is_trained(self) -> bool:
        return bool(self.setting.get("trained", True))

    def prompts(self) -> dict[str, list[int]]:
        """The first turn's tokens of every prompt; later turns hold the target's own answers."""
        lines = map(json.loads, (self.folder / "samples.jsonl").read_text().splitlines())
        return {line["id"]: line["prompt_tokens"] for line in lines if line["turn"] == 0}

    def columns(self, system: str) -> dict[str, NDArray[np.float64]]:
        """A system's sums over each prompt, in the order of ids."""
        rows = [row for row in pq.read_table(self.folder / "prompts.parquet").to_pylist() if row["system"] == system]
        return {key: np.array([row[key] for row in rows], dtype=np.float64) for key in SPEED_COLUMNS}


@dataclass
class Way:
    """A drafter with one of its trees: what a recommendation names."""

    scored: Scored
    system: str
    entry: dict[str, Any]
    row: dict[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.scored.name} ({self.entry['label']})"

    @property
    def speedup(self) -> float:
        return float(self.entry["speedup"]["ratio"])

    @property
    def length(self) -> float:
        """Tokens per forward of the target, those that draft counted too."""
        return float(self.entry["acceptance_length"]["pooled"]) / self.scored.forwards

    def told_from(self, other: "Way") -> bool:
        """Whether the two speedups differ on the same prompts beyond chance: the 95 % interval of their ratio leaves 1."""
        found = ratio_interval(self, other)
        return found is not None and not found[0] <= 1 <= found[1]


def ratio_interval(one: Way, other: Way) -> Interval:
    """The 95 % interval of one speedup over the other, prompt by prompt on the same prompts."""
    first, second = one.scored.columns(one.system), other.scored.columns(other.system)
    if len(first["tokens"]) != len(second["tokens"]):
        return None
    columns = np.stack([part[key] for part in (first, second) for key in SPEED_COLUMNS], axis=-1)
    return interval(columns, (*SPEED_SIGNS, *(-sign for sign in SPEED_SIGNS)))


def join(found: Sequence[Scored], place: Path, budget: str | None = None) -> dict[str, Any]:
    """One comparison of evaluations whose numbers may stand side by side; folders are told as seen from `place`."""
    caveats = [*check_same(found), *map(drift_of, (one for one in found if one.summary.get("target_drift")))]
    first = found[0].setting
    rows = [row_of(scored, place) for scored in found]
    ways = [
        Way(scored, system, entry, row)
        for scored, row in zip(found, rows)
        for system, entry in systems_of(scored.summary).items()
    ]
    return {
        "setting": {
            "target": found[0].target,
            "data": data_of(found),
            "budget": budget,
            **{
                key: first.get(key) for key in ("prompts", "max_new_tokens", "batch_size", "dtype", "device", "threads", "rule")
            },
            **{key: first.get(key) for key in ("commit", "versions", "hardware", "date")},
        },
        "rows": rows,
        "recommendations": [*recommend(ways), *sampling(found)],
        "caveats": caveats,
    }


def check_same(found: Sequence[Scored]) -> list[str]:
    """Refuse evaluations that must not be compared; sentences about whatever else differs."""
    first = found[0]
    prompts = first.prompts()
    for other in found[1:]:
        for key in ("target", *SAME, "acceptance"):
            mine, theirs = (one.told(key) for one in (first, other))
            if mine != theirs:
                raise UserError(
                    f"{other.folder}: it was scored with {key} {theirs}, and {first.folder} with {mine}; score both alike with "
                    "spectrain eval"
                )
        if other.prompts() != prompts:
            raise UserError(
                f"{other.folder}: its prompts are not those of {first.folder}; score both with the same eval.prompts, "
                "eval.limit and eval.categories"
            )
    return differences(found)


def differences(found: Sequence[Scored]) -> list[str]:
    """Sentences about what differs, and about what cannot be quoted."""
    caveats = []
    for key, what in (
        ("device", "devices"),
        ("threads", "numbers of threads"),
        ("commit", "commits"),
        ("versions", "versions of packages"),
    ):
        if len({json.dumps(one.setting.get(key), sort_keys=True) for one in found}) > 1:
            caveats.append(f"Scored with different {what}: times are not to be compared where that matters.")
    hashes = {one.facts["data"]["fingerprint"] for one in found if one.facts.get("data")}
    if len(hashes) > 1:
        caveats.append("Trained on different data.")
    apart = [one.name for one in found if one.engine != engine_of(found)]
    if apart:
        caveats.append(
            f"Decoded by the loop and not by captured rounds, beside a baseline of its own that is slower: {', '.join(apart)}; "
            "not ranked with the others."
        )
    for one in found:
        lossless = one.summary["lossless"]
        if lossless and lossless["differences"] and one.setting["dtype"] != "float32":
            caveats.append(
                f"{one.name}: {len(lossless['differences'])} answers differ by the rounding of {one.setting['dtype']}."
            )
    trained = [one.setting["training"] for one in found if one.setting.get("training")]
    if len(trained) > 1 and not any(alike([one[key] for one in trained]) for key in ("seconds", "tokens")):
        caveats.append("Trained with unequal budgets: neither their seconds nor their tokens are alike.")
    caveats += [
        f"{one.name} drafts with the target itself: its tokens per forward are those of {one.forwards} forwards."
        for one in found
        if one.forwards > 1
    ]
    caveats += [f"{one.name}: no speedup to be quoted, as {one.summary['speedup']['reason']}." for one in found if one.is_noisy]
    return caveats


def engine_of(found: Sequence[Scored]) -> str:
    """What drafters are ranked by: captured rounds where any was decoded so."""
    return "captured" if any(one.engine == "captured" for one in found) else "eager"


def data_of(found: Sequence[Scored]) -> str | None:
    """The training data in words."""
    known = {(one.facts["data"]["tokens"], one.facts["data"]["fingerprint"]) for one in found if one.facts.get("data")}
    return "; ".join(f"{tokens:,} tokens, fingerprint {name}" for tokens, name in sorted(known)) or None


def drift_of(scored: Scored) -> str:
    """What training did to a target, in a sentence."""
    drift = scored.summary["target_drift"]
    before, after = (drift[model]["perplexity"] for model in ("original", "trained"))
    return (
        f"{scored.name} changed the target: perplexity {before:.2f} to {after:.2f} on the original's greedy answers, the same "
        f"most likely token in {drift['agreement']:.0%} of the places."
    )


def alike(values: Sequence[float]) -> bool:
    """Whether budgets are equal, up to what an estimate of a step's time may err by."""
    return max(values) <= 1.35 * min(values)


def systems_of(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The drafter with its tree and, where they were decoded too, with others, and with copies."""
    found = {"drafter": {**summary, "label": str(summary["label"]).removeprefix("drafter, ")}}
    for name in OTHERS:
        if (entry := summary["compared"].get(name)) is not None:
            chain = f"chain of {entry['tree']['depth']}" if name == "chain" else entry["label"]
            found[name] = {**entry, "label": chain.removeprefix("the same, ")}
    return found


def row_of(scored: Scored, place: Path) -> dict[str, Any]:
    """One drafter's numbers."""
    setting, summary = scored.setting, scored.summary
    training = setting.get("training") or {}
    folder = scored.folder.resolve()
    of_system = ("label", "acceptance_length", "acceptance_by_depth", "speedup", "tokens_per_second", "lossless", "time_share")
    systems = [{key: entry.get(key) for key in of_system} for entry in systems_of(summary).values()]
    lossless = summary["lossless"]
    same = not lossless or not lossless["differences"] or setting["dtype"] != "float32"  # elsewhere rounding may decide
    exact = same and (lossless is None or lossless["lossless"])
    row = {
        "name": scored.name,
        "label": scored.name,
        "family": choice_name("drafter", setting["drafter"]),
        "evaluation": os.path.relpath(folder, place.resolve()),
        "trained": scored.is_trained,
        "systems": systems,
        "batched": None,
        "trained_parameters": training.get("parameters", 0),
        "training_seconds": training.get("seconds"),
        "training_tokens": training.get("tokens"),
        "extra_memory": summary.get("memory", {}).get("extra"),
        "lossless_to": ("trained target" if scored.changes_target else "target") if exact else "nothing",
        "drift": summary.get("target_drift"),
    }
    if scored.batched is not None:
        every = list(systems_of(scored.batched).values())
        possible = [entry for entry in every if is_possible(entry["speedup"])]
        best = max(possible or every, key=lambda entry: entry["speedup"]["ratio"])
        speed = {key: best["speedup"][key] for key in ("ratio", "predicted")}  # no interval: prompts of a batch share its time
        row["batched"] = {"batch_size": scored.batched["setting"]["batch_size"], "label": best["label"], "speedup": speed,
                          "tokens_per_second": best["tokens_per_second"]}  # fmt: skip
    return row


# Which to take


def recommend(ways: Sequence[Way]) -> list[dict[str, str]]:
    """For each thing that a user may care about: what to take, and why."""
    engine = engine_of([way.scored for way in ways])
    free = [way for way in ways if way.row["lossless_to"] == "target" and not way.row["trained"]]
    ways = [way for way in ways if way.scored.engine == engine]
    exact = [way for way in ways if way.row["lossless_to"] == "target"]
    if not exact:
        return [advice("any", ("none", "None of them leaves the target's output as it is under this rule."))]
    found = [advice("latency at batch 1", latency(exact, ways))]
    if any(way.row["batched"] for way in exact):
        found.append(advice("throughput", throughput(exact)))
    if any(way.row["extra_memory"] is not None for way in exact):
        found.append(advice("memory", memory(exact)))
    if free and any(way.row["trained"] for way in exact):
        found.append(advice("no training", latency(free, free)))
    return found


def sampling(found: Sequence[Scored]) -> list[dict[str, str]]:
    """How to sample where sample-and-match, which all were scored with, keeps less than drawing children would."""
    rules = {one.name: one.summary["rules"] for one in found if one.summary.get("rules")}
    better = {name: said for name, said in rules.items() if said["better"] == "recursive"}
    if not better or found[0].setting["rule"] == "sample":  # which uses it
        return []
    lengths = ", ".join(
        f"{name} {said['match']['forecast']:.2f} to {said['recursive']['forecast']:.2f}" for name, said in better.items()
    )
    return [advice("sampling", (
        "acceptance=sample",
        "It draws children without replacement where that keeps more. By what calibration measured, tokens a forward rise "
        f"where drafters are unsure: {lengths}.",
    ))]  # fmt: skip


def advice(goal: str, said: tuple[str, str]) -> dict[str, str]:
    return {"goal": goal, "choice": said[0], "because": said[1]}


def latency(exact: Sequence[Way], ways: Sequence[Way]) -> tuple[str, str]:
    """The fastest drafter of those whose output is the target's; none where none gains."""
    best = max([way for way in exact if is_possible(way.entry["speedup"])] or exact, key=lambda way: way.speedup)
    rivals = [way.name for way in exact if way is not best and way.scored is not best.scored and not best.told_from(way)]
    others = f" Not told apart from it on these prompts: {', '.join(rivals)}." if rivals else ""
    changed = max(
        (way for way in ways if way.row["lossless_to"] == "trained target"), key=lambda way: way.speedup, default=None
    )
    if changed is not None and changed.speedup > best.speedup and changed.told_from(best):
        others += f" {changed.name} is faster still, {changed.speedup:.2f}x, but changes what the target says."
    low = (best.entry["speedup"]["ci95"] or [0.0])[0]
    if best.speedup <= 1:
        longest = max(exact, key=lambda way: way.length)
        return "no drafter", (
            f"None is faster than decoding without one here: the best, {best.name}, reaches {best.speedup:.2f}x. Where "
            f"checking several tokens costs little more than one, {longest.name} has most to gain: {longest.length:.2f} tokens "
            "a forward."
        )
    sure = "" if low > 1 else " Whether that is a gain is not sure: score more prompts before relying on it."
    return best.name, (
        f"{best.speedup:.2f}x measured{_interval(best.entry['speedup']['ci95'])}, {best.entry['speedup']['predicted']:.2f}x "
        f"predicted, {best.length:.2f} tokens a forward.{sure}{others}"
    )


def throughput(exact: Sequence[Way]) -> tuple[str, str]:
    """The same for several prompts at once."""
    rows = {way.scored.name: way.row for way in exact if way.row["batched"]}
    name, row = max(rows.items(), key=lambda item: item[1]["batched"]["speedup"]["ratio"])
    found, size = row["batched"]["speedup"], row["batched"]["batch_size"]
    if found["ratio"] <= 1:
        return "no drafter", (
            f"With {size} prompts at once none is faster than decoding without one: the best, {name} "
            f"({row['batched']['label']}), reaches {found['ratio']:.2f}x."
        )
    return f"{name} ({row['batched']['label']})", f"{found['ratio']:.2f}x with {size} prompts at once."


def memory(exact: Sequence[Way]) -> tuple[str, str]:
    """The drafter that adds least of those that keep at least half of the longest's gain in tokens a forward."""
    most = max(way.length for way in exact)
    good = [way for way in exact if way.length - 1 >= (most - 1) / 2 and way.row["extra_memory"] is not None]
    if not good:
        return "unknown", "The drafters that accept most were scored without their memory."
    best = min(good, key=lambda way: (way.row["extra_memory"], -way.length))
    return best.name, (
        f"{best.row['extra_memory'] / 1e6:.1f} MB more than decoding without it, and {best.length:.2f} tokens a forward, where "
        f"the most of all is {most:.2f}."
    )


def _interval(ends: Interval) -> str:
    return "" if ends is None else f" (95 % {ends[0]:.2f} to {ends[1]:.2f})"
