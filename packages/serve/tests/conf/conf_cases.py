"""Cases of this package for tests/conf/test_conf.py."""

from typing import Any

from spectrain_serve.follow.settings import FollowSettings
from spectrain_serve.servers.base import Server
from spectrain_serve.times.bench import EngineBench

CASES: dict[str, Any] = {
    # Groups of a training, with what their choices build.
    "KINDS": {"server": Server},
    # Those of commands of their own.
    "APART": {"bench": EngineBench, "follow": FollowSettings},
}
