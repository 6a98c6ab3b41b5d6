"""economize trains an EAGLE-3 drafter on given batches, in an environment of its own.

It reads a job from standard input as JSON: `target` and `export` (folders; the second one is a
drafter of ours in the flat layout, of which config.json is kept), `layers`, `draft_ids`, `unrolled`
(draft steps in training), `lr`, `seed`, `batches` (lists of rows with `tokens` and the `mask` of
those that the loss counts) and `out`, the folder that gets the trained drafter in the same layout.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import economize
import torch
from economize.techniques.eagle3 import Eagle3Config
from economize.train import Example, collate, fit
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    model = economize.apply(
        target,
        Eagle3Config(
            aux_layers=tuple(job["layers"]),
            draft_vocab=len(job["draft_ids"]),
            train_steps=job["unrolled"],
        ),
    )
    technique = model.techniques["eagle3"]
    technique.set_draft_vocab(job["draft_ids"])
    batches = [collate([make_example(row) for row in rows]) for rows in job["batches"]]
    fit(
        model,
        batches,
        steps=len(batches),
        seed=job["seed"],
        **({} if job["lr"] is None else {"lr": job["lr"]}),
    )
    write_flat(technique.state_dict(), Path(job["export"]), Path(job["out"]))


def make_example(row: dict[str, Any]) -> Example:
    """Return a row; economize marks the positions before the tokens that count."""
    return Example(torch.tensor(row["tokens"]), torch.tensor([*row["mask"][1:], False]).long())


def write_flat(state: dict[str, torch.Tensor], export: Path, folder: Path) -> None:
    """Write a trained drafter under the flat layout's names, with the config.json of an export."""
    folder.mkdir()
    tensors = {
        name.replace("layer.", "midlayer.", 1) if name.startswith("layer.") else name: tensor
        for name, tensor in state.items()
        if not name.startswith("rotary.")
    }
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    shutil.copy(export / "config.json", folder)


if __name__ == "__main__":
    main()
