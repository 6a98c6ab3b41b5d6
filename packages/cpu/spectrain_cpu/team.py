"""A team of threads that share the parts of a job, compiled by Numba: the caller of a kernel, and
helpers.

A job is a list of numbers. The first is the address of the function that computes a part of it, so
the code of a kernel is compiled once, for the caller and for its helpers.

The operations of a decoding step take some microseconds each, so helpers wait in compiled code
without Python's lock: they poll for a job, and sleep where none comes for some tenths of a
millisecond. The parts of a job are divided among the threads, and one that is done takes parts of
another. So a helper that does not run, because other processes take its core, delays nothing but
the part that it is in. Which thread computes a part changes no bit of it.

A team is an array of int64, given by its address: for each thread a line of 64 bytes with the range
of its parts that nobody took, a line that counts the parts that helpers finished, for each thread a
line that tells whether it sleeps, and the job.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types

from .vectors import (
    WIDE,
    compile_cached,
    compile_inline,
    compile_unlocked,
    intrinsic,
    to_floats,
    to_longs,
)

MAX_MEMBERS = 8
LINE = 64  # bytes
# where lines begin
NUM_DONE = LINE * MAX_MEMBERS
ASLEEP = LINE * (MAX_MEMBERS + 1)
IS_CLOSED = ASLEEP + LINE * MAX_MEMBERS
JOB = IS_CLOSED + LINE
# numbers of the job; the last is how many threads it is for
JOB_SIZE = 32
MEMBERS_INDEX = 31
TEAM_BYTES = JOB + 8 * JOB_SIZE
END_SHIFT = 32  # a range is its first part, and its end in the upper half
POLLS = 4000  # of a helper before it sleeps
# of a helper before it lets another thread run on its core, such as one of torch's
YIELD_POLLS = 32
PATIENCE = 2000  # polls of the caller before it does
# on Linux for x86-64; those of one process
FUTEX_CALL = 202
FUTEX_WAIT = 128
FUTEX_WAKE = 129

system_call = types.ExternalFunction("syscall", types.int64(*[types.int64] * 5))
let_others_run = types.ExternalFunction("sched_yield", types.int32())

CAN_SHARE = sys.platform == "linux" and platform.machine() == "x86_64"


@intrinsic
def load_shared(context: Any, address: Any) -> Any:
    """Return the int64 at an address that other threads write to."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], WIDE.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_shared(context: Any, address: Any, value: Any) -> Any:
    """Store an int64 after everything that this thread stored before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], WIDE.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add_shared(context: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at an address, and return what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw(
            "add", builder.inttoptr(args[0], WIDE.as_pointer()), args[1], "seq_cst"
        )

    return types.int64(types.int64, types.int64), generate


@intrinsic
def pause(context: Any) -> Any:
    """Wait some tens of cycles."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.asm(ir.FunctionType(ir.VoidType(), []), "lfence", "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), generate


@compile_inline
def job_numbers(team: int) -> Any:
    """Return the numbers of the job [32]."""
    return carray(to_longs(team + JOB), (JOB_SIZE,))


@compile_inline
def job_floats(team: int) -> Any:
    """Return the job as float32 [64], two in the place of a number."""
    return carray(to_floats(team + JOB), (2 * JOB_SIZE,))


@compile_inline
def wake_sleepers(team: int, members: int) -> None:
    """Wake the helpers among so many threads that sleep."""
    for member in range(1, members):
        flag = team + ASLEEP + LINE * member
        if load_shared(flag) != 0:
            store_shared(flag, 0)
            system_call(FUTEX_CALL, flag, FUTEX_WAKE, 1, 0)


@compile_inline
def open_job(team: int, members: int, parts: int) -> None:
    """Divide the parts of the job, whose numbers are stored, among so many threads, and wake
    those that sleep.
    """
    store_shared(team + NUM_DONE, 0)
    job_numbers(team)[MEMBERS_INDEX] = members
    for member in range(members):
        first = member * parts // members
        end = (member + 1) * parts // members
        store_shared(team + LINE * member, end << END_SHIFT | first)
    wake_sleepers(team, members)


@compile_inline
def take_part(team: int, member: int) -> int:
    """Return a part that nobody took, of the thread's own range or else of another's, or -1
    where there is none.
    """
    mask = (1 << END_SHIFT) - 1
    for distance in range(MAX_MEMBERS):
        line = team + LINE * ((member + distance) % MAX_MEMBERS)
        parts = load_shared(line)
        if parts & mask < parts >> END_SHIFT:
            parts = add_shared(line, 1)
            if parts & mask < parts >> END_SHIFT:
                return parts & mask
    return -1


@compile_inline
def wait_for_helpers(team: int, parts: int) -> None:
    """Wait until helpers have finished so many parts."""
    polls = 0
    while load_shared(team + NUM_DONE) < parts:
        pause()
        polls += 1
        if polls % PATIENCE == 0:
            let_others_run()


@intrinsic
def call_part(context: Any, function: Any, team: Any, part: Any, member: Any) -> Any:
    """Call the function at an address, which computes a part of the job as so many-th thread of
    the team.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [WIDE] * 3)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@compile_inline
def run_job(team: int, members: int, parts: int) -> None:
    """Compute the parts of the job, whose numbers are stored and whose first is the function of a
    part, with so many threads."""
    open_job(team, members, parts)
    function = job_numbers(team)[0]
    left = parts
    part = take_part(team, 0)
    while part >= 0:
        call_part(function, team, part, 0)
        left -= 1
        part = take_part(team, 0)
    wait_for_helpers(team, left)


@compile_inline
def rest(team: int, member: int, polls: int) -> int:
    """Wait a moment, or sleep after so many polls without a job; return the next number of
    polls.
    """
    if polls < POLLS:
        pause()
        if polls % YIELD_POLLS == YIELD_POLLS - 1:
            let_others_run()
        return polls + 1
    flag = team + ASLEEP + LINE * member
    store_shared(flag, 1)
    # A job that was opened before the flag was set wakes nobody.
    mask = (1 << END_SHIFT) - 1
    has_job = False
    for other in range(MAX_MEMBERS):
        parts = load_shared(team + LINE * other)
        has_job = has_job or parts & mask < parts >> END_SHIFT
    if not has_job and load_shared(team + IS_CLOSED) == 0:
        system_call(FUTEX_CALL, flag, FUTEX_WAIT, 1, 0)
    store_shared(flag, 0)
    return 0


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


@cache
def current_team() -> Team:
    """Return the team of this process."""
    team = Team()
    atexit.register(team.close)
    return team


# A forked process does not have its parent's threads.
os.register_at_fork(after_in_child=current_team.cache_clear)


def count_members() -> int:
    """Return how many threads share the work of a kernel, as torch's number says; helpers are
    started where they miss.
    """
    return current_team().grow(torch.get_num_threads())
