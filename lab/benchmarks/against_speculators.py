"""EAGLE-3 trained by spectrain and by the speculators library on the same tokens, with learning
rates of one grid.

    python -m lab.benchmarks.against_speculators [--runs FILE] [--out FILE] [--target tiny]
        [--passes 1] [--seeds 3] [--prompts 24]
    python -m lab.benchmarks.against_speculators --pace 10 [--out FILE]

It needs an environment with both (make .venv-engines/installed). Both sides get the same
conversations (--limit of the embedded ones), batches of 512 packed tokens, three unrolled steps,
fused layers, draft vocabulary and features. Every rate of RATES is trained with seed 0; the best of
either optimizer, by the chain, is trained with the other seeds too. --rates names single choices
instead, as in muon:4e-3:2e-2, and --sides one side, so that two processes can share the work.
--changes gives spectrain other settings, as in drafter.step_decay=1, which the runs then name. All
other settings are the sides' own. Both are scored by this project: chains of three and trees of 16
nodes over held-out prompts, whose output must equal autoregressive decoding. FILE of --runs holds a
line per finished run; a second start trains only what is missing.

With --pace so many steps on SmolLM2 instead, a draft vocabulary of 8,192 in both, step by step in
turn over the same batches, one thread: seconds of the processor from given features (as from a
store), and of the target's forward that computes them.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

import spectrain
from lab.benchmarks.pooled_lengths import pool_lengths
from spectrain.cli.interface import compose_spec, hydra_context
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Batching, BatchStream, Dataset
from spectrain.data.readers import EmbeddedReader
from spectrain.decoding.acceptance.matching import Greedy
from spectrain.decoding.session import Session
from spectrain.drafters.base import Drafter
from spectrain.eval.prompts import read_prompts
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch, collate
from spectrain.models.features import Features, Layer
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.runs.init_drafter import init_drafter
from spectrain.training.initial_fit import fit_initial_weights
from spectrain.training.parallel.launch import make_strategy
from spectrain.training.run import TrainingRun
from spectrain.training.trainer import Trainer
from spectrain.trees import Chain, Eagle2

UNROLLED = 3
BATCH = 512
NEW_TOKENS = 64
CPU = torch.device("cpu")
SIDES = ("spectrain", "speculators")
TREES: dict[str, Callable[[], Any]] = {
    "chain": partial(Chain, depth=3),
    "tree": partial(Eagle2, depth=5, budget=16, top_k=4),
}
# Optimizer, rate of AdamW, rate of Muon's matrices. The first of Muon's is the library's default.
RATES = [
    "adamw:2e-3",
    "adamw:4e-3",
    "adamw:8e-3",
    "muon:1e-3:1e-3",
    "muon:4e-3:5e-3",
    "muon:4e-3:1e-2",
    "muon:4e-3:2e-2",
    "muon:4e-3:4e-2",
    "muon:8e-3:2e-2",
]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--runs", type=Path, default=Path("runs/against-speculators.jsonl"))
    arguments.add_argument("--out", type=Path, default=None)
    arguments.add_argument("--target", default="tiny")
    arguments.add_argument("--rates", nargs="*", default=None)
    arguments.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES)
    arguments.add_argument("--changes", nargs="*", default=[])
    for name, default in (
        ("seeds", 3),
        ("passes", 1),
        ("prompts", 24),
        ("limit", 320),
        ("pace", 0),
    ):
        arguments.add_argument(f"--{name}", type=int, default=default)
    settings = arguments.parse_args()
    torch.set_num_threads(1)
    if settings.pace:
        write_result(measure_pace(settings.pace, settings.limit), settings.out)
        return
    compare(
        Comparison(settings.target, settings.limit, settings.prompts, settings.changes), settings
    )


def compare(comparison: "Comparison", settings: argparse.Namespace) -> None:
    """Train what is missing, and write all runs of the file with the settings."""
    runs = RunList(settings.runs, comparison, settings.passes)
    for side in settings.sides:
        chosen = settings.rates or [
            runs.choose_best(side, optimizer) for optimizer in ("adamw", "muon")
        ]
        for rates in chosen:
            for seed in range(settings.seeds):
                runs.train(side, rates, seed)
    setting = {
        "target": settings.target,
        "prompts": settings.prompts,
        "new_tokens": NEW_TOKENS,
        "batch_tokens": BATCH,
    }
    write_result(
        {"setting": setting, "runs": runs.runs, "provenance": collect_provenance()}, settings.out
    )


def write_result(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


class RunList:
    """The finished runs of a file with a line for each, and what trains the missing ones."""

    def __init__(self, path: Path, comparison: "Comparison", passes: int) -> None:
        self.path, self.comparison, self.passes = path, comparison, passes
        path.parent.mkdir(parents=True, exist_ok=True)
        self.runs = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )

    def train(self, side: str, rates: str, seed: int) -> dict[str, Any]:
        """Return the run of these settings, which is trained where it is missing."""
        key = {
            "target": self.comparison.name,
            "side": side,
            "rates": rates,
            "seed": seed,
            "passes": self.passes,
        }
        changes = self.comparison.changes_of(side)
        for run in self.runs:
            if key.items() <= run.items() and run.get("changes", []) == changes:
                return run
        began = time.process_time()
        drafter, tokens = self.comparison.train(side, rates, seed, self.passes)
        seconds = time.process_time() - began
        named = {"changes": changes} if changes else {}
        run = (
            key
            | named
            | {"tokens": tokens, "cpu_seconds": round(seconds, 1)}
            | self.comparison.score(drafter)
        )
        self.runs.append(run)
        with self.path.open("a") as file:
            file.write(json.dumps(run) + "\n")
        print(
            json.dumps(
                {**run, "chain": pool_lengths([run], "chain"), "tree": pool_lengths([run], "tree")}
            ),
            flush=True,
        )
        return run

    def choose_best(self, side: str, optimizer: str) -> str:
        """Return the rates of an optimizer with the most tokens per forward by the chain, of
        seed 0.
        """
        candidates = [rates for rates in RATES if rates.startswith(optimizer)]
        return max(
            candidates, key=lambda rates: pool_lengths([self.train(side, rates, 0)], "chain")
        )


class Comparison:
    """A target, its data with features and its prompts, on which both sides train and are
    scored.
    """

    def __init__(
        self, target: str, limit: int, num_prompts: int, changes: Sequence[str] = ()
    ) -> None:
        # Settings of spectrain's side that differ from the recipe's.
        self.name = target
        self.changes = list(changes)
        with hydra_context():
            self.target: Target = compose_spec(
                {"recipe": "eagle3", "target": target}
            ).target.build()
        self.target.pack_weights()
        self.data: Dataset = EmbeddedReader(limit=limit, max_length=512).make_dataset(
            self.target.template
        )
        self.source = CachedSource()
        prompts = read_prompts(None, num_prompts).prompts
        self.prompts = [prompt.tokenize_for(self.target) for prompt in prompts]
        self.answers = Session(self.target, Greedy()).decode
        self.reference = [self.answers([prompt], NEW_TOKENS)[0].output for prompt in self.prompts]

    def changes_of(self, side: str) -> list[str]:
        """List the changed settings of a side; only spectrain's can be changed."""
        return self.changes if side == "spectrain" else []

    def compose(self, rates: str, seed: int, **settings: Any) -> RunSpec:
        """Compose spectrain's run with an optimizer and its rates."""
        optimizer, lr, *matrices = rates.split(":")
        if matrices:
            settings["optimizer.lr_ratio"] = float(matrices[0]) / float(lr)
        with hydra_context():
            return compose_spec(
                {
                    "recipe": "eagle3",
                    "target": self.name,
                    "optimizer": optimizer,
                    "trainer.lr": float(lr),
                    "trainer.seed": seed,
                    "trainer.packing": True,
                    "trainer.batch_tokens": BATCH,
                    "drafter.ttt_steps": UNROLLED,
                    **settings,
                }
            )

    def batches(self, seed: int, passes: int) -> Iterator[list[Example]]:
        """Return the batches of a training, the same for both sides."""
        batching = Batching(BATCH, seed, packed=True)
        return islice(self.data.stream_batches(batching), passes * self.data.num_batches(batching))

    def train(self, side: str, rates: str, seed: int, passes: int) -> tuple[Drafter, int]:
        """Train a drafter; return it and the number of tokens."""
        batches = [*self.batches(seed, passes)]
        spec = self.compose(
            rates, seed, **dict(change.split("=", 1) for change in self.changes_of(side))
        )
        drafter = init_drafter(spec, self.target, self.data)
        train = self.train_ours if side == "spectrain" else self.train_library
        drafter = train(spec, drafter, batches, rates)
        return drafter, sum(len(example.tokens) for examples in batches for example in examples)

    def train_ours(
        self, spec: RunSpec, drafter: Any, batches: list[list[Example]], rates: str
    ) -> Drafter:
        """Train spectrain's drafter."""
        job = start_run(Trainer.from_spec(spec), drafter, self.target, self.source, batches)
        for examples in batches:
            job.train_step([examples])
        job.finish()
        return drafter

    def train_library(
        self, spec: RunSpec, drafter: Any, batches: list[list[Example]], rates: str
    ) -> Drafter:
        """Train the library's drafter, with the fused layers and the draft vocabulary of
        spectrain's.
        """
        from lab.benchmarks.speculators_library import LibraryTraining, shift_batch

        optimizer, lr, *matrices = rates.split(":")
        chosen = {"optimizer": optimizer, "lr": float(lr), "muon_lr": float((matrices or [lr])[0])}
        layers = drafter.fused_layers
        num_layers = self.target.num_layers
        torch.manual_seed(spec.trainer.settings.get("seed", 0))
        library = LibraryTraining(
            self.target, drafter.draft_ids, layers, UNROLLED, len(batches), chosen
        )
        for examples in batches:
            request = BatchRequest(examples, self.target, (*layers, num_layers), packed=True)
            batch = self.source.make_batch(request)
            assert batch.features is not None
            library.train_step(shift_batch(batch, batch.features, layers, num_layers))
        with TemporaryDirectory() as folder:
            library.model.save_pretrained(folder)
            return spectrain.Drafter.from_pretrained(folder, self.target).module

    def score(self, drafter: Drafter) -> dict[str, Any]:
        """Decode the prompts; return tokens and complete rounds of each prompt, for a chain and
        a tree.
        """
        rounds_by_tree: dict[str, Any] = {}
        for name, make_tree in TREES.items():
            session = Session.from_drafter(
                self.target, drafter, make_tree(), Greedy(), lambda: self.prompts[:8], "eager"
            )
            answers = [session.decode([prompt], NEW_TOKENS)[0] for prompt in self.prompts]
            assert [answer.output for answer in answers] == self.reference, (
                "the output is not the target's own"
            )
            lengths = [answer.complete_round_lengths for answer in answers]
            rounds_by_tree[name] = [[sum(rounds), len(rounds)] for rounds in lengths]
        return rounds_by_tree


@dataclass
class CachedSource(Source):
    """The target's features, computed once per conversation and set of layers, and kept in
    memory.
    """

    def __post_init__(self) -> None:
        self.states: dict[tuple[Layer, ...], dict[str, Any]] = {}

    def make_batch(self, request: BatchRequest) -> Batch:
        batch = collate(request.examples, packed=True)
        cache = self.states.setdefault(request.layers, {})
        for example in request.examples:
            if example.content_hash not in cache:
                tokens = torch.tensor([example.tokens])
                cache[example.content_hash] = request.target.features(tokens, request.layers).hidden
        hidden = torch.cat([cache[example.content_hash] for example in request.examples], 1)
        return replace(batch, features=Features(batch.tokens, request.layers, hidden))


class ListedBatches(BatchStream):
    """The batches of a list, once."""

    def __init__(self, batches: list[list[Example]]) -> None:
        super().__init__(rank=0, num_processes=1, state=None)
        self.batches = batches

    def take_batch(self, number: int) -> list[Example]:
        if number >= len(self.batches):
            raise StopIteration
        return self.batches[number]


def start_run(
    trainer: Trainer, drafter: Drafter, target: Target, source: Source, batches: list[list[Example]]
) -> TrainingRun:
    """Start a training on these batches, whose steps are taken one by one."""
    strategy = make_strategy(
        trainer.make_accelerator(), "auto", 1, trainer.autocast_dtype(target, CPU)
    )
    job = TrainingRun(trainer, drafter, target, source, strategy, len(batches))
    fit_initial_weights(job, drafter, target, ListedBatches(batches))
    job.start_training()
    return job


# Pace


class PresetFeatures(Source):
    """Gives a batch whose features are computed already."""

    batch: Batch

    def make_batch(self, request: BatchRequest) -> Batch:
        return self.batch


def measure_pace(steps: int, limit: int) -> dict[str, Any]:
    """Measure the processor's seconds of a step of both sides over the same batches of SmolLM2,
    in turn; return the medians.
    """
    from lab.benchmarks.speculators_library import LibraryTraining, shift_batch

    with hydra_context():
        spec = compose_spec(
            {
                "recipe": "eagle3",
                "drafter.ttt_steps": UNROLLED,
                "drafter.start": "target",
                "trainer.packing": True,
            }
        )
    target: Target = spec.target.build()
    target.pack_weights()
    data: Dataset = EmbeddedReader(limit=limit, max_length=512).make_dataset(target.template)
    drafter: Any = init_drafter(spec, target, data)
    source = PresetFeatures()
    layers = drafter.fused_layers
    batches = [*islice(data.stream_batches(Batching(BATCH, 0, packed=True)), steps)]
    job = start_run(Trainer.from_spec(spec), drafter, target, source, batches)
    library = LibraryTraining(target, drafter.draft_ids, layers, UNROLLED, steps)
    seconds: dict[str, list[float]] = {"target": [], "ours": [], "theirs": []}
    tokens = []
    for number, examples in enumerate(batches):
        batch = collate(examples, packed=True)
        captured: tuple[Layer, ...] = (*layers, "final", target.num_layers)
        features = measure_call(
            seconds["target"], partial(target.features, batch.tokens, captured, batch.lengths)
        )
        source.batch = replace(batch, features=features)
        inputs = shift_batch(batch, features, layers, target.num_layers)
        both: list[tuple[str, Callable[[], Any]]] = [
            ("ours", partial(job.train_step, [examples])),
            ("theirs", partial(library.train_step, inputs)),
        ]
        for side, step in both if number % 2 else both[::-1]:
            measure_call(seconds[side], step)
        tokens.append(batch.tokens.numel())
    # The first two steps warm up.
    middle = {side: median(times[2:]) for side, times in seconds.items()}
    setting = {
        "target": target.name,
        "dtype": str(target.dtype),
        "steps": steps,
        "tokens_a_step": mean(tokens),
        "draft_vocab": len(drafter.draft_ids),
        "unrolled": UNROLLED,
        "threads": 1,
    }
    result = {
        "setting": setting,
        "seconds_a_step": middle,
        "ratio_from_features": middle["theirs"] / middle["ours"],
        "ratio_with_the_target": (middle["theirs"] + middle["target"])
        / (middle["ours"] + middle["target"]),
        "tokens_a_second_from_features": {
            side: mean(tokens) / middle[side] for side in ("ours", "theirs")
        },
    }
    print(json.dumps(result, indent=1))
    return result | {"seconds": seconds, "provenance": collect_provenance()}


def measure_call(seconds: list[float], work: Callable[[], Any]) -> Any:
    """Return the result of `work`, and append the processor's seconds that it took."""
    began = time.process_time()
    result = work()
    seconds.append(time.process_time() - began)
    return result


if __name__ == "__main__":
    main()
