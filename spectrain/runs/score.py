"""Scoring of a drafter, in its run folder or next to its directory."""

from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import PartialState

from spectrain.config.build import GroupSpec
from spectrain.config.command_only import without_downloads
from spectrain.config.plain_files import read_json_object
from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.data.datastore import INDEX_FILE, Datastore
from spectrain.data.index import index_dataset
from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.drafters.base import Drafter, has_weights
from spectrain.errors import UserError
from spectrain.files import atomic_write, make_folder_once, require_writable
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance, processor_name
from spectrain.training.checkpoints import load_start, start_weights_path
from spectrain.training.metrics import Tracker, track_run
from spectrain.trees.base import TreeBuilder

from .candidate import Candidate
from .drafters import load_drafter, load_facts, save_drafter
from .folder import (
    archive_earlier,
    find_drafter_directory,
    find_results_folder,
    find_shipped,
    find_trained_target,
)
from .init_drafter import init_drafter

MAX_INDEXED_TOKENS = 20_000_000  # tokens
CARRIED_SETTINGS = ("dtype", "device", "trust_remote_code", "chat_template", "template_kwargs")
"""Settings of the target that a target trained with the drafter is loaded with."""


def evaluate(spec: RunSpec, run: Path, target: Target | None = None) -> dict[str, Any]:
    """Score the drafter of a run folder or of a drafter directory, as a tracked run of its own;
    return the content of summary.json, empty on a process that scores nothing.
    """
    state = PartialState(cpu=not torch.cuda.is_available())
    tracker = spec.tracker.build() if state.is_main_process else None
    scoring = load_scoring(spec, run, target)
    if scoring is None:
        return {}
    with track_run(tracker, run, spec.to_nodes(), "eval") as run_tracker:
        return scoring.score(run_tracker)


def load_scoring(spec: RunSpec, run: Path, target: Target | None = None) -> "RunScoring | None":
    """Load what scores the drafter of a run folder or of a drafter directory; None on a process
    that scores nothing.

    The main process scores alone. If the target is sharded, all processes decode.
    """
    sharded = spec.target.settings.get("sharding", "none") != "none"
    if not PartialState().is_main_process and not sharded:
        # No process waits: scoring may exceed the timeout of the process group.
        return None
    evaluation, tree, rule = spec.build("eval", "tree", "acceptance")
    require_writable(find_results_folder(run) / "eval" / evaluation.name, "run")
    target = target or load_target(spec, run)
    goes_by_clock = any(part.uses_clock for part in evaluation.parts)
    if sharded and (goes_by_clock or tree.traits.uses_latency):
        raise UserError(
            f"target.sharding={target.sharding}: processes must draft the same trees, so no tree "
            "or guard can go by the clock; use tree=eagle2 and no eval.guard"
        )
    with without_downloads(spec.eval.origin):
        evaluation.check_prompts(target)
    dataset = None
    if evaluation.reads_data and spec.data:
        with without_downloads(spec.data.origin):
            dataset = spec.data.build().make_dataset(target.template, target.vision)
    drafter = load_drafter(spec, run, target)
    return RunScoring(spec, run, target, drafter, evaluation, (tree, rule), dataset)


def load_target(spec: RunSpec, run: Path) -> Target:
    """Load the target of a run folder or a drafter directory: the one trained with the drafter,
    or else that of `spec`.
    """
    saved_target = find_trained_target(run)
    if saved_target is None:
        own: Target = spec.target.build()
        return own
    loading = {key: value for key, value in spec.target.settings.items() if key in CARRIED_SETTINGS}
    target: Target = GroupSpec("target", "hf", {**loading, "model": str(saved_target)}).build()
    facts = saved_target.parent / "provenance.json"
    trained_name = read_json_object(facts).get("target_name") if facts.exists() else None
    target.name = f"{trained_name or spec.target_name}, trained"
    return target


@dataclass
class RunScoring:
    """A drafter to score, and what its run knows about it."""

    spec: RunSpec
    # The run folder or the drafter directory.
    run: Path
    target: Target
    drafter: Drafter
    evaluation: Any
    # How it decodes.
    decoding: tuple[TreeBuilder, AcceptanceRule]
    # The data of the training; None where it is not read.
    dataset: Dataset | None

    def score(self, tracker: Tracker) -> dict[str, Any]:
        """Run the evaluation and write its results below the run folder; the main process alone
        writes them.
        """
        if PartialState().is_main_process:
            return self._score_into(find_results_folder(self.run), tracker)
        with TemporaryDirectory() as scratch, redirect_stdout(StringIO()):
            return self._score_into(Path(scratch), Tracker())

    def _score_into(self, results: Path, tracker: Tracker) -> dict[str, Any]:
        folder = results / "eval" / self.evaluation.name
        trained_with = load_facts(self.run, "chat_template")
        scored_with = self.target.template.facts()
        if trained_with is not None and trained_with != scored_with:
            print(
                f"chat template: the drafter was trained with {describe_template(trained_with)}, "
                f"and is scored with {describe_template(scored_with)}"
            )
        with without_downloads(self.spec.eval.origin):
            summary = write_score(
                folder,
                lambda scratch: self.evaluation.score(self.make_candidate(scratch), scratch),
            )
        tracker.log_evaluation(summary, self.evaluation.tabulate(summary), folder)
        return summary

    def make_candidate(self, folder: Path) -> Candidate:
        """Return the candidate, with everything that the run knows about it; a drafter that learns
        while it is scored is saved into `folder`.
        """
        spec = self.spec
        path = self.run / "config.yaml"
        began = RunSpec.load(path) if path.exists() else spec
        training = self.drafter.capabilities.target_training
        trainable = self.dataset is not None and has_weights(self.drafter) and not training
        # The saved settings no longer describe the initial drafter.
        trainable = trainable and (began is not spec or not self.drafter.saved.settings)

        def make_untrained() -> Drafter:
            assert self.dataset is not None
            return init_drafter(began, self.target, self.dataset)

        def make_start() -> Drafter:
            start = make_untrained()
            load_start(self.run, start)
            return start

        has_start = trainable and start_weights_path(self.run).exists()
        changed_target = training and find_trained_target(self.run) is not None
        return Candidate(
            self.target,
            self.drafter,
            *self.decoding,
            describe_run(spec, self.run, self.target, self.drafter),
            make_untrained=make_untrained if trainable else None,
            load_original=spec.target.build if changed_target else None,
            open_store=lambda: open_answer_store(spec, self.run, self.target, self.dataset),
            save_learned=lambda learnt: save_drafter(folder / "drafter", learnt, spec),
            make_start=make_start if has_start else None,
        )


def write_score(folder: Path, measure: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Let `measure` score into a new folder, which then stands at `folder`; an earlier score there
    gets another name. Return the content of summary.json.
    """
    # A folder that cannot be written raises an error before anything is decoded or requested.
    with atomic_write(folder, folder=True) as scratch:
        summary = measure(scratch)
        archive_earlier(folder)
    print(f"written to {folder}")
    return summary


def describe_template(facts: dict[str, Any]) -> str:
    """Format the hash of a chat template, the date that it prints, and its arguments."""
    arguments = ", ".join(f"{key}={value}" for key, value in facts["arguments"].items())
    date = f", dated {facts['date']}," if "date" in facts else ""
    return f"template {facts['sha256']}{date} and {arguments or 'no arguments'}"


def describe_run(spec: RunSpec, run: Path, target: Target, drafter: Drafter) -> dict[str, Any]:
    """Return what the results of a run's score depend on."""
    trained = find_trained_target(run)
    training = drafter.capabilities.target_training
    is_shipped = find_shipped(str(spec.drafter.choice)) is not None
    return {
        "target": target.name,
        "target_path": str(trained.resolve()) if training and trained is not None else target.path,
        "recipe": spec.name,
        "drafter": spec.drafter.save(),
        "acceptance": spec.acceptance.save(),
        "trained": find_drafter_directory(run) is not None or is_shipped,
        "training": load_facts(run, "training"),
        "dtype": str(target.dtype).removeprefix("torch."),
        "chat_template": target.template.facts(),
        "device": torch.cuda.get_device_name()
        if target.device.type == "cuda"
        else processor_name(),
        **collect_provenance(),
    }


def open_answer_store(
    spec: RunSpec, run: Path, target: Target, dataset: Dataset | None
) -> Datastore | None:
    """Open the answers that a run was trained on as a store in its folder; the first call writes
    it.

    None for a stream, and for more tokens than are sorted in half a minute.
    """
    folder = run / "store"
    if not folder.exists():
        fits = (
            dataset is not None
            and not dataset.is_sample
            and dataset.num_tokens <= MAX_INDEXED_TOKENS
        )
        if dataset is None or not fits or not (run / "config.yaml").exists():
            return None
        data = spec.data.build()
        texts = dataset
        tokenizer = target.tokenizer
        make_folder_once(
            folder, INDEX_FILE, lambda scratch: index_dataset(data, texts, tokenizer, scratch)
        )
    return Datastore(str(folder), target.tokenizer)
