"""How the processes of a run share the drafter: copies of it (DDP), or each a part (FSDP2,
DeepSpeed's ZeRO-2 and ZeRO-3).
"""

from .base import ParallelStrategy, ParameterGroups, ReplicatedStrategy
from .context import check_context, choose_method, make_context_group
from .launch import (
    Sharding,
    connect_processes,
    disconnect_processes,
    make_strategy,
    wait_for_loading,
)
from .monitor import WAITING, ProcessMonitor
from .step_timer import StepTimer, summarize_processes

__all__ = ["WAITING", "ParallelStrategy", "ParameterGroups", "ProcessMonitor", "ReplicatedStrategy",
    "Sharding",
           "StepTimer", "check_context", "choose_method", "connect_processes",
           "disconnect_processes",
           "make_context_group", "make_strategy", "summarize_processes",
           "wait_for_loading"]  # fmt: skip
