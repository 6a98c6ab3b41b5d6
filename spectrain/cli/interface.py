"""The Python interface: the commands as functions. Each composes the configuration that its
command would compose.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from spectrain.config.build import register_resolvers
from spectrain.config.grouped import drop_parts, flatten_settings
from spectrain.config.resolve import default_group
from spectrain.config.spec import RunSpec, read_run
from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.session import Session
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError, explain_calls
from spectrain.export.hub import check_repository, push
from spectrain.export.targets import TargetFiles
from spectrain.models.bundled import SMOLLM2_NAME
from spectrain.models.target import Target
from spectrain.output.logs import redirect_output
from spectrain.runs import train as training
from spectrain.runs.callbacks import Callback
from spectrain.runs.candidate import Candidate
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.runs.drafters import load_drafter, save_drafter
from spectrain.runs.folder import find_trained_target
from spectrain.runs.server_scores import score_in_engine, score_server
from spectrain.trees import TreeBuilder

from .arguments import (
    describe,
    require_callbacks,
    require_count,
    require_number,
    require_path,
    require_replaceable,
    require_target,
    require_type,
    spread_groups,
)
from .export import write_card
from .help import COMMANDS
from .locate import locate_drafter
from .overrides import check_words, write_overrides
from .results import Answer, EvalResult, TrainResult
from .rows import Prompt, store_conversations, to_chat, write_prompts

PLAIN_TYPES = (str, bool, int, float, os.PathLike, list, tuple, dict, type(None))
"""Types of values that a setting may have."""


@explain_calls
def train(
    recipe: str,
    run: str | os.PathLike[str] | None = None,
    *,
    target: str | Target | None = None,
    data: str | os.PathLike[str] | Iterable[Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> TrainResult:
    """Train a recipe's drafter and, unless eval="none", score it; return the result, which is the
    path of the run folder too.

    `target` is a choice or a loaded target. `data` is a choice, a `pathlib.Path` of conversations,
    a `datasets.Dataset`, or a list of conversations; the last two are written to data/HASH.jsonl
    beside the run folder, where a resumed training finds them. Settings are those of `spectrain
    train`: groups by keyword, as in trainer={"max_steps": 100}, or dotted keys through a
    dictionary. A UserError reports a wrong setting, a RunError a failure in training.
    """
    require_callbacks(callbacks)
    requested: dict[str, Any] = {"recipe": recipe}
    if run is not None:
        require_path("run", run, "the folder to write")
        requested["run"] = Path(run)
    if settings.get("eval", "none") in (None, False):
        settings["eval"] = "none"
    if isinstance(data, os.PathLike):
        data, settings = "jsonl", {"data.path": data, **settings}
    if isinstance(target, Target):
        requested |= name_target(target)
        requested["target.dtype"] = str(target.dtype).removeprefix("torch.")
    elif target is not None:
        requested["target"] = target
    if data is not None and not isinstance(data, str):
        path = store_conversations(data, Path("runs") if run is None else Path(run).parent)
        requested |= {"data": "jsonl", "data.path": path}
    elif data is not None:
        requested["data"] = data
    with redirect_output():
        with hydra_context():
            spec = compose_spec({**requested, **settings})
        loaded = target if isinstance(target, Target) and not is_changed(target, spec) else None
        folder = training.train_and_score(spec, loaded, callbacks=callbacks)
        with hydra_context():
            score_in_engine(spec, folder)
    return TrainResult.from_folder(folder, spec.evaluation_name if spec.eval else None)


def name_target(target: Target) -> dict[str, Any]:
    """Return the settings that load a target again."""
    if target.name == "tiny" and Path(target.path) == TargetFiles("tiny").directory:
        return {"target": "tiny"}
    if target.name == SMOLLM2_NAME:
        return {"target": "smollm2"}
    return {"target": "hf", "target.model": target.path}


def is_changed(target: Target, spec: RunSpec) -> bool:
    """Tell whether settings ask for another target than the loaded one, or the drafter's training
    changes it, so that it has to be loaded anew.
    """
    own = spec.target.settings.keys() - {"model", "dtype"}
    drafter: Drafter = spec.drafter.build(target=target)
    return bool(own) or drafter.capabilities.target_training is not None


@contextmanager
def hydra_context() -> Iterator[None]:
    """Let hydra find conf/, as the command line does."""
    register_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        yield


def compose_config(command: str, settings: Mapping[str, Any]) -> tuple[DictConfig, list[str]]:
    """Compose a command's configuration from settings; return it with the settings as words. Call
    it inside `hydra_context`."""
    settings = dict(spread_groups(settings))
    for key, value in settings.items():
        if not isinstance(value, PLAIN_TYPES):
            raise UserError(
                f"{key}: this is {describe(value)}, which is no setting; give a name, a number or "
                "a text"
            )
    words = drop_parts(
        f"{key}={'null' if value is None else value}" for key, value in settings.items()
    )
    check_words(command, words)
    config = compose(COMMANDS[command].config or command, overrides=write_overrides(words))
    return config, words


def compose_spec(settings: Mapping[str, Any]) -> RunSpec:
    """Return the checked settings of `spectrain train`. Call it inside `hydra_context`."""
    config, words = compose_config("train", settings)
    return read_run(config, overrides=words, recipe=settings.get("recipe"))[0]


def require_drafter(drafter: object) -> None:
    """Raise a UserError where this is no loaded drafter."""
    require_type("drafter", drafter, PretrainedDrafter, "spectrain.Drafter.from_pretrained")


@dataclass
class PretrainedDrafter:
    """A drafter with its tree and its acceptance rule: `spectrain.Drafter`."""

    module: Drafter
    builder: TreeBuilder
    rule: AcceptanceRule
    # What it was made of: its drafter, target, tree and acceptance.
    spec: RunSpec
    # The folder that it was loaded from.
    folder: Path

    def __repr__(self) -> str:
        return (
            f"Drafter({self.spec.drafter.choice}, target={self.spec.target_name}, "
            f"tree={self.spec.tree.choice}, {str(self.folder)!r})"
        )

    @classmethod
    @explain_calls
    def from_pretrained(
        cls, name: str | os.PathLike[str], target: Target, **settings: Any
    ) -> PretrainedDrafter:
        """Load a drafter from a run folder, a drafter directory, an export, another project's
        checkpoint, or a hub repository of one of these; or load a drafter that ships with the
        package, by name.

        Settings change its tree or rule, as in tree="chain" and **{"tree.depth": 4}. A UserError
        says in one sentence what is no drafter.
        """
        require_target(target)
        require_path("drafter", name, "a run folder, a drafter directory, or ORG/NAME of the hub")
        path = locate_drafter(name)
        with hydra_context():
            requested, _ = compose_config("eval", {"run": path, **name_target(target), **settings})
            spec, folder = resolve_eval_spec(requested)
        module = load_drafter(spec, folder, target)
        trained = find_trained_target(folder)
        if (
            module.capabilities.target_training
            and trained is not None
            and Path(target.path) != trained.resolve()
        ):
            raise UserError(
                f"target {target.name}: this drafter belongs to the target in {trained}; load "
                "that one"
            )
        return cls(module, spec.tree.build(), spec.acceptance.build(), spec, path)

    @explain_calls
    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors; a folder with other files is refused."""
        require_path("directory", directory, "the folder to write")
        require_replaceable(Path(directory), ("config.json", "model.safetensors"))
        save_drafter(Path(directory), self.module, self.spec)

    @explain_calls
    def push_to_hub(self, name: str, private: bool = False) -> str:
        """Upload the drafter with its model card to a hub repository, which is created if it does
        not exist; return its address.

        The card holds the scores in the folder that the drafter was loaded from.
        """
        require_path("name", name, "ORG/NAME of the hub")
        check_repository(name)
        with redirect_output(), TemporaryDirectory() as scratch:
            directory = Path(scratch) / "drafter"
            self.save_pretrained(directory)
            write_card(directory, name, self.folder)
            return push(directory, name, private)


@explain_calls
def generate(
    target: Target,
    drafter: PretrainedDrafter | None,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 1,
) -> list[Answer]:
    """Answer prompts, with a drafter or, if it is None, without one; the text is the same.

    At a temperature above 0, each position draws one token of the target's distribution by `seed`,
    drafted or not.
    """
    require_target(target)
    if drafter is not None:
        require_drafter(drafter)
    if isinstance(prompts, str):
        raise UserError("prompts: this is one text; give a list of them")
    if not isinstance(prompts, Iterable):
        raise UserError(f"prompts: this is {describe(prompts)}; give a list of texts or chats")
    require_count("max_new_tokens", max_new_tokens)
    require_count("batch_size", batch_size)
    require_number("temperature", temperature)
    if not isinstance(seed, int):
        raise UserError(f"seed={seed!r}: give a whole number")
    rule: AcceptanceRule = Greedy() if temperature == 0 else Match(temperature, seed=seed)
    tokens = [
        tokenize_prompt(target.template, to_chat(prompt, f"prompts[{at}]"))
        for at, prompt in enumerate(prompts)
    ]
    for at, prompt_ids in enumerate(tokens):
        if len(prompt_ids) + max_new_tokens > target.max_length:
            raise UserError(
                f"prompts[{at}]: its {len(prompt_ids)} tokens and max_new_tokens={max_new_tokens} "
                f"do not fit the context of {target.name} ({target.max_length}); shorten one of "
                "them"
            )
    if drafter is None:
        # A drafter's session packs them too, so speeds compare.
        target.pack_weights()
        session = Session(target, rule, engine="auto")
    else:
        session = Session.from_drafter(
            target, drafter.module, drafter.builder, rule, lambda: tokens[:8]
        )
    answers: list[Answer] = []
    for first in range(0, len(tokens), batch_size):
        batch = tokens[first : first + batch_size]
        generations = session.decode(batch, max_new_tokens, list(range(first, first + len(batch))))
        answers += [Answer.from_generation(generation, target) for generation in generations]
    return answers


@explain_calls
def evaluate(
    target: Target,
    drafter: PretrainedDrafter,
    out: str | os.PathLike[str] | None = None,
    *,
    prompts: str | Iterable[Any] | None = None,
    **settings: Any,
) -> EvalResult:
    """Score a drafter by really decoding, with settings of the group eval, as in limit=20; return
    what was measured, which is the content of summary.json too.

    `prompts` is what `eval.prompts` takes, a list of texts or chats, or a `datasets.Dataset`. If
    `out` names a folder, everything that `spectrain eval` writes goes there.
    """
    require_target(target)
    require_drafter(drafter)
    with redirect_output(), TemporaryDirectory() as scratch:
        folder = Path(scratch if out is None else out)
        plain = {
            key: str(value) if isinstance(value, os.PathLike) else value
            for key, value in settings.items()
        }
        if isinstance(prompts, (str, os.PathLike)):
            plain["prompts"] = str(prompts)
        elif prompts is not None:
            plain["prompts"] = str(write_prompts(prompts, folder))
        settings = flatten_settings("eval", plain)
        evaluation = default_group("eval").with_settings(**settings).build()
        if evaluation.serve_in is not None:
            raise UserError(
                "serve_in: an engine serves the drafter of a run folder; use spectrain eval "
                "run=DIR eval.serve_in=auto"
            )
        evaluation.check_prompts(target)
        setting = {
            "target": target.name,
            "target_path": target.path,
            "recipe": drafter.spec.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
        }
        candidate = Candidate(target, drafter.module, drafter.builder, drafter.rule, setting)
        return EvalResult.from_summary(evaluation.score(candidate, folder))


@explain_calls
def evaluate_server(
    server: str,
    url: str | None = None,
    run: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> EvalResult:
    """Score a running server, as `spectrain eval server=NAME server.url=URL` does; return what was
    measured, which is the content of summary.json too.

    With `run`, the drafter of a run folder, the server's rounds are compared with our own chain's.
    Settings are those of the command, as in target="tiny" and **{"eval.concurrency": [1, 4]}.
    """
    requested = {
        "server": server,
        **({} if url is None else {"server.url": url}),
        **({} if run is None else {"run": Path(run)}),
    }
    with redirect_output(), hydra_context():
        config, _ = compose_config("eval", {**requested, **settings})
        return EvalResult.from_summary(score_server(config))
