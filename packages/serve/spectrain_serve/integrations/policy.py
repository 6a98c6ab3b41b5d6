"""A target that reads the weights of a policy in training, without a copy of them and without
touching the policy.

It is a second module tree whose parameters share the memory of the policy's. Mode, hooks, attention
and flags of gradients are its own, so that nothing done with it changes what the policy computes.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.models.target import Target


def make_policy_target(spec: RunSpec, policy: nn.Module) -> Target:
    """Return the target of a drafter's settings with the weights of a policy.

    A UserError says that the policy is another model, or that its weights cannot be shared.
    """
    if hasattr(policy, "peft_config"):
        raise UserError(
            "policy: it has adapters (peft), which a drafter's target cannot share; train the "
            "whole model, or merge them first"
        )
    weight = next(policy.parameters())
    settings = {"dtype": str(weight.dtype).removeprefix("torch."), "device": str(weight.device)}
    target: Target = spec.with_settings("target", **settings).target.build()
    target.shares_weights = True
    share_weights(target, policy)
    return target


def share_weights(target: Target, policy: nn.Module) -> None:
    """Let a target read the weights of a policy. Call it before each use: a policy may move its
    weights.
    """
    source = unwrap_compiled(policy)
    weights = dict(source.named_parameters())
    parameters = dict(target.model.named_parameters())
    if weights.keys() != parameters.keys():
        name = min(weights.keys() ^ parameters.keys())
        raise UserError(
            f"policy: {name} is a weight of one of the two only, the policy and the drafter's "
            f"target {target.name}; continue a drafter that was trained for this model"
        )
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise UserError(
                f"policy: {name} has the shape {[*weights[name].shape]}, and that of the "
                f"drafter's target {target.name} {[*parameter.shape]}; continue a drafter that "
                "was trained for this model"
            )
        if weights[name].data_ptr() != parameter.data_ptr():
            parameter.data = weights[name].data


def unwrap_compiled(policy: nn.Module) -> nn.Module:
    """Return the module that torch.compile wraps, or the module itself."""
    original: Any = getattr(policy, "_orig_mod", policy)
    return original
