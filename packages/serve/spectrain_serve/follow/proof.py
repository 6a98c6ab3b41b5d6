"""The process that proves a candidate: `python -m spectrain_serve.follow.proof FOLDER`.

It and the drafter that serves decode the same prompts in this project's engine, with the chain that
the server drafts, whose rounds are those of the server.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from spectrain.config.build import register_resolvers
from spectrain.config.spec import RunSpec
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.runs.drafters import load_for_decoding
from spectrain_serve.promotion import (
    PairedGain,
    PromotionProof,
    compare_rounds,
    decide_promotion,
    decode_prompts,
)

from .train_candidate import read_examples


def prove_candidate(folder: Path) -> PromotionProof:
    """Compare the candidate of a folder with the serving drafter, by the folder's plan.json and
    its conversations.
    """
    plan = json.loads((folder / "plan.json").read_text())
    register_resolvers()
    spec = RunSpec.from_nodes(plan["spec"])
    target: Target = spec.target.build()
    target.pack_weights()
    sets = {
        name: [example.prompt for example in read_examples(folder / f"prove-{name}.jsonl", target)]
        for name in ("new", "old")
    }
    results: dict[str, dict[str, list[Generation]]] = {name: {} for name in sets}
    for role, path in (
        ("serving", plan["serving"]),
        ("candidate", str(folder / "run" / "drafter")),
    ):
        drafter = load_for_decoding(Path(path), target)
        for name, prompts in sets.items():
            results[name][role] = decode_prompts(
                target, drafter, prompts, Greedy(), plan["depth"], plan["prove_tokens"]
            )
    new, old = (
        compare_rounds(results[name]["serving"], results[name]["candidate"])
        for name in ("new", "old")
    )
    proof = decide_promotion(new, old, plan["tolerance"])
    write_text(folder / "proof.json", json.dumps(asdict(proof), indent=2) + "\n")
    return proof


def read_proof(folder: Path) -> PromotionProof:
    """Return the proof of a candidate."""
    content = json.loads((folder / "proof.json").read_text())
    return PromotionProof(
        PairedGain(**content["new"]),
        None if content["old"] is None else PairedGain(**content["old"]),
        content["is_promoted"],
        content["reason"],
    )


if __name__ == "__main__":
    os.nice(int(os.environ.get("SPECTRAIN_FOLLOW_NICE", "10")))
    prove_candidate(Path(sys.argv[1]))
