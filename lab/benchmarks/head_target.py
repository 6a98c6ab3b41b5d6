"""What `target.parts=head` reads of a checkpoint with many layers, and a drafter that is trained
through it.

    python -m lab.benchmarks.head_target [--work DIR] [--out lab/results/head_target.json] [--layers
    94] [--width 1024]

The checkpoint has random weights in bfloat16, in shards of 200 MB (2.4 GB by default), and the
tokenizer of the tiny target. The complete target captures the features of 24 conversations; EAGLE-3
then trains from this store twice, with the complete target and without its layers. Each load runs
in a process of its own, after the checkpoint has left the page cache.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.models.bundled import load_tiny_tokenizer
from spectrain.models.checkpoint_files import INDEX_FILE
from spectrain.models.loading import load_hf
from spectrain.provenance import collect_provenance

SHARD_BYTES = 200_000_000
SETTINGS = [
    "recipe=eagle3",
    "data.limit=24",
    "data.held_out=0",
    "data.max_length=128",
    "drafter.ttt_steps=2",
    "eval=none",
    "source=store",
    "trainer.epochs=1",
    "trainer.log_every=1",
    "tracker=none",
    "target=hf",
]


def save_checkpoint(folder: Path, num_layers: int, width: int) -> int:
    """Write a Llama of random weights shard by shard, and return its bytes."""
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=num_layers,
        hidden_size=width,
        intermediate_size=3 * width,
        vocab_size=2048,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        noise = (
            torch.randn(shape, dtype=torch.bfloat16)
            if len(shape) > 1
            else torch.ones(shape, dtype=torch.bfloat16)
        )
        shard[name] = noise * shape[-1] ** -0.5 if len(shape) > 1 else noise
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES or name == [*shapes][-1]:
            file = f"model-{len({*weight_map.values()}) + 1:05}.safetensors"
            save_file(shard, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    config.save_pretrained(folder)
    load_tiny_tokenizer().save_pretrained(folder)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def drop_from_cache(folder: Path) -> None:
    """Write the files of a folder to disk and remove them from the page cache, so that reading
    them counts.
    """
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_disk_bytes() -> int:
    """Return the bytes that this process has caused to be read from disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def measure_load(folder: Path, parts: Any) -> dict[str, Any]:
    """Load a target in this process; return what that read, took and holds."""
    before = read_disk_bytes()
    start = time.perf_counter()
    target = load_hf(str(folder), parts=parts)
    weights = {
        name: parameter.nbytes
        for name, parameter in target.model.named_parameters()
        if not parameter.is_meta
    }
    return {
        "parts": parts,
        "disk_bytes": read_disk_bytes() - before,
        "weight_bytes": sum(weights.values()),
        "weights": len(weights),
        "layers": target.num_layers,
        "seconds": round(time.perf_counter() - start, 2),
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def measure_load_apart(folder: Path, parts: str) -> dict[str, Any]:
    """Measure a load in a new process, without the checkpoint in the page cache."""
    drop_from_cache(folder)
    command = [
        sys.executable,
        "-m",
        "lab.benchmarks.head_target",
        "--load",
        str(folder),
        "--parts",
        parts,
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def train_from_store(work: Path, parts: str) -> list[float]:
    """Train EAGLE-3 from the store with all of the target or its head, and return the losses."""
    run = work / parts
    words = [*SETTINGS, f"target.model={work / 'checkpoint'}", f"source.path={work / 'store'}"]
    command = ["train", *words, f"target.parts={parts}", f"run={run}"]
    subprocess.run([sys.executable, "-m", "spectrain", *command], check=True)
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/head_target"))
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parents[2] / "lab" / "results" / "head_target.json",
    )
    parser.add_argument("--layers", type=int, default=94)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--parts", default="head")
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(measure_load(options.load, options.parts)))
        return
    work = options.work.absolute()
    checkpoint = work / "checkpoint"
    size = save_checkpoint(checkpoint, options.layers, options.width)
    loads = [measure_load_apart(checkpoint, parts) for parts in ("all", "head")]
    words = [*SETTINGS, f"target.model={checkpoint}", f"source.path={work / 'store'}"]
    subprocess.run([sys.executable, "-m", "spectrain", "data", "store", *words], check=True)
    losses = {parts: train_from_store(work, parts) for parts in ("all", "head")}
    result = {
        "provenance": collect_provenance(),
        "layers": options.layers,
        "width": options.width,
        "checkpoint_bytes": size,
        "files": len([*checkpoint.glob("*.safetensors")]),
        "loads": loads,
        "losses": losses,
        "equal_losses": losses["all"] == losses["head"],
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        json.dumps({key: value for key, value in result.items() if key != "provenance"}, indent=2)
    )


if __name__ == "__main__":
    main()
