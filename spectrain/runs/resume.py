"""What a resumed training goes on with: the settings and the inputs that it began with, or else a
sentence that names the difference."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.config.build import GroupSpec
from spectrain.config.plain_files import read_json_object
from spectrain.config.spec import GROUPS, RunSpec
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.features.base import Source
from spectrain.features.store import hash_file
from spectrain.files import write_text
from spectrain.models.fingerprint import hash_tokenizer
from spectrain.models.target import Target
from spectrain.training.checkpoints import checkpoint_step, delete_best_except, delete_start
from spectrain.training.metrics import METRICS_NAME

CHANGEABLE_GROUPS = {
    "server": (
        "an address may change between launches, and a feature store names the engine that "
        "filled it"
    ),
    "tree": "it drafts while scoring",
    "acceptance": "it accepts while scoring",
    "eval": "it scores the finished drafter",
    "tracker": "it reports",
}
"""Groups that a resumed training may change, and why."""

CHANGEABLE_SETTINGS = {
    "trainer.resume": "it says that a run goes on",
    "trainer.save_every": "checkpoints change no weight",
    "trainer.keep_checkpoints": "checkpoints change no weight",
    "trainer.log_every": "metrics change no weight",
    "trainer.patience": "it is how long a slow process is waited for",
    "trainer.timeout": "it is how long loading is waited for",
    "trainer.max_skipped": "it ends a run whose gradients are not finite",
    "trainer.gradient_checkpointing": "it computes the same gradients in less memory",
    "trainer.sharding": "it computes the same gradients on other processes",
    "trainer.accumulate": "a step takes as many batches as before, by however many processes",
    "trainer.context_parallel": "it computes the same gradients on other processes",
    "trainer.context_method": "it computes the same gradients on other processes",
    "target.device": "the machine may be another one",
    "target.parts": "the head alone is loaded where features are stored",
    "target.sharding": "it computes the same features on other processes",
    "target.trust_remote_code": "it is a permission, which no file keeps",
    "source.path": "a store may move; what it holds is compared",
    "source.keep_gb": "it is how much memory features may take",
    "source.max_gb": "it is how much disk features may take",
    "source.shard_mb": "it is the size of the store's files",
    "source.capture": "what is captured equals what is stored",
    "source.ahead": "features that are requested earlier are the same",
}
"""Settings that a resumed training may change because they change nothing that is learned, and
why.
"""

REMEDY = (
    "put back what it began with, train in another folder, or accept the change with "
    "trainer.resume=changed"
)


@dataclass(frozen=True)
class InputFacts:
    """What a training reads and no setting says, as provenance.json holds it."""

    target: str
    target_name: str
    # Facts of the data, as its tokens and their hash.
    data: dict[str, Any]
    # Hashes of the other inputs by name.
    inputs: dict[str, Any]

    def to_provenance(self) -> dict[str, Any]:
        """Return the facts in the form of provenance.json."""
        return {
            "data": self.data,
            "target": self.target,
            "target_name": self.target_name,
            "inputs": self.inputs,
        }


def collect_facts(
    target: Target,
    weights: str | None,
    dataset: Dataset,
    drafter: Drafter,
    source: Source,
) -> InputFacts:
    """Collect the facts of a training's inputs; `weights` is the hash of the target before a
    drafter changed its layers.
    """
    folders = drafter.saved.origins
    files = {key: hash_file(path) for key, path in drafter.saved.read.items()}
    inputs = {
        **({} if weights is None else {"target_weights": weights}),
        "tokenizer": hash_tokenizer(target),
        "chat_template": target.template.facts()["sha256"],
        **(
            {
                "drafters": {
                    str(number): hash_folder(folder) for number, folder in enumerate(folders)
                }
            }
            if folders
            else {}
        ),
        **({"files": files} if files else {}),
        **({"source": facts} if (facts := source.provenance_facts()) else {}),
    }
    return InputFacts(target.path, target.name, dataset.provenance_facts(), inputs)


def hash_folder(folder: Path) -> str:
    """Return the hashes of the files directly in a folder as one text."""
    return " ".join(
        f"{path.name}:{hash_file(path)[:16]}" for path in sorted(folder.iterdir()) if path.is_file()
    )


def check_settings(run: Path, spec: RunSpec) -> None:
    """Raise a UserError if a run began with other settings than `spec`, or if its config.yaml
    cannot be read.
    """
    before = RunSpec.load(run / "config.yaml")
    for group in GROUPS:
        if group in CHANGEABLE_GROUPS:
            continue
        old, new = (
            list_settings(group, settings)
            for settings in (getattr(before, group), getattr(spec, group))
        )
        for key in ("choice", *sorted({*old, *new})):
            if old.get(key) != new.get(key):
                name = group if key == "choice" else f"{group}.{key}"
                raise UserError(
                    f"{name}={new.get(key)}: the run in {run} began with {old.get(key)}; use "
                    "that, or another run folder"
                )


def list_settings(group: str, spec: GroupSpec) -> dict[str, Any]:
    """Return the choice and the settings of a group that a resumed training keeps, with their
    defaults.
    """
    settings = {**spec.with_defaults(), "choice": spec.choice} if spec else {}
    return {
        key: value for key, value in settings.items() if f"{group}.{key}" not in CHANGEABLE_SETTINGS
    }


def check_inputs(run: Path, facts: InputFacts, checkpoint: Path, accepts_changes: bool) -> None:
    """Raise a UserError if the inputs of a run with a checkpoint are no longer those that it began
    with.

    With `accepts_changes` provenance.json records the change, and the training goes on. A run that
    an older version began has fewer facts, and those are compared.
    """
    path = run / "provenance.json"
    saved = read_json_object(path)
    kinds: dict[str, type[Any]] = {"data": dict, "inputs": dict, "changes": list}
    if not all(
        isinstance(saved.get(name, kind()), kind) for name, kind in kinds.items()
    ) or "tokens" not in saved.get("data", {}):
        raise UserError(
            f"{path}: it does not say what the run began with; put back a copy, or train in "
            "another folder"
        )
    now = json.loads(json.dumps(facts.to_provenance()))
    difference = find_difference(saved, now)
    if difference is None:
        return
    if not accepts_changes:
        raise UserError(f"{difference}; {REMEDY}")
    changes = [
        *saved.get("changes", []),
        {
            "step": checkpoint_step(checkpoint),
            "data": saved["data"],
            "inputs": saved.get("inputs", {}),
        },
    ]
    write_text(path, json.dumps({**saved, **now, "changes": changes}, indent=2) + "\n")
    print(f"trainer.resume=changed: {difference}; {path} says so", flush=True)


def find_difference(saved: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Describe the first input that differs from the one a run began with; None if all are the
    same.
    """
    before = saved.get("inputs", {})
    inputs = now["inputs"]
    described = {
        "target_weights": f"target: {now['target']} holds other weights than when the run began",
        "tokenizer": (
            f"target: the tokenizer of {now['target']} is another one than when the run began"
        ),
        "chat_template": (
            f"target: the chat template of {now['target']} is another one than when the run began"
        ),
        "drafters": (
            "drafter: the files of the drafter that it starts from are other ones than when "
            "the run began"
        ),
        "files": ("drafter: a file that its settings name is another one than when the run began"),
        "source": (
            f"source.path: the store holds other features ({inputs.get('source')}) than when "
            f"the run began ({before.get('source')})"
        ),
    }
    for name, sentence in described.items():
        if name in before and name in inputs and before[name] != inputs[name]:
            return sentence
    return find_data_difference(saved["data"], now["data"])


def find_data_difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Describe how data differs from the one a run began with; None if it does not."""
    if all(now.get(name) == value for name, value in before.items()):
        return None
    if before["tokens"] != now["tokens"]:
        return f"data: it has {now['tokens']} tokens, and had {before['tokens']} when the run began"
    if before.get("fingerprint") != now["fingerprint"]:
        return (
            f"data: it has {now['tokens']} tokens as when the run began, but other ones or in "
            "another order"
        )
    if before.get("bytes") != now.get("bytes"):
        return (
            f"data: its files have {now.get('bytes')} bytes, and had {before.get('bytes')} "
            "when the run began"
        )
    return "data: what is held out, or the number of its files, is another than when the run began"


def delete_unfinished(run: Path) -> None:
    """Delete what a run without a checkpoint has left: its metrics, the weights of its start and of
    its best validation, and the state of its tracker."""
    for name in (METRICS_NAME, "tracker.json"):
        (run / name).unlink(missing_ok=True)
    delete_best_except(run, set())
    delete_start(run)
