"""`make test-engines` installs every engine and names the folder of the drafters: there nothing
may be skipped in silence.
"""

import os
from collections.abc import Generator
from typing import Any

import pytest

INSTALLS_ALL = "SPECTRAIN_ENGINES_RUNS" in os.environ


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return fail_skipped(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return fail_skipped(report)


def fail_skipped(report: Any) -> Any:
    """Turn a skip into a failure where everything is installed."""
    if INSTALLS_ALL and report.skipped:
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = (
            f"{reason}: with SPECTRAIN_ENGINES_RUNS, which make test-engines sets, nothing "
            "may be skipped"
        )
    return report
