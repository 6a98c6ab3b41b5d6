"""Another project's checkpoint is read in its own layout and fine-tuned on a new domain, where
more of it is then accepted.
"""

import gzip
import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from safetensors.torch import load_file

from spectrain.config.spec import RunSpec
from spectrain.data.readers import DATA_FOLDER
from spectrain.export.converter import convert
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.runs.score import evaluate
from spectrain.runs.train import train_and_score

from .foreign import write_checkpoint, write_specforge
from .foreign import write_eagle1 as write_foreign_eagle1

COUNT = 200  # conversations of the first training, and as many of the new domain


def write_domains(folder: Path) -> None:
    """Write general.jsonl without code, code.jsonl, and prompts.jsonl with code that neither
    holds.
    """
    lines = (
        gzip.decompress((DATA_FOLDER / "conversations.jsonl.gz").read_bytes()).decode().splitlines()
    )
    conversations = [json.loads(line) for line in lines]
    code = [row for row in conversations if row["category"] == "code"]
    general = [row for row in conversations if row["category"] != "code"][::3][:COUNT]
    rows = {
        "general": general,
        "code": code[:COUNT],
        "prompts": [{**row, "messages": row["messages"][:1]} for row in code[-40:]],
    }
    for name, selected in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in selected))


def train_drafter(folder: Path, recipe: str, data: str, *more: str) -> Path:
    overrides = [
        f"recipe={recipe}",
        "target=tiny",
        "data=jsonl",
        f"data.path={folder / data}",
        "eval=none",
        f"run={folder / f'{recipe}-{data}'}",
        "++trainer.epochs=3",
        *more,
    ]
    overrides += [] if recipe == "eagle1" else ["++drafter.vocab_size=2048"]
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("train", overrides=overrides)
    return train_and_score(RunSpec.from_config(config, overrides))


def measure_acceptance(folder: Path, drafter: Path) -> float:
    """Return the tokens per forward of greedy chains on the new domain's prompts."""
    overrides = [
        f"run={drafter}",
        "target=tiny",
        "tree=chain",
        "tree.depth=3",
        "eval=default",
        "++eval.baselines=[]",
        f"++eval.prompts={folder / 'prompts.jsonl'}",
        "++eval.max_new_tokens=48",
        "++eval.oracle=false",
    ]
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        spec, out = resolve_eval_spec(compose("eval", overrides=overrides))
    summary = evaluate(spec, out)
    assert summary["lossless"]["identical"] == summary["lossless"]["checked"] == 40
    return float(summary["acceptance_length"]["pooled"])


def as_specforge(ours: Path, directory: Path, tiny: Target) -> Path:
    """Write our trained tensors under SpecForge's names, renamed here by hand."""
    write_specforge(directory, tiny, draft_vocab=2048)
    layer = ("self_attn", "mlp", "input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = load_file(ours / "drafter" / "model.safetensors")
    renamed = {
        f"midlayer.{name}" if name.startswith(layer) else name: tensor
        for name, tensor in tensors.items()
    }
    return write_checkpoint(directory, json.loads((directory / "config.json").read_text()), renamed)


def as_medusa(ours: Path, directory: Path, tiny: Target) -> Path:
    """Write our trained tensors under the names of Medusa's authors."""
    tensors = load_file(ours / "drafter" / "model.safetensors")
    renamed = {}
    for head in range(3):
        renamed[f"{head}.0.linear.weight"] = tensors[f"heads.{head}.blocks.0.linear.weight"]
        renamed[f"{head}.0.linear.bias"] = tensors[f"heads.{head}.blocks.0.linear.bias"]
        renamed[f"{head}.1.weight"] = tensors[f"heads.{head}.lm_head.weight"]
    settings = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": tiny.path}
    return write_checkpoint(directory, settings, renamed, "medusa_lm_head.safetensors")


def as_eagle1(ours: Path, directory: Path, tiny: Target) -> Path:
    """Write our trained tensors under the names of EAGLE's authors, with the target's embedding."""
    write_foreign_eagle1(directory, tiny, bias=False)
    tensors = load_file(ours / "drafter" / "model.safetensors")
    renamed = {
        name if name.startswith("fc.") else f"layers.0.{name}": tensor
        for name, tensor in tensors.items()
    }
    embedding = load_file(directory / "model.safetensors")["embed_tokens.weight"]
    return write_checkpoint(
        directory,
        json.loads((directory / "config.json").read_text()),
        renamed | {"embed_tokens.weight": embedding},
    )


FOREIGN = {"eagle1": as_eagle1, "eagle3": as_specforge, "medusa1": as_medusa}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FOREIGN)
def test_fine_tuning_a_foreign_checkpoint(recipe: str, tiny: Target, tmp_path: Path) -> None:
    """On the new domain acceptance is the same after conversion, and higher after fine-tuning."""
    write_domains(tmp_path)
    first = train_drafter(tmp_path, recipe, "general.jsonl")
    start = FOREIGN[recipe](first, tmp_path / "foreign", tiny)
    convert(start, tmp_path / "converted", "spectrain", TargetFiles("tiny"))
    before = measure_acceptance(tmp_path, start)
    assert measure_acceptance(tmp_path, tmp_path / "converted") == before
    tuned = train_drafter(tmp_path, recipe, "code.jsonl", f"++drafter.init={start}")
    after = measure_acceptance(tmp_path, tuned)
    print(f"\n{recipe}: {before:.3f} before, {after:.3f} after")
    assert after > before
