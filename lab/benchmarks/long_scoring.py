"""Tokens per forward of drafters by position in long documents, with every prompt read once for
all of them.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import make_context, make_request, run_prompts
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.eval.intervals import interval
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.runs.drafters import build_drafter, load_description, load_weights
from spectrain.trees import Chain
from spectrain.trees.base import RootOnlyBuilder

from .context import continue_prompt
from .long_documents import Document

RANGES = ((0, 1024), (1024, 2048), (2048, 4096), (4096, 8192))
DEPTH = 4
ANSWER_TOKENS = 48
ROWS = 512
"""Rows of the logits that exist at one time."""
EXTRA_SLOTS = 64
"""Slots of the caches for the nodes of a round."""
LEAD_TOKENS = 16
"""Tokens of a segment that a prompt ends with, so that it is clear whether the segment repeats
another one.
"""


@dataclass(frozen=True)
class System:
    """A trained drafter, which may decode with other settings than it was trained with."""

    name: str
    run: str  # folder of the training, or directory of a drafter
    changes: dict[str, Any] = field(default_factory=dict, hash=False)  # settings of the drafter
    # Number of first tokens that stay when all but the newest `window` tokens of a prompt are left
    # out; None reads all.
    sinks: int | None = None
    window: int = 0

    def load(self, work: Path, target: Target) -> Drafter:
        """Build the drafter with its weights."""
        folder = work / self.run
        directory = folder if (folder / "config.json").exists() else folder / "drafter"
        spec = load_description(directory, None).drafter.with_settings(**self.changes)
        drafter = build_drafter(spec, target)
        load_weights(drafter, directory, target)
        return drafter.eval()


@dataclass(frozen=True)
class LongPrompt:
    """The first tokens of a document, up to a place in a repetition or in new text."""

    id: str
    tokens: list[int]
    position: str  # the range of its end, as in 1-2k
    kind: str  # repeated or new
    # Tokens back to the passage that is repeated; None in new text.
    distance: int | None


@dataclass
class EvictedContext(Context):
    """A context whose drafter reads only some positions of the prompt, numbered as if these were
    all (StreamingLLM, Xiao et al., 2024)."""

    read_positions: Tensor | None = None  # [1, P]

    @property
    def next_tokens(self) -> Tensor:
        """Tokens [B, P] that follow the positions of the new features."""
        if self.round or self.read_positions is None:
            return super().next_tokens
        return self.tokens.gather(1, self.read_positions + 1)


def evict_prompt(context: Context, sinks: int, window: int) -> Context:
    """Return the context with the first `sinks` and the last `window` positions of its prompt
    for the drafter.
    """
    length = int(context.lengths)
    if length <= sinks + window:
        return context
    read = torch.cat([torch.arange(sinks), torch.arange(length - window, length)])[None]
    parts = {part.name: getattr(context, part.name) for part in fields(Context)}
    parts |= {
        "new_features": context.new_features.gather(read),
        "num_new": torch.tensor([sinks + window]),
    }
    return EvictedContext(**parts, read_positions=read)


def make_prompts(documents: Sequence[Document]) -> list[LongPrompt]:
    """Return prompts from documents: two of each range of positions, one in a repetition and one
    in new text.
    """
    prompts = list[LongPrompt]()
    count = len(documents)
    for number, document in enumerate(documents):
        for low, high in RANGES:
            # Prompts of a range end at another place in each document, and their answers inside the
            # range.
            first = low + max(256, (high - low) // 8)
            start = first + (high - first - 3 * ANSWER_TOKENS) * number // count
            for kind in ("repeated", "new"):
                prompt = cut_prompt(document, start, kind, f"{low // 1024}-{high // 1024}k", number)
                prompts += (
                    [] if prompt is None or len(prompt.tokens) + ANSWER_TOKENS > high else [prompt]
                )
    return prompts


def cut_prompt(
    document: Document, start: int, kind: str, position: str, number: int
) -> LongPrompt | None:
    """Return the prompt that ends in the first passage of a kind after `start`; None if there is
    none.
    """
    for segment in document.segments:
        is_repeated = segment.source is not None
        if segment.start >= start and not segment.is_fact and is_repeated == (kind == "repeated"):
            end = segment.start + LEAD_TOKENS
            distance = None if segment.source is None else segment.start - segment.source
            return LongPrompt(
                f"{number} {position} {kind}", document.tokens[:end], position, kind, distance
            )
    return None


@torch.inference_mode()
def score_systems(
    systems: Sequence[System], work: Path, target: Target, prompts: Sequence[LongPrompt]
) -> None:
    """Continue every prompt with each system that has not done so yet, and write the numbers
    after each prompt.
    """
    rows = {system: read_scores(work, system) for system in systems}
    done = {system: {row["id"] for row in rows[system]} for system in systems}
    missing = {
        prompt.id: [system for system in systems if prompt.id not in done[system]]
        for prompt in prompts
    }
    drafters = {
        system: system.load(work, target)
        for system in systems
        if any(system in some for some in missing.values())
    }
    layers = tuple(
        dict.fromkeys(
            ("final", *(layer for drafter in drafters.values() for layer in drafter.layers))
        )
    )
    for prompt in prompts:
        if not missing[prompt.id]:
            continue
        context = read_prompt(target, prompt, layers)
        nats = measure_nats(target, context, prompt)
        reference = continue_prompt(context, None, RootOnlyBuilder())
        for system in missing[prompt.id]:
            reduced = (
                context
                if system.sinks is None
                else evict_prompt(context, system.sinks, system.window)
            )
            start = time.process_time()
            answer = continue_prompt(reduced, drafters[system], Chain(DEPTH))
            seconds = round(time.process_time() - start, 4)
            rows[system].append(
                describe_answer(prompt, answer, reference) | {"nats": nats, "cpu_seconds": seconds}
            )
            write_text(score_path(work, system), json.dumps(rows[system]))
        lengths = {
            system.name: rows[system][-1]["tokens"] / rows[system][-1]["rounds"]
            for system in missing[prompt.id]
        }
        print(f"scored: {prompt.id}, {len(prompt.tokens)} tokens, {nats}", lengths, flush=True)


def measure_nats(target: Target, context: Context, prompt: LongPrompt) -> dict[str, list[float]]:
    """Return the sum of the target's losses in nats and the number of tokens by position, over
    all tokens of a prompt.
    """
    final = context.new_features.at_layer("final")[0]
    tokens = torch.tensor(prompt.tokens)
    losses = torch.cat(
        [
            torch.nn.functional.cross_entropy(
                target.head.logits(part).float(), labels, reduction="none"
            )
            for part, labels in zip(final[:-1].split(ROWS), tokens[1:].split(ROWS))
        ]
    )
    parts = {
        f"{low // 1024}-{high // 1024}k": losses[max(0, low - 1) : high - 1] for low, high in RANGES
    }
    return {
        name: [round(float(part.sum()), 2), len(part)] for name, part in parts.items() if len(part)
    }


def read_scores(work: Path, system: System) -> list[dict[str, Any]]:
    """Return the numbers of the prompts that a system has continued."""
    path = score_path(work, system)
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows


def score_path(work: Path, system: System) -> Path:
    """Return the file of a system's numbers."""
    return work / f"scored-{system.name}.json"


def read_prompt(target: Target, prompt: LongPrompt, layers: tuple[Any, ...]) -> Context:
    """Run a prompt with the features that all drafters need."""
    request = make_request(target, [prompt.tokens], ANSWER_TOKENS, ignore_eos=True)
    cache = target.new_cache(1, len(prompt.tokens) + ANSWER_TOKENS + EXTRA_SLOTS)
    context = make_context(target, Chain(DEPTH), cache, layers, 0)
    run_prompts(context, None, Greedy(), request)
    return context


def describe_answer(
    prompt: LongPrompt, answer: Generation, reference: Generation
) -> dict[str, Any]:
    """Return tokens and rounds of an answer, and whether it is the target's own answer."""
    rounds = answer.complete_round_lengths
    return {
        "id": prompt.id,
        "position": prompt.position,
        "kind": prompt.kind,
        "distance": prompt.distance,
        "length": len(prompt.tokens),
        "tokens": sum(rounds),
        "rounds": len(rounds),
        "identical": answer.output == reference.output,
    }


def summarize_scores(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return tokens per forward with 95 % intervals over prompts by position, of all prompts and
    of each kind.
    """
    rows = list(rows)
    table = dict[str, Any]()
    for low, high in RANGES:
        name = f"{low // 1024}-{high // 1024}k"
        placed = [row for row in rows if row["position"] == name]
        kinds = {
            "all": placed,
            **{
                kind: [row for row in placed if row["kind"] == kind] for kind in ("repeated", "new")
            },
        }
        table[name] = {kind: pool_rounds(part) for kind, part in kinds.items()}
    return {
        "by_position": table,
        "identical": sum(row["identical"] for row in rows),
        "checked": len(rows),
    }


def pool_rounds(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return tokens per forward over all rounds of some prompts, with a 95 % interval over
    prompts.
    """
    columns = np.array([[row["tokens"], row["rounds"]] for row in rows], dtype=np.float64)
    tokens, rounds = columns.sum(0)
    return {
        "acceptance_length": round(float(tokens / rounds), 4),
        "ci95": interval(columns, (1, -1)),
        "prompts": len(rows),
    }


def measure_seconds(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the CPU milliseconds per token of answers by position, without the target's reading
    of the prompt.
    """
    sums: dict[str, list[float]] = {}
    for row in rows:
        seconds, tokens = sums.get(row["position"], [0.0, 0])
        sums[row["position"]] = [seconds + row["cpu_seconds"], tokens + row["tokens"]]
    return {name: round(1e3 * seconds / tokens, 2) for name, (seconds, tokens) in sums.items()}


def compare_scores(
    rows: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return tokens per forward relative to those of another system, over the prompts of both
    beyond 1k, with an interval.
    """
    others = {row["id"]: row for row in reference}
    pairs = [
        (row, others[row["id"]])
        for row in rows
        if row["id"] in others and row["position"] != "0-1k"
    ]
    columns = np.array(
        [[row["tokens"], row["rounds"], other["tokens"], other["rounds"]] for row, other in pairs],
        dtype=float,
    )
    tokens, rounds, other_tokens, other_rounds = (float(value) for value in columns.sum(0))
    ratio = tokens / rounds / (other_tokens / other_rounds)
    return {
        "ratio": round(ratio, 4),
        "ci95": interval(columns, (1, -1, -1, 1)),
        "prompts": len(pairs),
    }
