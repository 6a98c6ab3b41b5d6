"""Cases of this package for tests/conf/test_conf.py."""

from typing import Any

from spectrain_serve.follow.settings import FollowSettings
from spectrain_serve.times.bench import EngineBench

# Groups of commands of their own, with what their choices build.
CASES: dict[str, Any] = {"APART": {"bench": EngineBench, "follow": FollowSettings}}
