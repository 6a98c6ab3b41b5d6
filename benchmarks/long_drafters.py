"""Drafters of five families, trained on texts of 512 and of 4,096 tokens, by position in texts of up to 8,192 tokens; and what
helps a drafter that was trained on short ones.

    python -m benchmarks.long_drafters [work=DIR] [out=eval/results/long-drafters.json] [families=[eagle3,mtp]]

The target is trained first (`long_target`). Short texts are the long ones cut to pieces, so both trainings have the same
tokens, as many in a batch, and as many steps. What the folder holds already is not done again.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.cli.main import dispatch_command
from spectrain.files import write_text
from spectrain.models.loading import load_hf, load_tokenizer
from spectrain.provenance import collect_provenance
from spectrain.runs.drafters import load_training_facts

from .command import run_benchmark
from .long_documents import DocumentWriter, read_passages
from .long_scoring import System, make_prompts, read_scores, score_systems, summarize_scores
from .long_target import ROPE_THETA, iterate_test_documents, train_target

SHORT, LONG = 512, 4096
FAMILIES = {
    "eagle3": (), "dflash": (), "mtp": (), "peagle": (), "gkd": ("drafter.num_layers=2",),
}  # fmt: skip
"""Recipes and their further settings."""
ANCHORS = 64
"""Anchors of dflash in every 512 tokens of a text."""
CONTINUED_SHARE = 5
"""The continued training has one of so many steps."""
SCALE = 16
"""Quotient of the longest texts and those of the short training."""
TRAINING = [
    "target=hf", "target.dtype=float32", "data=tokens", "data.limit=null", "data.held_out=0", "eval=none",
    "trainer.resume=auto", f"trainer.batch_tokens={LONG}", "trainer.save_every=null", "trainer.epochs=1",
]  # fmt: skip


@dataclass
class LongDrafters:
    """Train the target and the drafters that are missing, score them, and write the results."""

    # Folder of the target, the drafters and their scores.
    work: str = "runs/long-drafters"
    # JSON file of the results; null writes none.
    out: str | None = "eval/results/long-drafters.json"
    # Recipes to train; the first one is also the one that is changed for long texts.
    families: tuple[str, ...] = tuple(FAMILIES)
    # Steps of each training, of 4,096 tokens.
    steps: int = 40
    # Number of documents that prompts are cut from: two for each range of positions.
    documents: int = 8

    def run(self) -> None:
        self.folder = Path(self.work).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        train_target(self.folder / "target")
        self._write_data()
        for family in self.families:
            for length in (SHORT, LONG):
                self._train(f"{family}-{length}", family, length)
        first = self.families[0]
        self._train(f"{first}-continued", first, LONG, f"drafter.init={self.folder / f'{first}-{SHORT}'}", "trainer.lr=1e-3")
        target = load_hf(str(self.folder / "target"), dtype="float32")
        target.pack_weights()
        systems = self._list_systems()
        documents = [document for document, _ in zip(iterate_test_documents(target.tokenizer), range(self.documents))]
        score_systems(systems, self.folder, target, make_prompts(documents))
        if self.out is not None:
            self._write_results(systems)

    def _list_systems(self) -> list[System]:
        """Return the trained drafters, then the ways to change the first family's short one."""
        trained = [System(f"{family}-{length}", f"{family}-{length}") for family in self.families for length in (SHORT, LONG)]
        first = self.families[0]
        run, rope = f"{first}-{SHORT}", {"rope_theta": ROPE_THETA, "rope_type": "default"}
        # For the base of "NTK" scaling see YaRN (Peng et al., 2023), section 3.1; heads have 32 numbers.
        ntk = {**rope, "rope_theta": ROPE_THETA * SCALE ** (32 / 30)}
        linear = {**rope, "rope_type": "linear", "factor": float(SCALE)}
        changed = [
            System(f"{first}-window", run, {"window": SHORT}),
            System(f"{first}-sinks", run, sinks=4, window=SHORT - 4),
            System(f"{first}-linear", run, {"architecture": {"rope_parameters": linear}}),
            System(f"{first}-ntk", run, {"architecture": {"rope_parameters": ntk}}),
            System(f"{first}-continued", f"{first}-continued"),
        ]
        return [*trained, *changed]

    def _write_data(self) -> None:
        """Write documents of 4,096 tokens, the same ones in pieces of 512, and further ones for the continued training."""
        if (self.folder / f"continued-{LONG}.jsonl").exists():
            return
        tokenizer = load_tokenizer(str(self.folder / "target"), False, True)
        writer = DocumentWriter(tokenizer, read_passages(tokenizer, held_out=False), seed=2)
        for name, count in (("first", self.steps), ("continued", self.steps // CONTINUED_SHARE)):
            documents = [writer.write_document(LONG).tokens for _ in range(count)]
            for length in (SHORT, LONG):
                rows = [tokens[start : start + length] for tokens in documents for start in range(0, LONG, length)]
                lines = [json.dumps({"input_ids": row, "loss_mask": [1] * len(row)}) for row in rows]
                write_text(self.folder / f"{name}-{length}.jsonl", "\n".join(lines) + "\n")

    def _train(self, name: str, family: str, length: int, *settings: str) -> None:
        """Train a drafter unless its folder holds one, and note the CPU seconds that it took."""
        run, data = self.folder / name, self.folder / f"{'continued' if settings else 'first'}-{length}.jsonl"
        if (run / "cpu_seconds.json").exists():
            return
        anchors = [f"drafter.num_anchors={ANCHORS * length // SHORT}"] if family == "dflash" else []
        start = time.process_time()
        dispatch_command(["train", f"recipe={family}", f"target.model={self.folder / 'target'}", f"data.path={data}", *TRAINING,
                          f"data.max_length={length}", f"run={run}", *anchors, *FAMILIES[family], *settings])  # fmt: skip
        write_text(run / "cpu_seconds.json", json.dumps(round(time.process_time() - start, 1)))

    def _write_results(self, systems: list[System]) -> None:
        rows = []
        for system in systems:
            facts: dict[str, Any] = load_training_facts(self.folder / system.run) or {}
            seconds = json.loads((self.folder / system.run / "cpu_seconds.json").read_text())
            rows.append({
                "name": system.name, "run": system.run, "changes": system.changes, "sinks": system.sinks,
                "training": {key: facts[key] for key in ("steps", "tokens", "max_length")} | {"cpu_seconds": seconds},
                **summarize_scores(read_scores(self.folder, system)),
            })  # fmt: skip
        target = json.loads((self.folder / "target" / "perplexity.json").read_text())
        results = {"target": target, "rows": rows, "provenance": collect_provenance()}
        write_text(Path(str(self.out)), json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_benchmark(LongDrafters)
