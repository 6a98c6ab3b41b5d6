"""Shell commands that serve a drafter."""

import json
import shlex


def serve_vllm(target: str, method: str, drafter_path: str | None, num_tokens: int, is_parallel: bool = False) -> str:
    """Return the command for vLLM; a target that contains its drafter has no path of one."""
    path = {} if drafter_path is None else {"model": drafter_path}
    config = {"method": method, **path, "num_speculative_tokens": num_tokens}
    config |= {"parallel_drafting": True} if is_parallel else {}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(config))}"


def serve_sglang(target: str, algorithm: str, drafter_path: str, num_steps: int) -> str:
    steps = f"--speculative-num-steps {num_steps} --speculative-eagle-topk 1"
    return f"{_launch_command(target, algorithm, drafter_path)} {steps} --speculative-num-draft-tokens {num_steps + 1}"


def serve_sglang_mtp(target: str, num_steps: int) -> str:
    """Return the command for a target that contains its MTP layer."""
    steps = f"--speculative-num-steps {num_steps} --speculative-eagle-topk 1"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm NEXTN {steps} "
        f"--speculative-num-draft-tokens {num_steps + 1}"
    )


def serve_sglang_block(target: str, algorithm: str, drafter_path: str, num_tokens: int) -> str:
    """Return the command for a block drafter; `num_tokens` is the size of a block, the last committed token included."""
    return f"{_launch_command(target, algorithm, drafter_path)} --speculative-num-draft-tokens {num_tokens}"


def serve_sglang_dspark(target: str, drafter_path: str, num_tokens: int) -> str:
    return f"{_launch_command(target, 'DSPARK', drafter_path)} --speculative-dspark-block-size {num_tokens}"


def serve_sglang_uno(target: str, adapter_path: str, num_tokens: int) -> str:
    """Return the command for Uno; `num_tokens` counts the target's own next token and the masks."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm UNO "
        f"--uno-lora-path {shlex.quote(adapter_path)} --speculative-num-draft-tokens {num_tokens}"
    )


def _launch_command(target: str, algorithm: str, drafter_path: str) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(drafter_path)}"
    )
