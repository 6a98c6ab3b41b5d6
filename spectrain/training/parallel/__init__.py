"""How the processes of a run share the drafter: copies of it (DDP), or each a part (FSDP2, DeepSpeed's ZeRO-2 and ZeRO-3)."""

from .base import ParallelStrategy, ParameterGroups, ReplicatedStrategy
from .launch import WAITING, ProcessMonitor, Sharding, connect_processes, make_strategy

__all__ = ["WAITING", "ParallelStrategy", "ParameterGroups", "ProcessMonitor", "ReplicatedStrategy", "Sharding",
           "connect_processes", "make_strategy"]  # fmt: skip
