"""Decoding and training throughput; alternatives are interleaved in one process, so that ratios hold on a busy machine."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from spectrain.config.spec import RunSpec
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.models.fast import unpack_linears
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.provenance import processor_name
from spectrain.runs.drafters import init_drafter
from spectrain.training.trainer import Trainer
from spectrain.trees.token_tree import TokenTree

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)


def decode_table(spec: RunSpec, repeats: int = 9) -> None:
    """Print the time of a target forward by rows, plain and packed, then autoregressive decoding against `generate`."""
    target: Target = spec.target.build()
    evaluation = spec.eval.build()
    if evaluation is None:
        raise UserError("eval=none: bench decode needs prompts; leave it out")
    console = Console()
    prompts = [prompt.tokenize_for(target) for prompt in evaluation.chosen[:8]]
    machine = (
        torch.cuda.get_device_name()
        if target.device.type == "cuda"
        else f"{processor_name()}, {torch.get_num_threads()} threads"
    )
    table = Table(title=f"one forward of {target.name}, ms, median of {repeats}; {machine}")
    for title in ("rows", "plain linears", "packed linears", "packed / one row"):
        table.add_column(title, justify="right")
    times = {rows: forward_times(target, prompts[0], rows, repeats) for rows in ROW_COUNTS}
    for rows, (plain_seconds, packed_seconds) in times.items():
        table.add_row(
            str(rows), f"{plain_seconds * 1e3:.1f}", f"{packed_seconds * 1e3:.1f}", f"{packed_seconds / times[1][1]:.2f}"
        )
    console.print(table)
    candidate, baseline = compare_with_generate(target, prompts, min(evaluation.max_new_tokens, 64))
    ratios = sorted(b / a for a, b in zip(candidate, baseline))
    console.print(
        f"autoregressive decoding of {len(prompts)} prompts, prefill included, interleaved: generate with a static cache takes "
        f"{median(ratios):.2f} times as long as spectrain (from {ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def forward_times(target: Target, prompt: list[int], rows: int, repeats: int) -> tuple[float, float]:
    """Return the seconds of a chain of `rows` nodes after a prompt, with plain and with packed linears, alternating."""
    cache = target.new_cache(1, len(prompt) + rows)
    tokens = torch.tensor([prompt], device=target.device)
    chain = TokenTree.from_chain(torch.randint(0, target.head.vocab_size, (1, rows), device=target.device))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with torch.inference_mode():
        target.prefill(tokens, torch.tensor([len(prompt)], device=target.device), cache, ())
        for repeat in range(repeats + 1):
            for packed in (False, True):
                target.pack_weights() if packed else unpack_linears(target.model)
                target.verify(chain, cache)  # the first call after packing reorders the weights
                cache.roll_back()
                duration = time_call(target, lambda: target.verify(chain, cache))
                cache.roll_back()
                if repeat:
                    seconds[packed].append(duration)
    return median(seconds[False]), median(seconds[True])


def compare_with_generate(target: Target, prompts: list[list[int]], max_new_tokens: int) -> tuple[list[float], list[float]]:
    """Return seconds a prompt of spectrain and of transformers' `generate` with a static cache, in alternating order."""
    candidate: list[float] = []
    baseline: list[float] = []

    def run_candidate(prompt: list[int]) -> None:
        target.pack_weights()
        decode(target, [prompt], Greedy(), 2)  # reorders the weights outside the timer
        candidate.append(time_call(target, lambda: decode(target, [prompt], Greedy(), max_new_tokens)))

    def run_baseline(prompt: list[int]) -> None:
        with reference_model(target) as model:
            baseline.append(time_call(target, lambda: generate(model, prompt, max_new_tokens, target.stop_ids, static=True)))

    for number, prompt in enumerate([prompts[0], *prompts]):
        for run in (run_candidate, run_baseline) if number % 2 else (run_baseline, run_candidate):
            run(prompt)
    return candidate[1:], baseline[1:]  # the first prompt warmed up


def time_call(target: Target, work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes, the device included."""
    start = time.perf_counter()
    work()
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter() - start


def training_throughput(spec: RunSpec, steps: int = 12) -> None:
    """Train for a few steps on the recipe's data; print tokens per second and the share of each part of a step."""
    trainer = replace(Trainer.from_spec(spec).make_trial(steps), log_every=steps // 3)
    target: Target = spec.target.build()
    target.pack_weights()
    data = spec.data.build()
    data.limit = min(data.limit or 200, 200)
    dataset = data.make_dataset(target.template, target.vision)
    drafter = init_drafter(spec, target, dataset)
    with TemporaryDirectory() as folder:
        trainer.fit(drafter, target, dataset, spec.source.build(), Path(folder))
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    share = ", ".join(f"{part} {value:.0%}" for part, value in last["time_share"].items())
    Console().print(
        f"{last['tokens_per_second']:.0f} tokens/s, {last['supervised_per_second']:.0f} supervised, over the last "
        f"{steps // 3} of {steps} steps, features computed live\n"
        f"time: {share} (target: its forward; drafter: loss, backward and optimiser)"
    )
