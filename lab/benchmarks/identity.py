"""The engine's greedy answers against those of the eager loop, on one device, in float32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from spectrain.config.build import GroupSpec
from spectrain.config.choices import list_constructors
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.medusa import Medusa
from spectrain.drafters.pard import Pard
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Static, TreeBuilder

PROMPT_LENGTHS = (7, 2, 40)  # in tokens
DrafterFactory = Callable[[Target], tuple[Drafter | None, TreeBuilder | None]]
FAMILIES: dict[str, DrafterFactory] = {
    "autoregressive": lambda target: (None, None),
    "eagle3 eagle2": lambda target: (Eagle3(target, vocab_size=1024), Eagle2(4, 16)),
    "eagle3 chain": lambda target: (Eagle3(target, vocab_size=1024), Chain(3)),
    "medusa static": lambda target: (
        Medusa(target, num_heads=3, vocab_size=1024),
        Static(paths=[[0], [1], [0, 0], [0, 1]]),
    ),
    "causal chain": lambda target: (Causal(target, num_layers=2), Chain(3)),
    "pard chain": lambda target: (Pard(target, num_drafts=4, num_layers=2), Chain(4)),
}
if "hydra" in list_constructors("drafter"):
    FAMILIES["hydra eagle2"] = lambda target: (
        GroupSpec("drafter", "hydra").load_constructor()(target, num_heads=3, vocab_size=1024),
        Eagle2(3, 10, 3),
    )
"""Untrained drafters: some of their drafts are accepted, most are not, and neither may change
the answer.
"""


def target_loaders(directory: str | None, device: torch.device) -> dict[str, Callable[[], Target]]:
    """Return loaders of the tiny target and, if given, of the target in a directory."""
    device_name = str(device)
    loaders: dict[str, Callable[[], Target]] = {"tiny": partial(load_tiny, "float32", device_name)}
    if directory is not None:
        loaders["directory"] = partial(load_hf, directory, None, "float32", device_name)
    return loaders


def identity_row(load: Callable[[], Target], family: str, new_tokens: int) -> dict[str, Any]:
    """Count differing answers over a batch of three prompts and of one, each decoded twice so
    that graphs are replayed.
    """
    torch.manual_seed(0)
    target = load()
    drafter, builder = FAMILIES[family](target)
    if drafter is not None:
        drafter.prepare(target, torch.ones(target.head.vocab_size))
        drafter = drafter.to(target.device, target.dtype).eval()
    prompts = [
        torch.randint(target.head.vocab_size, (length,)).tolist() for length in PROMPT_LENGTHS
    ]
    engine = CapturedRunner(target, Greedy(), drafter, builder)
    pairs = []
    for batch in (prompts, prompts[:1]):
        expected = decode(target, batch, Greedy(), new_tokens, drafter, builder, ignore_eos=True)
        for _ in range(2):
            pairs += list(zip(engine.decode(batch, new_tokens, ignore_eos=True), expected))
    rounds = [count for answer, _ in pairs for count in answer.complete_round_lengths]
    return {
        "target": target.name,
        "backend": engine.backend,
        "captured": any(state.graphs for state in engine.states.values()),
        "answers": len(pairs),
        "tokens": sum(len(answer.output) for answer, _ in pairs),
        "differing": sum(answer.output != reference.output for answer, reference in pairs),
        "tau": sum(rounds) / len(rounds),
    }
