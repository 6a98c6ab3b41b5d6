"""The base of layouts of drafters that fuse layers of their target: EAGLE-3, P-EAGLE and the block
drafters; EAGLE reads one.

A layout translates config.json and the names of tensors; shapes come from the drafter's class, and
all else is shared here.
Sizes: H width of the drafter, V vocabulary of the target, Vd of the drafter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LlamaConfig

from spectrain.config.build import build
from spectrain.drafters.base import Drafter
from spectrain.drafters.layers.layers import LAYER_KEYS
from spectrain.errors import UserError, first_line
from spectrain.models.rope import PARTIAL, RopeError, depends_on_length, fit_to_head, read_rope
from spectrain.models.target import Target

from .layout import DrafterCheckpoint, DrafterFiles, ExpectedTensors, Finding, Layout, Shape
from .targets import TargetFiles, make_meta_target
from .vocabulary import add_maps, check_vocabulary

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
IGNORED_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that every reader ignores without harm."""
SIZE_KEYS: tuple[str, ...] = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


def layer_rope(architecture: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding of a drafter's layers as configurations hold it; raise
    UserError where it cannot be read.
    """
    try:
        rope = fit_to_head(read_rope(architecture), architecture["head_dim"])
    except RopeError as error:
        raise UserError(f"drafter.architecture.rope_parameters: {error}") from error
    if rope["rope_type"] == "longrope" and "attention_factor" in rope:
        # vLLM and SGLang read these keys, transformers the other.
        rope |= dict.fromkeys(("short_mscale", "long_mscale"), rope["attention_factor"])
    return rope


def flat_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a rotary embedding in the form of flat configurations."""
    is_default = set(rope) <= {"rope_type", "rope_theta"} and rope.get("rope_type") == "default"
    scaling = (
        None if is_default else {key: value for key, value in rope.items() if key != "rope_theta"}
    )
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def flatten_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with its nested groups merged into the top level."""
    return {
        **config,
        **(config.get("transformer_layer_config") or {}),
        **(config.get("dflash_config") or {}),
    }


@dataclass
class FusedConfig:
    """A drafter's settings from a layout's config.json, in spectrain's terms."""

    layer_config: dict[str, Any]  # a Llama configuration
    # fused streams, by the layer that they enter; None for the engine's default
    layers: list[int] | None
    variants: dict[str, bool]
    draft_vocab_size: int | None
    settings: dict[str, Any] = field(default_factory=dict)  # further settings of the family

    @property
    def width(self) -> int:
        return int(self.layer_config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """The size of the target's vocabulary."""
        return int(self.layer_config["vocab_size"])

    @property
    def draft_rows(self) -> int:
        """The number of tokens that it can draft."""
        return (
            self.vocab_size
            if self.draft_vocab_size is None
            else min(self.draft_vocab_size, self.vocab_size)
        )

    @property
    def has_draft_vocabulary(self) -> bool:
        return self.draft_rows < self.vocab_size

    @property
    def num_layers(self) -> int:
        return int(self.layer_config.get("num_hidden_layers") or 1)

    @property
    def window(self) -> int | None:
        """The number of positions back that its layers attend to; None for all."""
        kinds = set(self.layer_config.get("layer_types") or [])
        return int(self.layer_config["sliding_window"]) if kinds == {"sliding_attention"} else None

    @property
    def architecture(self) -> dict[str, Any]:
        """The constructor's `architecture`, complete except for variants that are off."""
        heads = self.layer_config["num_attention_heads"]
        values = {
            "head_dim": self.width // heads,
            "num_key_value_heads": heads,
            "rms_norm_eps": 1e-6,
            **self.layer_config,
        }
        values["head_dim"] = values["head_dim"] or self.width // heads
        values["num_key_value_heads"] = values["num_key_value_heads"] or heads
        values["rope_parameters"] = fit_to_head(read_rope(self.layer_config), values["head_dim"])
        variants = {name: True for name, is_on in self.variants.items() if is_on}
        return {key: values[key] for key in LAYER_KEYS if key in values} | variants


class FusedLayout(Layout):
    """The base of a fused drafter's layouts; a layout has `parse_config`, the names of tensors
    and `write`.
    """

    constructor: str
    # Classes that `architectures` in config.json may name; the first is written.
    architectures: ClassVar[tuple[str, ...]]
    # Part of a tensor's name -> what the tensor is: tensors that the family's class lacks, unless
    # `own_parts` is in the name.
    foreign_parts: ClassVar[dict[str, str]] = {".bias": "a bias, which our linears lack"}
    own_parts: tuple[str, ...] = ()
    # Tensors in place of which engines use the target's, whatever the files hold.
    replaced_tensors: ClassVar[tuple[str, ...]] = ()
    # Key of config.json -> the only value that the family's class can represent.
    fixed_values: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }

    @abstractmethod
    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        """Translate config.json into spectrain's terms; raise KeyError naming the keys that are
        missing.
        """

    @abstractmethod
    def native_name(self, name: str) -> str:
        """Return spectrain's name of a tensor."""

    @abstractmethod
    def layout_name(self, name: str) -> str:
        """Return the layout's name of a tensor."""

    @abstractmethod
    def class_settings(
        self, config: FusedConfig, files: DrafterFiles, own_embedding: bool
    ) -> dict[str, Any]:
        """Return the constructor's settings that the files determine."""

    @property
    def choice(self) -> str:
        """The choice of `drafter`, as messages name it."""
        return f"drafter={self.constructor.split('.')[-2]}"

    def native_tensors(self, files: DrafterFiles) -> dict[str, Tensor]:
        """Return the tensors under spectrain's names."""
        return {self.native_name(name): tensor for name, tensor in files.tensors.items()}

    def layout_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under the layout's names."""
        return {self.layout_name(name): tensor for name, tensor in tensors.items()}

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        config = self.parse_config(files)
        shapes = fused_shapes(
            config, {"_target_": self.constructor, **self.class_settings(config, files, False)}
        )
        optional = {
            EMBEDDING: (config.vocab_size, config.width),
            "t2d": shapes.pop("t2d", (config.vocab_size,)),
        }
        if not config.has_draft_vocabulary:
            optional |= {
                HEAD: (config.vocab_size, config.width),
                "d2t": shapes.pop("d2t", (config.vocab_size,)),
            }
            shapes.pop(HEAD, None)
        names = {self.native_name(name): name for name in files.tensors}
        required, optional = (
            {names.get(name, self.layout_name(name)): shape for name, shape in group.items()}
            for group in (shapes, optional)
        )
        foreign = {
            name: (None,) * files.tensors[name].dim() for name in self.find_foreign_tensors(files)
        }
        return ExpectedTensors(required, optional | foreign, IGNORED_TENSORS)

    def has_architecture(self, files: DrafterFiles) -> bool:
        """Tell whether config.json names a class by which engines recognize the layout."""
        return any(name in self.architectures for name in files.config.get("architectures") or [])

    def architecture_findings(self, files: DrafterFiles) -> Iterator[Finding]:
        """Yield a fault where config.json names no such class."""
        if not self.has_architecture(files):
            yield Finding(
                "architecture",
                "error",
                f"architectures={files.config.get('architectures')}",
                f"engines choose the class by it: they expect {self.architectures[0]}",
                f'write ["{self.architectures[0]}"]',
            )

    def find_foreign_tensors(self, files: DrafterFiles) -> dict[str, str]:
        """Return the tensors that the family's class cannot hold, each with a description."""
        matches = {
            name: next((what for part, what in self.foreign_parts.items() if part in name), None)
            for name in files.tensors
            if not any(part in name for part in self.own_parts)
            and not name.endswith(IGNORED_TENSORS)
        }
        return {name: what for name, what in matches.items() if what is not None}

    def find_unsupported(self, files: DrafterFiles) -> str | None:
        """Describe the first tensor, key or file that the family's class cannot represent;
        return None where there is none.
        """
        config = flatten_config(files.config)
        drafter = self.choice
        for name, what in self.find_foreign_tensors(files).items():
            return f"{name} is {what}"
        for key, fixed in self.fixed_values.items():
            if config.get(key, fixed) not in (fixed, None):
                return f"{key}={config[key]}: {drafter} has {key}={fixed}"
        if len(kinds := sorted(set(config.get("layer_types") or []))) > 1:
            return (
                f"layer_types mixes {' and '.join(kinds)}, and all layers of {drafter} attend alike"
            )
        target_width = config.get("target_hidden_size")
        if target_width is not None and target_width != config["hidden_size"]:
            return (
                f"target_hidden_size={target_width}: {drafter} has its target's width, not "
                f"{config['hidden_size']}"
            )
        return None

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        problem = self.find_unsupported(files)
        if problem is not None:
            yield Finding(
                "not-representable",
                "warning",
                problem,
                "spectrain cannot score or fine-tune it",
                "nothing, to serve it",
            )
        config = self.parse_config(files)
        tensors = self.native_tensors(files)
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

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        yield from check_against_target(self.parse_config(files), target)
        for name in self.replaced_tensors:
            tensor = self.native_tensors(files).get(name)
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

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        config = self.parse_config(files)
        tensors = self.native_tensors(files)
        problem = self.find_unsupported(files)
        if problem is not None:
            raise UserError(f"{files.directory}: {problem}")
        tensors = {
            name: tensor for name, tensor in tensors.items() if not name.endswith(IGNORED_TENSORS)
        }
        if (
            target is not None
            and EMBEDDING in tensors
            and equal_when_rounded(tensors[EMBEDDING], target.load_embedding())
        ):
            del tensors[EMBEDDING]
        self.read_head(files, config, tensors, target)
        add_maps(tensors, config.draft_rows, config.vocab_size)
        metadata = files.read_metadata()
        settings = self.class_settings(config, files, EMBEDDING in tensors)
        drafter = {"_target_": self.constructor, **metadata.drafter, **settings}
        return DrafterCheckpoint(
            drafter, tensors, self.target_name(files), description=metadata.description
        )

    @abstractmethod
    def read_head(
        self,
        files: DrafterFiles,
        config: FusedConfig,
        tensors: dict[str, Tensor],
        target: TargetFiles | None,
    ) -> None:
        """Add or drop an output layer that is the target's; raise UserError where the class
        cannot hold the file's.
        """

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        """Raise UserError where this layout has no key for a setting."""
        return

    def target_name(self, files: DrafterFiles) -> str | None:
        """Return the target that the files name."""
        return files.read_metadata().target


def require_keys(config: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Raise KeyError naming every missing key."""
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise KeyError(", ".join(missing))


def fused_shapes(config: FusedConfig, settings: dict[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the tensors of a fused drafter, under spectrain's names; raise
    ValueError where it cannot be built.

    Ids of layers and of the mask token shape nothing, so faults in them are left to other checks;
    so is the rotary embedding.
    """
    count = 3 if config.layers is None else len(config.layers)
    architecture = {
        key: value for key, value in config.architecture.items() if key != "rope_parameters"
    }
    if architecture.get("norm_before_fc"):
        # Both flags together are a fault with a check of its own.
        architecture.pop("fc_norm", None)
    neutral = {
        "layers": list(range(count)),
        "mask_token_id": 0,
        "own_embedding": False,
        "architecture": architecture,
    }
    # The drafter takes its width and its vocabulary from the target, and the sizes of its layers
    # from `architecture`.
    model_config = LlamaConfig(
        hidden_size=config.width,
        vocab_size=config.vocab_size,
        num_hidden_layers=count,
        intermediate_size=1,
        num_attention_heads=1,
    )
    try:
        changes = {key: value for key, value in neutral.items() if key in settings}
        drafter = build_meta_drafter({**settings, **changes}, make_meta_target(model_config))
    except Exception as error:  # settings of another project may raise anything
        raise ValueError(first_line(error)) from error
    return {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}


def build_meta_drafter(settings: dict[str, Any], target: Target) -> Drafter:
    """Return the drafter of these settings on the device "meta", for its shapes."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        drafter: Drafter = build(settings, target=target)
    return drafter


def equal_when_rounded(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors are equal after rounding the second to the first one's dtype."""
    return first.shape == second.shape and torch.equal(first, second.to(first.dtype))


def is_close_to(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors are equal up to rounding to bfloat16."""
    return first.shape == second.shape and torch.allclose(
        first.float(), second.float(), rtol=2**-7, atol=1e-6
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
