"""How the processes of a run share the drafter: copies of it (DDP), or each a part (FSDP2, DeepSpeed's ZeRO-2 and ZeRO-3)."""

from .base import ParallelStrategy, ParameterGroups, ReplicatedStrategy
from .launch import Sharding, connect_processes, make_strategy
from .monitor import WAITING, ProcessMonitor
from .step_timer import StepTimer, summarize_processes

__all__ = ["WAITING", "ParallelStrategy", "ParameterGroups", "ProcessMonitor", "ReplicatedStrategy", "Sharding",
           "StepTimer", "connect_processes", "make_strategy", "summarize_processes"]  # fmt: skip
