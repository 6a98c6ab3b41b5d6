"""Stand-ins for programs that write the layouts of installed packages."""

from collections.abc import Iterator

import pytest

from tests.installed import load_cases


@pytest.fixture(autouse=True, scope="session")
def replace_converters() -> Iterator[None]:
    """Replace the functions that need an environment of an engine."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, stand_in in load_cases("tests.export.test_stand_ins").get("STAND_INS", ()):
            patch.setattr(owner, name, stand_in)
        yield
