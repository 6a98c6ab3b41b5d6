"""Fingerprints of a target's weights and tokenizer, cheap enough for every start of a training."""

import hashlib

import torch
from torch import Tensor

from .target import Target

# Bytes up to which all values of the weights are hashed.
WHOLE_BYTES = 256 << 20
# Evenly spaced values of each weight that are hashed of a larger model.
NUM_SAMPLES = 4096


def hash_target(target: Target) -> str | None:
    """Hash names, shapes and values of a target's weights: all values of a model of up to 256 MB,
    else 4,096 of each weight.

    The values are rounded to bfloat16, so that a target has the same hash in every type that it is
    loaded in. All processes that share the weights must call this. None for a target that was
    loaded without its layers.
    """
    if not target.has_layers:
        return None
    weights = {
        name: weight
        for name, weight in sorted(target.model.named_parameters())
        if ".lora_" not in name
    }
    is_small = (
        sum(weight.numel() * weight.element_size() for weight in weights.values()) <= WHOLE_BYTES
    )
    digest = hashlib.sha256()
    for name, weight in weights.items():
        full: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        flat = full.detach().flatten()
        sample = flat if is_small else flat[:: max(1, len(flat) // NUM_SAMPLES)]
        sample = sample.bfloat16() if sample.is_floating_point() else sample
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def hash_tokenizer(target: Target) -> str | None:
    """Hash everything that a tokenizer does; None for one that Python code implements."""
    backend = getattr(target.tokenizer, "backend_tokenizer", None)
    return None if backend is None else hashlib.sha256(backend.to_str().encode()).hexdigest()[:16]
