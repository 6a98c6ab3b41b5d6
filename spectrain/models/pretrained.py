"""The only door through which weights of transformers' models are loaded, because none of them may
be invented.

transformers fills weights that a checkpoint lacks, or has in another shape, with random numbers,
and logs a report of them. Here such a checkpoint is refused by the name of its first such weight,
without the report. Tied weights and buffers that no checkpoint holds may be absent, and weights
that the model does not have are no fault: they are those of a vision tower or of layers for
drafting. A whole layer like the others is one: by its config.json the model would run without it.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging as transformers_logging

from spectrain.errors import UserError, first_line

from .checkpoint_files import INDEX_FILE, read_index

REPORT_ROW = re.compile(
    r"^(?P<weight>\S[^|\n]*?)\s*\|\s*(?:\x1b\[\d+m)?(?P<status>MISSING|MISMATCH|CONVERSION)",
    re.MULTILINE,
)
"""A row of the report of transformers about a weight that was not loaded."""
LAYER_WEIGHT = re.compile(r"(?P<layers>\D+\.)(?P<index>\d+)\.(?P<weight>.+)")
"""The name of a weight of a layer, as in model.layers.3.mlp.up_proj.weight."""
REPORTING_LOGGERS = ("transformers.modeling_utils", "transformers.integrations.peft")
ADVICE = "save the model again with all its weights, or use another checkpoint"


def load_pretrained(model_class: Any, model: Any, key: str, **options: Any) -> Any:
    """Load a model by a class of transformers from a directory or the hub; `options` are those of
    its `from_pretrained`.

    A UserError that begins with `key`, as in target.model, names a weight that is missing or has
    another shape.
    """
    # With the sizes ignored, transformers names the weights instead of ending with a reference to
    # its report.
    asked = {**options, "output_loading_info": True, "ignore_mismatched_sizes": True}
    index = Path(model) / INDEX_FILE
    if index.exists():
        read_index(index)
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
        )
        if fault is not None:
            reports.clear()
            raise UserError(f"{key}={model}: {fault}; {ADVICE}")
    return network


@contextmanager
def clear_bars() -> Iterator[None]:
    """Let the bars of transformers vanish where they end, in place of remaining on the screen."""
    transformers_logging.set_tqdm_hook(
        lambda make_bar, args, options: make_bar(*args, **{**options, "leave": False})
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
