"""Faults that every layout of drafters that fuse layers of their target can have, and what none of
their classes can represent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from spectrain.models.rope import PARTIAL, depends_on_length, read_rope

from .container import Finding
from .fused import FusedFiles
from .fused_config import EMBEDDING, HEAD, FusedConfig, flatten_config, is_close_to
from .targets import TargetFiles
from .vocabulary import check_vocabulary


def find_common_obstacle(source: FusedFiles) -> str | None:
    """Describe a tensor or a key that no family or not this one can represent."""
    config = flatten_config(source.files.config)
    choice = source.layout.choice
    for name, what in source.foreign_tensors.items():
        return f"{name} is {what}"
    for key, fixed in source.layout.family.fixed_values.items():
        if config.get(key, fixed) not in (fixed, None):
            return f"{key}={config[key]}: {choice} has {key}={fixed}"
    if len(kinds := sorted(set(config.get("layer_types") or []))) > 1:
        return f"layer_types mixes {' and '.join(kinds)}, and all layers of {choice} attend alike"
    target_width = config.get("target_hidden_size")
    if target_width is not None and target_width != config["hidden_size"]:
        return (
            f"target_hidden_size={target_width}: {choice} has its target's width, not "
            f"{config['hidden_size']}"
        )
    return None


def common_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield the faults that every layout of fused drafters can have."""
    if source.obstacle is not None:
        yield Finding(
            "not-representable",
            "warning",
            source.obstacle,
            "spectrain cannot score or fine-tune it",
            "nothing, to serve it",
        )
    config = source.config
    tensors = source.tensors
    yield from check_rope(config.layer_config)
    yield from check_vocabulary(config.vocab_size, tensors)
    yield from check_layers_and_norms(config, tensors)
    if len(tensors.get("d2t", ())) == config.vocab_size:
        yield Finding(
            "d2t-of-all",
            "error",
            "the files hold d2t and an output layer over the full vocabulary",
            "vLLM expects no map there and stops at the tensor",
            "spectrain convert DIR OUT --to vllm --target TARGET",
            is_repairable=True,
        )


def architecture_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a fault where config.json names no class by which engines recognize the layout."""
    if not source.has_architecture:
        yield Finding(
            "architecture",
            "error",
            f"architectures={source.files.config.get('architectures')}",
            f"engines choose the class by it: they expect {source.layout.architectures[0]}",
            f'write ["{source.layout.architectures[0]}"]',
        )


def common_target_findings(source: FusedFiles, target: TargetFiles) -> Iterator[Finding]:
    """Yield the settings that contradict the target's, and tensors that an engine replaces by the
    target's.
    """
    yield from check_against_target(source.config, target)
    for name in source.layout.replaced_tensors:
        tensor = source.tensors.get(name)
        load = {EMBEDDING: target.load_embedding, HEAD: target.load_head}[name]
        if tensor is not None and not is_close_to(tensor, load()):
            yield Finding(
                "ignored-tensor",
                "warning",
                f"the files hold {name}, and it is not the target's",
                "SGLang uses the target's instead, so the drafter reads other numbers than it "
                "was trained with",
                "serve it with vLLM: spectrain convert DIR OUT --to vllm --target TARGET; or "
                "train without one of its own",
            )


def check_rope(layer_config: dict[str, Any]) -> Iterator[Finding]:
    """Yield the keys of a rotary embedding that engines and spectrain interpret differently."""
    rope = read_rope(layer_config)
    kind = rope["rope_type"]
    share = rope.get(PARTIAL)
    if share is not None and kind != "proportional":
        yield Finding(
            "partial-rotary",
            "warning",
            f"{PARTIAL}={share}: spectrain, SpecForge and Llama's class rotate whole heads",
            "vLLM and SGLang rotate that part of each head, which costs acceptance where it was "
            "not trained so",
            "leave the key out, as spectrain convert does, if whole heads were rotated in training",
        )
    if depends_on_length(rope):
        yield Finding(
            "rope-by-length",
            "warning",
            f"rope_type={kind} scales in transformers only when a text reaches its length",
            "vLLM and SGLang scale every position, or choose by the served length",
            "serve texts below that length",
        )


def check_layers_and_norms(config: FusedConfig, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Yield the faults of the fused layers' ids and of norms whose flags and tensors disagree."""
    layers = config.layers
    if layers is not None and any(not isinstance(layer, int) for layer in layers):
        yield Finding(
            "layer-ids-range",
            "error",
            f"layer ids are {layers}",
            "engines need integers",
            "write integers",
        )
    elif layers is not None and layers != sorted(set(layers)):
        yield Finding(
            "layer-ids-order",
            "error",
            f"layer ids {layers} do not ascend",
            "vLLM sorts them, so fc reads its inputs in another order than it was trained on",
            "sort them, and the columns of fc.weight with them",
        )
    for flag, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if (name in tensors) != bool(config.architecture.get(flag)):
            yield Finding(
                "norm-flag",
                "error",
                f"{flag}={bool(config.architecture.get(flag))} and {name} is "
                f"{'present' if name in tensors else 'missing'}",
                "either the norm is skipped, or an untrained one is used",
                f"write {flag} as it was trained",
            )


def check_against_target(config: FusedConfig, target: TargetFiles) -> Iterator[Finding]:
    """Yield the settings that contradict the target's."""
    target_config = target.config
    vocab = target.vocab_size
    if config.layer_config["vocab_size"] != vocab:
        yield Finding(
            "vocab-size",
            "error",
            f"vocab_size is {config.layer_config['vocab_size']} and the target's {vocab}",
            "engines allocate d2t and the embedding by it",
            "write the target's, or lint with the target it is for",
        )
    if config.width != target_config.hidden_size:
        yield Finding(
            "hidden-size",
            "error",
            f"hidden_size is {config.width} and the target's {target_config.hidden_size}",
            "the target's states do not fit",
            "lint with the target it is for",
        )
    layers = config.layers or []
    if any(isinstance(layer, int) and not 0 <= layer <= target.num_layers for layer in layers):
        yield Finding(
            "layer-ids-range",
            "error",
            f"layers {layers} are not all in the target's range 0 to {target.num_layers}",
            "engines stop, or never fill the features",
            "write the layers that it was trained on",
        )
    rope = config.architecture["rope_parameters"]
    target_rope = target.drafter_rope(config.architecture["head_dim"])
    differing = sorted(
        key for key in {*rope, *target_rope} if rope.get(key) != target_rope.get(key)
    )
    if differing:
        shown = ", ".join(
            f"{key} {rope.get(key)} against {target_rope.get(key)}" for key in differing[:3]
        )
        yield Finding(
            "rope",
            "warning",
            f"the rotary embedding is not the target's: {shown}",
            "correct only if it was trained so; often it is a default that was never replaced",
            f"write the target's, which for whole heads is {target_rope}",
        )
    max_positions = config.layer_config.get("max_position_embeddings")
    if max_positions is not None and max_positions < target_config.max_position_embeddings:
        yield Finding(
            "max-position",
            "warning",
            f"max_position_embeddings is {max_positions}, the target's "
            f"{target_config.max_position_embeddings}",
            "some engines limit the served context to it",
            "write the target's",
        )
