"""The helpers of a team of threads (`cpu_team`): what they run, and when they begin and end.

Save this file too after a change of cpu_team.py, because Numba keeps compiled code until this file
changes.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
from functools import cache

import numpy as np

from .cpu_team import (
    IS_CLOSED,
    MAX_MEMBERS,
    MEMBERS_INDEX,
    NUM_DONE,
    TEAM_BYTES,
    add_shared,
    call_part,
    job_numbers,
    load_shared,
    rest,
    store_shared,
    take_part,
    wake_sleepers,
)
from .cpu_vectors import compile_cached, compile_unlocked


@compile_unlocked
def run_helper(team: int, member: int) -> None:
    """Run parts of jobs until the team is closed."""
    polls = 0
    job = job_numbers(team)
    while load_shared(team + IS_CLOSED) == 0:
        part = take_part(team, member) if member < job[MEMBERS_INDEX] else -1
        if part < 0:
            polls = rest(team, member, polls)
            continue
        polls = 0
        call_part(job[0], team, part, member)
        add_shared(team + NUM_DONE, 1)


@compile_cached
def close_team(team: int) -> None:
    """Let all helpers end."""
    store_shared(team + IS_CLOSED, 1)
    wake_sleepers(team, MAX_MEMBERS)


class Team:
    """The threads that share the work of kernels: the one that calls them, and as many helpers
    as were needed so far.
    """

    def __init__(self) -> None:
        # Lines of 64 bytes begin at multiples of 64.
        self.memory = np.zeros(TEAM_BYTES // 8 + 8, dtype=np.int64)
        self.address = (self.memory.ctypes.data + 63) // 64 * 64
        self.helpers: list[threading.Thread] = []
        self.process = os.getpid()

    def grow(self, members: int) -> int:
        """Start helpers until there are so many threads, if the system can; return the number of
        threads to use.
        """
        if members <= len(self.helpers) + 1:
            return members
        members = min(members, MAX_MEMBERS) if CAN_SHARE else 1
        while len(self.helpers) + 1 < members:
            helper = threading.Thread(
                target=run_helper, args=(self.address, len(self.helpers) + 1), daemon=True
            )
            helper.start()
            self.helpers.append(helper)
        return members

    def close(self) -> None:
        """End the helpers."""
        if self.process == os.getpid() and self.helpers:
            close_team(self.address)
            for helper in self.helpers:
                helper.join()


CAN_SHARE = sys.platform == "linux" and platform.machine() == "x86_64"


@cache
def current_team() -> Team:
    """Return the team of this process."""
    team = Team()
    atexit.register(team.close)
    return team


# A forked process does not have its parent's threads.
os.register_at_fork(after_in_child=current_team.cache_clear)
