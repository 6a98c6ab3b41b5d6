"""Sizes that a config.json may name: ones that no model has are refused before anything is built
by them.
"""

import codecs
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spectrain.config.plain_files import read_json_object
from spectrain.errors import UserError

from .rope import RopeError, check_rope
from .tokenizer_files import check_tokenizer_file

# Key -> its largest value. The largest published models have 126 layers, a width of 18,432 and
# 262,400 tokens.
MAX_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "block_size"), 4096),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts",
        "num_local_experts", "n_head"), 1 << 16),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 1 << 17),
    **dict.fromkeys(("medusa_num_layers", "num_nextn_predict_layers", "mtp_num_layers"), 256),
    "medusa_num_heads": 64, "intermediate_size": 1 << 24,
    "vocab_size": 10_000_000,
    "n_routed_experts": 1 << 16, "num_heads": 1 << 16, "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
}  # fmt: skip
# Sizes of which a model has one at least; of the others, as of experts, some have none.
LEAST_ONE = ("hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers",
    "num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings")  # fmt: skip
# Sizes that every config.json of a language model names, each with the names that models gave it.
# Where one is left out, transformers takes that of its class, which is another model's.
NAMED_SIZES = (
    ("hidden_size", "n_embd", "n_embed", "d_model"),
    ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    ("vocab_size",),
)
# Keys of the number of experts of a layer.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Keys whose values are texts, which transformers uses as they are.
TEXTS = ("dtype", "torch_dtype", "model_type", "hidden_act")
# Parts of a configuration with the layers of a language model.
TEXT_PARTS = ("text_config", "transformer_layer_config")
# A drafter of more layers than any target would take seconds to build, even without data.
DRAFTER_SIZES = {
    **MAX_SIZES,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 256),
}
# Keys of the number that a norm adds to a variance; published models have 1e-3 at most.
NORM_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
MAX_EPSILON = 0.01

# Files of settings that transformers reads beside config.json. It does not name the one that it
# cannot read, and passes over a generation_config.json, whose stop tokens then are not known.
SETTINGS_FILES = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "adapter_config.json",
)
# Files that are read whole; a tokenizer takes up to 40 MB, and the index of many experts a few.
TEXT_SUFFIXES = (".json", ".txt", ".jinja", ".model")
MAX_TEXT_BYTES = 200_000_000


def check_model_directory(directory: Path) -> None:
    """Raise a UserError where reading a directory would not end, and for a size in its config.json
    that no model has; of anything but a directory with a config.json nothing is known."""
    if not directory.is_dir():
        return
    refuse_odd_files(directory)
    for name in SETTINGS_FILES:
        if (directory / name).is_file():
            read_settings(directory / name)
    check_tokenizer_file(directory / "tokenizer.json")
    path = directory / "config.json"
    if path.exists():
        config = read_settings(path)
        check_sizes(config, path)
        check_named_sizes(config, path)
        check_embeddings(config, path)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a JSON file that transformers reads, too; raise a UserError for a
    byte-order mark, which it does not know.
    """
    settings = read_json_object(path)
    with path.open("rb") as file:
        if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            raise UserError(
                f"{path}: it begins with a byte-order mark, which transformers cannot read; save "
                "it as UTF-8 without one"
            )
    return settings


def refuse_odd_files(directory: Path) -> None:
    """Raise a UserError for a pipe, a device or a socket in a directory, and for a text file
    that is larger than a model's.
    """
    for path in sorted(directory.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path}: this is no file; copy it again")
        if path.suffix in TEXT_SUFFIXES and path.is_file() and path.stat().st_size > MAX_TEXT_BYTES:
            raise UserError(
                f"{path}: it has more than {MAX_TEXT_BYTES // 1_000_000} MB, which no model "
                "needs; copy the file again"
            )


def check_sizes(config: dict[str, Any], path: Path, limits: Mapping[str, int] = MAX_SIZES) -> None:
    """Raise a UserError for the first size of a configuration, or of a part of it, that no model
    has.

    Null stands for a default. A list has a value for every layer, as of models whose layers differ.
    """
    window = config.get("sliding_window")
    if isinstance(window, (dict, list)):
        raise UserError(
            f"{path}: sliding_window={str(window)[:100]}: use one whole number; copy the file again"
        )
    for key, value in iterate_settings(config):
        remedy = None
        if key in TEXTS and not isinstance(value, str | None):
            remedy = "use a text"
        if key in limits:
            remedy = find_wrong_size(value, limits[key], least=1 if key in LEAST_ONE else 0)
        elif key in NORM_EPSILONS and value is not None and not is_number(value, MAX_EPSILON):
            remedy = f"use a number above 0 that is {MAX_EPSILON} or less"
        if remedy is not None:
            raise UserError(f"{path}: {key}={str(value)[:100]}: {remedy}; copy the file again")


def check_named_sizes(config: dict[str, Any], path: Path) -> None:
    """Raise a UserError for a configuration of a language model that leaves out one of its sizes.

    A model with parts, as with one that reads images, may leave out what its class has. A size that
    is a property follows from others, as the number of layers does from a list of their kinds.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = config.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        return
    kind = CONFIG_MAPPING[name]
    if getattr(kind, "sub_configs", None):
        return
    aliases = getattr(kind, "attribute_map", {})
    for names in NAMED_SIZES:
        keys = [aliases.get(size, size) for size in names]
        sizes = [getattr(kind, key, None) for key in keys]
        has_size = any(size is not None and not isinstance(size, property) for size in sizes)
        if has_size and not any(config.get(key) is not None for key in (*names, *keys)):
            raise UserError(f"{path}: {names[0]} is missing; copy the file again")


def check_embeddings(config: dict[str, Any], path: Path) -> None:
    """Raise a UserError for a rotary embedding of a configuration, or of its language model's
    part, that no model has."""
    for key in (None, *TEXT_PARTS):
        group = config if key is None else config.get(key)
        if isinstance(group, dict):
            try:
                check_rope(group)
            except RopeError as error:
                raise UserError(f"{path}: {error}") from error


def find_wrong_size(value: Any, limit: int, least: int = 0) -> str | None:
    """Return what to write in place of a size; None for a size that a model may have, or for
    null. In a list, a layer may have none of what it counts.
    """
    if isinstance(value, list):
        return next(filter(None, (find_wrong_size(size, limit) for size in value)), None)
    if value is None or (is_number(value, limit, least) and int(value) == value):
        return None
    is_large = isinstance(value, (int, float)) and value > limit
    return f"use {limit} or less" if is_large else f"use a whole number from {least} to {limit}"


def check_shape(config: Any, path: Path) -> None:
    """Raise a UserError where the sizes of a loaded text configuration contradict each other.

    What a config.json leaves out is the default of its class. Sizes in lists, and those of
    configurations whose layers differ, are not compared.
    """
    sizes = config.to_dict()
    check_experts(sizes, path)
    width, heads, pairs, head_dim = (
        sizes.get(key)
        for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if not isinstance(heads, int) or heads < 1:
        return
    if isinstance(width, int) and not head_dim and width < heads:
        raise UserError(
            f"{path}: hidden_size={width} is less than num_attention_heads={heads}; copy the file "
            "again"
        )
    if isinstance(pairs, int) and pairs and heads % pairs:
        raise UserError(
            f"{path}: num_attention_heads={heads} is no multiple of num_key_value_heads={pairs}; "
            "copy the file again"
        )


def check_experts(sizes: Mapping[str, Any], path: Path) -> None:
    """Raise a UserError where a token is sent to more experts than a layer has."""
    chosen = sizes.get("num_experts_per_tok")
    for key in EXPERT_COUNTS:
        count = sizes.get(key)
        if isinstance(chosen, int) and isinstance(count, int) and 0 < count < chosen:
            raise UserError(
                f"{path}: num_experts_per_tok={chosen} is more than {key}={count}; copy the file "
                "again"
            )


def is_number(value: Any, limit: float, least: float = math.ulp(0.0)) -> bool:
    """Tell whether a value is a number, and no truth value, from `least` to `limit`."""
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= limit
    )


def iterate_settings(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a configuration and of its parts."""
    parts = [config]
    while parts:
        for key, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
                continue
            if isinstance(value, list):
                parts += [part for part in value if isinstance(part, dict)]
            yield str(key), value
