"""Score a drafter by really decoding: the one evaluator of every family.

For every prompt the autoregressive run and the drafted runs follow each other, in an order that rotates, in one engine:
same kernels, same cache, same stop handling. The reference of the lossless check is computed apart from all of them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spectrain.acceptance import AcceptanceRule, Greedy
from spectrain.data.chat import render
from spectrain.decode import Generation, decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval import metrics
from spectrain.eval.baselines import NEAR_TIE, Identity, first_difference, generate, logit_gap, plain_model
from spectrain.eval.metrics import Turn
from spectrain.eval.prompts import read_prompts
from spectrain.eval.report import print_table
from spectrain.packing import pack_linears
from spectrain.shapes import Chain, TreeBuilder
from spectrain.target import Target


@dataclass(frozen=True)
class System:
    """A drafter with a tree: one row of the table."""

    name: str
    drafter: Drafter
    builder: TreeBuilder


class Evaluation:
    """Which prompts, how long, and what else is decoded beside the drafter: `baselines` of chain, untrained, ngram."""

    def __init__(
        self,
        name: str = "heldout",
        prompts: str | None = None,
        limit: int | None = None,
        max_new_tokens: int = 128,
        baselines: tuple[str, ...] = ("chain", "untrained", "ngram"),
        check: bool = True,
    ) -> None:
        if limit is not None and limit < 1:
            raise UserError(f"eval.limit={limit}: use 1 or more, or null for all")
        if max_new_tokens < 2:
            raise UserError(f"eval.max_new_tokens={max_new_tokens}: use 2 or more")
        unknown = set(baselines) - {"chain", "untrained", "ngram"}
        if unknown:
            raise UserError(f"eval.baselines: {min(unknown)!r} is unknown; use chain, untrained and ngram")
        self.name, self.max_new_tokens, self.check = name, max_new_tokens, check
        self.baselines = tuple(baselines)
        self.prompts = read_prompts(prompts, limit)

    def check_prompts(self, target: Target) -> None:
        """Stop where a prompt and its answer do not fit the target's context."""
        for prompt in self.prompts:
            length = len(prompt_tokens(target, prompt.opening))
            if length + self.max_new_tokens > target.max_length:
                raise UserError(
                    f"eval.prompts: prompt {prompt.id} has {length} tokens and, with "
                    f"eval.max_new_tokens={self.max_new_tokens}, does not fit the context of {target.name} "
                    f"({target.max_length} tokens); shorten one of them"
                )

    def systems(
        self, target: Target, drafter: Drafter, builder: TreeBuilder, untrained: Callable[[], Drafter] | None
    ) -> list[System]:
        """The drafter with its tree first, then what it is shown beside."""
        systems = [System("drafter", drafter, builder)]
        chain = Chain(min(3, builder.depth))
        if "chain" in self.baselines and builder.name != "chain":
            systems.append(System("chain", drafter, chain))
        if "untrained" in self.baselines and untrained is not None:
            systems.append(System("untrained", untrained().to(target.device, target.dtype).eval(), builder))
        if "ngram" in self.baselines and not isinstance(drafter, Ngram):
            systems.append(System("ngram", Ngram(target), chain))
        return systems

    def score(
        self,
        target: Target,
        drafter: Drafter,
        builder: TreeBuilder,
        rule: AcceptanceRule,
        folder: Path,
        setting: dict[str, Any],
        untrained: Callable[[], Drafter] | None = None,
    ) -> dict[str, Any]:
        """Decode every prompt with every system, write summary.json and samples.jsonl to `folder`, print the table."""
        drafter = drafter.to(target.device, target.dtype).eval()
        systems = self.systems(target, drafter, builder, untrained)
        target.pack()
        for system in systems:
            pack_linears(system.drafter)
        turns = self._decode_all(target, systems, rule)
        identity = self._identity(target, systems, rule, turns) if self.check else None
        summary = summarise(turns[systems[0].name])
        summary["lossless"] = None if identity is None else identity["drafter"].summary()
        others = {system.name: summarise(turns[system.name]) for system in systems[1:]}
        for name, other in others.items():
            other["lossless"] = None if identity is None else identity[name].summary()
        summary["compared"] = others
        summary["setting"] = {
            **setting,
            "prompts": len(self.prompts),
            "max_new_tokens": self.max_new_tokens,
            "batch_size": 1,
            "rule": rule.name,
            "tree": {"name": builder.name, "depth": builder.depth, "budget": builder.budget},
            "threads": torch.get_num_threads(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        write_whole(folder / "samples.jsonl", "".join(json.dumps(sample(turn)) + "\n" for turn in turns["drafter"]))
        print_table(summary)
        return summary

    def _decode_all(self, target: Target, systems: list[System], rule: AcceptanceRule) -> dict[str, list[Turn]]:
        """Every prompt's turns, each decoded autoregressively and by every system, interleaved."""
        self._warm_up(target, systems, rule)
        turns: dict[str, list[Turn]] = {system.name: [] for system in systems}
        row = 0
        for number, prompt in enumerate(self.prompts):
            messages = list(prompt.before)
            for index, text in enumerate(prompt.turns):
                messages.append({"role": "user", "content": text})
                tokens = prompt_tokens(target, messages)
                runs: dict[str, Generation] = {}
                contenders: list[System | None] = [None, *systems]
                for offset in range(len(contenders)):
                    system = contenders[(offset + number) % len(contenders)]
                    name = "autoregressive" if system is None else system.name
                    runs[name] = run(target, system, rule, tokens, self.max_new_tokens, row)
                for system in systems:
                    pair = (runs["autoregressive"], runs[system.name])
                    turns[system.name].append(Turn(prompt.id, index, prompt.category, *pair))
                answer = [token for token in runs["autoregressive"].output if token not in target.stop_ids]
                messages.append({"role": "assistant", "content": str(target.tokenizer.decode(answer))})
                row += 1
        return turns

    def _warm_up(self, target: Target, systems: list[System], rule: AcceptanceRule) -> None:
        """One short run of each contender, outside every timer."""
        tokens = prompt_tokens(target, self.prompts[0].opening)
        for system in (None, *systems):
            run(target, system, rule, tokens, min(8, self.max_new_tokens), 0)

    def _identity(
        self, target: Target, systems: list[System], rule: AcceptanceRule, turns: dict[str, list[Turn]]
    ) -> dict[str, Identity]:
        """Compare every output with its reference: `generate` for greedy decoding, our autoregressive run for sampling."""
        greedy = isinstance(rule, Greedy)
        reference = "transformers generate" if greedy else "autoregressive, same random draws"
        found = {system.name: Identity(rule.name, reference) for system in systems}
        outputs: list[list[int]] = []
        everything = turns[systems[0].name]
        if greedy:
            with plain_model(target) as model:
                for turn in everything:
                    outputs.append(generate(model, turn.autoregressive.prompt, self.max_new_tokens, target.stop_ids))
        else:
            outputs = [turn.autoregressive.output for turn in everything]
        for system in systems:
            for row, (turn, wanted) in enumerate(zip(turns[system.name], outputs)):
                self._compare(target, system, rule, found[system.name], turn, wanted, row)
        return found

    def _compare(
        self,
        target: Target,
        system: System,
        rule: AcceptanceRule,
        found: Identity,
        turn: Turn,
        wanted: list[int],
        row: int,
    ) -> None:
        """Count a turn as identical; where two logits are nearly equal, go on from the reference's token."""
        found.checked += 1
        output = list(turn.drafted.output)
        while (position := first_difference(output, wanted)) is not None:
            where = {"id": turn.id, "turn": turn.turn, "position": position}
            prefix = wanted[:position]
            tied = isinstance(rule, Greedy)  # a sampled token is decided by logits and noise, so equal logits excuse nothing
            gap = logit_gap(target, turn.drafted.prompt + prefix) if tied else None
            if gap is None or gap >= NEAR_TIE or position >= len(wanted):
                found.differences.append({**where, "gap": gap})
                return
            found.near_ties.append({**where, "gap": gap})
            prefix = wanted[: position + 1]
            left = self.max_new_tokens - len(prefix)
            if left < 1 or prefix[-1] in target.stop_ids:
                output = prefix
                continue
            context = turn.drafted.prompt + prefix
            output = prefix + run(target, system, rule, context, left, row).output
        found.identical += 1


def run(target: Target, system: System | None, rule: AcceptanceRule, prompt: list[int], limit: int, row: int) -> Generation:
    """Decode one prompt with a system, or autoregressively; `row` keys its random draws."""
    drafter, builder = (None, None) if system is None else (system.drafter, system.builder)
    return decode(target, [prompt], rule, limit, drafter, builder, rows=[row])[0]


def prompt_tokens(target: Target, messages: list[dict[str, str]]) -> list[int]:
    """The token ids after which the assistant goes on."""
    text = render(target.tokenizer, messages, prompt=True)
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def summarise(turns: list[Turn]) -> dict[str, Any]:
    """The numbers of one system, under the names of summary.json."""
    pooled = metrics.pooled_acceptance(turns)
    by_category = {}
    for category in sorted({turn.category for turn in turns}):
        part = [turn for turn in turns if turn.category == category]
        by_category[category] = {
            "acceptance_length": round(metrics.pooled_acceptance(part), 4),
            "speedup": round(metrics.speedup(part), 4),
        }
    return {
        "acceptance_length": {
            "pooled": round(pooled, 4),
            "ci95": metrics.bootstrap(turns, metrics.pooled_acceptance),
            "without_bonus": round(pooled - 1, 4),
            "per_prompt_mean": round(metrics.per_prompt_acceptance(turns), 4),
        },
        "acceptance_by_depth": metrics.acceptance_by_depth(turns),
        "tokens_per_second": {
            "autoregressive": round(metrics.tokens_per_second([turn.autoregressive for turn in turns]), 3),
            "drafted": round(metrics.tokens_per_second([turn.drafted for turn in turns]), 3),
        },
        "speedup": {
            "ratio": round(metrics.speedup(turns), 4),
            "ci95": metrics.bootstrap(turns, metrics.speedup),
            "predicted": round(metrics.predicted_speedup(turns), 4),
        },
        "time_share": metrics.time_share(turns),
        "by_category": by_category,
    }


def sample(turn: Turn) -> dict[str, Any]:
    """One line of samples.jsonl."""
    drafted = turn.drafted
    return {
        "id": turn.id,
        "turn": turn.turn,
        "category": turn.category,
        "prompt_tokens": drafted.prompt,
        "output_tokens": drafted.output,
        "rounds": len(drafted.accepted),
        "accepted": drafted.accepted,
    }


def write_whole(path: Path, text: str) -> None:
    """Write a file beside and rename it, so that a kill leaves no half of it."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(text)
    scratch.replace(path)
