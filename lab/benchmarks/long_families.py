"""Families trained on texts of 512 and of 4,096 tokens, and what helps the former in texts of up to
8,192 tokens, by position.

    python -m lab.benchmarks.long_target
    python -m lab.benchmarks.long_families [families=["eagle3"]] [remedies=["eagle3"]] [steps=120]
    [documents=10]

The default target reads synthetic documents and depends on its whole context (`long_target`);
`target=smollm2` takes documents made of embedded conversations instead, for about 20 CPU seconds
per text of 4,096 tokens. Both trainings of a family take as many tokens in as many steps of 4,096
tokens; the short texts are documents of their own. A remedy changes how the drafter of short texts
decodes, or continues its training by a quarter of the steps. What the folder holds already is not
done again.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spectrain.cli.main import dispatch_command
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance

from .command import run_benchmark
from .long_documents import Document, DocumentWriter, read_passages
from .long_drafters import SCORED_LENGTH, SHORT, measure_limited, pool_nats, scale_rope
from .long_scoring import (
    RANGES,
    System,
    compare_scores,
    make_prompts,
    measure_seconds,
    read_scores,
    score_systems,
    summarize_scores,
)
from .long_target import write_documents

LONG = 4096
ANCHORS = 64
"""Anchors of DFlash in every 512 tokens of a text."""
OWN_SETTINGS = {"gkd": ["drafter.num_layers=2"]}
"""Settings of a family that differ from its recipe; one layer of the small target cannot copy."""
TRAINING = [
    "data=tokens",
    "data.limit=null",
    "data.held_out=0",
    "eval=none",
    "trainer.resume=auto",
    f"trainer.batch_tokens={LONG}",
    "trainer.save_every=null",
    "trainer.epochs=1",
]
SCORED_SEED = 1
TRAINED_SEED = 2
CONTINUED_SEED = 3


@dataclass
class LongFamilies:
    """Train the drafters that are missing, score all, and write the results."""

    # Directory of the target, or smollm2.
    target: str = "runs/long-target"
    # Folder of the drafters and of all scores.
    work: str = "runs/long-families"
    # JSON file of the results; null writes none.
    out: str | None = "lab/results/long-families.json"
    # Recipes to train on texts of 512 and of 4,096 tokens.
    families: tuple[str, ...] = ("eagle3", "dflash", "mtp", "peagle", "gkd")
    # Families whose drafter of short texts is tried with every remedy.
    remedies: tuple[str, ...] = ("eagle3", "dflash")
    # Number of seeds of each training.
    seeds: int = 1
    # Steps of each training, of 4,096 tokens.
    steps: int = 120
    # Number of documents that prompts are cut from: two for each range of positions.
    documents: int = 10

    def run(self) -> None:
        self.folder = Path(self.work).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        target = Target.from_pretrained(self.target)
        for seed in range(self.seeds):
            for family in self.families:
                self._train(target, f"{family}-{SHORT}-{seed}", SHORT, seed)
                self._train(target, f"{family}-{LONG}-{seed}", LONG, seed)
                if family in self.remedies:
                    self._continue(target, family, seed)
        target.pack_weights()
        documents = self._write_documents(target, SCORED_SEED, SCORED_LENGTH, self.documents)
        systems = self._list_systems(target)
        prompts = make_prompts(documents)
        score_systems(systems, self.folder, target, prompts)
        limited = measure_limited(
            target,
            self.folder,
            [prompt for prompt in prompts if len(prompt.tokens) > RANGES[-1][0]],
        )
        if self.out is not None:
            rows = [self._describe_system(system) for system in systems]
            setting = {
                "target": target.name,
                "dtype": str(target.dtype),
                "steps": self.steps,
                "step_tokens": LONG,
            }
            perplexity = {
                "by_position": pool_nats(read_scores(self.folder, systems[0])),
                "last_tokens_by_context": limited,
            }
            results = {
                "setting": setting,
                "perplexity": perplexity,
                "rows": rows,
                "provenance": collect_provenance(),
            }
            write_text(Path(self.out), json.dumps(results, indent=1) + "\n")

    def _write_documents(
        self, target: Target, seed: int, length: int, count: int
    ) -> list[Document]:
        if self.target != "smollm2":
            return write_documents(seed, length, count)
        held_out = seed == SCORED_SEED
        writer = DocumentWriter(target.tokenizer, read_passages(target.tokenizer, held_out), seed)
        return [writer.write_document(length) for _ in range(count)]

    def _write_data(self, target: Target, seed: int, length: int, steps: int) -> Path:
        """Return a file of documents of a length for a number of steps, which is written once."""
        path = self.folder / f"{length}-{seed}-{steps}.jsonl"
        if not path.exists():
            documents = self._write_documents(target, seed, length, steps * LONG // length)
            rows = [
                json.dumps({"input_ids": part.tokens, "loss_mask": [1] * length})
                for part in documents
            ]
            write_text(path, "\n".join(rows) + "\n")
        return path

    def _continue(self, target: Target, family: str, seed: int) -> None:
        """Continue the training of the drafter of short texts on long ones, with and without a
        window, and on short ones.
        """
        init = [f"drafter.init={self.folder / f'{family}-{SHORT}-{seed}'}"]
        self._train(target, f"{family}-more-{SHORT}-{seed}", SHORT, seed, init)
        self._train(target, f"{family}-more-{LONG}-{seed}", LONG, seed, init)
        self._train(
            target, f"{family}-more-window-{seed}", LONG, seed, [*init, f"drafter.window={SHORT}"]
        )

    def _train(
        self, target: Target, name: str, length: int, seed: int, continued: Sequence[str] = ()
    ) -> None:
        """Train a drafter unless its folder holds one, and note the CPU seconds that it took."""
        run = self.folder / name
        family = name.split("-")[0]
        if (run / "cpu_seconds.json").exists():
            return
        steps = self.steps // 4 if continued else self.steps
        data = self._write_data(
            target, CONTINUED_SEED if continued else TRAINED_SEED, length, steps
        )
        anchors = [f"drafter.num_anchors={ANCHORS * length // SHORT}"] if family == "dflash" else []
        model = (
            ["target=smollm2"]
            if self.target == "smollm2"
            else ["target=hf", f"target.model={Path(self.target).absolute()}"]
        )
        settings = [
            f"recipe={family}",
            f"data.path={data}",
            f"data.max_length={length}",
            f"trainer.seed={seed}",
            f"run={run}",
        ]
        start = time.process_time()
        dispatch_command(
            [
                "train",
                *settings,
                *model,
                *TRAINING,
                *anchors,
                *OWN_SETTINGS.get(family, []),
                *continued,
            ]
        )
        write_text(run / "cpu_seconds.json", json.dumps(round(time.process_time() - start, 1)))

    def _list_systems(self, target: Target) -> list[System]:
        """Return the drafters of both lengths, and those of short texts with every remedy."""
        systems = list[System]()
        for seed in range(self.seeds):
            for family in self.families:
                systems += [
                    System(name := f"{family}-{length}-{seed}", name) for length in (SHORT, LONG)
                ]
                if family in self.remedies:
                    systems += list_remedies(target, family, seed)
        return systems

    def _describe_system(self, system: System) -> dict[str, Any]:
        """Return the numbers of a system, and relative to the same family's drafter of short
        texts.
        """
        family, *_, seed = system.name.split("-")
        run = self.folder / system.run
        scores = read_scores(self.folder, system)
        seconds = json.loads((run / "cpu_seconds.json").read_text())
        relative = compare_scores(
            scores, read_scores(self.folder, System(f"{family}-{SHORT}-{seed}", ""))
        )
        return {
            "name": system.name.rsplit("-", 1)[0],
            "family": family,
            "seed": int(seed),
            "changes": system.changes,
            "sinks": system.sinks,
            "steps": self.steps,
            "training_cpu_seconds": seconds,
            "relative": relative,
            **summarize_scores(scores),
            "cpu_ms_per_token": measure_seconds(scores),
        }


def list_remedies(target: Target, family: str, seed: int) -> list[System]:
    """Return the drafter of short texts with every remedy."""
    run = f"{family}-{SHORT}-{seed}"
    more = (str(SHORT), str(LONG), "window")
    ropes = {
        f"rope-{kind}": {"architecture": {"rope_parameters": rope}}
        for kind, rope in scale_rope(target).items()
    }
    return [
        System(f"{family}-window-{seed}", run, {"window": SHORT}),
        System(f"{family}-sinks-{seed}", run, sinks=4, window=SHORT - 4),
        *(System(f"{family}-{name}-{seed}", run, changes) for name, changes in ropes.items()),
        *(System(f"{family}-more-{name}-{seed}", f"{family}-more-{name}-{seed}") for name in more),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_benchmark(LongFamilies)
