"""vLLM as its users have it, the offline class and the server, and what both count of their
rounds.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from spectrain.decoding.generation import Generation
from spectrain.servers.ports import find_free_port
from spectrain_serve.servers.base import DraftCounters
from spectrain_serve.servers.counters import parse_counters

ROWS = 4  # prompts decoded together
MAX_LENGTH = 512
PATIENCE = 600.0  # seconds that a server may take to start
COUNTERS = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Answers:
    """The answer to every prompt, and the draft counters over all answers."""

    tokens: list[list[int]]
    texts: list[str]
    counts: DraftCounters | None


def count_rounds(generations: Sequence[Generation]) -> DraftCounters:
    """Count our complete rounds by vLLM's definitions: a round's tokens less the bonus, over all
    rounds at every position.
    """
    rounds = [tokens for generation in generations for tokens in generation.complete_round_lengths]
    depths = [
        depth
        for generation in generations
        for depth in generation.depths[: len(generation.complete_round_lengths)]
    ]
    accepted = tuple(
        sum(tokens > position for tokens in rounds) for position in range(1, max(depths) + 1)
    )
    return DraftCounters(len(rounds), sum(depths), accepted)


def compute_rates(counts: DraftCounters) -> list[float]:
    """Return the share of all rounds that accepted drafted token k + 1, as entry k."""
    return [accepted / counts.num_rounds for accepted in counts.accepted_by_position]


def make_environment() -> dict[str, str]:
    """Return the environment of vLLM on a CPU, without a network, and with its own OpenMP
    library preloaded.
    """
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return variables | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "LD_PRELOAD": str(openmp) if openmp.exists() else "",
    }


def answer_offline(
    target: Path,
    drafting: dict[str, Any] | None,
    prompts: list[list[int]],
    limits: list[int],
    scratch: Path,
    rows: int = ROWS,
    dtype: str = "float32",
) -> Answers:
    """Return the greedy answers of `vllm.LLM`, `rows` at a time; `drafting` is its
    speculative_config.
    """
    out = scratch / "offline.json"
    log = scratch / "offline.log"
    model = {
        "model": str(target),
        "dtype": dtype,
        "max_model_len": MAX_LENGTH,
        "max_num_seqs": rows,
        "enforce_eager": True,
        "speculative_config": drafting,
    }
    job = json.dumps({"model": model, "prompts": prompts, "limits": limits, "out": str(out)})
    with log.open("w") as file:
        command = [sys.executable, str(Path(__file__).with_name("offline.py"))]
        process = subprocess.run(
            command,
            input=job,
            text=True,
            stdout=file,
            stderr=file,
            env=make_environment(),
            check=False,
        )
    assert process.returncode == 0, last_lines(log)
    results = json.loads(out.read_text())
    return Answers(
        results["answers"],
        results["texts"],
        parse_counts(results["counters"]) if drafting else None,
    )


def parse_counts(counters: dict[str, Any]) -> DraftCounters:
    return DraftCounters(
        int(counters[f"{COUNTERS}drafts"]),
        int(counters[f"{COUNTERS}draft_tokens"]),
        tuple(int(accepted) for accepted in counters[f"{COUNTERS}accepted_tokens_per_pos"]),
    )


def answer_by_server(
    command: str, prompts: list[list[int]], limits: list[int], scratch: Path
) -> Answers:
    """Return the answers of the server that `command` starts, with the counters of its /metrics."""
    with run_server(command, scratch / "server.log") as client:
        name = client.get("/v1/models").json()["data"][0]["id"]

        def ask(prompt: list[int], limit: int) -> dict[str, Any]:
            body = {
                "model": name,
                "prompt": prompt,
                "max_tokens": limit,
                "temperature": 0.0,
                "return_token_ids": True,
            }
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            choice: dict[str, Any] = answer.json()["choices"][0]
            return choice

        with ThreadPoolExecutor(ROWS) as pool:
            choices = list(pool.map(ask, prompts, limits))
        counts = wait_for_counts(client)
    return Answers(
        [choice["token_ids"] for choice in choices], [choice["text"] for choice in choices], counts
    )


@contextmanager
def run_server(command: str, log: Path) -> Iterator[httpx.Client]:
    """Start a model card's server on a free port, in float32 and small; yield a client of it."""
    port = find_free_port()
    # the build for CPUs lacks the metadata that `vllm serve` asks for; the same:
    _, _, target, *options = shlex.split(command)
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        target,
        *options,
    ]
    small = [
        "--dtype",
        "float32",
        "--max-model-len",
        str(MAX_LENGTH),
        "--max-num-seqs",
        str(ROWS),
        "--enforce-eager",
    ]
    words += [*small, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=file, env=make_environment(), start_new_session=True
        )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False)
    try:
        wait_until_healthy(client, process, log)
        yield client
    finally:
        client.close()
        stop_server(process)


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """End a server and the engine that it started, both of one process group."""
    for signal_number, seconds in ((signal.SIGTERM, 30), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def wait_until_healthy(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert process.poll() is None, last_lines(log)
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise AssertionError(f"no answer in {PATIENCE:.0f} seconds; {last_lines(log)}")


def wait_for_counts(client: httpx.Client) -> DraftCounters | None:
    """Return the counters of /metrics once they stand still: an answer may leave a moment before
    it is counted.
    """
    before = None
    while (now := parse_counters(client.get("/metrics").text, "vllm")) != before:
        before = now
        time.sleep(1)
    return now


def last_lines(log: Path, count: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
