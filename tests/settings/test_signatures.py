"""Constructors' settings, read from their sources, are those that python finds when it imports
them.
"""

import inspect
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
from hydra.utils import get_object

from spectrain.config import values
from spectrain.config.check import check_node, check_overrides, describe_type, describe_values
from spectrain.config.choices import _read_constructors, conf_folders, load_schema
from spectrain.config.installed import load_entry_points
from spectrain.config.parts import find_config_type
from spectrain.config.signatures import (
    PACKAGE_ROOT,
    SettingKey,
    join_declarations,
    list_choices,
    list_keys,
    list_own_keys,
)
from spectrain.errors import UserError

CONSTRUCTORS = sorted(
    {
        path
        for group in _read_constructors(tuple(conf_folders())).values()
        for path in group.values()
    }
)
PLAIN = (int, float, str, bool, type(None), list, tuple, dict, Any)


def is_plain(hint: Any) -> bool:
    """Tell whether a parameter is a setting, as opposed to a runtime object such as the target."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return is_plain(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return all(is_plain(part) for part in typing.get_args(hint))
    return origin in (list, tuple, dict, typing.Literal) or hint in PLAIN


def get_hints(target: Any) -> dict[str, Any]:
    """Return type hints; names that are imported for them alone stand for runtime objects."""
    # A class with a constructor of its own may inherit from a dataclass.
    if "__dataclass_fields__" in vars(target):
        return typing.get_type_hints(target, include_extras=True)
    module = inspect.getmodule(target)
    assert module is not None
    names = dict(vars(module))
    for block in re.findall(r"if TYPE_CHECKING:\n((?:[ \t]+.*\n|\n)+)", inspect.getsource(module)):
        for name in re.findall(r"import (.+)", block):
            names |= {
                part.split(" as ")[-1].strip(): object
                for part in name.split(",")
                if part.strip() not in names
            }
    constructor = target.__init__ if inspect.isclass(target) else target
    return typing.get_type_hints(constructor, names, include_extras=True)


@pytest.mark.parametrize("target", CONSTRUCTORS)
def test_settings_are_those_that_python_finds(target: str) -> None:
    """Names in their order, types with their bounds, which must be given, and the values that
    may be chosen.
    """
    constructor = get_object(target)
    constructor = find_config_type(constructor) or constructor
    hints = get_hints(constructor)
    expected = {
        name: p
        for name, p in inspect.signature(constructor).parameters.items()
        if is_plain(hints.get(name))
    }
    keys = list_own_keys(target)
    assert [key.name for key in keys] == list(expected)
    for key in keys:
        assert key.hint == hints[key.name], key.name
        assert (key.default is None) == (expected[key.name].default is inspect.Parameter.empty)
        assert key.choices == list_choices(hints[key.name])


def test_parts_of_packages_join_the_settings() -> None:
    """A choice that takes parts has its own settings first, then those of each part, whose
    declarations count; one that several parts declare has the values of all of them.
    """
    target = "spectrain.eval.default.DefaultEvaluation"
    parts = [f"{part.__module__}.{part.__qualname__}" for part in load_entry_points("eval")]
    declared = [key for path in (target, *parts) for key in list_own_keys(path)]
    keys = {key.name: key for key in list_keys(target)}
    assert [*keys] == [*dict.fromkeys(key.name for key in declared)]
    for key in declared:
        assert {*key.choices} <= {*keys[key.name].choices}
        if sum(other.name == key.name for other in declared) == 1:
            assert keys[key.name] == key


def test_two_declarations_are_joined() -> None:
    """The values of both in their order, null if either allows it, and each sentence once."""
    first, second = (
        SettingKey("over", "", "null", hint=hint, description=text)
        for hint, text in (
            (Literal["a", "b"] | None, "What to vary. With a, this is one."),
            (Literal["b", "c"], "What to vary. With c, this is another."),
        )
    )
    joined = join_declarations(first, second)
    assert joined.hint == (Literal["a", "b", "c"] | None) and joined.choices == ("a", "b", "c")
    assert joined.type == "Literal['a', 'b', 'c'] | None"
    assert joined.description == "What to vary. With a, this is one. With c, this is another."
    number = SettingKey("over", "int", "1", hint=int)
    assert join_declarations(first, number) == number


WRONG = {
    "trainer.lr=nan": "finite",
    "trainer.lr=inf": "finite",
    "trainer.lr=abc": "write a number or auto",
    "trainer.lrr=1": "nearest is lr",
    "drafter.ttt_stepz=1": "ttt_steps",
    "drafter.loss=forward_kll": "forward_kl",
    "drafter.architecture={a: {_target_: os.system}}": "architecture.a._target_ is an order",
    "tree.depth=1.5": "write a whole number",
    "data.limit=10k": "without a unit",
    "data.limit=None": "write null",
    "eval.name=../escape": "one folder",
    "target.network=x": "there is no such key",
}


@pytest.mark.parametrize("word", WRONG)
def test_a_wrong_setting_is_named_from_its_word_alone(word: str) -> None:
    """What the sources of constructors show needs no composition."""
    with pytest.raises(UserError) as error:
        check_overrides(load_schema("train"), ["recipe=eagle3", word])
    assert str(error.value).startswith(word.split("=")[0]) and WRONG[word] in str(error.value)


@pytest.mark.parametrize(
    "word",
    [
        "trainer.lr=1e-3,2e-3",
        "tree.depth=${drafter.ttt_steps}",
        "drafter.init=runs/x",
        "data.limit=null",
        "eval.baselines=[ngram]",
        "eval.prompts='a b'",
        "tree.budget='16'",
    ],
)
def test_what_may_be_right_is_left_to_the_composition(word: str) -> None:
    """Sweeps, references and values that fit pass."""
    check_overrides(load_schema("train"), ["recipe=eagle3", word])


def test_mistakes_are_named_before_torch_is_imported() -> None:
    """A key that does not exist, and a folder without a drafter: neither torch nor transformers
    is waited for.
    """
    program = (
        "import sys\nfrom spectrain.cli.overrides import check_drafters, check_words\nfor "
        "command, word in (('train', 'trainer.lrr=1'), ('eval', 'run=none'), ('chat', "
        "'run=none'),\n                      ('export', 'run=none'), ('train', "
        "'drafter.init=none')):\n    try:\n        check_words(command, [word])\n        "
        "check_drafters(command, [word])\n    except ValueError as error:\n        print(error, "
        "{'torch', 'transformers'} & sys.modules.keys())\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(PACKAGE_ROOT).parent,
    )
    key, *run_errors = ran.stdout.splitlines()
    assert key.startswith("trainer.lrr: there is no such key") and key.endswith("set()"), (
        ran.stdout + ran.stderr
    )
    no_drafter = "=none: there is no such folder; give a run folder or a drafter directory set()"
    assert run_errors == [
        f"{name}{no_drafter}" for name in ("run", "run", "run", "drafter.init")
    ], ran.stdout + ran.stderr


def test_bounds_are_shown_as_users_write_them() -> None:
    """The error for a value out of bounds says what to write; for a wrong type it names the type
    without its bounds.
    """
    assert (
        describe_type(values.Count | None) == "int | null"
        and describe_type(typing.Literal["a", "b"]) == "Literal['a', 'b']"
    )
    assert describe_values(float | typing.Literal["auto"] | None) == ["a number", "auto", "null"]
    assert describe_values(list[int] | None) is None
    rate: Any = {"_target_": "spectrain.training.trainer.Trainer", "lr": "fast"}
    with pytest.raises(UserError, match="^trainer.lr=fast: write a number or auto$"):
        check_node("trainer", rate)
    node = {"_target_": "spectrain.eval.default.DefaultEvaluation", "name": "a/b"}
    with pytest.raises(
        UserError, match="eval.name=a/b: use the name of one folder, without slashes"
    ):
        check_node("eval", node)
