"""Commands that serve a drafter."""

import json
import shlex
from typing import Any


def serve_vllm(target: str, drafting: dict[str, Any]) -> str:
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(drafting))}"


def serve_sglang(target: str, algorithm: str, place: str, num_steps: int) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(place)} --speculative-num-steps {num_steps} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {num_steps + 1}"
    )
