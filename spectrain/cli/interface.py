"""The Python interface: what the command line does, as functions. Each composes the configuration that the command would."""

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
from omegaconf import DictConfig, OmegaConf, open_dict

from spectrain.config.build import build, register_resolvers
from spectrain.config.check import check_config
from spectrain.config.keys import TRAIN_KEYS
from spectrain.data.chat import tokenize_prompt
from spectrain.data.readers import check_text
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.generation import Generation
from spectrain.decoding.session import Session
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.export.hub import push
from spectrain.models.target import Target
from spectrain.runs import train as training
from spectrain.runs.candidate import Candidate
from spectrain.runs.defaults import resolve_eval_config
from spectrain.runs.drafter_files import load_drafter, save_drafter
from spectrain.runs.folder import find_trained_target, recipe_name
from spectrain.runs.paths import find_drafter_directory
from spectrain.trees import TreeBuilder

from .overrides import allow_new_keys, check_words, list_config_groups

Prompt = str | list[dict[str, str]]
"""What a user says, or a chat of such messages as {"role": .., "content": ..}."""


def train(recipe: str, run: str | Path | None = None, **settings: Any) -> Path:
    """Train a recipe's drafter and, unless eval="none", score it; the run folder.

    Settings are those of `spectrain train`: groups by keyword, dotted keys through a dictionary. A UserError says what is wrong
    with one, a RunError what went wrong in training.
    """
    with hydra_context():
        config, words = compose_config("train", {"recipe": recipe, **({} if run is None else {"run": run}), **settings})
    return training.train(check_config(config, TRAIN_KEYS), words)


@contextmanager
def hydra_context() -> Iterator[None]:
    """Let hydra find conf/, as the command line does."""
    register_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        yield


def compose_config(command: str, settings: Mapping[str, Any]) -> tuple[DictConfig, list[str]]:
    """The configuration that a command composes from such settings, and these as words; to be called while `composing`."""
    words = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    check_words(command, words)
    groups = list_config_groups(words)
    config = compose(command, overrides=[allow_new_keys(word, groups) for word in words])
    if "recipe" in settings:
        with open_dict(config):
            config.recipe_name = settings["recipe"]
    return config, words


@dataclass
class PretrainedDrafter:
    """A drafter with the tree and the rule that it is used with: `spectrain.Drafter`."""

    module: Drafter
    builder: TreeBuilder
    rule: AcceptanceRule
    config: DictConfig  # its description: drafter, target, tree, acceptance

    @classmethod
    def from_pretrained(cls, name: str | Path, target: Target, **settings: Any) -> PretrainedDrafter:
        """The drafter of a run folder, a drafter directory, an export, another project's checkpoint, or of such a repository
        on the hub, or the one of this name that comes with the package. Settings change its tree or rule, as in tree="chain"
        and **{"tree.depth": 4}."""
        place = Path(name).expanduser()
        if not place.exists() and find_drafter_directory(place) is None:
            place = Path(snapshot_download(str(name)))
        with hydra_context():
            asked, _ = compose_config("eval", {"run": place, "target": "hf", "target.model": target.path, **settings})
            config, folder = resolve_eval_config(asked)
        config = check_config(config, TRAIN_KEYS)
        module = load_drafter(config, folder, target)
        trained = find_trained_target(folder)
        if module.abilities.target_training and trained is not None and Path(target.path) != trained.resolve():
            raise UserError(f"target {target.name}: this drafter belongs to the target in {trained}; load that one")
        return cls(module, build(config.tree), build(config.acceptance), config)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors."""
        save_drafter(Path(directory), self.module, self.config)

    def push_to_hub(self, name: str, private: bool = False) -> str:
        """Upload it to a repository of the hub, made where there is none; its address."""
        with TemporaryDirectory() as scratch:
            self.save_pretrained(Path(scratch) / "drafter")
            return push(Path(scratch) / "drafter", name, private)


@dataclass(frozen=True)
class Answer:
    """What decoding one prompt gave."""

    text: str  # without what ends it
    tokens: list[int]  # the one that ends it included
    statistics: dict[str, float]  # rounds, acceptance_length, tokens_per_second

    @classmethod
    def from_generation(cls, generation: Generation, target: Target) -> Answer:
        """An answer as text, with what its rounds gave and took."""
        kept = [token for token in generation.output if token not in target.stop_ids]
        rounds, seconds = generation.complete_round_lengths, generation.finish_seconds
        statistics = {
            "rounds": float(len(generation.round_lengths)),
            "acceptance_length": sum(rounds) / len(rounds) if rounds else 1.0,
            "tokens_per_second": (len(generation.output) - 1) / seconds if seconds else 0.0,
        }
        return cls(str(target.tokenizer.decode(kept)), generation.output, statistics)


def generate(
    target: Target,
    drafter: PretrainedDrafter | None,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 1,
) -> list[Answer]:
    """Answers to prompts, through a drafter or, with None, without one: the same text either way.

    At a temperature above 0 each place of a text draws one token of the target's distribution by `seed`, drafted or not.
    """
    if isinstance(prompts, str):
        raise UserError("prompts: this is one text; give a list of them")
    rule: AcceptanceRule = Greedy() if temperature == 0 else Match(temperature, seed=seed)
    for key, number in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if number < 1:
            raise UserError(f"{key}={number}: use 1 or more")
    tokens = [tokenize_prompt(target.tokenizer, to_chat(prompt, f"prompts[{at}]")) for at, prompt in enumerate(prompts)]
    for at, one in enumerate(tokens):
        if len(one) + max_new_tokens > target.max_length:
            raise UserError(
                f"prompts[{at}]: its {len(one)} tokens and max_new_tokens={max_new_tokens} do not fit the context of "
                f"{target.name} ({target.max_length}); shorten one of them"
            )
    if drafter is None:
        target.pack_weights()  # as a drafter's session does, so that speeds compare
        session = Session(target, rule, engine="auto")
    else:
        session = Session.from_drafter(target, drafter.module, drafter.builder, rule, lambda: tokens[:8])
    answers: list[Answer] = []
    for first in range(0, len(tokens), batch_size):
        batch = tokens[first : first + batch_size]
        found = session.decode(batch, max_new_tokens, list(range(first, first + len(batch))))
        answers += [Answer.from_generation(generation, target) for generation in found]
    return answers


def to_chat(prompt: Prompt, location: str) -> list[dict[str, str]]:
    """A text as the first thing that a user says; stops at what is neither text nor chat."""
    chat: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(chat, list) or not all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in chat):
        raise UserError(f'{location}: it is no prompt; give a text, or messages [{{"role": .., "content": ..}}, ..]')
    for message in chat:
        check_text(message["content"], location)
    return chat


def evaluate(target: Target, drafter: PretrainedDrafter, out: str | Path | None = None, **settings: Any) -> dict[str, Any]:
    """Score a drafter by really decoding, with settings of the group eval, as in limit=20; what summary.json holds.

    Everything that `spectrain eval` writes goes to the folder `out`, if one is named.
    """
    with TemporaryDirectory() as scratch:
        asked = {f"eval.{key}": value for key, value in settings.items()}
        with hydra_context():
            config, _ = compose_config("train", {"drafter": "ngram", **asked})
        evaluation = build(check_config(OmegaConf.create({"eval": config.eval}), ("eval",)).eval)
        evaluation.check_prompts(target)
        setting = {"target": target.name, "target_path": target.path, "recipe": recipe_name(drafter.config),
                   "dtype": str(target.dtype).removeprefix("torch."), "device": str(target.device)}  # fmt: skip
        candidate = Candidate(target, drafter.module, drafter.builder, drafter.rule, setting)
        found: dict[str, Any] = evaluation.score(candidate, Path(scratch) if out is None else Path(out))
        return found
