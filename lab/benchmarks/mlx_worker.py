"""MLX's side of `lab.benchmarks.mlx_rounds`: decodes with an export, in an environment of its own.

It reads a job from standard input as JSON: `target` and `drafter` (folders), `family`, `drafted`
(tokens a round drafts), `prompts` (lists of token ids) and `limits`. It writes `versions` and
`answers`: for each prompt its `tokens`, the position at which its rounds begin (`start`) and how
many tokens each of them emitted (`rounds`).
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx

PACKAGES = ("mlx-cpu", "mlx", "mlx-lm", "mlx-dspark")
Decode = Callable[[list[int], int], dict[str, Any]]


def main() -> None:
    job = json.load(sys.stdin)
    answers_file = os.fdopen(os.dup(1), "w")
    # Whatever a library prints goes to stderr.
    os.dup2(2, 1)
    mx.set_default_device(mx.cpu)
    decode = {"dspark": use_dspark, "dflash": use_dflash, "causal": use_draft_model}[job["family"]](
        job
    )
    answers = [decode(*pair) for pair in zip(job["prompts"], job["limits"], strict=True)]
    versions = {name: version(name) for name in PACKAGES}
    json.dump({"versions": versions, "answers": answers}, answers_file)
    answers_file.close()


def use_dspark(job: dict[str, Any]) -> Decode:
    from mlx_dspark import load_drafter, speculative_generate

    return use_blocks(job, load_drafter, speculative_generate)


def use_dflash(job: dict[str, Any]) -> Decode:
    from mlx_dspark import dflash_generate, load_dflash

    return use_blocks(job, load_dflash, dflash_generate)


def use_blocks(
    job: dict[str, Any], load: Callable[..., Any], generate: Callable[..., Any]
) -> Decode:
    """Decode with mlx-dspark, without its own n-grams."""
    from mlx_dspark import load_target

    target, tokenizer = load_target(job["target"], require_tap=True)
    target.model.set_dtype(mx.float32)
    drafter = load(job["drafter"], quantize=False)[0]
    drafter.set_dtype(mx.float32)

    def decode(prompt: list[int], limit: int) -> dict[str, Any]:
        result = generate(
            target,
            tokenizer,
            drafter,
            prompt_ids=prompt,
            max_new_tokens=limit,
            max_draft_tokens=job["drafted"],
            lookup_drafts=False,
        )
        return {"tokens": result.token_ids, "start": 1, "rounds": result.accept_lengths}

    return decode


def use_draft_model(job: dict[str, Any]) -> Decode:
    """Decode with mlx-lm, whose first round drafts the first token too."""
    from mlx_lm import load
    from mlx_lm.generate import speculative_generate_step

    model, drafter = (load(job[name])[0] for name in ("target", "drafter"))
    for part in (model, drafter):
        part.set_dtype(mx.float32)

    def decode(prompt: list[int], limit: int) -> dict[str, Any]:
        steps = speculative_generate_step(
            mx.array(prompt), model, drafter, num_draft_tokens=job["drafted"], max_tokens=limit
        )
        tokens, rounds, count = [], [], 0
        for token, _, is_drafted in steps:
            tokens.append(int(token))
            count += 1
            if not is_drafted:
                rounds.append(count)
                count = 0
        # The limit cuts the last round.
        return {"tokens": tokens, "start": 0, "rounds": rounds if count else rounds[:-1]}

    return decode


if __name__ == "__main__":
    main()
