"""The only door through which weights of transformers' models are loaded, because none of them may
be invented.

transformers fills weights that a checkpoint lacks, or has in another shape, with random numbers,
and logs a report of them. Here such a checkpoint is refused by the name of its first such weight,
without the report. Tied weights and buffers that no checkpoint holds may be absent, and weights
that the model does not have are no fault: they are those of a vision tower or of layers for
drafting. A whole layer like the others is one, and so is a bias of a module: by its config.json the
model would run without it.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging as transformers_logging

from spectrain.config.plain_files import read_json_object
from spectrain.errors import UserError, first_line

from .checked_tensors import open_tensors
from .checkpoint_files import INDEX_FILE, SINGLE_FILE, check_index, list_weight_files
from .load_errors import describe_adapter
from .model_sizes import check_model_directory

REPORT_ROW = re.compile(
    r"^(?P<weight>\S[^|\n]*?)\s*\|\s*(?:\x1b\[\d+m)?(?P<status>MISSING|MISMATCH|CONVERSION)",
    re.MULTILINE,
)
"""A row of the report of transformers about a weight that was not loaded."""
LAYER_WEIGHT = re.compile(r"(?P<layers>\D+\.)(?P<index>\d+)\.(?P<weight>.+)")
"""The name of a weight of a layer, as in model.layers.3.mlp.up_proj.weight."""
QUANTIZED = ("quantization_config", "compression_config")
"""Keys of config.json that say how weights are quantized."""
REAL_DTYPES = ("F64", "F32", "F16", "BF16")
"""The names of safetensors' types of real numbers that need no scales."""
SCALED_DTYPES = ("F8_", "F6_", "F4")
"""Beginnings of the names of its shorter ones."""
SCALES = (".weight_scale", ".weight_scale_inv")
"""Ends of the names of tensors by which quantized weights are multiplied."""
REPORTING_LOGGERS = ("transformers.modeling_utils", "transformers.integrations.peft")
BAR_DELAY = 3.0
"""Seconds after which a bar of transformers is shown: small models are loaded before."""
ADVICE = "save the model again with all its weights, or use another checkpoint"


def load_pretrained(model_class: Any, model: Any, key: str, **options: Any) -> Any:
    """Load a model by a class of transformers from a directory or the hub; `options` are those of
    its `from_pretrained`.

    A UserError that begins with `key`, as in target.model, names a weight that is missing, has
    another shape, or is quantized without a word of it in config.json.
    """
    # With the sizes ignored, transformers names the weights instead of ending with a reference to
    # its report.
    asked = {**options, "output_loading_info": True, "ignore_mismatched_sizes": True}
    files = [] if "gguf_file" in options else list_dense_files(model, options.get("revision"))
    with hold_back_reports() as reports, clear_bars():
        try:
            network, info = model_class.from_pretrained(model, **asked)
        except SafetensorError as error:
            raise UserError(
                f"{key}={model}: its weights cannot be read ({first_line(error)}); copy its files "
                "again"
            ) from error
        except RuntimeError as error:
            fault = describe_reported_fault(reports)
            if fault is None:
                raise
            reports.clear()
            raise UserError(f"{key}={model}: {fault}; {ADVICE}") from error
        # Of a model with an adapter, the information is that of the adapter alone.
        fault = (
            describe_fault(info)
            or describe_reported_fault(reports)
            or describe_left_out_layer(info["unexpected_keys"], network)
            or describe_unread_quantization(files, info["unexpected_keys"])
            or describe_left_out_bias(files, info["unexpected_keys"], network)
        )
        if fault is not None:
            reports.clear()
            raise UserError(f"{key}={model}: {fault}; {ADVICE}")
    return network


def check_model_files(model: str | Path) -> None:
    """Raise a UserError where the files of a model's directory contradict each other, or where
    reading them would not end. Its tokenizer, too, may be loaded only afterwards; of a name on the
    hub nothing is checked.
    """
    folder = Path(model)
    check_model_directory(folder)
    refuse_adapter(folder)
    check_index(folder)


def refuse_adapter(folder: Path) -> None:
    """Raise a UserError for a directory with an adapter: transformers would load the model that
    the adapter's file names, from wherever that is, in place of the directory's.
    """
    if (folder / "adapter_config.json").is_file():
        beside = (
            "it holds a LoRA adapter beside a model, and adapter_config.json names another model "
            "to load; merge the adapter, or delete that file"
        )
        raise UserError(f"{folder}: {describe_adapter(folder) or beside}")


@contextmanager
def clear_bars() -> Iterator[None]:
    """Let the bars of transformers appear after some seconds alone, and vanish where they end."""
    changes = {"leave": False, "delay": BAR_DELAY}
    transformers_logging.set_tqdm_hook(
        lambda make_bar, args, options: make_bar(*args, **{**options, **changes})
    )
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(None)


def describe_fault(info: Mapping[str, Any]) -> str | None:
    """Describe the first weight that was not loaded, from the loading information of
    transformers; None where all were.
    """
    if info["missing_keys"]:
        return describe_missing(info["missing_keys"])
    if info["mismatched_keys"]:
        name, stored, expected = min(info["mismatched_keys"])
        others = _count_others(info["mismatched_keys"], "have other shapes too")
        return (
            f"{name} has the shape {[*stored]} in its files and {[*expected]} by its "
            f"config.json{others}"
        )
    return None


def describe_reported_fault(reports: Collection[logging.LogRecord]) -> str | None:
    """Describe the first weight that a report of transformers calls missing or unfit; None where
    there is none.
    """
    rows = [row for record in reports for row in REPORT_ROW.finditer(record.getMessage())]
    if not rows:
        return None
    converted = [row["weight"] for row in rows if row["status"] == "CONVERSION"]
    if converted:
        others = _count_others(converted, "cannot either")
        return (
            f"{converted[0]} cannot be made of the weights in its files, of which some are "
            f"missing or do not fit{others}"
        )
    return describe_missing([row["weight"] for row in rows])


def describe_left_out_layer(unexpected: Collection[str], network: nn.Module) -> str | None:
    """Describe the first layer of the files that the model lacks although its weights are named
    as those of a layer that it has; None where there is none.

    Layers for drafting, which config.json counts apart, have weights of their own.
    """
    if not unexpected:
        return None
    own_layers = group_by_layer(network.state_dict())
    own_names: dict[str, set[str]] = defaultdict(set)
    for (layers, _), names in own_layers.items():
        own_names[layers] |= names
    for (layers, index), names in sorted(group_by_layer(unexpected).items()):
        if (layers, index) not in own_layers and names <= own_names[layers]:
            return (
                f"{layers}{index}.{min(names)} is among its weights, and by its config.json the "
                "model has no such layer"
            )
    return None


def describe_unread_quantization(
    files: Collection[Path], unexpected: Collection[str]
) -> str | None:
    """Describe the first weight that transformers took for real numbers although its files hold
    integers, numbers that need scales, or scales of it; None where there is none.
    """
    if not files:
        return None
    scales = [name for name in unexpected if name.endswith(SCALES)]
    if scales:
        return (
            f"{min(scales)} is among its weights, and its config.json does not say how they are "
            "quantized"
        )
    for file in files:
        with open_tensors(file, "copy the file again") as tensors:
            for name in set(tensors.keys()).difference(unexpected):
                dtype = tensors.get_slice(name).get_dtype()
                if dtype.startswith(SCALED_DTYPES):
                    return f"{name} holds rounded numbers ({dtype}) without their scales"
                if name.endswith(".weight") and dtype not in REAL_DTYPES:
                    return f"{name} holds no real numbers ({dtype}) in its files"
    return None


def describe_left_out_bias(
    files: Collection[Path], unexpected: Collection[str], network: nn.Module
) -> str | None:
    """Describe the first bias of the files that a module of the model lacks, as where config.json
    names another class; None where there is none. Zeros change nothing.
    """
    own_names = network.state_dict().keys()
    biases = {
        name
        for name in unexpected
        if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in own_names
    }
    for file in files if biases else ():
        with open_tensors(file, "copy the file again") as tensors:
            for name in sorted(biases.intersection(tensors.keys())):
                if tensors.get_tensor(name).any():
                    return (
                        f"{name} is among its weights, and by its config.json the model has no "
                        "such bias"
                    )
    return None


def list_dense_files(model: Any, revision: str | None) -> list[Path]:
    """Return the safetensors files that transformers loads of a directory, or of a name on the hub
    from the hub's cache; none where config.json says that weights are quantized.
    """
    folder = Path(model)
    if not folder.is_dir():
        try:
            config = try_to_load_from_cache(str(model), "config.json", revision=revision)
        except HFValidationError:  # transformers says what is wrong with the name
            config = None
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    path = folder / "config.json"
    config = read_json_object(path) if path.exists() else {}
    parts = (config, config.get("text_config"))
    if any(isinstance(part, dict) and not part.keys().isdisjoint(QUANTIZED) for part in parts):
        return []
    if not any((folder / name).exists() for name in (INDEX_FILE, SINGLE_FILE)):
        return []
    return [path for path in list_weight_files(folder) if path.is_file()]


def group_by_layer(weights: Collection[str]) -> dict[tuple[str, int], set[str]]:
    """Return (name of a list of layers, index) -> names of weights within this layer."""
    groups: dict[tuple[str, int], set[str]] = defaultdict(set)
    for match in filter(None, map(LAYER_WEIGHT.fullmatch, weights)):
        groups[match["layers"], int(match["index"])].add(match["weight"])
    return groups


def describe_missing(names: Collection[str]) -> str:
    """Describe the first of the weights that a model's files lack."""
    others = _count_others(names, "are missing too")
    return (
        f"{min(names)} is not among its weights{others}, and transformers would fill it with "
        "random numbers"
    )


def _count_others(names: Collection[Any], what: str) -> str:
    return f" ({len(names) - 1} more {what})" if len(names) > 1 else ""


@contextmanager
def hold_back_reports() -> Iterator[list[logging.LogRecord]]:
    """Collect what transformers logs about loading instead of printing it; what is still in the
    list at the end is printed.
    """
    reports: list[logging.LogRecord] = []
    loggers = [logging.getLogger(name) for name in REPORTING_LOGGERS]
    levels = [logger.level for logger in loggers]

    def hold_back(record: logging.LogRecord) -> bool:
        reports.append(record)
        return False

    for logger in loggers:
        logger.addFilter(hold_back)
        # A silenced logger would make no report.
        if not logger.isEnabledFor(logging.WARNING):
            logger.setLevel(logging.WARNING)
    try:
        yield reports
    finally:
        for logger, level in zip(loggers, levels):
            logger.removeFilter(hold_back)
            logger.setLevel(level)
        for record in reports:
            if logging.getLogger(record.name).isEnabledFor(record.levelno):
                logging.getLogger(record.name).handle(record)
