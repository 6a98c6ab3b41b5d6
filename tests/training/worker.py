"""What test_processes.py starts on several processes: trains drafters and writes down what came of it. Not a test."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter
from spectrain.loading import load_tiny
from spectrain.sources import Generated, Live
from spectrain.target import Target
from spectrain.training.loop import Trainer

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3.Eagle3", {"ttt_steps": 2, "vocab_size": 256}),
    "medusa": ("medusa.Medusa", {"num_heads": 2, "vocab_size": 256}),
    "medusa2": ("medusa.Medusa", {"num_heads": 2, "vocab_size": 256, "adapt": "lora", "rank": 4, "heads_first": 0.5}),
    "hydra": ("hydra.Hydra", {"num_heads": 2, "vocab_size": 256, "prefix_attention": True}),
    "causal": ("causal.Causal", {"num_layers": 2}),
    "pard": ("pard.Pard", {"num_layers": 2, "num_drafts": 3}),
    "kangaroo": ("kangaroo.Kangaroo", {}),
    "gated_lora": ("gated_lora.GatedLora", {"num_masks": 2, "rank": 4}),
    "early_exit": ("early_exit.EarlyExit", {"max_dropout": 0.5, "exit_scale": 1.0, "self_distillation": True}),
}


def dataset(count: int = 8, length: int = 16) -> Dataset:
    """Equally long conversations, so that every step sees all of them; prompts of unequal length."""
    rows = torch.randint(3, 2000, (count, length), generator=torch.Generator().manual_seed(5)).tolist()
    return Dataset([Example(row, [i >= 4 + n % 5 for i in range(length)]) for n, row in enumerate(rows)], count, 0, 0)


def make(family: str, target: Target) -> Drafter:
    import importlib

    path, options = FAMILIES[family]
    module, name = path.split(".")
    torch.manual_seed(0)
    made: Drafter = getattr(importlib.import_module(f"spectrain.drafters.{module}"), name)(target, **options)
    made.prepare(target, torch.arange(target.head.vocab_size))
    return made


def train(family: str, out: Path, options: dict[str, Any], generated: bool = False) -> None:
    """Train one family and write its weights, those of the target that it trained, and the metrics to `out`."""
    target = load_tiny()
    drafter = make(family, target)
    names = sorted(name for name, parameter in target.named_parameters() if id(parameter) in _trained(drafter))
    trainer = Trainer(**{"lr": 1e-3, "max_steps": 4, "warmup": 0.0, "log_every": 1, **options})
    source = Generated(0.5, "target", max_new_tokens=4) if generated else Live()
    shared = trainer.fit(drafter, target, dataset(), source, out)
    if shared.is_main:
        weights = {f"drafter.{name}": value.clone() for name, value in drafter.state_dict().items()}
        after = dict(target.named_parameters())
        weights |= {f"target.{name}": after[name].detach().clone() for name in names if name in after}
        save_file(weights, out / "weights.safetensors")


def _trained(drafter: Drafter) -> set[int]:
    own = {id(parameter) for parameter in drafter.parameters()}
    return {id(p) for group in drafter.param_groups(1) for p in group["params"]} - own


if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in json.loads(sys.argv[1]):
        train(job["family"], Path(job["out"]), job["options"], job.get("generated", False))
