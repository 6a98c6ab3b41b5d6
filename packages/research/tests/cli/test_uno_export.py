"""Exports of Uno: peft reads what we decode with, and lint names what SGLang would misread."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spectrain.config.build import GroupSpec
from spectrain.export.engine_support import PROGRAMS, list_support
from spectrain.export.linter import lint
from spectrain.export.targets import TargetFiles
from spectrain.models.cache_arguments import cache_argument, read_cache
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.runs.drafters import load_weights
from tests.cli.test_export import export_run, make_run

UNO: dict[str, Any] = {"num_masks": 3, "rank": 4, "alpha": 8.0}


def test_every_program_of_the_table_reads_a_layout() -> None:
    """Only Uno's layout, in this package, is for peft; the core's tests allow programs without."""
    assert {support.program for support in list_support()} == PROGRAMS.keys()


def test_peft_says_what_unos_noise_rows_say(tiny: Target, tmp_path: Path) -> None:
    """Behind the base model's cache, peft's adapter, and what peft merges of it, give our logits at
    random tokens; the folder holds peft's two files and no tensor more, and the command is
    SGLang's."""
    from peft import PeftModel

    run = make_run(tmp_path / "run", tiny, "uno", **UNO)
    out = export_run(run, "uno", tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "spectrain.json",
        "README.md",
    }
    card = (out / "README.md").read_text()
    assert (
        f"--speculative-algorithm UNO --uno-lora-path {out} --speculative-num-draft-tokens 4"
        in card
    )
    drafter = GroupSpec("drafter", "uno", UNO).build(target=tiny)
    load_weights(drafter, run / "drafter")
    text = torch.randint(3, 2000, (1, 9))
    noise = torch.randint(0, 2048, (1, 3))
    numbers = torch.tensor([[-1] * 9 + [0, 1, 2]])
    with torch.no_grad(), drafter.insert_masks(tiny, numbers):
        ours = tiny.run(torch.cat([text, noise], dim=1), ForwardPlan(logits=True)).logits
    assert ours is not None
    with torch.no_grad():
        model: Any = PeftModel.from_pretrained(plain_tiny(tiny), out).eval()
        with model.disable_adapter():
            cached = model(text, use_cache=True)
        cache_copy = copy.deepcopy(read_cache(cached))
        name = cache_argument(plain_tiny(tiny))
        adapted = model(noise, **{name: read_cache(cached)}).logits
        merged = model.merge_and_unload()(noise, **{name: cache_copy}).logits
    torch.testing.assert_close(cached.logits, ours[:, :9], rtol=1e-4, atol=1e-3)
    for logits in (adapted, merged):
        torch.testing.assert_close(logits, ours[:, 9:], rtol=1e-4, atol=1e-3)
    plain = plain_tiny(tiny)(torch.cat([text, noise], dim=1)).logits
    assert (plain[:, 9:] - ours[:, 9:]).abs().max() > 0.01


def plain_tiny(tiny: Target) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32)


def drop_tensors(tensors: dict[str, Tensor], part: str) -> None:
    for name in [name for name in tensors if part in name]:
        del tensors[name]


UNO_FAULTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], None], str]] = {
    "a tensor more": (lambda config, tensors: tensors.update(masks=torch.zeros(3, 128)),
        "unknown-tensor"),
    "a factor less": (lambda config,
        tensors: drop_tensors(tensors, ".layers.2.mlp.up_proj.lora_A."), "missing-tensor"),
    "a layer less": (lambda config, tensors: drop_tensors(tensors, ".layers.7."), "adapter-layers"),
    "another rank": (lambda config, tensors: config.update(r=5), "wrong-shape"),
    "weights of its own": (lambda config, tensors: config.update(modules_to_save=["lm_head"]),
        "adapter-setting"),
    "another scale": (lambda config, tensors: config.update(use_rslora=True), "adapter-setting"),
    "another module": (lambda config, tensors: config["target_modules"].append("lm_head"),
        "adapter-module"),
}  # fmt: skip


@pytest.mark.sweep(2, free=("fault",))
@pytest.mark.parametrize("fault", UNO_FAULTS)
def test_lint_names_what_sglang_would_misread_of_uno(
    fault: str, tiny: Target, tmp_path: Path
) -> None:
    """A sound adapter has no finding; each fault has its own."""
    out = export_run(make_run(tmp_path / "run", tiny, "uno", **UNO), "uno", tmp_path / "out")
    target = TargetFiles("tiny")
    assert not [finding for finding in lint(out, target) if finding.level == "error"]
    config = json.loads((out / "adapter_config.json").read_text())
    tensors = load_file(out / "adapter_model.safetensors")
    change, name = UNO_FAULTS[fault]
    change(config, tensors)
    (out / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, out / "adapter_model.safetensors")
    assert name in {finding.name for finding in lint(out, target) if finding.level == "error"}
