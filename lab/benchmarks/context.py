"""`python -m lab.benchmarks.context`: the acceptance and memory traffic of drafting with less of
the cache, by text length.

Every prompt is read once and continued by all drafters in turn. Positions beyond the target's
training length are allowed, so that small targets can be measured; the perplexity next to each
length shows what its answers are worth.
"""

import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from spectrain.config.build import GroupSpec
from spectrain.data.chat import render_chat
from spectrain.data.readers import load_embedded
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import EagerRunner, make_request, prefill_context
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.files import write_text
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees import Chain, TreeBuilder
from spectrain.trees.base import RootOnlyBuilder
from spectrain_research.less_cache.bytes_read import BytesRead
from spectrain_research.less_cache.evaluation import measure_traffic
from spectrain_research.shared.rewinding import rewind_tokens

from .command import run_benchmark
from .measure import describe_setting

NUM_SCORED_TOKENS = 128
"""Tokens at a prompt's end whose perplexity is computed."""


@dataclass
class ContextBench:
    """Continue prompts of several lengths greedily, with chains; write the results and a plot."""

    # Target to decode with: a name that comes with the project, or a directory.
    target: str = "tiny"
    # Dtype of the weights: auto, float32, bfloat16 or float16. A CPU holds keys of half precision
    # in 8 bytes.
    dtype: str = "auto"
    # Lengths of the prompts in tokens.
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    # Number of prompts of each length, cut in sequence from the embedded conversations.
    prompts: int = 4
    # Tokens of each answer.
    new_tokens: int = 64
    # Number of draft tokens that one round proposes.
    depth: int = 4
    # Tokens of the cache that windows, SnapKV and Quest read.
    budget: int = 256
    # Names of the drafters to measure, such as [snap, signs]; null measures all of them.
    drafters: tuple[str, ...] | None = None
    # JSON file of the results; the plot is written next to it with the suffix .svg.
    out: str = "lab/results/context.json"

    def __post_init__(self) -> None:
        # The first new token takes no round, so at least two are needed.
        for key, least in (("prompts", 1), ("new_tokens", 2), ("depth", 1), ("budget", 1)):
            if getattr(self, key) < least:
                raise UserError(f"{key}={getattr(self, key)}: use {least} or more")
        if not self.lengths or min(self.lengths) < 2:
            raise UserError(f"lengths={list(self.lengths)}: give lengths of 2 or more tokens")

    def build_drafters(self, target: Target) -> dict[str, Any]:
        """Return the drafters to measure, by name."""
        make = GroupSpec("drafter", "self").load_constructor()
        budget = self.budget
        return {
            "window": make(target, "window", budget),
            "snap": make(target, "snap", budget),
            "quest": make(target, "quest", budget),
            "int8 cache": make(target, "int8"),
            "int4 cache": make(target, "int4"),
            "int4 weights": make(target, "full", weights="int4"),
            "quest, int4 weights": make(target, "quest", budget, weights="int4"),
            "quest, 3 guesses": make(target, "quest", budget, guesses=3),
            **{
                name: make(target, name, budget)
                for name in ("defensive", "compress", "signs", "clusters")
            },
            **{name: make(target, name) for name in ("sink4", "turbo4", "merged")},
        }

    @torch.inference_mode()
    def run(self) -> None:
        target = Target.from_pretrained(self.target, self.dtype)
        trained_length = target.max_length
        extend_context(target, max(self.lengths) + self.new_tokens)
        target.pack_weights()
        all_drafters = self.build_drafters(target)
        if unknown := {*(self.drafters or ())} - {*all_drafters}:
            raise UserError(f"drafters={sorted(unknown)}: choose from {', '.join(all_drafters)}")
        drafters = {
            name: all_drafters[name].to(target.device).eval()
            for name in self.drafters or all_drafters
        }
        text = take_tokens(target, self.prompts * max(self.lengths))
        rows = [self.measure_length(target, drafters, text, length) for length in self.lengths]
        setting = {
            **describe_setting(target.device, target.dtype, False),
            "target": target.name,
            "trained_length": trained_length,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            "depth": self.depth,
            "budget": self.budget,
        }
        results = {"setting": setting, "rows": rows}
        write_text(Path(self.out), json.dumps(results, indent=1) + "\n")
        plot_results(Path(self.out).with_suffix(".svg"), rows, trained_length)
        for table in build_tables(results):
            Console(width=140).print(table)
        print(f"written: {self.out} and {Path(self.out).with_suffix('.svg')}")

    def measure_length(
        self, target: Target, drafters: dict[str, Any], text: list[int], length: int
    ) -> dict[str, Any]:
        """Run all drafters on all prompts of a length."""
        builder = Chain(self.depth)
        generations: dict[str, list[Generation]] = {name: [] for name in drafters}
        reads = dict.fromkeys(drafters, BytesRead())
        identical = dict.fromkeys(drafters, 0)
        losses = []
        seconds = dict.fromkeys(("reference", *drafters), 0.0)
        for start in range(0, self.prompts * length, length):
            prompt = text[start : start + length]
            request = make_request(target, [prompt], self.new_tokens, ignore_eos=True)
            widest = max(drafters.values(), key=lambda drafter: drafter.guesses)
            context = prefill_context(target, Greedy(), request, widest, builder)
            losses.append(prompt_loss(context, prompt))
            reference, seconds["reference"] = time_call(
                seconds["reference"], context, None, RootOnlyBuilder()
            )
            for name, drafter in drafters.items():
                generation, seconds[name] = time_call(seconds[name], context, drafter, builder)
                generations[name].append(generation)
                reads[name] += drafter.bytes_read
                identical[name] += generation.output == reference.output
        entries = {
            name: {
                **acceptance_entry(answers),
                "identical": identical[name],
                **measure_traffic(target, reads[name], answers),
                "cpu_ratio": round(seconds[name] / seconds["reference"], 3),
            }
            for name, answers in generations.items()
        }
        return {
            "length": length,
            "perplexity": round(math.exp(sum(losses) / len(losses)), 2),
            "drafters": entries,
        }


def time_call(
    earlier: float, context: Context, drafter: Drafter | None, builder: TreeBuilder
) -> tuple[Generation, float]:
    """Continue a prompt; return the answer, and the processor's seconds of this and `earlier`
    answers.
    """
    start = time.process_time()
    return continue_prompt(context, drafter, builder), earlier + time.process_time() - start


def extend_context(target: Target, length: int) -> None:
    """Raise a target's length limit where its positions are plain rotary ones; raise UserError
    for others.
    """
    if target.max_length >= length:
        return
    rope = getattr(target.config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "default":
        raise UserError(
            f"lengths: {target.name} takes {target.max_length} tokens, and its positions "
            "cannot be extended; use shorter prompts"
        )
    target.config.max_position_embeddings = length


def take_tokens(target: Target, count: int) -> list[int]:
    """Return the first `count` tokens of the embedded conversations."""
    tokens: list[int] = []
    for conversation in load_embedded():
        tokens += target.tokenizer(
            render_chat(target.template, conversation), add_special_tokens=False
        )["input_ids"]
        if len(tokens) >= count:
            return tokens[:count]
    raise UserError(
        f"lengths: the embedded conversations have {len(tokens)} tokens, fewer than {count}; use "
        "fewer or shorter prompts"
    )


def prompt_loss(context: Context, prompt: list[int]) -> float:
    """Return the loss in nats a token of the prompt's end, which is read again after the rest."""
    count = min(NUM_SCORED_TOKENS, len(prompt) - 1)
    tokens = torch.tensor([prompt[-count:]], device=context.target.device)
    with rewind_tokens(context.cache, count):
        logits = context.target.run(tokens, ForwardPlan(logits=True, cache=context.cache)).logits
    assert logits is not None
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]))


def continue_prompt(
    prefilled: Context, drafter: Drafter | None, builder: TreeBuilder
) -> Generation:
    """Continue a prefilled prompt; the cache is as before afterwards."""
    cache = prefilled.cache
    length = int(prefilled.lengths)
    limit = int(prefilled.tokens_left) + 1
    copies = {
        name: getattr(prefilled, name).clone()
        for name in ("tokens", "num_new", "active", "tokens_left")
    }
    context = replace(prefilled, builder=builder, deferred=[], **copies)
    runner = EagerRunner(prefilled.target, Greedy(), drafter, builder)
    runner.context = context
    generation = Generation(context.tokens[0, :length].tolist(), [int(context.root)])
    while not generation.is_done:
        for (line,), seconds in runner.run_rounds(limit - len(generation.output)):
            generation.record_round(line, seconds)
            generation.emit_tokens(line.tokens, frozenset(), limit)
    cache.roll_back(int(cache.lengths) - length)
    return generation


def acceptance_entry(generations: list[Generation]) -> dict[str, Any]:
    """Return the tokens a round over all complete rounds, and the tokens and rounds of every
    prompt.
    """
    by_prompt = [
        [sum(generation.complete_round_lengths), len(generation.complete_round_lengths)]
        for generation in generations
    ]
    tokens, rounds = map(sum, zip(*by_prompt))
    return {"acceptance_length": round(tokens / max(1, rounds), 4), "by_prompt": by_prompt}


def build_tables(results: dict[str, Any]) -> list[Table]:
    """Return two tables by length: tokens a round, and bytes a token relative to decoding
    without a drafter.
    """
    rows = results["rows"]
    setting = results["setting"]
    values = {
        "tokens a round": lambda entry: f"{entry['acceptance_length']:.2f}",
        "bytes a token, relative to decoding without a drafter": lambda entry: (
            f"{entry['ratio']:.2f}"
        ),
    }
    tables = []
    for title, value in values.items():
        table = Table(
            title=(
                f"{title}: {setting['target']}, chains of {setting['depth']}, budget "
                f"{setting['budget']}"
            )
        )
        for column in ("length", "perplexity", *rows[0]["drafters"]):
            table.add_column(column, justify="right")
        for row in rows:
            cells = map(value, row["drafters"].values())
            table.add_row(str(row["length"]), f"{row['perplexity']:.1f}", *cells)
        tables.append(table)
    return tables


def plot_results(path: Path, rows: list[dict[str, Any]], trained_length: int) -> None:
    """Plot both against the length, a curve for each drafter, with a line at the training
    length.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "context", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        panels = figure.subplots(1, 2)
        names = dict.fromkeys(name for row in rows for name in row["drafters"])
        for axes, key in zip(panels, ("acceptance_length", "ratio")):
            for number, name in enumerate(names):
                points = [
                    (row["length"], row["drafters"][name][key])
                    for row in rows
                    if name in row["drafters"]
                ]
                axes.plot(*zip(*points), marker="os^Dv<>P"[number % 8], markersize=4, label=name)
            axes.axvline(trained_length, color="0.7", linewidth=0.8)
            axes.set_xscale("log", base=2)
        panels[0].set(xlabel="tokens of text", ylabel="tokens a round")
        panels[1].set(
            xlabel="tokens of text", ylabel="bytes a token, relative to decoding without a drafter"
        )
        panels[1].legend(fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    run_benchmark(ContextBench)
