"""`python -m lab.benchmarks.axes`: the three sweeps of `eval.sweep` for several drafters, on the
tiny target and on SmolLM2.

Drafters are trained with few steps first, or need no training. What was trained or measured before
is not done again, and every sweep is written at once, so an interrupted run goes on where it
stopped. One thread; plain and drafted rounds alternate.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.cli.main import dispatch_command
from spectrain.files import write_text
from spectrain.provenance import collect_provenance

from .command import list_defaults, run_benchmark

TRAINING = [
    "target=tiny",
    "data.limit=null",
    "data.max_length=512",
    "trainer.batch_tokens=512",
    "trainer.seed=0",
    "trainer.max_steps=400",
    "trainer.resume=auto",
    "eval=none",
]
SCORING = ["eval.baselines=[]", "eval.oracle=false", "eval.report=false", "eval.repeats=1"]
CHAIN = ["tree=chain", "tree.depth=3"]
TRAINED = ("eagle3", "medusa1", "gkd", "dflash")
SHIPPED = "drafter=smollm2-eagle3"
AUTO = ["tree=auto", "eval.max_new_tokens=64"]
"""Longer answers, because the first trials of a number of prompts are a larger share of short ones.
On tiny also more prompts."""
DRAFTERS: dict[str, dict[str, list[str]]] = {
    "tiny": {
        **{f"{recipe}, chain of 3": [f"run=WORK/{recipe}", *CHAIN] for recipe in TRAINED},
        "n-gram, chain of 3": ["target=tiny", "drafter=ngram", *CHAIN],
        "retrieval, chain of 3": ["target=tiny", "drafter=retrieval", *CHAIN],
        "eagle3, tree=auto": ["run=WORK/eagle3", *AUTO, "eval.limit=60"],
        "n-gram, tree=auto": ["target=tiny", "drafter=ngram", *AUTO, "eval.limit=60"],
    },
    "smollm2": {
        "shipped eagle3, chain of 3": ["target=smollm2", SHIPPED, *CHAIN],
        "n-gram, chain of 3": ["target=smollm2", "drafter=ngram", *CHAIN],
        "retrieval, chain of 3": ["target=smollm2", "drafter=retrieval", *CHAIN],
        "lookahead": ["target=smollm2", "drafter=lookahead"],
        "sparse cache, chain of 3": ["target=smollm2", "drafter=self", *CHAIN],
        "layer skipping, chain of 3": ["target=smollm2", "drafter=layer_skip", *CHAIN],
        "shipped eagle3, tree=auto": ["target=smollm2", SHIPPED, *AUTO],
        "n-gram, tree=auto": ["target=smollm2", "drafter=ngram", *AUTO],
    },
}
"""Arguments of each drafter, by target and name; WORK is the folder of the trained ones."""
SWEEPS: dict[str, dict[str, list[str]]] = {
    "tiny": {
        "batch": ["eval.limit=32", "eval.max_new_tokens=48"],
        "context": ["eval.context=[256,512,896]", "eval.limit=12", "eval.max_new_tokens=48"],
        "temperature": ["eval.limit=16", "eval.max_new_tokens=48"],
    },
    "smollm2": {
        "batch": ["eval.limit=32", "eval.max_new_tokens=24"],
        "context": ["eval.context=[512,1k,2k]", "eval.limit=6", "eval.max_new_tokens=32"],
        "temperature": ["eval.limit=8", "eval.max_new_tokens=32", "eval.temperatures=[0,0.6,1]"],
    },
}
"""Arguments of each sweep, by target."""


@dataclass
class AxesBench:
    """Train the drafters of the tiny target, and sweep every drafter over batch size, context
    and temperature.
    """

    # Folder of the trained drafters and of the scores.
    work: str = "runs/axes"
    # JSON file of the results.
    out: str = "lab/results/axes.json"
    # Targets to measure.
    targets: tuple[str, ...] = tuple(DRAFTERS)
    # Names of the drafters to measure; null means all.
    names: tuple[str, ...] | None = None
    # Sweeps to measure.
    sweeps: tuple[str, ...] = ("batch", "context", "temperature")

    def run(self) -> None:
        self.folder, out = Path(self.work).absolute(), Path(self.out)
        rows: dict[str, Any] = json.loads(out.read_text())["rows"] if out.exists() else {}
        for over in self.sweeps:
            for target in self.targets:
                for name in DRAFTERS[target]:
                    if self.names is not None and name not in self.names:
                        continue
                    measured = rows.setdefault(target, {}).setdefault(name, {})
                    if over in measured:
                        continue
                    measured[over] = self.sweep_drafter(target, name, over)
                    setting = {
                        "training": TRAINING,
                        "scoring": SCORING,
                        "sweeps": SWEEPS,
                        **collect_provenance(),
                    }
                    write_text(out, json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")

    def sweep_drafter(self, target: str, name: str, over: str) -> dict[str, Any]:
        """Sweep a drafter over one axis, and return the axis with its command, commit, date and
        hardware.
        """
        words = DRAFTERS[target][name]
        for recipe in TRAINED:
            if f"run=WORK/{recipe}" in words and not (self.folder / recipe / "drafter").exists():
                dispatch_command(
                    ["train", f"recipe={recipe}", *TRAINING, f"run={self.folder / recipe}"]
                )
        label = "".join(sign if sign.isalnum() else "-" for sign in f"{target}-{name}-{over}")
        given = [word.replace("WORK", str(self.folder)) for word in words]
        run = (
            next((word for word in given if word.startswith("run=")), None)
            or f"run={self.folder / 'scores' / label}"
        )
        settings = list_defaults([f"eval.sweep={over}", *SWEEPS[target][over], *SCORING], words)
        dispatch_command(
            ["eval", *given, *([] if run in given else [run]), *settings, f"eval.name={label}"]
        )
        summary = json.loads(
            (Path(run.removeprefix("run=")) / "eval" / label / "summary.json").read_text()
        )
        facts = {key: summary["setting"][key] for key in ("commit", "date", "hardware")}
        return {
            "command": " ".join(["eval", *words, *settings]).replace("WORK", "runs/axes"),
            **facts,
            **summary["axis"],
        }


if __name__ == "__main__":
    run_benchmark(AxesBench)
