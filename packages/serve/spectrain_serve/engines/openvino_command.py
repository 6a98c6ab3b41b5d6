"""The settings of OpenVINO GenAI, and the command that serves with it. OpenVINO GenAI is a library,
so spectrain serves it.
"""

from __future__ import annotations

from dataclasses import dataclass

from spectrain.errors import UserError
from spectrain.servers.commands import EngineCommand, EngineLaunch

from ..servers.settings import EngineSettings
from .openvino_ir import WEIGHT_FORMATS

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "auto": None}
"""Types in which OpenVINO computes, and its names for them; None leaves the choice to OpenVINO."""


@dataclass
class OpenVinoSettings(EngineSettings):
    """Settings of server=openvino."""

    # Nodes of a draft tree that are verified are server.draft_tokens; this is the number of
    # branches that each level of the tree keeps. Null drafts a chain.
    branching_factor: int | None = None
    # Depth of the draft tree, at most server.draft_tokens; null drafts a chain.
    tree_depth: int | None = None
    # Weight type of the target's converted files: float32, float16, int8 or int4.
    weights: str = "float32"
    # Device of OpenVINO, such as CPU or GPU.
    device: str = "CPU"
    # Threads that OpenVINO computes with; null leaves the choice to OpenVINO.
    threads: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights not in WEIGHT_FORMATS:
            raise UserError(f"server.weights={self.weights}: use {', '.join(WEIGHT_FORMATS)}")
        if self.dtype is not None and self.dtype not in PRECISIONS:
            raise UserError(
                f"server.dtype={self.dtype}: OpenVINO computes in {', '.join(PRECISIONS)}"
            )
        for key in ("branching_factor", "tree_depth", "threads"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"server.{key}={value}: use 1 or more")
        if (self.branching_factor is None) != (self.tree_depth is None):
            raise UserError(
                "server.branching_factor, server.tree_depth: a tree needs both; give both, or "
                "leave both out"
            )


def serve_openvino(launch: EngineLaunch) -> EngineCommand:
    """Return spectrain's command for a launch, as a user types it."""
    served = ["target=hf", f"target.model={launch.target}"]
    if launch.drafter is not None:
        served = [f"run={launch.drafter.path}"]
    return EngineCommand(["spectrain", "serve", *served, "server=openvino"])
