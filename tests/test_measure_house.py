"""The script that measures the house, on a house of three rooms that can be counted by hand, and
what it may count in this one.
"""

import ast
from pathlib import Path

import pytest

from scripts import measure_house
from scripts.measure_house import House, describe_house, measure_walk

TRAIN = """
from .build import build_part, make
from spectrain.spec import RunSpec


def train(spec: RunSpec, path: str) -> None:
    print(path)
    name = spec.describe()
    part = spec.target
    build_part(part)
    changed = make(spec)
    build_part(changed.target)
    other(path)


def other(path: str) -> None:
    print(path)
"""
BUILD = """
from .spec import GroupSpec, RunSpec


def build_part(part: GroupSpec) -> None:
    part.build()


def make(spec: RunSpec) -> RunSpec:
    return spec
"""
SPEC = """
class Base:
    size: int = 0

    def describe(self) -> str:
        return self.name()

    def name(self) -> str:
        return ""


class GroupSpec:
    def build(self) -> None:
        pass


class RunSpec(Base):
    target: GroupSpec
    size: int = 1
"""


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    room = tmp_path / "spectrain"
    room.mkdir()
    for name, text in {"train": TRAIN, "build": BUILD, "spec": SPEC, "__init__": ""}.items():
        (room / f"{name}.py").write_text(text)
    monkeypatch.setattr(measure_house, "WALKS", (("spectrain.train", "train", "spec"),))
    return House.read(tmp_path)


def test_members_are_those_of_the_class_and_its_bases(house: House) -> None:
    module = house.modules["spectrain.spec"]
    assert house.count_members(module, "RunSpec") == 4  # describe, name, size, target
    assert house.count_members(module, "GroupSpec") == 1


def test_a_walk_counts_the_calls_that_a_value_enters(house: House) -> None:
    """describe and its name; build_part and its build; make; build_part again, which is read once.
    What gets the path alone is no stay.
    """
    walk = measure_walk(house, "spectrain.train", "train", "spec")
    assert walk.stays == 6
    assert {path.stem for path in walk.files} == {"train", "build", "spec"}
    assert ("spectrain.train", "other") not in walk.read


def test_the_tables_count_lines_and_characters(house: House) -> None:
    table = "\n".join(describe_house(house))
    lines = sum(len(text.splitlines()) for text in (TRAIN, BUILD, SPEC))
    assert f"| spectrain | 4 | {lines} |" in table
    assert "| spectrain.spec.RunSpec | 4 |" in table
    assert "| spectrain.train:train:spec | 6 | 3 |" in table


def test_classes_have_few_members() -> None:
    """45 at most, with those of their bases, and ten in the contract of drafters: past that, a part
    of the class is an object of its own or a function.
    """
    house = House.read(Path(__file__).parents[1])
    counts = {
        f"{module.name}.{node.name}": house.count_members(module, node.name)
        for module in house.modules.values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }
    large = {name: count for name, count in counts.items() if count > 45}
    assert not large, large
    assert counts["spectrain.drafters.base.Drafter"] <= 10


MOST_STAYS = {"train_and_score": 50, "evaluate": 25, "score_server": 38, "run_round": 8}
"""Function -> the stays of its argument, which may only fall."""


def test_walks_do_not_grow() -> None:
    """What a training, a score and a round are given enters no more functions than it did: past
    that, a function gets settings of which it needs an object that is built already.
    """
    house = House.read(Path(__file__).parents[1])
    stays = {walk[1]: measure_walk(house, *walk).stays for walk in measure_house.WALKS}
    longer = {name: count for name, count in stays.items() if count > MOST_STAYS[name]}
    assert not longer, longer
