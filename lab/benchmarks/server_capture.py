"""Hidden states from a server against those of the target in this process: errors, next tokens, and
tokens per second.

    spectrain serve target=tiny recipe=eagle3 server=vllm server.python=ENV/bin/python
    server.port=8123 capture=true python -m lab.benchmarks.server_capture url=http://127.0.0.1:8123/v1
    layers=[2,4,5,8] [target=tiny] [dtype=float32]

It captures random token sequences whose lengths lie around the engine's blocks, conversations of
the embedded data at many requests at a time, and greedy answers with their prompts. Each state is
compared with the same layer of the target: the largest relative error of a state, by layer.
Distances of the server's next token from the largest logit are in roundings, as
`spectrain_serve.training.server_states` limits them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.benchmarks.command import run_benchmark
from spectrain.data.readers import EmbeddedReader
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain_serve.servers.base import Completion, CompletionRequest
from spectrain_serve.servers.vllm import VllmServer, VllmSettings
from spectrain_serve.training.server_states import measure_gaps

BLOCK_LENGTHS = (1, 5, 40, 127, 128, 129, 200, 255, 256, 257, 300, 500)


class CaptureBenchmark:
    """Compares the states of a vLLM server that was started with capture=true with those of the
    target.
    """

    def __init__(
        self,
        url: str,
        layers: tuple[int, ...],
        target: str = "tiny",
        dtype: str = "float32",
        limit: int = 200,
        concurrency: int = 16,
        new_tokens: int = 32,
        out: str | None = None,
    ) -> None:
        self.url = url
        self.layers = tuple(layers)
        self.limit = limit
        self.new_tokens = new_tokens
        self.out = out
        self.concurrency = concurrency
        self.target = Target.from_pretrained(target, dtype)
        self.target.pack_weights()

    def run(self) -> None:
        server = VllmServer(VllmSettings(url=self.url, concurrency=self.concurrency))
        served = server.check_ready()
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.target.head.vocab_size
        random = [
            torch.randint(5, vocabulary, (length,), generator=generator).tolist()
            for length in BLOCK_LENGTHS
        ]
        reader = EmbeddedReader(limit=self.limit, max_length=512)
        examples = reader.make_dataset(self.target.template).examples
        conversations = [example.tokens for example in examples]
        prompts = [example.prompt for example in examples[: max(1, self.limit // 4)]]
        result = {
            "target": self.target.name,
            "dtype": str(self.target.dtype),
            "served": served.weights,
            "layers": self.layers,
            "concurrency": self.concurrency,
            "block lengths": self.measure(server, random, 1),
            "conversations": self.measure(server, conversations, 1),
            f"answers of {self.new_tokens} tokens": self.measure(server, prompts, self.new_tokens),
            "made_with": collect_provenance(),
        }
        print(
            json.dumps(
                {key: value for key, value in result.items() if key != "made_with"}, indent=1
            )
        )
        if self.out is not None:
            Path(self.out).write_text(json.dumps(result, indent=1) + "\n")

    def measure(
        self, server: VllmServer, sequences: Sequence[list[int]], new_tokens: int
    ) -> dict[str, Any]:
        """Capture sequences from the server, run the target over the same tokens, and compare."""
        began = time.perf_counter()
        busy = time.process_time()
        completions = asyncio.run(self.request_all(server, sequences, new_tokens))
        seconds = time.perf_counter() - began
        own_work = time.process_time() - busy
        errors = torch.zeros(len(self.layers))
        gaps = 0.0
        num_wrong = 0
        tokens = 0
        target_seconds = target_work = 0.0
        for sequence, completion in zip(sequences, completions):
            assert completion.states is not None and completion.token_ids is not None
            expected = sequence + (completion.token_ids[:-1] if new_tokens > 1 else [])
            num_wrong += completion.state_tokens != expected or len(completion.states) != len(
                expected
            )
            began = time.perf_counter()
            busy = time.process_time()
            hidden = self.target.features(torch.tensor([expected]), (*self.layers, "final")).hidden[
                0
            ]
            target_seconds = target_seconds + time.perf_counter() - began
            target_work = target_work + time.process_time() - busy
            errors = errors.maximum(relative_errors(completion.states, hidden[:, :-1]))
            gaps = max(gaps, self.largest_gap(completion))
            tokens += len(expected)
        return {
            "sequences": len(sequences),
            "tokens": tokens,
            "wrong ids or lengths": num_wrong,
            "largest relative error by layer": [float(f"{error:.2g}") for error in errors.tolist()],
            "largest distance of the next token, in roundings": round(gaps, 3),
            "tokens per second": round(tokens / seconds),
            "of the target here": round(tokens / target_seconds),
            "tokens per CPU second of the client": round(tokens / own_work),
            "of the target here, per CPU second": round(tokens / target_work),
        }

    async def request_all(
        self, server: VllmServer, sequences: Sequence[list[int]], new_tokens: int
    ) -> list[Completion]:
        slots = asyncio.Semaphore(self.concurrency)

        async def request(tokens: list[int]) -> Completion:
            async with slots:
                return await server.complete(
                    CompletionRequest(tokens, new_tokens, captures_states=True)
                )

        async with server:
            return await asyncio.gather(*map(request, sequences))

    def largest_gap(self, completion: Completion) -> float:
        """Return the largest distance of a generated token's logit from the largest one, in
        roundings.
        """
        assert completion.states is not None and completion.token_ids is not None
        last = completion.states[-len(completion.token_ids) :, -1].to(self.target.dtype)
        final = self.target.apply_final_norm(last[None])
        logits = self.target.head.logits(final)[0].float()
        gaps = measure_gaps(
            logits, torch.tensor(completion.token_ids), completion.states.dtype, self.target.dtype
        )
        return float(gaps.max())


def relative_errors(states: Tensor, own: Tensor) -> Tensor:
    """Return the largest relative error [L] of states [T, L, D]."""
    states = states.float()
    own = own.float()
    return ((states - own).norm(dim=-1) / own.norm(dim=-1)).amax(0)


if __name__ == "__main__":
    run_benchmark(CaptureBenchmark)
