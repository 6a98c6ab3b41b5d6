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

from spectrain.config.build import build
from spectrain.data.chat import render_chat
from spectrain.data.readers import EmbeddedReader
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.vocabulary import VocabularyDrafter
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.training.checkpoints import find_mismatches, load_tensors
from spectrain.trees import Chain

from .fused_settings import read_rope
from .layout import DrafterCheckpoint, Finding
from .targets import TargetFiles

NUM_PROMPTS, NUM_TOKENS, DEPTH = 16, 64, 3
MIN_RELATIVE_GAIN, MIN_STANDARD_ERRORS = (
    0.02,
    3.0,
)  # how much nearer a reading must be, and by how many standard errors over prompts: a drafter after
# 40 steps is 1.7 % nearer in a wrong one, while right ones were 5 % and more nearer, by 4 standard errors and more


@dataclass(frozen=True)
class Interpretation:
    """Another way to read a drafter's tensors."""

    finding_name: str
    description: str  # goes on "read with .."
    remedy: str
    drafter: DrafterCheckpoint


def find_misinterpretation(drafter: DrafterCheckpoint, files: TargetFiles) -> list[Finding]:
    """A finding where the drafter agrees better with its target in another reading than as its files say."""
    if drafter.family not in INTERPRETATIONS:
        return []
    target: Target = build(files.settings)
    target.pack_weights()
    for _, fault in find_mismatches(build_drafter(drafter, target), drafter.tensors):
        return [Finding("wrong-shape", "error", fault, "it is of another target", "lint with the target that it is for")]
    found = list(check_head_order(drafter, target))
    written = decode(target, opening_prompts(target), Greedy(), NUM_TOKENS)
    as_said = measure_divergence(drafter, target, written)
    better = []
    for reading in INTERPRETATIONS[drafter.family](drafter, files):
        theirs = measure_divergence(reading.drafter, target, written)
        gain = as_said - theirs
        if (
            gain.mean() > MIN_RELATIVE_GAIN * as_said.mean()
            and gain.mean() > MIN_STANDARD_ERRORS * gain.std() / len(gain) ** 0.5
        ):
            better.append((theirs.mean().item(), reading))
    if not better:
        return found
    _, best = min(better, key=lambda pair: pair[0])
    kept, theirs_kept = (measure_acceptance(one, target, written) for one in (drafter, best.drafter))
    what = (
        f"with {best.description} it would accept {theirs_kept:.2f} tokens a forward instead of {kept:.2f} ("
        f"{NUM_PROMPTS} prompts, chain of {DEPTH}, greedy), and it is nearer to its target"
    )
    return [*found, Finding(best.finding_name, "error", what, "engines read what the files say", best.remedy)]


def opening_prompts(target: Target) -> list[list[int]]:
    """Prompts in the target's own template."""
    conversations = EmbeddedReader(limit=NUM_PROMPTS).load_conversations()
    texts = [render_chat(target.tokenizer, messages[:1], for_generation=True) for messages in conversations]
    return [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def measure_divergence(drafter: DrafterCheckpoint, target: Target, written: list[Generation]) -> Tensor:
    """KL(target || drafter) in nats a token of what the target wrote, summed over draft steps, by prompt."""
    module = load_drafter(drafter, target)
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


def measure_acceptance(drafter: DrafterCheckpoint, target: Target, written: list[Generation]) -> float:
    """Tokens emitted in a whole round of greedy chains."""
    prompts = [generation.prompt for generation in written]
    generations = decode(target, prompts, Greedy(), NUM_TOKENS, load_drafter(drafter, target), Chain(depth=DEPTH))
    rounds = [count for generation in generations for count in generation.complete_round_lengths]
    return sum(rounds) / max(1, len(rounds))


def load_drafter(drafter: DrafterCheckpoint, target: Target) -> VocabularyDrafter:
    """The drafter as a module, ready to decode."""
    module = build_drafter(drafter, target)
    load_tensors(module, drafter.tensors)
    return module.to(target.device, target.dtype).eval()


def build_drafter(drafter: DrafterCheckpoint, target: Target) -> VocabularyDrafter:
    """The module that a drafter's settings construct, without its weights."""
    module: VocabularyDrafter = build({**drafter.drafter, **MEASUREMENT_SETTINGS.get(drafter.family, {})}, target=target)
    return module


def with_changes(drafter: DrafterCheckpoint, settings: dict[str, Any], tensors: dict[str, Tensor]) -> DrafterCheckpoint:
    architecture = {**drafter.drafter.get("architecture", {}), **settings.pop("architecture", {})}
    described = copy.deepcopy({**drafter.drafter, **settings})
    if architecture:
        described["architecture"] = architecture
    return replace(drafter, drafter=described, tensors={**drafter.tensors, **tensors})


def fused_interpretations(drafter: DrafterCheckpoint, target: TargetFiles) -> Iterator[Interpretation]:
    """Of any drafter that fuses layers and has attention of its own."""
    for shift, word in ((-1, "lower"), (1, "higher")):
        moved = [layer + shift for layer in drafter.drafter["layers"]]
        if min(moved) >= 0 and max(moved) <= target.num_layers:
            other = with_changes(drafter, {"layers": moved}, {})
            yield Interpretation("layer-ids-off-by-one", f"layers one {word}, {moved},", f"write {moved} in their place", other)
    rope = read_rope(target.config.to_dict())
    if rope != drafter.drafter["architecture"]["rope_parameters"]:
        other = with_changes(drafter, {"architecture": {"rope_parameters": rope}}, {})
        yield Interpretation("rope", "the target's rotary embedding", "write the target's rope_parameters", other)
    yield from transposed_interpretations(
        drafter, [name for name in drafter.tensors if name.endswith(("_proj.weight", "fc.weight"))]
    )


def eagle3_interpretations(drafter: DrafterCheckpoint, target: TargetFiles) -> Iterator[Interpretation]:
    yield from fused_interpretations(drafter, target)
    tensors, architecture = drafter.tensors, drafter.drafter["architecture"]
    for flag, name in (("norm_before_residual", "norm-before-residual"), ("norm_output", "norm-output")):
        turned = not architecture.get(flag, False)
        other = with_changes(drafter, {"architecture": {flag: turned}}, {})
        yield Interpretation(f"{name}-swapped", f"{flag}={str(turned).lower()}", f"write {flag}={str(turned).lower()}", other)
    swapped = {"input_layernorm.weight": tensors["hidden_norm.weight"], "hidden_norm.weight": tensors["input_layernorm.weight"]}
    mend = "exchange input_layernorm.weight, of the embedding, and hidden_norm.weight, of the state"
    yield Interpretation("norms-swapped", "the two input norms exchanged", mend, with_changes(drafter, {}, swapped))
    halves = {
        name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1) for name in (f"self_attn.{p}_proj.weight" for p in "qkv")
    }
    mend = "exchange the halves of the columns of q_proj, k_proj and v_proj: the embedding comes first, then the state"
    yield Interpretation("halves-swapped", "state before embedding", mend, with_changes(drafter, {}, halves))


def medusa_interpretations(drafter: DrafterCheckpoint, target: TargetFiles) -> Iterator[Interpretation]:
    tensors, heads = drafter.tensors, drafter.drafter["num_heads"]
    blocks = [name for name in tensors if name.endswith("linear.weight")]
    together = with_changes(drafter, {}, {name: tensors[name].T.contiguous() for name in blocks})
    yield Interpretation("transposed-tensor", "the blocks transposed", "save the transpose of every block's weight", together)
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
            yield Interpretation(name, what, "number the heads by how far ahead they predict", with_changes(drafter, {}, moved))


def transposed_interpretations(drafter: DrafterCheckpoint, names: list[str]) -> Iterator[Interpretation]:
    """One square tensor after another the other way round: its shape does not show it."""
    for name in names:
        tensor = drafter.tensors[name]
        if tensor.shape[0] == tensor.shape[1]:
            other = with_changes(drafter, {}, {name: tensor.T.contiguous()})
            yield Interpretation("transposed-tensor", f"{name} transposed", f"save the transpose of {name}", other)


def check_head_order(drafter: DrafterCheckpoint, target: Target) -> Iterator[Finding]:
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


INTERPRETATIONS = {"eagle3": eagle3_interpretations, "medusa": medusa_interpretations, "dflash": fused_interpretations}
MEASUREMENT_SETTINGS = {"eagle3": {"ttt_steps": DEPTH}}  # settings that a measurement wants
