"""The worker of test_processes.py: it trains drafters on several processes and writes the
results. Not a test itself.
"""

import copy
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object
from safetensors.torch import save_file

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain.servers.ports import find_free_port
from spectrain.training.trainer import Trainer
from tests.factories import make_drafter

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("spectrain.drafters.eagle3.Eagle3", {"ttt_steps": 2, "vocab_size": 256}),
    "medusa": ("spectrain.drafters.medusa.Medusa", {"num_heads": 2, "vocab_size": 256}),
    "medusa2": (
        "spectrain.drafters.medusa.Medusa",
        {"num_heads": 2, "vocab_size": 256, "adapt": "lora", "rank": 4, "heads_first": 0.5},
    ),
    "hydra": (
        "spectrain_research.hydra.drafter.Hydra",
        {"num_heads": 2, "vocab_size": 256, "prefix_attention": True},
    ),
    "amphista": (
        "spectrain_research.amphista.drafter.Amphista",
        {"num_heads": 2, "vocab_size": 256},
    ),
    "ctc": (
        "spectrain_research.ctc.drafter.Ctc",
        {"num_drafts": 2, "num_slots": 3, "vocab_size": 256},
    ),
    "gumiho": (
        "spectrain_research.gumiho.drafter.Gumiho",
        {"num_parallel": 2, "num_layers": 1, "vocab_size": 256},
    ),
    "transformer_heads": (
        "spectrain_research.transformer_heads.drafter.TransformerHeads",
        {"num_heads": 2, "vocab_size": 256},
    ),
    "eagle1": ("spectrain.drafters.eagle1.Eagle1", {"num_steps": 2, "top_k_weight": 1.0}),
    "redrafter": (
        "spectrain_research.redrafter.drafter.Redrafter",
        {"num_steps": 2, "vocab_size": 256},
    ),
    "causal": ("spectrain.drafters.causal.Causal", {"num_layers": 2}),
    "pard": ("spectrain.drafters.pard.Pard", {"num_layers": 2, "num_drafts": 3}),
    "mtp": ("spectrain.drafters.mtp.Mtp", {"num_steps": 2}),
    "peagle": (
        "spectrain.drafters.peagle.PEagle",
        {"num_layers": 2, "num_drafts": 3, "vocab_size": 256, "mask_token_id": 0},
    ),
    "kangaroo": ("spectrain_research.kangaroo.drafter.Kangaroo", {}),
    "gated_lora": ("spectrain_research.gated_lora.drafter.GatedLora", {"num_masks": 2, "rank": 4}),
    "uno": (
        "spectrain_research.uno.drafter.Uno",
        {"num_masks": 2, "rank": 4, "strategy": "quadratic", "tiles": [2]},
    ),
    "streams": (
        "spectrain_research.hidden_transfer.drafter.SpeculativeStreaming",
        {"num_masks": 2, "rank": 4, "sampler": False},
    ),
    "ppd": (
        "spectrain_research.ppd.drafter.PromptTokens",
        {"num_masks": 2, "rank": 0, "ensembles": 2, "sampler": False},
    ),
    "jacobi": (
        "spectrain_research.jacobi.drafter.Jacobi",
        {"block": 3, "num_blocks": 2, "adapt": "lora", "rank": 4, "self_distillation": True},
    ),
    "dflash": (
        "spectrain.drafters.dflash.DFlash",
        {"block_size": 3, "num_layers": 2, "num_anchors": 4, "vocab_size": 256, "mask_token_id": 0},
    ),
    **{
        family: (
            f"spectrain.drafters.{family}.{name}",
            {"block_size": 3, "num_layers": 2, "num_anchors": 4, "mask_token_id": 0},
        )
        for family, name in (("dflash2", "DFlash2"), ("dspark", "DSpark"), ("lilicorr", "LiLiCorr"))
    },
    "early_exit": (
        "spectrain.drafters.early_exit.EarlyExit",
        {"max_dropout": 0.5, "exit_scale": 1.0, "self_distillation": True},
    ),
}


def dataset(count: int = 8, length: int = 16) -> Dataset:
    """Equally long conversations, by default so few that every step sees all of them; prompts of
    unequal length.
    """
    rows = torch.randint(
        3, 2000, (count, length), generator=torch.Generator().manual_seed(5)
    ).tolist()
    return Dataset(
        [Example(row, [i >= 4 + n % 5 for i in range(length)]) for n, row in enumerate(rows)],
        count,
        0,
        0,
    )


def make(family: str, target: Target) -> Drafter:
    path, options = FAMILIES[family]
    torch.manual_seed(0)
    drafter = make_drafter(get_object(path), target, **options)
    drafter.prepare(target, torch.arange(target.head.vocab_size))
    return drafter


class Slow(LiveSource):
    """The second process reads its data slowly."""

    def make_batch(self, request: BatchRequest) -> Batch:
        if os.environ.get("RANK") == "1":
            time.sleep(6)
        return super().make_batch(request)


def target_of(model: str, sharding: Any) -> Target:
    """Return a target of its own for each training; one that is not sharded is read once."""
    return (
        copy.deepcopy(load_target(model))
        if sharding == "none"
        else load_hf(model, sharding=sharding)
    )


@cache
def load_target(model: str) -> Target:
    return load_hf(model)


def train_job(job: dict[str, Any]) -> None:
    """Train one family for the target in the directory `model`; write its weights, those of the
    target that it trained, and the metrics to `out`.

    `die` is (rank, step) of a process that is killed there, `leave` a step after which all of them
    leave.
    """
    out = Path(job["out"])
    target = target_of(job["model"], job.get("target", "none"))
    drafter = make(job["family"], target)
    drafter_ids = {id(parameter) for parameter in drafter.parameters()}
    target_ids = {
        id(p) for group in drafter.stages[-1].groups for p in group["params"]
    } - drafter_ids
    names = [name for name, parameter in target.named_parameters() if id(parameter) in target_ids]
    trainer = Trainer(
        **{"lr": 1e-3, "max_steps": 4, "warmup": 0.0, "log_every": 1, **job["options"]}
    )

    def on_step(step: int) -> None:
        if "RANK" in os.environ and step == 3:
            gc.collect()  # collecting what an earlier stage left must remove nothing else
        if step == job.get("leave"):
            raise Left
        if [int(os.environ.get("RANK", 0)), step] == job.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)

    source = Slow() if job.get("slow") else LiveSource()
    try:
        trainer.fit(drafter, target, dataset(job.get("count", 8)), source, out, on_step=on_step)
    except Left:
        return
    if os.environ.get("RANK", "0") == "0":
        weights = {f"drafter.{name}": value.clone() for name, value in drafter.state_dict().items()}
        after = dict(target.named_parameters())
        weights |= {
            f"target.{name}": after[name].detach().clone() for name in names if name in after
        }
        save_file(weights, out / "weights.safetensors")


class Left(Exception):
    """Stands for a kill of all processes between two steps."""


def train_all(jobs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # collections need not visit the modules
    for job in jobs:
        train_job(job)


def as_rank(rank: int, port: int, jobs: list[dict[str, Any]]) -> None:
    """One process of two, with the variables that torchrun sets."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train_all(jobs)


def launch_processes() -> None:
    """Run two processes as torchrun does, but forked from this one, which has imported everything.
    Torchrun ends the others if one is killed; here they must end themselves."""
    port = find_free_port()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=as_rank, args=(rank, port, json.loads(sys.argv[1])))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    train_all(json.loads(sys.argv[1]))
