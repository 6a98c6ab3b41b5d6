"""What a training changes and what it learns from, in the words of the surveys.

It trains heads (small networks that do not attend), layers, a draft model, adapters or all of the
target, and learns from the target's distributions (distillation) or from text.
"""

from typing import Any

from torch import nn

from spectrain.drafters.base import adapts_layers
from spectrain.drafters.step_cost import BatchShape

from .footprint import Models, trained_parameters


def describe_needs(models: Models, batch: BatchShape) -> dict[str, Any]:
    """Return what the training changes (`trains`), what it learns from (`learns_from`), and whether
    it reads the target's states (`reads_states`), which the target must compute.
    """
    drafter = models.drafter
    labels = drafter.step_cost(models.target, batch).judged.label_rows
    changes = drafter.capabilities.target_training
    trained = {id(parameter) for stage in drafter.stages for parameter in trained_parameters(stage)}
    own = any(id(parameter) in trained for parameter in drafter.parameters())
    if changes is not None:
        where = "all weights of the target" if changes.adapt == "full" else "adapters of the target"
        kind = f"heads and {where}" if own else where
    elif drafter.capabilities.is_acceptance_probe:
        kind = "a probe"
    elif adapts_layers(drafter):
        kind = "adapters beside the target"
    elif drafter.capabilities.draft_model is not None:
        kind = "a draft model"
    elif not any(count_trained(module, trained) for module in find_networks(drafter)):
        kind = "prompt tokens"
    else:
        attends = any(
            count_trained(module, trained)
            for module in drafter.modules()
            if hasattr(module, "q_proj") or "Attention" in type(module).__name__
        )
        kind = "layers" if attends else "heads"
    source = "the target's distributions" if labels else "text"
    if drafter.capabilities.is_acceptance_probe:
        source = "the target's choices"
    return {"trains": kind, "learns_from": source, "reads_states": bool(drafter.layers)}


def find_networks(drafter: nn.Module) -> list[nn.Module]:
    """Return the modules that compute, not those that look tokens up."""
    return [
        module
        for module in drafter.modules()
        if module is not drafter
        and not isinstance(module, nn.Embedding)
        and not [*module.children()]
    ]


def count_trained(module: nn.Module, trained: set[int]) -> int:
    """Count the trained parameters of a module."""
    return sum(id(parameter) in trained for parameter in module.parameters())
