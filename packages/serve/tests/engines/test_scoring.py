"""vLLM is scored as our users score it: started with a run's drafter and without, and with broken
exports, each named.

The drafters are those that `make test-engines` trains (`test_vllm`). Our own chain decodes with the
drafter as it was trained.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import load_file, save_file

import spectrain
from spectrain.cli.export import export_command
from spectrain.export.targets import TargetFiles
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain_serve.engines.launch import start_engine
from spectrain_serve.layouts.gguf_layout import convert_heads
from spectrain_serve.servers.vllm import VllmServer, VllmSettings

from .test_vllm import PROMPTS, RUNS, TOKENS

PORT = 8345
LEVELS = [1, 4, 8]
SETTINGS = {
    # In bfloat16 rounding would decide between tokens.
    "target.dtype": "float32",
    "eval.limit": PROMPTS,
    "eval.max_new_tokens": TOKENS,
    "eval.report": False,
}


@pytest.mark.parametrize("recipe", ["eagle3", "medusa1", "gkd", "tiny-peagle"])
def test_a_server_is_scored_as_our_chain(recipe: str, tmp_path: Path) -> None:
    """At every concurrency: rounds, counters and outputs equal our chain's, vLLM's own totals,
    and vLLM without a drafter.
    """
    settings = {
        "server.python": sys.executable,
        "server.port": PORT,
        "server.dtype": "float32",
        "eval.concurrency": LEVELS,
        "eval.name": "server",
    }
    summary = spectrain.evaluate_server(
        "vllm", run=RUNS / f"engines-{recipe}", serve=True, **settings, **SETTINGS
    )
    own = summary["server"]["own_chain"]
    server = summary["server"]
    assert own["equal"] == own["checked"] == own["same_outputs"] == PROMPTS
    assert server["requests_counted"] == server["totals_counted"]
    levels = [summary, *summary["compared"].values()]
    assert [entry["serving"]["concurrency"] for entry in levels] == LEVELS
    for entry in levels:
        assert (
            entry["acceptance_length"]["pooled"]
            == summary["acceptance_length"]["pooled"]
            == own["acceptance_length"]
        )
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == PROMPTS


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def shift_layers(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [
        layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]
    ]


def permute(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors.update(convert_heads(tensors, config["transformer_layer_config"], to_file=True))


def read_offsets_as_ids(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] -= torch.arange(len(tensors["d2t"]))


def add_window(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    window = {
        "sliding_window": 48,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"],
        "max_window_layers": 0,
    }
    config["transformer_layer_config"] |= window


FAULTS: dict[str, tuple[str, Change]] = {
    "layers one lower": ("layer-ids-off-by-one", shift_layers),
    "the other residual": (
        "norm-before-residual-swapped",
        lambda config, tensors: config.update(norm_before_residual=True),
    ),
    "normed feedback": (
        "norm-output-swapped",
        lambda config, tensors: config.update(norm_output=True),
    ),
    "queries and keys permuted": ("heads-permuted", permute),
    "offsets read as ids": ("d2t-as-ids", read_offsets_as_ids),
    "a window of 48": ("context-window", add_window),
}


@contextmanager
def serve_broken(folder: Path, change: Change) -> Iterator[str]:
    """Start vLLM with the export in a folder after a change, and yield its address."""
    config = folder / "config.json"
    weights = folder / "model.safetensors"
    entries = json.loads(config.read_text())
    tensors = load_file(weights)
    change(entries, tensors)
    config.write_text(json.dumps(entries))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        weights,
        metadata={"format": "pt"},
    )
    server = VllmServer(VllmSettings(python=sys.executable, port=PORT))
    launch = EngineLaunch(str(TargetFiles("smollm2").directory), "target", "float32")
    with start_engine(
        server, replace(launch, drafter=DrafterLaunch("eagle3", str(folder), 3))
    ) as engine:
        yield engine.url


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_exports_are_named(fault: str, tmp_path: Path) -> None:
    """A broken export of the EAGLE-3 drafter is served; the score names the fault, which
    explains vLLM's rounds.
    """
    name, change = FAULTS[fault]
    run = RUNS / "engines-eagle3"
    with serve_broken(export_command(str(run), "vllm", str(tmp_path / "exported")), change) as url:
        settings = {**SETTINGS, "eval.limit": 8, "eval.name": "broken"}
        summary = spectrain.evaluate_server("vllm", url, run=run, **settings)
    cause = summary["server"]["own_chain"]["cause"]
    assert cause["name"] == name and cause["agreement"]["share"] > 0.95
