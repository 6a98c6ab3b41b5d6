"""Ways to accept and to draft on the tiny target, each by the command that docs/systems.md names.

    python -m lab.benchmarks.measure_ways [--work DIR] [--out lab/results/ways-tiny.json] [GROUP ..]

One thread, float32, one seed; what a group trains or has scored already is not done again, and rows
of other groups stay in the file. Without names: every group but `overlap`, whose wall clock wants
two cores that do nothing else.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from spectrain.cli.main import dispatch_command
from spectrain.files import write_text
from spectrain.provenance import collect_provenance

RESULTS = Path(__file__).parents[2] / "lab" / "results" / "ways-tiny.json"
TRAINING = [
    "target=tiny",
    "data.limit=null",
    "data.max_length=512",
    "trainer.batch_tokens=512",
    "trainer.seed=0",
    "trainer.resume=auto",
    "eval=none",
]
BEYOND = ["recipe=gkd", "drafter.init=WORK/gkd", "trainer.max_steps=150", "trainer.lr=3e-4"]
RUNS = {  # what is trained, by name
    "gkd": ["recipe=gkd", "drafter.stop_head=1", "trainer.max_steps=512"],
    **{
        name: [f"recipe={name}", "trainer.max_steps=300"]
        for name in ("eagle1", "hass", "eagle3", "cllm")
    },
    "more-data": BEYOND,
    "more-replay": [*BEYOND, "source=generated", "source.by=replay"],
    "more-balanced": [*BEYOND, "source=generated", "source.by=replay", "source.balanced=true"],
    "more-branches": [*BEYOND, "source=generated", "source.by=replay", "source.branches=true"],
    "more-policy": [*BEYOND, "source=generated", "source.by=policy"],
    "more-windows": [*BEYOND, "source=generated", "source.by=policy", "source.windows=divergence"],
    "more-near": [*BEYOND, "source=generated", "source.by=policy", "source.near=0.1"],
}
SCORING = ["eval.baselines=[]", "eval.oracle=false", "eval.report=false"]
GKD = "run=WORK/gkd"
CHAIN = ["tree=chain", "tree.depth=4"]
DRAWN = [GKD, *CHAIN, "tree.children=sampled", "eval.quality=true"]
TWENTY_FOUR = ["eval.limit=24", "eval.max_new_tokens=48"]
FORTY = [
    "eval.limit=40",
    "eval.max_new_tokens=64",
    "eval.batch_size=8",
    "eval.repeats=1",
    "acceptance=greedy",
]
SIXTEEN = ["tree=eagle2", "tree.depth=4", "tree.budget=16"]
CACHES = (
    "window",
    "snap",
    "quest",
    "compress",
    "defensive",
    "signs",
    "clusters",
    "merged",
    "int8",
    "int4",
    "sink4",
    "turbo4",
)
LOSSY = {
    "chain": ["acceptance=chain"],
    "deferral, chow": ["acceptance=deferral", "acceptance.defer=chow"],
    "deferral, diff": ["acceptance=deferral", "acceptance.defer=diff"],
    "deferral, opt": ["acceptance=deferral"],
    "deferral, opt, alpha=0": ["acceptance=deferral", "acceptance.alpha=0"],
    "deferral, token": ["acceptance=deferral", "acceptance.defer=token"],
    "bounded, bias=0.1": ["acceptance=bounded"],
    "bounded, bias=0.3": ["acceptance=bounded", "acceptance.bias=0.3"],
    "sigmoid": ["acceptance=sigmoid"],
    "sigmoid, high=10": ["acceptance=sigmoid", "acceptance.high=10"],
}


def list_phrase_drafters(
    target: str, models: tuple[str, str], limit: list[str]
) -> dict[str, list[str]]:
    """Drafters that copy, look up or share, each after its base; the drafter to lengthen and the
    one to combine.
    """
    model, combined = (
        f"run={name}" if name.startswith("WORK/") else f"drafter={name}" for name in models
    )
    shared = [f"target={target}", "acceptance=greedy", "eval.repeats=1", *limit]
    chain = ["tree=chain", "tree.depth=4"]
    drafters = {
        "ngram": [*SIXTEEN, "drafter=ngram"],
        "retrieval": [*SIXTEEN, "drafter=retrieval"],
        "bigrams": [*SIXTEEN, "drafter=bigrams", f"drafter.table=WORK/bigrams-{target}"],
        "bigrams alone": [*SIXTEEN, "drafter=bigrams", "drafter.copies=false",
            f"drafter.table=WORK/bigrams-{target}"],
        "trigrams": [*SIXTEEN, "drafter=trigrams"],
        "trigrams and copies": [*SIXTEEN, "drafter=trigrams", "drafter.copies=true"],
        "ngram, chain": [*chain, "drafter=ngram"],
        "ouroboros over ngram, chain": [*chain, "drafter=ouroboros", "drafter.inner=ngram"],
        "model, chain": [*chain, model],
        "ouroboros over the model, chain": [*chain, "drafter=ouroboros",
            f"drafter.inner={models[0]}"],
        "model": [*SIXTEEN, model],
        "graph over the model": [*SIXTEEN, "drafter=graph", f"drafter.inner={models[0]}"],
        "graph over the model, 3 tokens": [*SIXTEEN, "drafter=graph", f"drafter.inner={models[0]}",
            "drafter.suffix=3"],
        "eagle3": [*SIXTEEN, combined],
        "hybrid": [*SIXTEEN, "drafter=hybrid", f"drafter.inner={models[1]}"],
        "respec": [*SIXTEEN, "drafter=respec", f"drafter.inner={models[1]}"],
        "respec, chance": [
            *SIXTEEN, "drafter=respec", f"drafter.inner={models[1]}", "drafter.entropy=null",
            "drafter.chance=0.3",
        ],
    }  # fmt: skip
    return {name: [*arguments, *shared] for name, arguments in drafters.items()}


GROUPS: dict[str, dict[str, list[str]]] = {  # rows: the arguments of `spectrain eval`
    "lossy": {name: [*DRAWN, "eval.limit=24", "eval.max_new_tokens=32", *rule] for name,
        rule in LOSSY.items()},
    "tasks": {
        name: [*DRAWN, "eval.prompts=arithmetic", "eval.max_new_tokens=48", *LOSSY[name]]
        for name in ("chain", "deferral, opt", "bounded, bias=0.3", "sigmoid")
    },
    "drafts": {
        f"sampled, T = {warm}": [
            GKD, "tree=cartesian", "tree.widths=[4,2,1]", "tree.children=sampled", *TWENTY_FOUR,
            f"tree.temperature={warm}",
            "acceptance=kseq", f"acceptance.temperature={warm}", "eval.optimum=true",
        ]
        for warm in (1.0, 0.6)
    },
    "lengths": {"sweep": [GKD, "tree=chain", "tree.depth=8", *TWENTY_FOUR, "acceptance=greedy",
        "eval.sweep=length"]},
    "several": {
        name: [*CHAIN, *TWENTY_FOUR, "acceptance=greedy", "target=tiny", *drafter]
        for name, drafter in {
            "gkd": ["drafter=chosen", "drafter.inner=[WORK/gkd,WORK/gkd]"],
            "cascade": ["drafter=cascade", "drafter.inner=WORK/gkd", "drafter.helper=ngram"],
            "handover": ["drafter=cascade", "drafter.inner=WORK/gkd", "drafter.handover=2",
                "drafter.ahead=0"],
            "qualify": ["drafter=cascade", "drafter.inner=WORK/gkd", "drafter.qualify=0.3"],
            "hedge": ["drafter=chosen", "drafter.inner=[ngram,WORK/gkd,WORK/eagle3]"],
            "bandit": ["drafter=chosen", "drafter.inner=[ngram,WORK/gkd,WORK/eagle3]",
                "drafter.by=bandit"],
            "vote": ["drafter=chosen", "drafter.inner=[ngram,WORK/gkd,WORK/eagle3]",
                "drafter.by=vote"],
        }.items()
    },
    "adversary": {
        "gkd": [GKD, *CHAIN, *TWENTY_FOUR, "acceptance=greedy", "eval.adversary=32"],
        "gkd, same=1": [GKD, *CHAIN, *TWENTY_FOUR, "acceptance=greedy", "eval.adversary=32",
            "eval.adversary_same=1"],
    },
    "trained": {
        f"{name}, {kind}": [f"run=WORK/{name}", *tree, *FORTY]
        for name in ("eagle1", "hass", "eagle3", "cllm")
        for kind, tree in (
            {"chain of 8": ["tree=chain", "tree.depth=8"]} if name == "cllm" else {"chain": CHAIN,
                "16 nodes": SIXTEEN}
        ).items()
    },
    "beyond": {
        name: [f"run=WORK/{name}", *CHAIN, *FORTY]
        for name in ("gkd", *(run for run in RUNS if run.startswith("more-")))
    },
    "phrases": list_phrase_drafters("tiny", ("WORK/gkd", "WORK/eagle3"), TWENTY_FOUR),
    "phrases-smollm2": list_phrase_drafters(
        "smollm2", ("smollm2-eagle3", "smollm2-eagle3"), ["eval.limit=8", "eval.max_new_tokens=48"]
    ),
    "codecs-smollm2": {
        cache: [
            "target=smollm2", "drafter=self", f"drafter.cache={cache}", "drafter.budget=256",
            *CHAIN, "acceptance=greedy",
            "eval.context=[1k]", "eval.limit=6", "eval.max_new_tokens=32", "eval.repeats=1",
        ]
        for cache in CACHES
    },
    "overlap": {
        f"{way}, chain of {depth}": [
            GKD, "tree=chain", f"tree.depth={depth}", *TWENTY_FOUR, "acceptance=greedy",
            "eval.repeats=1",
            f"eval.overlap={way}",
        ]
        for depth in (2, 4)
        for way in ("outcomes", "post", "pearl")
    },
}  # fmt: skip
SUMMARY_KEYS = (
    "acceptance_length", "acceptance_by_depth", "speedup", "tokens_per_second", "time_share",
    "noise", "drift", "task", "tasks",
    "adversary", "overlap", "optimum", "sweep", "target_drift",
)  # fmt: skip


def measure(group: str, name: str, arguments: list[str], work: Path) -> dict[str, Any]:
    """Return a row: the results of its scoring, which is run unless that was done before."""
    folder = (
        work / "scores" / "".join(sign if sign.isalnum() else "-" for sign in f"{group} {name}")
    )
    command = [*(argument.replace("WORK", str(work)) for argument in arguments), *SCORING]
    drafts = next((argument for argument in command if argument.startswith("run=")), None)
    path = (
        (Path(drafts.removeprefix("run=")) if drafts else folder)
        / "eval"
        / folder.name
        / "summary.json"
    )
    for run in RUNS:
        if any(
            f"WORK/{run}" in argument.replace("]", ",").split(",")[0]
            or f"WORK/{run}," in argument + ","
            for argument in arguments
        ):
            train(run, work)
    if not path.exists():
        dispatch_command(
            ["eval", *command, f"eval.name={folder.name}", *([] if drafts else [f"run={folder}"])]
        )
    summary = json.loads(path.read_text())
    return {
        "group": group,
        "name": name,
        "command": " ".join(["eval", *arguments, *SCORING]).replace("WORK", "runs"),
        "commit": summary["setting"]["commit"],
        "prompts": summary["setting"]["prompts"],
        "tree": summary["tree"],
        **{key: summary[key] for key in SUMMARY_KEYS if key in summary},
        "lossless": {key: summary["lossless"][key] for key in ("rule", "checked", "identical")},
        "compared": {
            label: {
                key: entry[key]
                for key in ("acceptance_length", "speedup", "lossless")
                if key in entry
            }
            for label, entry in summary.get("compared", {}).items()
        },
    }


def train(name: str, work: Path) -> None:
    """Train a drafter that a row needs, after those that it starts from."""
    for other in RUNS:
        if any(argument == f"drafter.init=WORK/{other}" for argument in RUNS[name]):
            train(other, work)
    dispatch_command(
        [
            "train",
            *(argument.replace("WORK", str(work)) for argument in RUNS[name]),
            *TRAINING,
            f"run={work / name}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/ways"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "groups", nargs="*", default=[group for group in GROUPS if group != "overlap"]
    )
    options = parser.parse_args()
    earlier_rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows = {(row["group"], row["name"]): row for row in earlier_rows}
    for group in options.groups:
        for name, arguments in GROUPS[group].items():
            rows[group, name] = measure(group, name, arguments, options.work.absolute())
            setting = {
                "target": "tiny",
                "training": TRAINING,
                "runs": RUNS,
                "scoring": SCORING,
                **collect_provenance(),
            }
            write_text(
                options.out,
                json.dumps({"setting": setting, "rows": list(rows.values())}, indent=1) + "\n",
            )


if __name__ == "__main__":
    main()
