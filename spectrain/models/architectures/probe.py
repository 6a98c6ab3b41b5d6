"""One forward of a target at load, with its attention calls and states recorded, from which its
architecture is chosen.

Shapes: T tokens, P probed positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import UserError, describe_error
from spectrain.models.attention import AttentionCall, AttentionRange
from spectrain.models.cache_arguments import CACHE_ARGUMENTS, accepts_argument, cache_argument
from spectrain.models.masks import RequestedMask, record_masks
from spectrain.models.model_parts import ModelParts

from .recurrent_calls import RecurrentModule, StateRecorder

MAX_POSITION = 1 << 20  # largest probed position
ADVICE = (
    "use a target that docs/architectures.md calls identical, or add its architecture "
    "(CONTRIBUTING.md, target quirk)"
)


@dataclass
class Probe:
    """What one forward over two tokens showed."""

    parts: ModelParts
    # argument of the decoder for its cache, by `cache_arguments.cache_argument`
    cache_argument: str
    calls: list[AttentionCall] = field(default_factory=list)
    first_call: list[int] = field(default_factory=list)  # by layer, index of the first call in it
    recurrent_modules: dict[int, RecurrentModule] = field(default_factory=dict)  # by layer
    output: Any = None  # of the first layer
    masks: Sequence[tuple[Tensor, RequestedMask]] = ()  # the masks that the model requested
    accepts_use_cache: bool = True

    @property
    def output_tuple_size(self) -> int:
        """The size of the tuple that a layer returns; 0 where it returns a tensor."""
        return len(self.output) if isinstance(self.output, tuple) else 0

    def record_output(self) -> AbstractContextManager[Any]:
        """Record the output of the first layer while the context is open."""
        return self.parts.layers[0].register_forward_hook(
            lambda module, args, output: setattr(self, "output", output)
        )

    def cache_arguments(self, cache: Any) -> dict[str, Any]:
        """Return the arguments that give the decoder a cache; raise UserError where it has none
        for one.
        """
        check_cache_argument(self.parts, self.cache_argument)
        return {self.cache_argument: cache, "use_cache": True}

    def refuse(self, reason: str) -> UserError:
        """Return the error for a target with which trees cannot be verified."""
        return UserError(
            f"target {self.parts.name}: {reason}, so trees cannot be verified with it; {ADVICE}"
        )


def probe_target(parts: ModelParts) -> Probe:
    """Run two tokens through a target and record what its layers do."""
    recorder = StateRecorder(parts.config)
    probe = Probe(parts, cache_argument(parts.decoder))
    cached: dict[str, Any] = (
        probe.cache_arguments(recorder) if recorder.is_recurrent else {"use_cache": False}
    )
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=parts.device)
    with (
        ExitStack() as hooks,
        torch.no_grad(),
        explain_incompatibility(parts.name),
        record_masks() as probe.masks,
        recorder.record_layers(parts.layers),
    ):
        for layer in parts.layers:
            hooks.enter_context(
                layer.register_forward_pre_hook(
                    lambda *given: probe.first_call.append(len(probe.calls))
                )
            )
        hooks.enter_context(probe.record_output())
        probe.accepts_use_cache = _run_decoder(
            parts, cached | {"input_ids": tokens, "calls": probe.calls}
        )
    # Modules that several layers share have no layer index.
    if len(recorder.updated_layers) == len(probe.calls):
        probe.calls = [
            replace(call, layer=layer) for call, layer in zip(probe.calls, recorder.updated_layers)
        ]
    probe.recurrent_modules = recorder.recurrent_modules
    return probe


def _run_decoder(parts: ModelParts, arguments: dict[str, Any]) -> bool:
    """Run the decoder with a cache; return whether it accepts `use_cache`."""
    try:
        parts.decoder(**arguments)
    except ValueError:
        if not arguments["use_cache"]:
            raise
        parts.decoder(**arguments | {"use_cache": False})
        return False
    return True


def check_cache_argument(parts: ModelParts, name: str) -> None:
    """Raise UserError where the decoder has no argument of this name for its cache."""
    if not accepts_argument(parts.decoder, name):
        *names, last = dict.fromkeys((name, *CACHE_ARGUMENTS))
        shown = f"{', '.join(names)} or {last}"
        raise UserError(
            f"target {parts.name}: its decoder has no argument named {shown}, so it takes no "
            f"cache; {ADVICE}"
        )


@contextmanager
def explain_incompatibility(name: str) -> Iterator[None]:
    """Turn any error of the model's code into a UserError that says that the model does not run
    here.
    """
    try:
        yield
    except UserError:
        raise
    # Errors are of any kind: the model's code is transformers' or a stranger's.
    except Exception as error:
        if "'NoneType' object" in str(error):
            raise UserError(
                f"target {name}: its layers compute with masks themselves, to choose by content "
                f"what they see, and trees have none; {ADVICE}"
            ) from error
        raise UserError(
            f"target {name}: its layers do not run on spectrain's attention and cache "
            f"({describe_error(error)}); {ADVICE}"
        ) from error


def find_range(probe: Probe, call: AttentionCall) -> AttentionRange | None:
    """Return the range of a layer by its mask; None where its call gives the same range, or it
    has no mask.
    """
    mask = next((mask for tensor, mask in probe.masks if tensor is call.mask), None)
    if mask is None:
        return None
    size = mask.size or call.window
    candidates = [
        AttentionRange(),
        *([] if size is None else [AttentionRange(window=size), AttentionRange(chunk=size)]),
    ]
    positions = _probe_positions(size, probe.parts.device)
    visible = mask.visible_keys(positions, positions)
    for candidate in candidates:
        if torch.equal(visible, _range_mask(candidate, positions)):
            return None if candidate == AttentionRange(call.window) else candidate
    raise probe.refuse(
        f"layer {call.layer} sees neither all the text before a token nor a window or chunk of it"
    )


def are_causal(masks: Sequence[tuple[Tensor, RequestedMask]], device: torch.device) -> bool:
    """Return whether a model requested masks, all of which are causal."""
    positions = _probe_positions(None, device)
    causal = _range_mask(AttentionRange(), positions)
    return bool(masks) and all(
        torch.equal(mask.visible_keys(positions, positions), causal) for _, mask in masks
    )


def _probe_positions(size: int | None, device: torch.device) -> Tensor:
    """Return positions [P] around which a mask can change."""
    positions = {0, 1, 2, 3, *(1 << power for power in range(2, MAX_POSITION.bit_length()))}
    positions |= (
        {max(0, turn * size + offset) for turn in range(1, 4) for offset in (-2, -1, 0, 1, 2)}
        if size
        else set()
    )
    return torch.tensor(sorted(positions), device=device)


def _range_mask(reach: AttentionRange, positions: Tensor) -> Tensor:
    """Return [P, P], what a layer of this range sees at these positions."""
    queries = positions[:, None]
    keys = positions[None]
    visible = keys <= queries
    if reach.window is not None:
        visible = visible & (queries - keys < reach.window)
    return (
        visible
        if reach.chunk is None
        else visible & (queries // reach.chunk == keys // reach.chunk)
    )
