"""Hidden states that a server captures, checked before anything uses them. Shapes: T tokens, L
layers, D target width.

Five checks of each sequence: as many states as tokens; the same token ids; finite; not zero; and
the last state, through the target's final norm and output layer, gives the token that the server
itself gave next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.errors import UserError
from spectrain.features.store_contents import format_layers
from spectrain.models.features import Layer
from spectrain.models.target import Target

from ..servers.base import Completion, CompletionRequest, ServedModel, Server
from ..servers.errors import ServerError

ATTEMPTS = 3
"""Number of requests for a sequence before it counts as failed."""
NUM_PROBES = 4
"""Number of sequences that are captured before anything is written."""
LOGIT_TOLERANCE = 8.0
"""Largest distance of the next token's logit from the largest one, in roundings: the epsilon of the
coarser of both types times the largest logit. Measured with vLLM on a CPU for tiny: 0 in float32,
at most 0.75 in bfloat16."""
NUM_CHECKED = 8
"""Number of generated tokens per answer that are compared with the output layer; each takes a
product with the vocabulary.
"""
SURPRISE_SLACK = 12.0
"""Nats that sampled tokens may cost beyond five standard deviations. Tokens of another model
cost about that much each.
"""

Result = TypeVar("Result")


class StatesError(Exception):
    """States that fail a check, with the reason. Another request may give right ones."""


class OtherModelError(StatesError):
    """States that are not those of the target."""


@dataclass(frozen=True)
class CapturedStates:
    """States of a sequence that pass the checks which need no model."""

    tokens: list[int]
    # Streams [T, L, D] of `StateRequester.captured_layers`, in the server's type.
    states: Tensor
    # The tokens that the server generated after the last states, in order.
    generated: list[int]
    temperature: float = 0.0


def list_captured_layers(layers: Sequence[Layer], num_layers: int) -> tuple[int, ...]:
    """Return the layers, in ascending order, that a server captures for a drafter that reads
    `layers`: theirs and the last.
    """
    return tuple(sorted({*(layer for layer in layers if layer != "final"), num_layers}))


class StateRequester:
    """Requests the states of a target's layers from a server, which captures these layers and
    the last one.
    """

    def __init__(self, server: Server, target: Target, layers: tuple[Layer, ...]) -> None:
        if not server.capabilities.captures_states:
            raise UserError(
                f"server={server.name}: this server captures no states; use server=vllm"
            )
        if target.sharding != "none":
            raise UserError(
                f"target.sharding={target.sharding}: states come from the server; leave it out"
            )
        if not layers:
            raise UserError(
                "server: this family reads no features, because it runs the target itself; leave "
                "the server out"
            )
        self.server, self.target, self.layers = server, target, layers
        self.captured_layers = list_captured_layers(layers, target.num_layers)
        # Sequences whose first request failed a check.
        self.num_repeated = 0

    async def capture_states(self, tokens: list[int]) -> Tensor:
        """Return the states [T, L, D] of `layers`; raise a ServerError or a StatesError if no
        attempt passes the checks.
        """

        async def request() -> Tensor:
            return self.read_layers(await self._request_once(tokens))

        return await self.repeat(request)

    async def request_states(self, tokens: list[int]) -> CapturedStates:
        """Return the states of a sequence for `read_layers`; this is safe while another thread
        runs the target.
        """
        return await self.repeat(lambda: self._request_once(tokens))

    async def _request_once(self, tokens: list[int]) -> CapturedStates:
        completion = await self.server.complete(CompletionRequest(tokens, 1, captures_states=True))
        return self.check_completion(completion, tokens)

    async def repeat(self, request: Callable[[], Awaitable[Result]]) -> Result:
        """Return what a request gives; one that fails, or whose states are wrong, is repeated."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await request()
            except (StatesError, ServerError) as error:
                if attempt == ATTEMPTS or (
                    isinstance(error, ServerError) and error.kind != "failed"
                ):
                    raise
                self.num_repeated += attempt == 1
        raise AssertionError("the last attempt returns or raises")

    def check_completion(
        self, completion: Completion, tokens: list[int], temperature: float = 0.0
    ) -> CapturedStates:
        """Return the states of these tokens in a completion; raise a StatesError if the length, the
        ids or a value is wrong.

        A UserError is raised if the server captures other layers or states of another width.
        """
        states = completion.states
        layers = completion.state_layers
        if states is None or completion.state_tokens is None:
            raise StatesError("the server returned no states")
        if states.ndim != 3 or len(states) != len(tokens):
            raise StatesError(f"the server returned {len(states)} states for {len(tokens)} tokens")
        if completion.state_tokens != tokens:
            raise StatesError("the server returned the states of other tokens")
        if states.shape[2] != self.target.width:
            raise UserError(
                f"server.url: the server's states have width {states.shape[2]}, those of "
                f"{self.target.name} {self.target.width}; it serves another model than "
                f"target={self.target.name}"
            )
        states = states[:, self._find_layers(layers, states.shape[1])]
        if not bool(states.isfinite().all()):
            raise StatesError("a state is not finite")
        if bool((states == 0).all(-1).any()):
            raise StatesError("a state is zero at all positions of its vector")
        if not completion.token_ids:
            raise StatesError("the server did not return the ids of the next tokens")
        return CapturedStates(tokens, states, completion.token_ids, temperature)

    def _find_layers(self, layers: tuple[int, ...] | None, count: int) -> list[int]:
        """Return where the captured layers are in the server's states; a file that names no
        layers must hold just these.
        """
        wanted = self.captured_layers
        if layers is None and count == len(wanted):
            return [*range(count)]
        if layers is None or not {*wanted} <= {*layers} or count != len(layers):
            held = f"{count} layers" if layers is None else f"layers {format_layers(layers)}"
            raise UserError(
                f"server: it captures {held}, and this drafter needs {format_layers(wanted)}; "
                f"start it with spectrain serve server={self.server.name} capture=true and the "
                "same target, recipe and drafter settings"
            )
        return [layers.index(layer) for layer in wanted]

    @torch.no_grad()
    def read_layers(self, captured: CapturedStates) -> Tensor:
        """Return the states [T, L, D] of `layers` in the target's type on its device; an
        OtherModelError if they do not give the tokens that the server generated."""
        target = self.target
        number_of = self.captured_layers.index
        states = captured.states.to(target.device, target.dtype)
        final = target.apply_final_norm(states[None, :, -1])[0]
        self._check_generated(final, captured)
        parts = [
            final if layer == "final" else states[:, number_of(layer)] for layer in self.layers
        ]
        return torch.stack(parts, dim=1)

    def _check_generated(self, final: Tensor, captured: CapturedStates) -> None:
        """Compare generated tokens with the output layer: the largest logit if greedy, else a
        likely one.
        """
        count = len(captured.generated)
        # The last one is always among them.
        chosen = torch.linspace(count - 1, 0, min(count, NUM_CHECKED)).round().long()
        rows = len(final) - count + chosen
        logits = self.target.head.logits(final[rows.to(final.device)][None])[0].float()  # [n, V]
        tokens = torch.tensor(captured.generated, device=logits.device)[chosen.to(logits.device)]
        if int(tokens.max()) >= logits.shape[1]:
            raise OtherModelError(
                f"the server gives token {int(tokens.max())}, beyond the target's vocabulary"
            )
        gaps = measure_gaps(logits, tokens, captured.states.dtype, final.dtype)
        if captured.temperature == 0 and bool((gaps > LOGIT_TOLERANCE).any()):
            worst = int(gaps.argmax())
            raise OtherModelError(
                f"the server gives token {int(tokens[worst])} where its states give "
                f"{int(logits[worst].argmax())}"
            )
        if captured.temperature > 0 and not are_likely(logits / captured.temperature, tokens):
            raise OtherModelError("the server gives tokens that its states make unlikely")

    def connect(self, examples: Sequence[Example]) -> str:
        """Check that the server serves the target's states and has room for these examples; return
        the server's name.

        A UserError says what is wrong. Call this before anything is written, and outside of event
        loops.
        """
        served = self.server.check_ready()
        self._check_room(served, max(len(example.tokens) for example in examples))
        asyncio.run(self._probe_server(examples))
        return f"{self.server.name}: {served.weights or served.name}"

    def _check_room(self, served: ServedModel, longest: int) -> None:
        if served.max_length is not None and longest >= served.max_length:
            raise UserError(
                f"server.url: the server's context has {served.max_length} tokens, and the "
                f"longest sequence {longest} with one more to generate; start it with a longer "
                f"context, or use data.max_length={served.max_length - 1}"
            )

    async def _probe_server(self, examples: Sequence[Example]) -> None:
        """Capture a few short sequences."""
        shortest = sorted(examples, key=lambda example: len(example.tokens))[:NUM_PROBES]
        async with self.server:
            for example in shortest:
                try:
                    await self.capture_states(example.tokens)
                except OtherModelError as error:
                    raise UserError(
                        f"server.url: it serves another model than target={self.target.name}: "
                        f"after a sequence of {len(example.tokens)} tokens {error}; give the "
                        "target that is served"
                    ) from error
                except (StatesError, ServerError) as error:
                    raise UserError(
                        f"server.url: the states of a first sequence cannot be captured: {error}"
                    ) from error


def measure_gaps(logits: Tensor, tokens: Tensor, *dtypes: torch.dtype) -> Tensor:
    """Return the distances [n] of the tokens' logits [n, V] from the largest, in roundings of
    the coarsest type.
    """
    largest = logits.amax(-1)
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes) * logits.abs().amax(-1)
    return (largest - logits.gather(1, tokens[:, None])[:, 0]) / rounding


def are_likely(logits: Tensor, tokens: Tensor) -> bool:
    """Tell whether sampled tokens [n] fit the logits [n, V]: their surprise is at most five
    standard deviations and SURPRISE_SLACK above its expectation. Cutting the distribution, as top_p
    does, only lowers the surprise."""
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    expected = -(probs * log_probs).sum(-1)
    variance = (probs * log_probs.square()).sum(-1) - expected.square()
    surprise = -log_probs.gather(1, tokens[:, None])[:, 0]
    return bool(
        surprise.sum() <= expected.sum() + 5 * variance.clamp(min=0).sum().sqrt() + SURPRISE_SLACK
    )
