"""Cases of this package for tests/conf/test_conf.py."""

from typing import Any

from spectrain_studies.comparison.compare import Comparison
from spectrain_studies.planning.plan import Plan

# Groups of commands of their own, with what their choices build.
CASES: dict[str, Any] = {"APART": {"compare": Comparison, "plan": Plan}}
