"""Every limit and every retry stands in the documentation as in the code, and no age is measured
by a clock that jumps.
"""

import re
from pathlib import Path

import pytest

from spectrain.errors import UserError
from spectrain_serve.follow.limits import format_tables
from spectrain_serve.follow.requests import COMPUTED_PATHS, READ_PATHS, STORED_PATHS
from spectrain_serve.follow.settings import ListenSettings

ROOT = Path(__file__).parents[4]
DATES = {
    # The only place of `spectrain follow` that reads the date.
    "packages/serve/spectrain_serve/follow/clock.py": 1,
    # The age of unfinished files, beside a lock.
    "spectrain/features/store.py": 1,
    # The date in the provenance of a run, which nothing reads.
    "spectrain/provenance.py": 1,
    # A seed where a request gives none.
    "packages/serve/spectrain_serve/engines/plugins/spectrain_openvino.py": 1,
    # Dates that are compared with those of a ledger.
    "lab/benchmarks/follow_day.py": 1,
    "lab/benchmarks/follow_traffic.py": 1,
}
"""Files that read the date of the machine, and how often."""
SKIPPED = {"tests", "build"}
"""Folders that are not read; `build` holds copies of which wheels were made."""
READS_DATE = re.compile(
    r"\btime\.time(_ns)?\b|\bfrom time import "
    r".*\btime(_ns)?\b|\b(datetime|date)\.(now|utcnow|today)\b"
    r"|\bCLOCK_REALTIME\b|\b(local|gm|c|asc)time\(\)"
)


def test_the_page_holds_the_tables_and_the_paths() -> None:
    page = (ROOT / "docs/follow.md").read_text()
    assert all(table in page for table in format_tables().split("\n\n"))
    listed = set(re.findall(r"`(/[a-z0-9_/]+)`", page))
    assert {*COMPUTED_PATHS, *STORED_PATHS, *READ_PATHS} <= listed


def test_durations_and_ages_use_a_clock_that_does_not_jump() -> None:
    """The date of the machine is for records; a clock that is set forward must delete nothing."""
    found = {}
    for folder in ("spectrain", "eval", "kernels", "packages", "lab", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            uses = READS_DATE.findall(path.read_text())
            is_link = any(above.is_symlink() for above in path.parents)
            if uses and not is_link and not SKIPPED & {*path.relative_to(ROOT).parts}:
                found[str(path.relative_to(ROOT))] = len(uses)
    assert found == DATES


@pytest.mark.parametrize(
    "listen",
    ["9000", ":9000", "host:", "host:0", "host:65536", "host:\u00b2", "host:" + "9" * 5000],
)
def test_an_address_without_a_port_that_exists_is_refused(listen: str) -> None:
    with pytest.raises(UserError, match="give an address and a port"):
        ListenSettings(listen=listen)
