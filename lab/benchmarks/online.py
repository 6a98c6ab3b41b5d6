"""Peak memory of an online training step, target and EAGLE-3 drafter on one device: `spectrain
plan`'s prediction and a measurement.

The geometry is that of Llama-3.1-8B, weights are random. On a GPU the allocator reports the peak;
on a CPU torch's profiler, which records every allocation.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters import step_cost
from spectrain.features.live_source import LiveSource
from spectrain.models.loading import load_tokenizer
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer
from spectrain_studies.planning import footprint
from spectrain_studies.planning.footprint import Models, bytes_of, peak_memory
from spectrain_studies.planning.operations import flops_per_token
from spectrain_studies.planning.workload import batch_shape

from .command import run_benchmark
from .engine import TOY as TOY_ENGINE
from .models import ModelGeometry, random_network, randomize_weights
from .steps import Bench, Measurement, source_digest


@dataclass(frozen=True)
class OnlineSizes:
    """The shapes to measure."""

    model: ModelGeometry = field(default_factory=ModelGeometry)
    batches: tuple[tuple[int, int], ...] = ((4, 2048), (1, 8192))  # conversations, tokens each
    ttt_steps: int = 7
    steps: int = 3
    copied_bytes: int = 2 << 30
    product_width: int = 8192
    repeats: int = 20


TOY = OnlineSizes(TOY_ENGINE.model, ((2, 64),), 3, 3, 1 << 16, 32, 2)


@dataclass
class OnlineBench(Bench):
    """Measure every row and write it into `out` as soon as it is measured."""

    # Part to measure: all.
    part: Literal["all"] = "all"
    # JSON file of the results.
    out: str = "lab/results/online.json"
    # Whether to run every line at a small size, on any machine; the numbers then mean nothing.
    toy: bool = False
    # Seconds after which no new row is begun.
    seconds: float = 360

    @property
    def sizes(self) -> OnlineSizes:
        return TOY if self.toy else OnlineSizes()

    def plan_measurements(self) -> Iterator[Measurement]:
        for conversations, length in self.sizes.batches:
            name = f"online/eagle3 B={conversations} T={length}"
            work = partial(online_row, self.sizes, conversations, length, self.device, self.dtype)
            yield Measurement(name, source_digest(step_cost, footprint), work)


def online_row(
    sizes: OnlineSizes, conversations: int, length: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return planned and measured peak bytes of a training step over conversations whose every
    token is supervised.
    """
    examples = [
        Example([1] * length, [False] + [True] * (length - 1)) for _ in range(conversations)
    ]
    dataset = Dataset(examples, conversations, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(sizes, conversations * length, folder)
        batches = [batch_shape(examples, False)]
        models = Models.from_spec(config, device, 1000)
        parts = peak_memory(models, batches)
        flops = flops_per_token(models, batches)
        measured = measure_training(config, sizes, dataset, device, dtype, Path(folder))
    return {
        "conversations": conversations,
        "length": length,
        "ttt_steps": sizes.ttt_steps,
        "dtype": str(dtype),
        "planned_bytes": sum(parts.values()),
        "measured_bytes": measured,
        "planned_over_measured": sum(parts.values()) / measured,
        "parts": parts,
        "flops_per_token": flops.features + flops.step,
    }


def make_config(sizes: OnlineSizes, batch_tokens: int, folder: str) -> RunSpec:
    """Return the settings of `spectrain train` whose target is a config.json in a folder."""
    llama_config(sizes.model).save_pretrained(folder)
    return RunSpec(
        target=GroupSpec("target", "hf", {"model": folder}),
        drafter=GroupSpec(
            "drafter",
            "eagle3",
            {"ttt_steps": sizes.ttt_steps, "vocab_size": sizes.model.draft_vocab},
        ),
        trainer=GroupSpec(
            "trainer", "default", {"batch_tokens": batch_tokens, "max_steps": sizes.steps}
        ),
    )


def llama_config(model: ModelGeometry) -> LlamaConfig:
    config: LlamaConfig = random_network(model, torch.device("meta"), torch.float32).config
    config.architectures = ["LlamaForCausalLM"]
    return config


def measure_training(
    spec: RunSpec,
    sizes: OnlineSizes,
    dataset: Dataset,
    device: torch.device,
    dtype: torch.dtype,
    folder: Path,
) -> int:
    """Return the bytes that training holds at its peak."""
    tokenizer = load_tokenizer(str(folder), False, required=False)
    target = Target(random_network(sizes.model, device, dtype), tokenizer, "random", "random")
    with device:
        drafter = spec.drafter.build(target=target)
    randomize_weights(drafter)
    target.pack_weights()
    trainer = Trainer.from_spec(spec)
    work = partial(trainer.fit, drafter, target, dataset, LiveSource(), folder / "run")
    return measure_peak(
        work, bytes_of([*target.parameters(), *drafter.parameters(), *drafter.buffers()]), device
    )


def measure_peak(work: Callable[[], Any], resident_bytes: int, device: torch.device) -> int:
    """Return the most bytes in tensors while `work` runs; `resident_bytes` are allocated before
    it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    current = highest = 0
    results: Any = profiler.profiler
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            highest = max(highest, current)
    return resident_bytes + highest


if __name__ == "__main__":
    run_benchmark(OnlineBench)
