"""`spectrain bench context`: what drafting with less of the cache keeps and reads, by the length of the text.

Every prompt is read once and continued by all drafters in turn. Positions beyond those that a target was trained on are asked
for without more ado, so that a small one can be measured: the perplexity beside each length says what its answers are worth.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from spectrain.config.choices import load_constructor
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
from spectrain.models.traffic import BytesRead
from spectrain.trees import Chain, TreeBuilder
from spectrain.trees.base import RootOnlyBuilder

from .measure import describe_setting
from .traffic import measure_traffic

NUM_SCORED_TOKENS = 128  # tokens at a prompt's end whose perplexity is taken


@dataclass
class ContextBench:
    """Continue prompts of several `lengths` greedily, with chains, and write what was found into `out` and a plot beside it."""

    target: str = "tiny"  # a name that comes with the project, or a directory
    dtype: str = "auto"  # float32, bfloat16 or float16; of half precision a CPU holds keys in 8 bytes
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)  # of prompts, in tokens
    prompts: int = 4  # of each length, cut one after another from the embedded conversations
    new_tokens: int = 64  # of each answer
    depth: int = 4  # drafts a round
    budget: int = 256  # tokens that windows, SnapKV and Quest read
    out: str = "eval/results/context.json"  # the plot has the same name, as .svg

    def __post_init__(self) -> None:
        for key, least in (("prompts", 1), ("new_tokens", 2), ("depth", 1), ("budget", 1)):  # the first token takes no round
            if getattr(self, key) < least:
                raise UserError(f"bench.{key}={getattr(self, key)}: use {least} or more")
        if not self.lengths or min(self.lengths) < 2:
            raise UserError(f"bench.lengths={list(self.lengths)}: name lengths of 2 or more tokens")

    def build_drafters(self, target: Target) -> dict[str, Any]:
        """What is measured."""
        make, budget = load_constructor("drafter", "self"), self.budget
        return {
            "window": make(target, "window", budget),
            "snap": make(target, "snap", budget),
            "quest": make(target, "quest", budget),
            "int8 cache": make(target, "int8"),
            "int4 cache": make(target, "int4"),
            "int4 weights": make(target, "full", weights="int4"),
            "quest, int4 weights": make(target, "quest", budget, weights="int4"),
            "quest, 3 guesses": make(target, "quest", budget, guesses=3),
        }

    @torch.inference_mode()
    def run(self) -> None:
        target = Target.from_pretrained(self.target, self.dtype)
        trained = target.max_length
        extend_context(target, max(self.lengths) + self.new_tokens)
        target.pack_weights()
        drafters = {name: drafter.to(target.device).eval() for name, drafter in self.build_drafters(target).items()}
        text = take_tokens(target, self.prompts * max(self.lengths))
        rows = [self.measure_length(target, drafters, text, length) for length in self.lengths]
        found = {"setting": {**describe_setting(target.device, target.dtype, False), "target": target.name,
            "trained_length": trained,
                             "prompts": self.prompts, "new_tokens": self.new_tokens, "depth": self.depth,
                             "budget": self.budget}, "rows": rows}  # fmt: skip
        write_text(Path(self.out), json.dumps(found, indent=1) + "\n")
        plot_results(Path(self.out).with_suffix(".svg"), rows, trained)
        for table in build_tables(found):
            Console(width=140).print(table)
        print(f"written: {self.out} and {Path(self.out).with_suffix('.svg')}")

    def measure_length(self, target: Target, drafters: dict[str, Any], text: list[int], length: int) -> dict[str, Any]:
        """All drafters on all prompts of a length."""
        builder = Chain(self.depth)
        generations: dict[str, list[Generation]] = {name: [] for name in drafters}
        reads = dict.fromkeys(drafters, BytesRead())
        identical, losses = dict.fromkeys(drafters, 0), []
        for start in range(0, self.prompts * length, length):
            prompt = text[start : start + length]
            request = make_request(target, [prompt], self.new_tokens, ignore_eos=True)
            roomiest = max(drafters.values(), key=lambda drafter: drafter.guesses)
            context = prefill_context(target, Greedy(), request, roomiest, builder)
            losses.append(prompt_loss(context, prompt))
            plain = continue_prompt(context, None, RootOnlyBuilder())
            for name, drafter in drafters.items():
                generations[name].append(generation := continue_prompt(context, drafter, builder))
                reads[name] += drafter.reads
                identical[name] += generation.output == plain.output
        found = {
            name: {**acceptance_entry(mine), "identical": identical[name], **measure_traffic(target, reads[name], mine)}
            for name, mine in generations.items()
        }
        return {"length": length, "perplexity": round(math.exp(sum(losses) / len(losses)), 2), "drafters": found}


def extend_context(target: Target, length: int) -> None:
    """Let a target take texts so long, where its positions are only turned."""
    if target.max_length >= length:
        return
    rope = getattr(target.config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "default":
        raise UserError(
            f"bench.lengths: {target.name} takes {target.max_length} tokens, and has no positions beyond them; use shorter ones"
        )
    target.config.max_position_embeddings = length


def take_tokens(target: Target, count: int) -> list[int]:
    """So many tokens of the embedded conversations, one after another."""
    found: list[int] = []
    for messages in load_embedded():
        found += target.tokenizer(render_chat(target.tokenizer, messages), add_special_tokens=False)["input_ids"]
        if len(found) >= count:
            return found[:count]
    raise UserError(
        f"bench.lengths: the embedded conversations have {len(found)} tokens, fewer than {count}; use fewer or shorter prompts"
    )


def prompt_loss(context: Context, prompt: list[int]) -> float:
    """Nats a token of the prompt's end, which is read once more behind the rest."""
    count = min(NUM_SCORED_TOKENS, len(prompt) - 1)
    tokens = torch.tensor([prompt[-count:]], device=context.target.device)
    with context.cache.rewind_tokens(count):
        logits = context.target.run(tokens, ForwardPlan(logits=True, cache=context.cache)).logits
    assert logits is not None
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]))


def continue_prompt(prefilled: Context, drafter: Drafter | None, builder: TreeBuilder) -> Generation:
    """A prompt that was read, continued from there; nothing of it is left in the cache."""
    cache, length, limit = prefilled.cache, int(prefilled.lengths), int(prefilled.left) + 1
    fresh = {name: getattr(prefilled, name).clone() for name in ("tokens", "counts", "active", "left")}
    context = replace(prefilled, builder=builder, waiting=[], **fresh)
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
    """Tokens a round, over all rounds that nothing cut short, and tokens and rounds of every prompt."""
    by_prompt = [[sum(one.complete_round_lengths), len(one.complete_round_lengths)] for one in generations]
    tokens, rounds = map(sum, zip(*by_prompt))
    return {"acceptance_length": round(tokens / max(1, rounds), 4), "by_prompt": by_prompt}


def build_tables(found: dict[str, Any]) -> list[Table]:
    """Tokens a round, and bytes a token as a share of what decoding without a drafter reads, by length."""
    rows, known = found["rows"], found["setting"]
    values = {
        "tokens a round": lambda entry: f"{entry['acceptance_length']:.2f}",
        "bytes a token, of those without a drafter": lambda entry: f"{entry['ratio']:.2f}",
    }
    made = []
    for title, value in values.items():
        table = Table(title=f"{title}: {known['target']}, chains of {known['depth']}, budget {known['budget']}")
        for column in ("length", "perplexity", *rows[0]["drafters"]):
            table.add_column(column, justify="right")
        for row in rows:
            cells = map(value, row["drafters"].values())
            table.add_row(str(row["length"]), f"{row['perplexity']:.1f}", *cells)
        made.append(table)
    return made


def plot_results(path: Path, rows: list[dict[str, Any]], trained: int) -> None:
    """Both against the length, a curve for each drafter; a line where positions end that were trained on."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "context", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        sides = figure.subplots(1, 2)
        names = dict.fromkeys(name for row in rows for name in row["drafters"])
        for axes, key in zip(sides, ("acceptance_length", "ratio")):
            for number, name in enumerate(names):
                points = [(row["length"], row["drafters"][name][key]) for row in rows if name in row["drafters"]]
                axes.plot(*zip(*points), marker="os^Dv<>P"[number % 8], markersize=4, label=name)
            axes.axvline(trained, color="0.7", linewidth=0.8)
            axes.set_xscale("log", base=2)
        sides[0].set(xlabel="tokens of text", ylabel="tokens a round")
        sides[1].set(xlabel="tokens of text", ylabel="bytes a token, of those without a drafter")
        sides[1].legend(fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
