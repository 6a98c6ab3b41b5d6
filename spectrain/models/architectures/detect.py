"""The choice of a target's architecture, made once when it is loaded."""

from spectrain.models.cache_arguments import cache_argument
from spectrain.models.model_parts import ModelParts

from .base import Architecture
from .masked import MASKED, Masked
from .probe import Probe, check_cache_argument, probe_target
from .recurrent import Recurrent
from .standard import Standard

ARCHITECTURES: tuple[type[Architecture], ...] = (Masked, Recurrent, Standard)
"""The kinds of targets; a target is of the first kind that matches it, so a new kind stands
before `Standard`.
"""


def detect_architecture(parts: ModelParts) -> Architecture:
    """Return the architecture of a target; raise UserError where trees cannot be verified with
    it.
    """
    # A model on the meta device has only shapes, so nothing can run.
    if parts.device.type == "meta":
        return Standard(cache_argument=cache_argument(parts.decoder))
    # Models that were loaded without the attention interface accept no arguments for it.
    goes_past_interface = parts.config._attn_implementation == MASKED
    probe = (
        Probe(parts, cache_argument(parts.decoder)) if goes_past_interface else probe_target(parts)
    )
    kind = next(kind for kind in ARCHITECTURES if kind.matches(probe))
    architecture = kind.from_probe(probe)
    check_cache_argument(parts, architecture.cache_argument)
    return architecture
