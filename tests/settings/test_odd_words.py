"""Words of a command that are no settings: each is refused in one sentence that names it."""

import re

import pytest

from spectrain.cli.overrides import check_words
from spectrain.config.check import check_node, check_overrides
from spectrain.config.choices import choice_files, conf_folders, load_schema, load_yaml
from spectrain.config.signatures import list_keys
from spectrain.errors import UserError

WORDS = {
    "hydra/sweeper=[basic]": "hydra takes the name of a choice here",
    "hydra/launcher=null": "hydra takes the name of a choice here",
    "hydra/output=0": "hydra takes the name of a choice here",
    "~hydra/hydra_logging=False": "hydra takes the name of a choice here",
    "optimizer=int(1)": "there is no such choice",
    "trainer.batch_tokens=" + "9" * 5000: "a number has at most 300 digits",
    "drafter.layers=" + "[" * 500: "its brackets are nested too deeply",
    "trainer.batch_tokens=True": "write a number",
    "trainer.lr=true": "write a number",
    "drafter.layers=[true]": "write a number",
    "trainer.betas=[0.9,false]": "write a number",
    "trainer.keep_best=1": "write true or false",
    "trainer.keep_best=0.0": "write true or false",
}


@pytest.mark.parametrize("word", WORDS)
def test_odd_words_are_refused(word: str) -> None:
    with pytest.raises(UserError, match=re.escape(WORDS[word])) as error:
        check_words("train", ["recipe=eagle3", word])
    assert len(str(error.value)) < 1000 and "\n" not in str(error.value)


def list_numeric_settings() -> list[tuple[str, str]]:
    """Return the constructor and the name of every setting of any group that takes a number and
    no truth value.
    """
    targets = [
        load_yaml(path).get("_target_")
        for group in load_schema("train").groups
        for path in choice_files(group, conf_folders()).values()
        if group != "recipe"
    ]
    keys = [
        (str(target), key)
        for target in dict.fromkeys(filter(None, targets))
        for key in list_keys(str(target))
    ]
    others = ("bool", "Any", "dict", "Mapping", "str", "Literal")
    return [
        (target, key.name)
        for target, key in keys
        if re.search("int|float", str(key.hint))
        and not any(kind in str(key.hint) for kind in others)
    ]


def test_no_number_is_a_truth_value() -> None:
    """True is 1 for Python; for a setting it is a mistake, whichever setting it is."""
    from spectrain.config.choices import find_group

    settings = list_numeric_settings()
    assert len(settings) > 200
    for target, name in settings:
        with pytest.raises(UserError, match=rf"{name}="):
            check_node(find_group(target), {"_target_": target, name: True})


def test_long_values_are_shortened() -> None:
    """A message shows the beginning of a value, not all of it."""
    with pytest.raises(UserError) as error:
        check_overrides(load_schema("train"), ["recipe=eagle3", "trainer.lr=" + "x" * 5000])
    assert len(str(error.value)) < 500
