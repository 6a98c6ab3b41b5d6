"""Wrong calls of the Python interface: each error is one sentence of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spectrain
from spectrain.cli.arguments import require_replaceable, spread_groups
from spectrain.cli.interface import PretrainedDrafter
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain.servers.engines import simulate_acceptance


class Listener(spectrain.Callback):
    """A callback."""


def call_train(**settings: Any) -> Callable[[Any, Any], Any]:
    return lambda target, drafter: spectrain.train("medusa1", **{"target": "tiny", **settings})


def call_generate(**settings: Any) -> Callable[[Any, Any], Any]:
    return lambda target, drafter: spectrain.generate(
        **{"target": target, "drafter": drafter, "prompts": ["a"], **settings}
    )


# Calls that Python's types would not allow.
API: Any = spectrain

CALLS: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "without a recipe": (lambda target, drafter: API.train(), ("train:", "'recipe'", "**settings")),
    "without a drafter": (lambda target, drafter: API.evaluate(target), ("evaluate:", "'drafter'")),
    "without a prompts": (
        lambda target, drafter: API.generate(target, drafter),
        ("'prompts'", "seed"),
    ),
    "without a name": (
        lambda target, drafter: API.Target.from_pretrained(),
        ("'name'", "dtype, device"),
    ),
    "without a target": (lambda target, drafter: API.Drafter.from_pretrained("a"), ("'target'",)),
    "without a server": (
        lambda target, drafter: API.evaluate_server(),
        ("evaluate_server:", "'server'"),
    ),
    "without a folder": (lambda target, drafter: drafter.save_pretrained(), ("'directory'",)),
    "without a repository": (lambda target, drafter: drafter.push_to_hub(), ("'name'", "private")),
    "an unknown argument": (call_generate(beams=2), ("generate:", "'beams'", "batch_size")),
    "too many arguments": (
        lambda target, drafter: API.train("a", "b", "c"),
        ("train:", "too many"),
    ),
    "a target by number": (
        lambda target, drafter: Target.from_pretrained(3),  # type: ignore[arg-type]
        ("target", "int", "ORG/NAME"),
    ),
    "callbacks as one": (call_train(callbacks=Listener()), ("callbacks", "Listener", "a list")),
    "a function": (call_train(callbacks=[print]), ("callbacks[0]", "spectrain.Callback")),
    "a class": (call_train(callbacks=[Listener]), ("callbacks[0]", "the class Listener")),
    "a run by number": (call_train(run=3), ("run", "int", "folder")),
    "an object as a setting": (call_train(target=object()), ("target", "no setting")),
    "data by number": (call_train(data=3), ("data", "int", "a list")),
    "a key in a dict": (call_train(trainer={"max_step": 3}), ("trainer.max_step", "max_steps")),
    "a name of transformers": (call_train(learning_rate=1e-3), ("learning_rate", "trainer.lr")),
    "prompts as a text": (call_generate(prompts="a"), ("prompts", "a list")),
    "no prompts": (call_generate(prompts=None), ("prompts", "None", "a list")),
    "a number as a prompt": (call_generate(prompts=[1]), ("prompts[0]", "a text")),
    "tokens as a text": (call_generate(max_new_tokens="x"), ("max_new_tokens='x'", "whole")),
    "half a token": (call_generate(max_new_tokens=4.5), ("max_new_tokens=4.5", "whole")),
    "no tokens": (call_generate(max_new_tokens=0), ("max_new_tokens=0", "1 or more")),
    "no batch": (call_generate(batch_size=0), ("batch_size=0", "1 or more")),
    "a hot text": (call_generate(temperature="hot"), ("temperature='hot'", "a number")),
    "a seed of letters": (call_generate(seed="x"), ("seed='x'", "whole")),
    "a target by name": (call_generate(target="tiny"), ("target", "Target.from_pretrained")),
    "a drafter by name": (call_generate(drafter="x"), ("drafter", "Drafter.from_pretrained")),
    "in another order": (
        lambda target, drafter: spectrain.generate(drafter, target, ["a"]),
        ("target", "PretrainedDrafter"),
    ),
    "a score without a drafter": (
        lambda target, drafter: spectrain.evaluate(target, None),  # type: ignore[arg-type]
        ("drafter", "None"),
    ),
    "a score of numbers": (
        lambda target, drafter: spectrain.evaluate(target, drafter, prompts=[1]),
        ("prompts[0]", "columns"),
    ),
    "a score of other columns": (
        lambda target, drafter: spectrain.evaluate(target, drafter, prompts=[{"a": 1}]),
        ("prompts[0]", "question"),
    ),
    "a drafter by number": (
        lambda target, drafter: spectrain.Drafter.from_pretrained(3, target),  # type: ignore[arg-type]
        ("drafter", "int", "ORG/NAME"),
    ),
    "a drafter of nothing": (
        lambda target, drafter: spectrain.Drafter.from_pretrained("x", object()),  # type: ignore[arg-type]
        ("target", "object"),
    ),
    "an upload to nowhere": (lambda target, drafter: drafter.push_to_hub(""), ("name", "ORG/NAME")),
    "an upload to a path": (
        lambda target, drafter: drafter.push_to_hub("a/b/c"),
        ("push=a/b/c", "ORG/NAME"),
    ),
    "saved nowhere": (lambda target, drafter: drafter.save_pretrained(None), ("directory", "None")),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained("tiny")


@pytest.mark.parametrize("call, parts", CALLS.values(), ids=list(CALLS))
def test_a_wrong_call_is_a_single_sentence(
    call: Callable[[Any, Any], Any],
    parts: tuple[str, ...],
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sentence names the argument and what to give; nothing is written."""
    monkeypatch.chdir(tmp_path)
    unused: Any = SimpleNamespace()
    drafter = PretrainedDrafter(unused, unused, unused, unused, tmp_path)
    with pytest.raises(UserError) as raised:
        call(target, drafter)
    sentence = str(raised.value)
    assert "\n" not in sentence and all(part in sentence for part in parts), sentence
    assert not [*tmp_path.iterdir()]


def test_groups_are_dicts_or_choices() -> None:
    settings = {
        "trainer": {"max_steps": 2, "lr": 1e-3},
        "tree": {"choice": "chain", "depth": 3},
        "drafter.architecture": {"experts": True},
        "data.limit": 4,
    }
    assert dict(spread_groups(settings)) == {
        "trainer.max_steps": 2,
        "trainer.lr": 1e-3,
        "tree": "chain",
        "tree.depth": 3,
        "drafter.architecture": {"experts": True},
        "data.limit": 4,
    }


def test_a_saved_drafter_replaces_a_drafter_alone(tmp_path: Path) -> None:
    """Other files of a folder would be deleted."""
    names = ("config.json", "model.safetensors")
    require_replaceable(tmp_path / "new", names)
    for name in names:
        (tmp_path / name).touch()
    require_replaceable(tmp_path, names)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="notes.txt, which would be deleted"):
        require_replaceable(tmp_path, names)


def test_a_card_of_our_own_layout_simulates_nothing() -> None:
    """Our own engine has no command; `push_to_hub` writes the card of a scored drafter too."""
    launches = {
        name: EngineLaunch("target", drafter=DrafterLaunch("eagle3", "drafter", 2))
        for name in ("spectrain", "vllm")
    }
    simulated = simulate_acceptance(launches, [0.5])
    assert [*simulated] == ["vllm"] and simulated["vllm"].acceptance_rates == (0.5, 0.0)
