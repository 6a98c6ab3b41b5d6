"""Types of settings with bounds, declared at the constructor that takes them and reported in one
place.
"""

from typing import Annotated

from annotated_types import Ge, Gt, Interval, Predicate

# File systems take 255; a scratch folder has a longer name than what it becomes.
MAX_NAME_BYTES = 200


def is_folder_name(value: str) -> bool:
    """the name of one folder, without slashes and of at most 200 bytes"""
    is_short = len(value.encode()) <= MAX_NAME_BYTES
    return (
        bool(value)
        and value not in (".", "..")
        and is_short
        and not any(sign in value for sign in "/\\\0")
    )


Count = Annotated[int, Ge(1)]
# of drafting: each is a pass or a head, and hardly a tenth token is ever kept
Steps = Annotated[int, Interval(ge=1, le=64)]
Number = Annotated[int, Ge(0)]
LayerCount = Annotated[int, Interval(ge=1, le=256)]  # of a drafter; the deepest targets have 126
OptionalLayers = Annotated[int, Interval(ge=0, le=256)]
# of a matrix in a drafter; the widest targets have 16,384
Width = Annotated[int, Interval(ge=1, le=65_536)]
Seed = Annotated[int, Interval(ge=0, le=2**31 - 1)]
# of a drafter; no target has so many tokens
VocabularySize = Annotated[int, Interval(ge=2, le=1_000_000)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
Below1 = Annotated[float, Interval(ge=0, lt=1)]
FolderName = Annotated[str, Predicate(is_folder_name)]
