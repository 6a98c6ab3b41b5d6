"""Faults that no shape shows, detected by measurement: interpret the same tensors in other ways and
compare.

An interpretation is a mistake that porting code makes: layers off by one, a flipped norm flag, a
transposed square tensor. Each is judged by its divergence from the target on text that the target
generated: divergence tells a layer from its neighbour where acceptance on a few prompts cannot. The
report then gives the acceptance from real decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from scipy.special import stdtrit
from torch import Tensor

from spectrain.data.chat import tokenize_question
from spectrain.data.readers import EmbeddedReader
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.vocabulary import VocabularyDrafter
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.training.checkpoints import find_mismatches, load_tensors
from spectrain.trees import Chain

from .container import Finding
from .layout import DrafterCheckpoint, Interpretation, Layout
from .targets import TargetFiles

NUM_PROMPTS = 16
NUM_TOKENS = 64
DEPTH = 3
MIN_RELATIVE_GAIN = 0.02
MIN_STANDARD_ERRORS = 3.0
"""How much lower a divergence must be, relatively and in standard errors over prompts. After 40
training steps wrong ones were up to 1.7 % lower; right ones were at least 5 % and 4 standard errors
lower. After 300 steps exchanged rows of queries and keys were 4.7 % and 2.8 standard errors lower,
over 16 prompts."""
DOUBTFUL_STANDARD_ERRORS = 2.0
"""Where a divergence is lower by so many, and not by enough, as many prompts again decide."""
NUM_SHUFFLES = 16
FALSE_ALARMS = 0.01
"""Number of shuffled copies with which a better interpretation is compared, and the share of
untrained drafters that may be reported, whatever the number of interpretations."""
SHUFFLED = ("_proj.weight", "linear.weight")
"""Names of the matrices that are shuffled."""


def find_misinterpretation(
    drafter: DrafterCheckpoint, files: TargetFiles, layout: Layout
) -> list[Finding]:
    """Return a fault where another interpretation agrees better with the target than the files'
    own.
    """
    if drafter.family not in INTERPRETATIONS:
        return []
    target: Target = files.spec.build()
    target.pack_weights()
    mismatch = find_mismatch(drafter, target)
    if mismatch is not None:
        return [
            Finding(
                "wrong-shape",
                "error",
                mismatch,
                "it is of another target",
                "lint with the target that it is for",
            )
        ]
    findings = list(check_head_order(drafter, target))
    candidates = [
        *INTERPRETATIONS[drafter.family](drafter, files),
        *layout.interpretations(drafter),
    ]
    prompts = opening_prompts(target)
    generations = decode(target, prompts[:NUM_PROMPTS], Greedy(), NUM_TOKENS)
    divergences = measure_all(drafter, candidates, target, generations)
    if not list_closer(*divergences) and list_closer(*divergences, errors=DOUBTFUL_STANDARD_ERRORS):
        more = decode(target, prompts[NUM_PROMPTS:], Greedy(), NUM_TOKENS)
        divergences = torch.cat(
            [divergences, measure_all(drafter, candidates, target, more)], dim=1
        )
        generations = [*generations, *more]
    own, *others = divergences
    better = [(others[i].mean().item(), candidates[i]) for i in list_closer(own, *others)]
    if not better:
        return findings
    lowest, best = min(better, key=lambda pair: pair[0])
    if not is_trained(best.drafter, lowest, target, generations, FALSE_ALARMS / len(candidates)):
        return findings
    accepted, best_accepted = (
        measure_acceptance(checkpoint, target, generations)
        for checkpoint in (drafter, best.drafter)
    )
    problem = (
        f"with {best.description} it would accept {best_accepted:.2f} tokens per forward instead "
        f"of {accepted:.2f} ({len(generations)} prompts, chain of {DEPTH}, greedy), and it is "
        "closer to its target"
    )
    return [
        *findings,
        Finding(
            best.finding_name, "error", problem, "engines read what the files say", best.remedy
        ),
    ]


def measure_all(
    drafter: DrafterCheckpoint,
    candidates: list[Interpretation],
    target: Target,
    generations: list[Generation],
) -> Tensor:
    """Return the divergences of a drafter and of its other interpretations by prompt [1 + C, P]."""
    drafters = [drafter, *(candidate.drafter for candidate in candidates)]
    return torch.stack([measure_divergence(other, target, generations) for other in drafters])


def list_closer(own: Tensor, *others: Tensor, errors: float = MIN_STANDARD_ERRORS) -> list[int]:
    """Return which of the other divergences [P] are lower than a drafter's own by enough, and by
    this number of standard errors over the prompts.
    """
    closer = []
    for number, other in enumerate(others):
        gain = own - other
        standard_error = gain.std() / len(gain) ** 0.5
        if gain.mean() > MIN_RELATIVE_GAIN * own.mean() and gain.mean() > errors * standard_error:
            closer.append(number)
    return closer


def is_trained(
    drafter: DrafterCheckpoint,
    divergence: float,
    target: Target,
    generations: list[Generation],
    chance: float,
) -> bool:
    """Tell whether a drafter agrees better with its target than copies of it whose matrices are
    shuffled.

    Of a drafter with random matrices, each interpretation is another random drafter, and the best
    of many may be several percent closer to the target, on every prompt: no standard error over
    prompts shows that. Its copies are as good as itself, so it passes with the given chance, by
    Student's t over the copies.
    """
    generator = torch.Generator().manual_seed(0)
    copies = [shuffle_matrices(drafter, generator) for _ in range(NUM_SHUFFLES)]
    divergences = torch.stack(
        [measure_divergence(copy, target, generations).mean() for copy in copies]
    )
    deviation = divergences.std().item() * (1 + 1 / NUM_SHUFFLES) ** 0.5
    return (
        divergences.mean().item() - divergence
        > float(stdtrit(NUM_SHUFFLES - 1, 1 - chance)) * deviation
    )


def shuffle_matrices(drafter: DrafterCheckpoint, generator: torch.Generator) -> DrafterCheckpoint:
    """Return a copy of a drafter with the rows and the columns of its layers' matrices in random
    order.
    """
    shuffled = {}
    for name, tensor in drafter.tensors.items():
        if tensor.dim() == 2 and name.endswith(SHUFFLED):
            rows, columns = (torch.randperm(size, generator=generator) for size in tensor.shape)
            shuffled[name] = tensor[rows][:, columns].contiguous()
    return with_changes(drafter, {}, shuffled)


def opening_prompts(target: Target) -> list[list[int]]:
    """Return the tokens of twice `NUM_PROMPTS` prompts in the target's own template."""
    conversations = EmbeddedReader(limit=2 * NUM_PROMPTS).load_conversations()
    return [tokenize_question(target.template, conversation) for conversation in conversations]


def measure_divergence(
    drafter: DrafterCheckpoint, target: Target, generations: list[Generation]
) -> Tensor:
    """Return, by prompt, KL(target || drafter) in nats per generated token, summed over draft
    steps.
    """
    module = load_drafter(drafter, target)
    module.divergence = "forward_kl"
    divergences = []
    for generation in generations:
        tokens = torch.tensor([generation.prompt + generation.output], device=target.device)
        loss_mask = torch.zeros_like(tokens, dtype=torch.bool)
        loss_mask[:, len(generation.prompt) :] = True
        batch = Batch(tokens, loss_mask, target.features(tokens, module.layers))
        with torch.no_grad():
            divergences.append(
                module.loss(batch, target, TrainingState()).total.item() / len(generation.output)
            )
    return torch.tensor(divergences)


def measure_acceptance(
    drafter: DrafterCheckpoint, target: Target, generations: list[Generation]
) -> float:
    """Return the tokens that a complete round of greedy chains emits, pooled over prompts."""
    prompts = [generation.prompt for generation in generations]
    drafted = decode(
        target, prompts, Greedy(), NUM_TOKENS, load_drafter(drafter, target), Chain(depth=DEPTH)
    )
    rounds = [count for generation in drafted for count in generation.complete_round_lengths]
    return sum(rounds) / max(1, len(rounds))


def load_drafter(drafter: DrafterCheckpoint, target: Target) -> VocabularyDrafter:
    """Return the drafter as a module with its weights, ready to decode."""
    module = build_drafter(drafter, target)
    load_tensors(module, drafter.tensors)
    return module.to(target.device, target.dtype).eval()


def build_drafter(drafter: DrafterCheckpoint, target: Target) -> VocabularyDrafter:
    """Return the module that a drafter's settings construct, without its weights."""
    spec = drafter.spec.with_settings(**MEASUREMENT_SETTINGS.get(drafter.family, {}))
    module: VocabularyDrafter = spec.build(target=target)
    return module


def find_mismatch(drafter: DrafterCheckpoint, target: Target) -> str | None:
    """Return why a drafter does not fit a target, and None where it fits."""
    try:
        module = build_drafter(drafter, target)
    except UserError as error:
        return str(error).partition(";")[0]
    return next((fault for _, fault in find_mismatches(module, drafter.tensors)), None)


def with_changes(
    drafter: DrafterCheckpoint, settings: dict[str, Any], tensors: dict[str, Tensor]
) -> DrafterCheckpoint:
    """Return a copy of a drafter with some settings and tensors replaced."""
    architecture = {**drafter.drafter.get("architecture", {}), **settings.pop("architecture", {})}
    changed = copy.deepcopy({**drafter.drafter, **settings})
    if architecture:
        changed["architecture"] = architecture
    return replace(drafter, drafter=changed, tensors={**drafter.tensors, **tensors})


def fused_interpretations(
    drafter: DrafterCheckpoint, target: TargetFiles
) -> Iterator[Interpretation]:
    """Yield the interpretations of any drafter that fuses target layers and has its own
    attention.
    """
    for shift, word in ((-1, "lower"), (1, "higher")):
        shifted = [layer + shift for layer in drafter.drafter["layers"]]
        if min(shifted) >= 0 and max(shifted) <= target.num_layers:
            changed = with_changes(drafter, {"layers": shifted}, {})
            yield Interpretation(
                "layer-ids-off-by-one",
                f"layers one {word}, {shifted},",
                f"write {shifted} instead",
                changed,
            )
    architecture = drafter.drafter["architecture"]
    rope = target.drafter_rope(architecture["head_dim"])
    if rope != architecture["rope_parameters"]:
        changed = with_changes(drafter, {"architecture": {"rope_parameters": rope}}, {})
        yield Interpretation(
            "rope", "the target's rotary embedding", "write the target's rope_parameters", changed
        )
    yield from transposed_interpretations(
        drafter, [name for name in drafter.tensors if name.endswith(("_proj.weight", "fc.weight"))]
    )


INPUT_WEIGHTS = [
    f"self_attn.{name}.weight"
    for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
]
"""The weights that read the inputs of the first attention, latent or not."""


def eagle3_interpretations(
    drafter: DrafterCheckpoint, target: TargetFiles
) -> Iterator[Interpretation]:
    yield from fused_interpretations(drafter, target)
    tensors = drafter.tensors
    architecture = drafter.drafter["architecture"]
    for flag, name in (
        ("norm_before_residual", "norm-before-residual"),
        ("norm_output", "norm-output"),
    ):
        flipped = not architecture.get(flag, False)
        changed = with_changes(drafter, {"architecture": {flag: flipped}}, {})
        yield Interpretation(
            f"{name}-swapped",
            f"{flag}={str(flipped).lower()}",
            f"write {flag}={str(flipped).lower()}",
            changed,
        )
    swapped = {
        "input_layernorm.weight": tensors["hidden_norm.weight"],
        "hidden_norm.weight": tensors["input_layernorm.weight"],
    }
    remedy = (
        "exchange input_layernorm.weight, of the embedding, and hidden_norm.weight, of the state"
    )
    yield Interpretation(
        "norms-swapped", "the two input norms exchanged", remedy, with_changes(drafter, {}, swapped)
    )
    halves = {
        name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)
        for name in INPUT_WEIGHTS
        if name in tensors
    }
    remedy = (
        "exchange the halves of the columns of the linears that read the inputs of attention "
        "(q_proj, k_proj and v_proj): the embedding comes first, then the state"
    )
    yield Interpretation(
        "halves-swapped", "state before embedding", remedy, with_changes(drafter, {}, halves)
    )


def medusa_interpretations(
    drafter: DrafterCheckpoint, target: TargetFiles
) -> Iterator[Interpretation]:
    tensors = drafter.tensors
    heads = drafter.drafter["num_heads"]
    blocks = [name for name in tensors if name.endswith("linear.weight")]
    transposed = with_changes(drafter, {}, {name: tensors[name].T.contiguous() for name in blocks})
    yield Interpretation(
        "transposed-tensor",
        "the blocks transposed",
        "save the transpose of every block's weight",
        transposed,
    )
    for name, order in (
        ("heads-shifted", [*range(1, heads), 0]),
        ("heads-reversed", list(range(heads))[::-1]),
    ):
        moved = {
            f"heads.{head}.{rest}": tensors[f"heads.{source}.{rest}"]
            for head, source in enumerate(order)
            for rest in (
                key.split(".", 2)[2] for key in tensors if key.startswith(f"heads.{source}.")
            )
        }
        if order != list(range(heads)):
            description = f"heads in the order {', '.join(map(str, order))}"
            yield Interpretation(
                name,
                description,
                "number the heads by how far ahead they predict",
                with_changes(drafter, {}, moved),
            )


def transposed_interpretations(
    drafter: DrafterCheckpoint, names: list[str]
) -> Iterator[Interpretation]:
    """Yield each square tensor transposed, because its shape does not show it."""
    for name in names:
        tensor = drafter.tensors[name]
        if tensor.shape[0] == tensor.shape[1]:
            changed = with_changes(drafter, {}, {name: tensor.T.contiguous()})
            yield Interpretation(
                "transposed-tensor", f"{name} transposed", f"save the transpose of {name}", changed
            )


def check_head_order(drafter: DrafterCheckpoint, target: Target) -> Iterator[Finding]:
    """Yield a fault where rows of an output layer resemble the target's rows of other tokens than
    d2t maps them to.

    Output layers remain close to their initialization, and layers that are trained apart come to
    resemble the target's: similar tokens have similar rows.
    """
    name = next((name for name in drafter.tensors if name.endswith("lm_head.weight")), None)
    if name is None:
        return
    ids = drafter.tensors["d2t"] + torch.arange(len(drafter.tensors["d2t"]))
    rows = F.normalize(drafter.tensors[name].float(), dim=-1)
    target_rows = F.normalize(target.head.output.weight[ids].detach().cpu().float(), dim=-1)
    if rows.shape != target_rows.shape:
        return
    sample = torch.linspace(0, len(ids) - 1, min(256, len(ids))).long()
    similarity = rows[sample] @ target_rows.T
    nearest = similarity.argmax(-1)
    expected = similarity.gather(1, sample[:, None])[:, 0]
    misplaced = (similarity.max(-1).values > 0.5) & (expected < 0.25) & (nearest != sample)
    if misplaced.float().mean() > 0.5:
        yield Finding(
            "head-order",
            "error",
            f"{int(misplaced.sum())} of {len(sample)} rows of {name} resemble the target's rows "
            "of other tokens than d2t's",
            "every draft is another token than intended",
            "write the rows in d2t's order, or d2t in the rows' order",
        )


INTERPRETATIONS = {
    "eagle3": eagle3_interpretations,
    "medusa": medusa_interpretations,
    "dflash": fused_interpretations,
}
MEASUREMENT_SETTINGS = {"eagle3": {"ttt_steps": DEPTH}}
"""Family -> settings for the measurement."""
