"""EAGLE-3 trained here and by the speculators library, on the same tokens in as many passes: acceptance, tokens a second.

    python -m benchmarks.against_speculators [--work DIR] [--out FILE] [--seeds 3] [--passes 1] [--prompts 16]
    python -m benchmarks.against_speculators --pace 24 [--out FILE]

Needs an environment with both (make .venv-engines/installed). The target is tiny, with embedded conversations up to --limit,
batches of 512 packed tokens and three unrolled steps. The library has its defaults: Muon with AdamW beside it, its rates, its
warm-up and linear decay, its norms; attention in torch's eager code, for its own wants a GPU. Both are scored by this project
on the same held-out prompts, by chains of three and by trees. Seconds are of the processor, the target's features included.

With --pace so many steps on SmolLM2 instead, a draft vocabulary of 8,192 in both, step by step in turn over the same batches,
one thread: seconds of the processor from given features (as from a store), and of the target's forward that computes them.
Beside a target in bfloat16 both compute their products in bfloat16.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.optimizers import build_optimizers
from torch import Tensor
from transformers import LlamaConfig, get_linear_schedule_with_warmup

import spectrain
from spectrain.cli.interface import compose_spec, hydra_context
from spectrain.data.dataset import Batching, Dataset
from spectrain.data.readers import EmbeddedReader
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch, collate
from spectrain.models.features import Features, Layer
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.runs.drafters import init_drafter
from spectrain.training.parallel import make_strategy
from spectrain.training.run import TrainingRun
from spectrain.training.trainer import Trainer

STEPS, BATCH, LAYERS = 3, 512, (2, 4, 5)
CPU = torch.device("cpu")
THEIR_OPTIMIZER = SimpleNamespace(
    optimizer="muon", lr=1e-3, weight_decay=0.01, muon_lr=1e-3, muon_momentum=0.95, muon_weight_decay=0.1, muon_ns_steps=5,
    muon_adjust_lr_fn="match_rms_adamw",
)  # fmt: skip
TREES: dict[str, dict[str, Any]] = {"chain": {"tree": "chain", "tree.depth": 3}, "tree": {"tree": "eagle2", "tree.depth": 5}}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--work", type=Path, default=Path("runs/against-speculators"))
    arguments.add_argument("--out", type=Path, default=None)
    for name, default in (("seeds", 3), ("passes", 1), ("prompts", 16), ("limit", 320), ("pace", 0)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    settings = arguments.parse_args()
    torch.set_num_threads(1)
    if settings.pace:
        write(pace(settings.pace, settings.limit), settings.out)
        return
    rows: list[dict[str, Any]] = []
    for seed in range(settings.seeds):
        for train in (train_ours, train_theirs) if seed % 2 == 0 else (train_theirs, train_ours):
            folder = settings.work / f"{train.__name__}-{settings.passes}-{seed}"
            tokens, seconds = train(folder, seed, settings.passes, settings.limit)
            row = {"by": train.__name__, "seed": seed, "tokens": tokens, "tokens_a_second": round(tokens / seconds)}
            rows.append(row | {tree: scored(folder / "drafter", tree, settings.prompts) for tree in TREES})
            print(json.dumps(rows[-1]), flush=True)
    found: dict[str, Any] = {"setting": {key: value for key, value in vars(settings).items() if key not in ("work", "out")}}
    for key in ("chain", "tree", "tokens_a_second"):
        ours, theirs = (mean(row[key] for row in rows if row["by"] == by) for by in ("train_ours", "train_theirs"))
        found[key] = {"ours": ours, "theirs": theirs, "ratio": ours / theirs}
    print(json.dumps({key: found[key] for key in ("chain", "tree", "tokens_a_second")}, indent=1))
    write(found | {"rows": rows, "provenance": collect_provenance()}, settings.out)


def write(found: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


def train_ours(folder: Path, seed: int, passes: int, limit: int) -> tuple[int, float]:
    """The recipe with the library's batches; tokens trained on, and seconds of the processor."""
    began = time.process_time()
    spectrain.train("eagle3", run=folder, target="tiny", eval="none", **{
        "drafter.ttt_steps": STEPS, "data.limit": limit, "data.held_out": 0, "trainer.epochs": passes,
        "trainer.batch_tokens": BATCH, "trainer.packing": True, "trainer.seed": seed,
    })  # fmt: skip
    seconds = time.process_time() - began
    return json.loads((folder / "drafter" / "config.json").read_text())["training"]["tokens"], seconds


def train_theirs(folder: Path, seed: int, passes: int, limit: int) -> tuple[int, float]:
    """The library's model, loss, optimisers and schedule over the same batches."""
    began = time.process_time()
    target = load_tiny()
    target.pack_weights()
    data: Dataset = EmbeddedReader(limit=limit, max_length=512).make_dataset(target.template)
    batching = Batching(BATCH, seed, packed=True)
    num_steps = passes * data.num_batches(batching)
    torch.manual_seed(seed)
    theirs = Theirs(target, torch.arange(target.head.vocab_size), LAYERS, num_steps)
    tokens = 0
    for examples in islice(data.stream_batches(batching), num_steps):
        batch = collate(examples, packed=True)
        tokens += batch.tokens.numel()
        features = target.features(batch.tokens, (*LAYERS, target.num_layers), batch.lengths)
        theirs.step(shifted(batch, features, LAYERS, target.num_layers))
    seconds = time.process_time() - began
    theirs.model.save_pretrained(folder / "drafter")
    return tokens, seconds


class Theirs:
    """The library's model, loss, optimisers and schedule of a training."""

    def __init__(self, target: Target, draft_ids: Tensor, layers: tuple[int, ...], num_steps: int) -> None:
        self.model = library_model(target, draft_ids, layers)
        self.loss: Any = resolve_loss_config("kl_div", "eager")
        self.optimizers = build_optimizers(self.model, THEIR_OPTIMIZER)
        self.schedules = [get_linear_schedule_with_warmup(one, round(0.01 * num_steps), num_steps) for one in self.optimizers]
        self.autocast = partial(torch.autocast, "cpu", torch.bfloat16, target.dtype == torch.bfloat16)

    def step(self, inputs: dict[str, Any]) -> None:
        with self.autocast():
            _, loss, _ = self.model(**inputs, ttt_steps=STEPS, loss_config=self.loss)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for one in (*self.optimizers, *self.schedules):
            one.step()
        self.model.zero_grad()


class Given(Source):
    """One batch, whose features are there already."""

    given: Batch

    def make_batch(self, request: BatchRequest) -> Batch:
        return self.given


def pace(steps: int, limit: int) -> dict[str, Any]:
    """Seconds of a step, ours and theirs, over the same batches of SmolLM2, in turn; the median of each."""
    with hydra_context():
        spec = compose_spec({"recipe": "eagle3", "drafter.ttt_steps": STEPS, "trainer.packing": True})
    target: Target = spec.target.build()
    target.pack_weights()
    data: Dataset = EmbeddedReader(limit=limit, max_length=512).make_dataset(target.template)
    drafter: Any = init_drafter(spec, target, data)
    trainer, given = Trainer.from_spec(spec), Given()
    layers: tuple[int, ...] = drafter.fused
    wanted: tuple[Layer, ...] = (*layers, "final", target.num_layers)
    job = TrainingRun(
        trainer,
        drafter,
        target,
        given,
        make_strategy(trainer.make_accelerator(), "auto", 1, trainer.autocast_dtype(target, CPU)),
        steps,
    )
    job.start_training()
    theirs = Theirs(target, drafter.draft_ids, layers, steps)
    seconds: dict[str, list[float]] = {"target": [], "ours": [], "theirs": []}
    tokens = []
    for number, examples in enumerate(islice(data.stream_batches(Batching(BATCH, 0, packed=True)), steps)):
        batch = collate(examples, packed=True)
        features = timed(seconds["target"], partial(target.features, batch.tokens, wanted, batch.lengths))
        given.given = replace(batch, features=features)
        inputs = shifted(batch, features, layers, target.num_layers)
        both: list[tuple[str, Callable[[], Any]]] = [
            ("ours", partial(job.train_step, [examples])),
            ("theirs", partial(theirs.step, inputs)),
        ]
        for by, step in both if number % 2 else both[::-1]:
            timed(seconds[by], step)
        tokens.append(batch.tokens.numel())
    middle = {by: median(found[2:]) for by, found in seconds.items()}  # behind two that warm up
    found = {
        "setting": {"target": target.name, "dtype": str(target.dtype), "steps": steps, "tokens_a_step": mean(tokens),
                    "draft_vocab": len(drafter.draft_ids), "unrolled": STEPS, "threads": 1},
        "seconds_a_step": middle,
        "ratio_from_features": middle["theirs"] / middle["ours"],
        "ratio_with_the_target": (middle["theirs"] + middle["target"]) / (middle["ours"] + middle["target"]),
        "tokens_a_second_from_features": {by: mean(tokens) / middle[by] for by in ("ours", "theirs")},
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    return found | {"seconds": seconds, "provenance": collect_provenance()}


def timed(seconds: list[float], work: Callable[[], Any]) -> Any:
    """What `work` gives; its seconds of the processor are added."""
    began = time.process_time()
    found = work()
    seconds.append(time.process_time() - began)
    return found


def library_model(target: Target, draft_ids: Tensor, layers: tuple[int, ...]) -> Any:
    """The library's EAGLE-3 for a target, over a draft vocabulary, with the defaults of its command line."""
    config: Any = target.model.config
    config = LlamaConfig(
        **{key: value for key, value in config.to_diff_dict().items() if key not in ("model_type", "architectures")}
    )
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    drafted = torch.zeros(target.head.vocab_size, dtype=torch.bool)
    drafted[draft_ids] = True
    return Eagle3DraftModel.from_training_args(
        config, t2d=drafted, d2t=draft_ids - torch.arange(len(draft_ids)), draft_vocab_size=len(draft_ids),
        ttt_steps=STEPS, verifier_name_or_path=target.path, target_layer_ids=list(layers), draft_attn_impl="eager",
        norm_before_residual=True, norm_before_fc=True, norm_output=True,
    )  # fmt: skip


def shifted(batch: Batch, features: Features, layers: tuple[int, ...], num_layers: int) -> dict[str, Any]:
    """A batch as the library's trainer hands it in: features at t beside token t + 1, document by document."""
    assert batch.lengths is not None
    last = features.at_layer(num_layers)
    ends = torch.tensor(batch.lengths).cumsum(0)
    follows = torch.ones(batch.tokens.shape[1], dtype=torch.bool)  # the places that a place of the same document follows
    follows[ends - 1] = False
    here = follows.nonzero()[:, 0]
    documents = torch.repeat_interleave(torch.arange(len(ends)), torch.tensor(batch.lengths))
    return {
        "hidden_states": features.fuse_layers(layers)[:, here], "input_ids": batch.tokens[:, here + 1],
        "document_ids": documents[None, here], "loss_mask": batch.loss_mask[:, here + 1],
        "position_ids": batch.positions[:, here + 1], "verifier_last_hidden_states": last[:, here + 1],
    }  # fmt: skip


def scored(drafter: Path, tree: str, prompts: int) -> float:
    """Tokens a forward over held-out prompts."""
    target = spectrain.Target.from_pretrained("tiny")
    found = spectrain.Drafter.from_pretrained(drafter, target, **TREES[tree])
    summary = spectrain.evaluate(
        target, found, limit=prompts, max_new_tokens=64, baselines=[], oracle=False, report=False, repeats=1
    )
    assert summary["lossless"]["identical"] == summary["lossless"]["checked"]
    return float(summary["acceptance_length"]["pooled"])


if __name__ == "__main__":
    main()
