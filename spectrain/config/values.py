"""Types of settings with bounds, declared at the constructor that takes them and reported in one
place.

`Bounds` and `Predicate` follow the protocol of annotated-types for grouped metadata, which is
imported only where a value is checked: a drafter that is built in Python needs no checks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

# File systems take 255; a scratch folder has a longer name than what it becomes.
MAX_NAME_BYTES = 200


@dataclass(frozen=True)
class Bounds:
    """The least and the largest value of a number; None leaves an end open."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    @property
    def __is_annotated_types_grouped_metadata__(self) -> Literal[True]:
        return True

    def __iter__(self) -> Iterator[Any]:
        from annotated_types import Interval

        yield from Interval(ge=self.ge, gt=self.gt, le=self.le, lt=self.lt)


@dataclass(frozen=True)
class Predicate:
    """A condition that a value meets; its docstring ends the sentence "use ..."."""

    func: Callable[[Any], bool]

    @property
    def __is_annotated_types_grouped_metadata__(self) -> Literal[True]:
        return True

    def __iter__(self) -> Iterator[Any]:
        from annotated_types import Predicate as Checked

        yield Checked(self.func)


def is_folder_name(value: str) -> bool:
    """the name of one folder, without slashes and of at most 200 bytes"""
    is_short = len(value.encode()) <= MAX_NAME_BYTES
    return (
        bool(value)
        and value not in (".", "..")
        and is_short
        and not any(sign in value for sign in "/\\\0")
    )


Count = Annotated[int, Bounds(ge=1)]
# of drafting: each is a pass or a head, and hardly a tenth token is ever kept
Steps = Annotated[int, Bounds(ge=1, le=64)]
Number = Annotated[int, Bounds(ge=0)]
LayerCount = Annotated[int, Bounds(ge=1, le=256)]  # of a drafter; the deepest targets have 126
OptionalLayers = Annotated[int, Bounds(ge=0, le=256)]
# of a matrix in a drafter; the widest targets have 16,384
Width = Annotated[int, Bounds(ge=1, le=65_536)]
Seed = Annotated[int, Bounds(ge=0, le=2**31 - 1)]
# of a drafter; no target has so many tokens
VocabularySize = Annotated[int, Bounds(ge=2, le=1_000_000)]
Positive = Annotated[float, Bounds(gt=0)]
NotNegative = Annotated[float, Bounds(ge=0)]
Share = Annotated[float, Bounds(ge=0, le=1)]
Epochs = Annotated[float, Bounds(le=1_000_000)]
PositiveShare = Annotated[float, Bounds(gt=0, le=1)]
Below1 = Annotated[float, Bounds(ge=0, lt=1)]
FolderName = Annotated[str, Predicate(is_folder_name)]
