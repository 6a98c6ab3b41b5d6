"""Faults that no shape shows, found by decoding: read the same tensors in other ways and see which reading is accepted.

A reading is a change that a porter makes by mistake: layers off by one, a norm flag the other way, a square tensor transposed.
All readings decode the same few prompts, so they differ in nothing but the reading.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..acceptance import Greedy
from ..config import build
from ..data.chat import render
from ..data.readers import Embedded
from ..decode import decode
from ..drafters.base import Drafter
from ..shapes import Chain
from ..target import Target
from ..training.checkpoints import load_tensors
from .eagle3 import rope_of
from .layout import Finding, Portable
from .targets import TargetFiles

NUM_PROMPTS, NUM_TOKENS, DEPTH = 8, 32, 3
NOISE = 0.04  # acceptance length that another reading may gain without being the right one: see `better`


@dataclass(frozen=True)
class Reading:
    """Another way to read a drafter's tensors."""

    finding: str
    what: str  # goes on "read with .."
    mend: str
    drafter: Portable


def misread(drafter: Portable, files: TargetFiles) -> list[Finding]:
    """Findings for readings under which the target accepts more than as the files say."""
    makers = {"Eagle3": eagle3_readings, "Medusa": medusa_readings}
    if drafter.family not in makers:
        return []
    target: Target = build(files.settings)
    target.pack()
    found = list(head_order(drafter, target))
    prompts = openings(target)
    kept, rounds = accepted(drafter, target, prompts)
    for reading in makers[drafter.family](drafter, files):
        theirs, their_rounds = accepted(reading.drafter, target, prompts)
        if better(theirs, their_rounds, kept, rounds):
            found.append(
                Finding(
                    reading.finding, "error",
                    f"read with {reading.what} the target accepts {theirs / their_rounds:.2f} tokens a forward, as the files "
                    f"say {kept / rounds:.2f} ({len(prompts)} prompts, chain of {DEPTH}, greedy)",
                    "an engine reads what the files say", reading.mend,
                )
            )  # fmt: skip
    return found


def better(theirs: int, their_rounds: int, kept: int, rounds: int) -> bool:
    """Whether another reading is accepted so much more that it must be what was trained."""
    return theirs / their_rounds > kept / rounds + NOISE


def openings(target: Target) -> list[list[int]]:
    """Prompts in the target's own template."""
    conversations = Embedded(limit=NUM_PROMPTS).conversations()
    texts = [render(target.tokenizer, messages[:1], prompt=True) for messages in conversations]
    return [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def accepted(drafter: Portable, target: Target, prompts: list[list[int]]) -> tuple[int, int]:
    """Tokens emitted in whole rounds of greedy chains, and how many rounds that were."""
    module = instantiate(drafter, target)
    generations = decode(target, prompts, Greedy(), NUM_TOKENS, module, Chain(depth=DEPTH))
    rounds = [count for generation in generations for count in generation.whole_rounds]
    return sum(rounds), max(1, len(rounds))


def instantiate(drafter: Portable, target: Target) -> Drafter:
    """The drafter as a module, ready to decode."""
    module: Drafter = build(drafter.drafter, target=target)
    load_tensors(module, drafter.tensors)
    return module.to(target.device, target.dtype).eval()


def changed(drafter: Portable, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Portable:
    architecture = {**drafter.drafter.get("architecture", {}), **settings.pop("architecture", {})}
    described = copy.deepcopy({**drafter.drafter, **settings})
    if architecture:
        described["architecture"] = architecture
    return replace(drafter, drafter=described, tensors={**drafter.tensors, **tensors})


def eagle3_readings(drafter: Portable, target: TargetFiles) -> Iterator[Reading]:
    settings, tensors = drafter.drafter, drafter.tensors
    layers, architecture = settings["layers"], settings["architecture"]
    for shift, word in ((-1, "lower"), (1, "higher")):
        moved = [layer + shift for layer in layers]
        if min(moved) >= 0 and max(moved) <= target.num_layers:
            other = changed(drafter, {"layers": moved}, {})
            yield Reading("layer-ids-off-by-one", f"layers one {word}, {moved},", f"write {moved} in their place", other)
    for flag, name in (("norm_before_residual", "norm-before-residual"), ("norm_output", "norm-output")):
        turned = not architecture.get(flag, False)
        other = changed(drafter, {"architecture": {flag: turned}}, {})
        yield Reading(f"{name}-swapped", f"{flag}={str(turned).lower()}", f"write {flag}={str(turned).lower()}", other)
    rope = rope_of(target.config.to_dict())
    if rope != architecture["rope_parameters"]:
        other = changed(drafter, {"architecture": {"rope_parameters": rope}}, {})
        yield Reading("rope", "the target's rotary embedding", "write the target's rope_parameters", other)
    yield from transposed(drafter, [name for name in tensors if name.endswith(("_proj.weight", "fc.weight"))])
    swapped = {"input_layernorm.weight": tensors["hidden_norm.weight"], "hidden_norm.weight": tensors["input_layernorm.weight"]}
    mend = "exchange input_layernorm.weight, of the embedding, and hidden_norm.weight, of the state"
    yield Reading("norms-swapped", "the two input norms exchanged", mend, changed(drafter, {}, swapped))
    halves = {
        name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1) for name in (f"self_attn.{p}_proj.weight" for p in "qkv")
    }
    mend = "exchange the halves of the columns of q_proj, k_proj and v_proj: the embedding comes first, then the state"
    yield Reading("halves-swapped", "state before embedding", mend, changed(drafter, {}, halves))


def medusa_readings(drafter: Portable, target: TargetFiles) -> Iterator[Reading]:
    tensors, heads = drafter.tensors, drafter.drafter["num_heads"]
    blocks = [name for name in tensors if name.endswith("linear.weight")]
    together = changed(drafter, {}, {name: tensors[name].T.contiguous() for name in blocks})
    yield Reading("transposed-tensor", "the blocks transposed", "save the transpose of every block's weight", together)
    for name, order in (
        ("heads-shifted", [*range(1, heads), 0]),
        ("heads-reversed", list(range(heads))[::-1]),
    ):
        moved = {
            f"heads.{head}.{rest}": tensors[f"heads.{source}.{rest}"]
            for head, source in enumerate(order)
            for rest in (key.split(".", 2)[2] for key in tensors if key.startswith(f"heads.{source}."))
        }
        if order != list(range(heads)):
            what = f"heads in the order {', '.join(map(str, order))}"
            yield Reading(name, what, "number the heads by how far ahead they predict", changed(drafter, {}, moved))


def transposed(drafter: Portable, names: list[str]) -> Iterator[Reading]:
    """One square tensor after another the other way round: its shape does not show it."""
    for name in names:
        tensor = drafter.tensors[name]
        if tensor.shape[0] == tensor.shape[1]:
            other = changed(drafter, {}, {name: tensor.T.contiguous()})
            yield Reading("transposed-tensor", f"{name} transposed", f"save the transpose of {name}", other)


def head_order(drafter: Portable, target: Target) -> Iterator[Finding]:
    """Whether rows of an output layer resemble the target's rows of other tokens than those they are said to be.

    Output layers keep much of the one that they started from, and trained apart they come to resemble the target's: tokens
    that are used alike lie alike.
    """
    name = next(name for name in drafter.tensors if name.endswith("lm_head.weight"))
    ids = drafter.tensors["d2t"] + torch.arange(len(drafter.tensors["d2t"]))
    mine = F.normalize(drafter.tensors[name].float(), dim=-1)
    theirs = F.normalize(target.head.output.weight[ids].detach().cpu().float(), dim=-1)
    if mine.shape != theirs.shape:
        return
    sample = torch.linspace(0, len(ids) - 1, min(256, len(ids))).long()
    likeness = mine[sample] @ theirs.T
    nearest, own = likeness.argmax(-1), likeness.gather(1, sample[:, None])[:, 0]
    astray = (likeness.max(-1).values > 0.5) & (own < 0.25) & (nearest != sample)
    if astray.float().mean() > 0.5:
        yield Finding(
            "head-order", "error",
            f"{int(astray.sum())} of {len(sample)} rows of {name} resemble the target's rows of other tokens than d2t says",
            "every draft is another token than was meant", "write the rows in d2t's order, or d2t in theirs",
        )  # fmt: skip
