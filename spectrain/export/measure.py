"""Faults that no shape shows, found by measurement: read the same tensors in other ways and see which way they were trained.

A reading is a change that a porter makes by mistake: layers off by one, a norm flag the other way, a square tensor transposed.
All readings are judged on the same text, which the target wrote, by their divergence from the target: it tells a layer from
its neighbour, where acceptance on a few prompts cannot. What a reading is worth is then told by really decoding with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.data.chat import render
from spectrain.data.readers import Embedded
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.shared.vocabulary import VocabularyDrafter
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.settings.build import build
from spectrain.training.checkpoints import load_tensors, misfits
from spectrain.trees import Chain

from .fused_settings import rope_of
from .layout import Finding, Portable
from .targets import TargetFiles

NUM_PROMPTS, NUM_TOKENS, DEPTH = 16, 64, 3
MARGIN, ERRORS = 0.02, 3.0  # how much nearer a reading must be, and by how many standard errors over prompts: a drafter after
# 40 steps is 1.7 % nearer in a wrong one, while right ones were 5 % and more nearer, by 4 standard errors and more


@dataclass(frozen=True)
class Reading:
    """Another way to read a drafter's tensors."""

    finding: str
    what: str  # goes on "read with .."
    mend: str
    drafter: Portable


def misread(drafter: Portable, files: TargetFiles) -> list[Finding]:
    """A finding where the drafter agrees better with its target in another reading than as its files say."""
    if drafter.family not in READERS:
        return []
    target: Target = build(files.settings)
    target.pack()
    for _, fault in misfits(described(drafter, target), drafter.tensors):
        return [Finding("wrong-shape", "error", fault, "it is of another target", "lint with the target that it is for")]
    found = list(head_order(drafter, target))
    written = decode(target, openings(target), Greedy(), NUM_TOKENS)
    as_said = divergences(drafter, target, written)
    better = []
    for reading in READERS[drafter.family](drafter, files):
        theirs = divergences(reading.drafter, target, written)
        gain = as_said - theirs
        if gain.mean() > MARGIN * as_said.mean() and gain.mean() > ERRORS * gain.std() / len(gain) ** 0.5:
            better.append((theirs.mean().item(), reading))
    if not better:
        return found
    _, best = min(better, key=lambda pair: pair[0])
    kept, theirs_kept = (accepted(one, target, written) for one in (drafter, best.drafter))
    what = (
        f"with {best.what} it would accept {theirs_kept:.2f} tokens a forward instead of {kept:.2f} ({NUM_PROMPTS} prompts, "
        f"chain of {DEPTH}, greedy), and it is nearer to its target"
    )
    return [*found, Finding(best.finding, "error", what, "engines read what the files say", best.mend)]


def openings(target: Target) -> list[list[int]]:
    """Prompts in the target's own template."""
    conversations = Embedded(limit=NUM_PROMPTS).conversations()
    texts = [render(target.tokenizer, messages[:1], prompt=True) for messages in conversations]
    return [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def divergences(drafter: Portable, target: Target, written: list[Generation]) -> Tensor:
    """KL(target || drafter) in nats a token of what the target wrote, summed over draft steps, by prompt."""
    module = instantiate(drafter, target)
    module.divergence = "forward_kl"
    found = []
    for generation in written:
        tokens = torch.tensor([generation.prompt + generation.output], device=target.device)
        mine = torch.zeros_like(tokens, dtype=torch.bool)
        mine[:, len(generation.prompt) :] = True
        batch = Batch(tokens, mine, target.features(tokens, module.layers))
        with torch.no_grad():
            found.append(module.loss(batch, target, TrainingState()).total.item() / len(generation.output))
    return torch.tensor(found)


def accepted(drafter: Portable, target: Target, written: list[Generation]) -> float:
    """Tokens emitted in a whole round of greedy chains."""
    prompts = [generation.prompt for generation in written]
    generations = decode(target, prompts, Greedy(), NUM_TOKENS, instantiate(drafter, target), Chain(depth=DEPTH))
    rounds = [count for generation in generations for count in generation.whole_rounds]
    return sum(rounds) / max(1, len(rounds))


def instantiate(drafter: Portable, target: Target) -> VocabularyDrafter:
    """The drafter as a module, ready to decode."""
    module = described(drafter, target)
    load_tensors(module, drafter.tensors)
    return module.to(target.device, target.dtype).eval()


def described(drafter: Portable, target: Target) -> VocabularyDrafter:
    """The module that a drafter's settings construct, without its weights."""
    module: VocabularyDrafter = build({**drafter.drafter, **MEASURED.get(drafter.family, {})}, target=target)
    return module


def changed(drafter: Portable, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Portable:
    architecture = {**drafter.drafter.get("architecture", {}), **settings.pop("architecture", {})}
    described = copy.deepcopy({**drafter.drafter, **settings})
    if architecture:
        described["architecture"] = architecture
    return replace(drafter, drafter=described, tensors={**drafter.tensors, **tensors})


def fused_readings(drafter: Portable, target: TargetFiles) -> Iterator[Reading]:
    """Of any drafter that fuses layers and has attention of its own."""
    for shift, word in ((-1, "lower"), (1, "higher")):
        moved = [layer + shift for layer in drafter.drafter["layers"]]
        if min(moved) >= 0 and max(moved) <= target.num_layers:
            other = changed(drafter, {"layers": moved}, {})
            yield Reading("layer-ids-off-by-one", f"layers one {word}, {moved},", f"write {moved} in their place", other)
    rope = rope_of(target.config.to_dict())
    if rope != drafter.drafter["architecture"]["rope_parameters"]:
        other = changed(drafter, {"architecture": {"rope_parameters": rope}}, {})
        yield Reading("rope", "the target's rotary embedding", "write the target's rope_parameters", other)
    yield from transposed(drafter, [name for name in drafter.tensors if name.endswith(("_proj.weight", "fc.weight"))])


def eagle3_readings(drafter: Portable, target: TargetFiles) -> Iterator[Reading]:
    yield from fused_readings(drafter, target)
    tensors, architecture = drafter.tensors, drafter.drafter["architecture"]
    for flag, name in (("norm_before_residual", "norm-before-residual"), ("norm_output", "norm-output")):
        turned = not architecture.get(flag, False)
        other = changed(drafter, {"architecture": {flag: turned}}, {})
        yield Reading(f"{name}-swapped", f"{flag}={str(turned).lower()}", f"write {flag}={str(turned).lower()}", other)
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
    name = next((name for name in drafter.tensors if name.endswith("lm_head.weight")), None)
    if name is None:  # the target's own
        return
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


READERS = {"eagle3": eagle3_readings, "medusa": medusa_readings, "dflash": fused_readings}
MEASURED = {"eagle3": {"ttt_steps": DEPTH}}  # settings that a measurement wants
