"""Decoding and training throughput; alternatives are interleaved in one process, so that ratios
hold on a busy machine.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.table import Table

from spectrain.config.spec import RunSpec
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.models.threads import format_threads
from spectrain.output.console import make_console
from spectrain.output.verbosity import result_output
from spectrain.provenance import processor_name
from spectrain.runs.init_drafter import init_drafter
from spectrain.trees.token_tree import TokenTree

from .trial import make_trial, trial_folder

ROW_COUNTS = (1, 2, 4, 8, 12, 16, 32)
PREFIX_LENGTHS = (150, 600)


def decode_table(spec: RunSpec, repeats: int = 12) -> dict[str, Any]:
    """Print the time of a target forward by rows and prefix, then that of autoregressive
    decoding beside `generate`; return these times.
    """
    target: Target = spec.target.build()
    evaluation = spec.eval.build()
    if evaluation is None:
        raise UserError("eval=none: bench decode needs prompts; leave it out")
    console = make_console()
    prompts = [prompt.tokenize_for(target) for prompt in evaluation.chosen[:8]]
    target.pack_weights()
    forwards = time_forwards(target, [token for prompt in prompts for token in prompt], repeats)
    with result_output():
        console.print(make_forward_table(target, forwards, repeats))
    candidate, baseline = compare_with_generate(target, prompts, min(evaluation.max_new_tokens, 64))
    ratios = sorted(b / a for a, b in zip(candidate, baseline))
    with result_output():
        console.print(
            f"autoregressive decoding of {len(prompts)} prompts, prefill included, interleaved: "
            f"{1e3 * median(candidate):.1f} ms per token; generate with a static cache takes "
            f"{1e3 * median(baseline):.1f} ms, {median(ratios):.2f} times as long (from "
            f"{ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    return {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "machine": machine_name(target),
        # The least of the repeats, by tokens before it and by rows.
        "forward_seconds": forwards,
        "repeats": repeats,
        "seconds_per_token": {
            "prompts": len(prompts),
            "spectrain": median(candidate),
            "generate": median(baseline),
            "ratio": {"median": median(ratios), "least": ratios[0], "most": ratios[-1]},
        },
    }


def machine_name(target: Target) -> str:
    """Return the name of the device that a target is on, with the number of its threads."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{processor_name()}, {format_threads(torch.get_num_threads())}"


def time_forwards(target: Target, text: list[int], repeats: int) -> dict[int, dict[int, float]]:
    """Return the least seconds of forwards behind the first tokens of a text, by their number
    and by rows.
    """
    return {
        length: forward_seconds(target, (text * (length // len(text) + 1))[:length], repeats)
        for length in PREFIX_LENGTHS
        if length + max(ROW_COUNTS) <= target.max_length
    }


def make_forward_table(
    target: Target, forwards: dict[int, dict[int, float]], repeats: int
) -> Table:
    """Return a table with the seconds of forwards by the tokens before them and by rows."""
    table = Table(
        title=(
            f"one forward of {target.name} in {target.dtype}, ms, the least of {repeats}; "
            f"{machine_name(target)}"
        )
    )
    table.add_column("rows", justify="right")
    for length in forwards:
        table.add_column(f"behind {length} tokens", justify="right")
        table.add_column("/ one row", justify="right")
    for rows in ROW_COUNTS:
        times = [(seconds[rows], seconds[1]) for seconds in forwards.values()]
        table.add_row(
            str(rows),
            *(cell for own, one in times for cell in (f"{own * 1e3:.1f}", f"{own / one:.2f}")),
        )
    return table


def forward_seconds(target: Target, prefix: list[int], repeats: int) -> dict[int, float]:
    """Return the least seconds of a forward over a chain of nodes after a prefix, by its rows,
    in alternating order.
    """
    cache = target.new_cache(1, len(prefix) + max(ROW_COUNTS))
    device = target.device
    chains = {
        rows: TokenTree.from_chain(
            torch.randint(0, target.head.vocab_size, (1, rows), device=device)
        )
        for rows in ROW_COUNTS
    }
    seconds: dict[int, list[float]] = {rows: [] for rows in ROW_COUNTS}
    with torch.inference_mode():
        target.prefill(
            torch.tensor([prefix], device=device),
            torch.tensor([len(prefix)], device=device),
            cache,
            (),
        )
        for repeat in range(repeats + 1):
            for rows, chain in chains.items():
                duration = time_call(target, partial(target.verify, chain, cache))
                cache.roll_back()
                if repeat:
                    seconds[rows].append(duration)
    return {rows: min(times) for rows, times in seconds.items()}


def compare_with_generate(
    target: Target, prompts: list[list[int]], max_new_tokens: int
) -> tuple[list[float], list[float]]:
    """Return seconds per token by prompt of spectrain and of transformers' `generate` with a
    static cache, in turn.
    """
    candidate: list[float] = []
    baseline: list[float] = []

    def run_candidate(prompt: list[int]) -> None:
        target.pack_weights()
        decode(target, [prompt], Greedy(), 2)  # reorders the weights outside the timer
        candidate.append(
            time_tokens(
                target, lambda: decode(target, [prompt], Greedy(), max_new_tokens)[0].output
            )
        )

    def run_baseline(prompt: list[int]) -> None:
        with reference_model(target) as model:
            work = partial(generate, model, prompt, max_new_tokens, target.stop_ids, static=True)
            baseline.append(time_tokens(target, work))

    for number, prompt in enumerate([prompts[0], *prompts]):
        for run in (run_candidate, run_baseline) if number % 2 else (run_baseline, run_candidate):
            run(prompt)
    return candidate[1:], baseline[1:]  # the first prompt warmed up


def time_tokens(target: Target, work: Callable[[], list[int]]) -> float:
    """Return the seconds per token that `work` takes to produce tokens."""
    tokens: list[int] = []
    return time_call(target, lambda: tokens.extend(work())) / len(tokens)


def time_call(target: Target, work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes, the device included."""
    start = time.perf_counter()
    work()
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter() - start


def training_throughput(spec: RunSpec, steps: int = 12) -> dict[str, Any]:
    """Train for a few steps on the recipe's data; print and return tokens per second and the
    share of each part of a step.
    """
    trainer = replace(make_trial(spec, steps), log_every=steps // 3)
    target: Target = spec.target.build()
    target.pack_weights()
    data = spec.data.build()
    data.limit = min(data.limit or 200, 200)
    dataset = data.make_dataset(target.template, target.vision)
    drafter = init_drafter(spec, target, dataset)
    with trial_folder("bench train") as folder:
        trainer.fit(drafter, target, dataset, spec.source.build(), folder)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    share = ", ".join(f"{part} {value:.0%}" for part, value in last["time_share"].items())
    with result_output():
        make_console().print(
            f"{last['tokens_per_second']:.0f} tokens/s, {last['supervised_per_second']:.0f} "
            f"supervised, over the last {steps // 3} of {steps} steps, features computed live\n"
            f"time: {share} (target: its forward; drafter: loss, backward and optimiser)"
        )
    keys = ("tokens_per_second", "supervised_per_second", "time_share")
    return {"steps": steps, **{key: last[key] for key in keys}}
