"""The Python interface: the commands as functions. Each composes the configuration that its
command would compose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import snapshot_download
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, open_dict

from spectrain.config.build import register_resolvers
from spectrain.config.resolve import default_group
from spectrain.config.spec import RunSpec
from spectrain.data.chat import tokenize_prompt
from spectrain.data.messages import check_text
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.generation import Generation
from spectrain.decoding.session import Session
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.export.hub import push
from spectrain.models.target import Target
from spectrain.runs import train as training
from spectrain.runs.candidate import Candidate
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.runs.drafters import load_drafter, save_drafter
from spectrain.runs.folder import find_drafter_directory, find_trained_target
from spectrain.runs.server_scores import score_in_engine, score_server
from spectrain.trees import TreeBuilder

from .overrides import allow_new_keys, check_words, list_config_groups

Prompt = str | list[dict[str, str]]
"""What a user says, or a chat of such messages as {"role": .., "content": ..}."""


def train(recipe: str, run: str | Path | None = None, **settings: Any) -> Path:
    """Train a recipe's drafter and, unless eval="none", score it; return the run folder.

    Settings are those of `spectrain train`: groups by keyword, dotted keys through a dictionary. A
    UserError reports a wrong setting, a RunError a failure in training.
    """
    with hydra_context():
        spec = compose_spec({"recipe": recipe, **({} if run is None else {"run": run}), **settings})
    folder = training.train_and_score(spec)
    with hydra_context():
        score_in_engine(spec, folder)
    return folder


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
    words = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    check_words(command, words)
    groups = list_config_groups(words)
    config = compose(command, overrides=[allow_new_keys(word, groups) for word in words])
    if "recipe" in settings:
        with open_dict(config):
            config.recipe_name = settings["recipe"]
    return config, words


def compose_spec(settings: Mapping[str, Any]) -> RunSpec:
    """Return the checked settings of `spectrain train`. Call it inside `hydra_context`."""
    config, words = compose_config("train", settings)
    return RunSpec.from_config(config, words)


@dataclass
class PretrainedDrafter:
    """A drafter with its tree and its acceptance rule: `spectrain.Drafter`."""

    module: Drafter
    builder: TreeBuilder
    rule: AcceptanceRule
    # What it was made of: its drafter, target, tree and acceptance.
    spec: RunSpec

    @classmethod
    def from_pretrained(
        cls, name: str | Path, target: Target, **settings: Any
    ) -> PretrainedDrafter:
        """Load a drafter from a run folder, a drafter directory, an export, another project's
        checkpoint, or a hub repository of one of these; or load a drafter that ships with the
        package, by name.

        Settings change its tree or rule, as in tree="chain" and **{"tree.depth": 4}.
        """
        path = Path(name).expanduser()
        if not path.exists() and find_drafter_directory(path) is None:
            path = Path(snapshot_download(str(name)))
        with hydra_context():
            requested, _ = compose_config(
                "eval", {"run": path, "target": "hf", "target.model": target.path, **settings}
            )
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
        return cls(module, spec.tree.build(), spec.acceptance.build(), spec)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors."""
        save_drafter(Path(directory), self.module, self.spec)

    def push_to_hub(self, name: str, private: bool = False) -> str:
        """Upload the drafter to a hub repository, which is created if it does not exist; return
        its address.
        """
        with TemporaryDirectory() as scratch:
            self.save_pretrained(Path(scratch) / "drafter")
            return push(Path(scratch) / "drafter", name, private)


@dataclass(frozen=True)
class Answer:
    """The result of decoding one prompt."""

    text: str  # without what ends it
    # The tokens of the answer, the stop token included.
    tokens: list[int]
    statistics: dict[str, float]  # rounds, acceptance_length, tokens_per_second

    @classmethod
    def from_generation(cls, generation: Generation, target: Target) -> Answer:
        """Return a generation as text, with the statistics of its rounds."""
        tokens = [token for token in generation.output if token not in target.stop_ids]
        rounds = generation.complete_round_lengths
        seconds = generation.finish_seconds
        statistics = {
            "rounds": float(len(generation.round_lengths)),
            "acceptance_length": sum(rounds) / len(rounds) if rounds else 1.0,
            "tokens_per_second": (len(generation.output) - 1) / seconds if seconds else 0.0,
        }
        return cls(str(target.tokenizer.decode(tokens)), generation.output, statistics)


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
    if isinstance(prompts, str):
        raise UserError("prompts: this is one text; give a list of them")
    rule: AcceptanceRule = Greedy() if temperature == 0 else Match(temperature, seed=seed)
    for key, number in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if number < 1:
            raise UserError(f"{key}={number}: use 1 or more")
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


def to_chat(prompt: Prompt, location: str) -> list[dict[str, str]]:
    """Return a text as the user's first message; raise a UserError for what is neither text nor
    chat.
    """
    chat: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(chat, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str) for turn in chat
    ):
        raise UserError(
            f'{location}: it is no prompt; give a text, or messages [{{"role": .., "content": '
            f"..}}, ..]"
        )
    for message in chat:
        check_text(message["content"], location)
    return chat


def evaluate(
    target: Target, drafter: PretrainedDrafter, out: str | Path | None = None, **settings: Any
) -> dict[str, Any]:
    """Score a drafter by really decoding, with settings of the group eval, as in limit=20; return
    the content of summary.json.

    If `out` names a folder, everything that `spectrain eval` writes goes there.
    """
    with TemporaryDirectory() as scratch:
        plain = {
            key: str(value) if isinstance(value, Path) else value for key, value in settings.items()
        }
        evaluation = default_group("eval").with_settings(**plain).build()
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
        summary: dict[str, Any] = evaluation.score(
            candidate, Path(scratch) if out is None else Path(out)
        )
        return summary


def evaluate_server(
    server: str, url: str | None = None, run: str | Path | None = None, **settings: Any
) -> dict[str, Any]:
    """Score a running server, as `spectrain eval server=NAME server.url=URL` does; return the
    content of summary.json.

    With `run`, the drafter of a run folder, the server's rounds are compared with our own chain's.
    Settings are those of the command, as in target="tiny" and **{"eval.concurrency": [1, 4]}.
    """
    requested = {
        "server": server,
        **({} if url is None else {"server.url": url}),
        **({} if run is None else {"run": run}),
    }
    with hydra_context():
        config, _ = compose_config("eval", {**requested, **settings})
        return score_server(config)
